"""Cost of a step against ls, or against the first row."""

import numpy as np
import pytest

from moonopt.runs.report.costs import cost_table
from moonopt.runs.report.layout import DASH
from moonopt.runs.report.study import read_runs, studies

MILLISECONDS, TIME, MEGABYTES, MEMORY = range(4)


def table_of(make_run):
    (study,) = studies(read_runs([make_run.args[0]]))
    return cost_table(study)


def test_ratios_are_those_of_means_over_seeds(make_run):
    seconds = {"moon": [0.02, 0.03], "ls": [0.010, 0.012]}
    for method, each in seconds.items():
        for seed, value in enumerate(each):
            make_run(method, seed, {}, seconds_per_step=value, peak_memory_mb=100.0 * (seed + len(method)))
    table = table_of(make_run)
    entries = table.rows[0].entries
    assert (table.rows[0].label, table.columns[TIME].heading) == ("moon", "time / ls")
    assert entries[MILLISECONDS].value == pytest.approx(25)
    assert entries[MILLISECONDS].spread == pytest.approx(np.std([20, 30], ddof=1))
    assert entries[TIME].value == pytest.approx(0.025 / 0.011)
    assert entries[MEMORY].value == pytest.approx(450 / 250)
    assert table.rows[1].entries[TIME].text == "1.00"
    (note,) = table.notes
    assert "on a CPU what the process grew by after its start" in note


def test_without_ls_the_first_row_is_the_base_and_that_is_said(make_run):
    make_run("moon", 0, {}, seconds_per_step=0.2)
    make_run("famo", 0, {}, seconds_per_step=0.1, hardware={"device": "cuda"})
    table = table_of(make_run)
    assert [row.entries[TIME].value for row in table.rows] == [1.0, 0.5]
    assert table.notes[1:] == [
        "There is no run of ls here: the ratios are to moon, the first row.",
        "Not all runs were made on the same hardware: compare with care.",
    ]


def test_plain_ls_is_the_base_before_one_with_overrides(make_run):
    for overrides in ({"optimizer.lr": 0.1}, {}):
        make_run("ls", 0, {}, overrides=overrides)
    assert table_of(make_run).columns[TIME].heading == "time / ls"


@pytest.mark.parametrize("method", ["stl", "stl+muon"])
def test_a_model_per_task_costs_the_sum_of_seconds_and_the_largest_memory(scenes, make_run, method):
    tasks = ("segment", "depth")
    for task, memory in zip(tasks, (100.0, 300.0), strict=True):
        overrides = {"balancer.task": task}
        make_run(method, 0, {}, scenes, tasks, overrides=overrides, seconds_per_step=0.5, peak_memory_mb=memory)
    table = table_of(make_run)
    (row,) = table.rows
    assert (row.label, row.entries[MILLISECONDS].value, row.entries[MEGABYTES].value) == (method, 1000.0, 300.0)
    assert f"{method} trains one model per task: time, parameters and steps are sums, memory is the largest." in table.notes


def test_what_was_not_measured_is_a_dash(make_run):
    make_run("ls", 0, {}, peak_memory_mb=None)
    entries = table_of(make_run).rows[0].entries
    assert [entries[MEGABYTES].text, entries[MEMORY].text] == [DASH, DASH]
