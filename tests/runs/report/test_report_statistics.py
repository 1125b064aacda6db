"""The paired test against scipy, and where there is nothing to test."""

import pytest
from scipy import stats

from moonopt.runs.report.layout import DASH
from moonopt.runs.report.statistics import compare_rows, comparison_table, holm
from moonopt.runs.report.study import read_runs, studies


def comparisons(make_run, values):
    """Values of the headline metric by method and seed."""
    for method, by_seed in values.items():
        for seed, value in by_seed.items():
            make_run(method, seed, {"average loss": value})
    (study,) = studies(read_runs([make_run.args[0]]), list(values))
    return compare_rows(study), comparison_table(study)


def test_differences_intervals_and_p_are_those_of_scipy(make_run):
    moon = dict(enumerate([0.31, 0.29, 0.33, 0.30, 0.28]))
    ls = dict(enumerate([0.35, 0.31, 0.36, 0.35, 0.30]))
    famo = dict(enumerate([0.30, 0.31, 0.32, 0.31, 0.29]))
    found, table = comparisons(make_run, {"moon": moon, "ls": ls, "famo": famo})
    for comparison, other in zip(found, (ls, famo), strict=True):
        expected = stats.ttest_rel(list(moon.values()), list(other.values()))
        interval = expected.confidence_interval(0.95)
        assert comparison.p == pytest.approx(expected.pvalue)
        assert (comparison.low, comparison.high) == pytest.approx((interval.low, interval.high))
        assert comparison.difference == pytest.approx(sum(moon.values()) / 5 - sum(other.values()) / 5)
    assert found[0].adjusted_p == pytest.approx(2 * found[0].p)
    assert found[1].adjusted_p == pytest.approx(found[1].p)
    assert [row.label for row in table.rows] == ["moon vs ls", "moon vs famo"]
    assert "below zero, the first is better" in table.notes[0]


def test_only_common_seeds_are_paired(make_run):
    found, _ = comparisons(make_run, {"moon": {0: 1.0, 1: 2.0, 2: 4.0}, "ls": {1: 1.5, 2: 3.0, 7: 9.0}})
    assert found[0].seeds == [1, 2]
    assert found[0].p == pytest.approx(stats.ttest_rel([2.0, 4.0], [1.5, 3.0]).pvalue)


def test_too_few_seeds_are_said_to_be_too_few(make_run):
    values = {"moon": {0: 1.0, 1: 2.0}, "ls": {1: 1.5}, "famo": {9: 1.0}}
    (one, none), table = comparisons(make_run, values)
    assert (one.difference, one.p, one.adjusted_p) == (0.5, None, None)
    assert one.note == "too few seeds: a test needs 2 that both have"
    assert none.note == "no common seeds"
    assert table.rows[0].entries[2].text == DASH


@pytest.mark.filterwarnings("error")
def test_equal_differences_give_no_test_and_no_warning(make_run):
    (same, shifted), _ = comparisons(make_run, {"moon": {0: 1.0, 1: 2.0}, "ls": {0: 1.0, 1: 2.0}, "famo": {0: 0.5, 1: 1.5}})
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, None)
    assert (shifted.difference, shifted.p) == (0.5, None)
    assert shifted.note == "equal differences with every seed: no test"


@pytest.mark.filterwarnings("error")
def test_differences_that_are_equal_but_for_rounding_give_no_test(make_run):
    moon, ls = [90.1, 90.3, 95.7], [90.0, 90.2, 95.6]
    assert len({a - b for a, b in zip(moon, ls, strict=True)}) > 1
    (found,), table = comparisons(make_run, {"moon": dict(enumerate(moon)), "ls": dict(enumerate(ls))})
    assert found.difference == pytest.approx(0.1)
    assert (found.p, found.adjusted_p, found.note) == (None, None, "equal differences with every seed: no test")
    assert not any(entry.best for entry in table.rows[0].entries)


def test_small_differences_that_are_not_equal_are_tested(make_run):
    moon, ls = {0: 100.0 + 1e-6, 1: 100.0 + 2e-6}, {0: 100.0, 1: 100.0}
    (found,), _ = comparisons(make_run, {"moon": moon, "ls": ls})
    assert found.p == pytest.approx(stats.ttest_rel(list(moon.values()), list(ls.values())).pvalue)


def test_seeds_that_are_not_finite_are_left_out_and_named(make_run):
    values = {"moon": {0: 1.0, 1: 2.0, 2: 2.5}, "ls": {0: float("nan"), 1: 1.5, 2: 1.0}}
    found, _ = comparisons(make_run, values)
    assert found[0].seeds == [1, 2]
    assert found[0].note == "without seeds 0: not finite"
    assert found[0].p is not None


def test_a_row_without_the_headline_metric_says_so(many_runs, scenes):
    (study,) = (each for each in studies(read_runs([many_runs])) if each.name == scenes)
    assert next(each for each in compare_rows(study) if each.other == "stl").note == "stl has no mean score"


def test_holm_is_monotone_and_at_most_one():
    assert holm([]) == []
    assert holm([0.5, 0.9, 0.7]) == [1.0, 1.0, 1.0]
    assert holm([0.02, 0.001]) == pytest.approx([0.02, 0.002])
