"""Metrics and Δm."""

import pytest
from hypothesis import given, settings, strategies as st

from moonopt.bench import Metric, delta_m
from moonopt.errors import UserError

ERROR = Metric("error", higher=False, task="a")
ACCURACY = Metric("accuracy", higher=True, task="b")
AVERAGE = Metric("average", higher=True)

numbers = st.floats(0.01, 100)


def test_a_heading_shows_the_unit_and_the_good_direction():
    assert ACCURACY.heading == "accuracy ↑"
    assert Metric("angle", higher=False, unit="°").heading == "angle (°) ↓"


@pytest.mark.parametrize(("metric", "value", "expected"), [(ERROR, 1.5, 50.0), (ERROR, 0.5, -50.0), (ACCURACY, 1.5, -50.0)])
def test_delta_m_is_positive_where_worse(metric, value, expected):
    assert delta_m({metric.name: value}, {metric.name: 1.0}, [metric]) == pytest.approx(expected)


def test_delta_m_leaves_summaries_out():
    values, reference = {"error": 2.0, "average": 9.0}, {"error": 1.0, "average": 1.0}
    assert delta_m(values, reference, [ERROR, AVERAGE]) == delta_m(values, reference, [ERROR])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(error=numbers, accuracy=numbers, factor=numbers)
def test_delta_m_is_zero_for_the_reference_itself_and_free_of_units(error, accuracy, factor):
    reference = {"error": error, "accuracy": accuracy}
    assert delta_m(reference, reference, [ERROR, ACCURACY]) == 0
    values = {"error": 2 * error, "accuracy": accuracy}
    other_unit = {"error": factor * error, "accuracy": accuracy}
    expected = delta_m(values, reference, [ERROR, ACCURACY])
    assert expected == pytest.approx(50)
    assert delta_m(values | {"error": 2 * factor * error}, other_unit, [ERROR, ACCURACY]) == pytest.approx(expected)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(reference=st.floats(-100, 100).filter(lambda number: abs(number) > 0.01), change=numbers, higher=st.booleans())
def test_delta_m_tells_better_from_worse_whatever_the_sign_of_the_reference(reference, change, higher):
    metric = Metric("score", higher=higher, task="a")
    assert (delta_m({"score": reference + change}, {"score": reference}, [metric]) < 0) == higher


def test_delta_m_refuses_a_reference_of_zero_by_name():
    with pytest.raises(UserError, match="'error' is 0"):
        delta_m({"error": 1.0}, {"error": 0.0}, [ERROR])


@pytest.mark.parametrize(
    ("values", "reference", "message"),
    [
        ({"accuracy": 1.0}, {"error": 1.0}, "'error', which the values lack: found accuracy"),
        ({"error": 1.0}, {}, "'error', which the references lack: found none"),
    ],
)
def test_delta_m_names_a_metric_that_is_not_there(values, reference, message):
    with pytest.raises(UserError, match=message):
        delta_m(values, reference, [ERROR])


def test_delta_m_of_summaries_alone_is_refused():
    with pytest.raises(ValueError, match="belong to a task"):
        delta_m({"average": 1.0}, {"average": 1.0}, [AVERAGE])
