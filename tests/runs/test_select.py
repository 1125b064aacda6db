"""Which evaluation is reported: the last, the best on validation data, the mean of the last few."""

import math

import pytest

from moonopt.errors import UserError
from moonopt.runs.select import Selection


def evaluations(*scores):
    return [{"epoch": epoch, "valid": {"x": score}, "test": {"x": 10.0 * epoch}} for epoch, score in enumerate(scores, 1)]


def reported(name, *scores):
    return Selection.read(name, True).reported(evaluations(*scores), lambda metrics: metrics["x"])


def test_the_last_is_reported():
    found = reported("last", 1.0, 3.0, 2.0)
    assert (found["metrics"], found["valid"], found["epoch"], found["selection"]) == (
        {"x": 30.0},
        {"x": 2.0},
        3,
        "epoch 3, the last",
    )


def test_the_best_is_the_first_of_the_lowest_and_never_what_is_no_number():
    assert reported("best", math.nan, 2.0, 1.0, 1.0, math.nan)["epoch"] == 3
    assert reported("best", math.nan, math.inf)["epoch"] == 1
    assert reported("best", 2.0, 1.0)["selection"] == "epoch 2 of 2, the best on validation data"


def test_the_mean_of_the_last_few_takes_what_there_is():
    assert reported("last:2", 1.0, 3.0, 2.0)["metrics"] == {"x": 25.0}
    assert reported("last:9", 1.0, 3.0)["metrics"] == {"x": 15.0}
    assert reported("last:9", 1.0, 3.0)["selection"] == "mean of the last 2 evaluations"


def test_without_validation_data_there_is_none_to_report():
    rows = [{"epoch": 1, "valid": None, "test": {"x": 1.0}}]
    assert Selection.read("last", False).reported(rows, lambda metrics: 0.0)["valid"] is None
    with pytest.raises(UserError, match="best needs validation data, and this benchmark has none: use last"):
        Selection.read("best", False)


@pytest.mark.parametrize("name", ["first", "last:0", "last:x", "last:-1", "best:2", ""])
def test_what_is_no_selection_is_told(name):
    with pytest.raises(UserError, match=r"train.select must be last, best or last:10"):
        Selection.read(name, True)
