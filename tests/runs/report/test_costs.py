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
    assert len(table.notes) == 1


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


def test_what_was_not_measured_is_a_dash(make_run):
    make_run("ls", 0, {}, peak_memory_mb=None)
    entries = table_of(make_run).rows[0].entries
    assert [entries[MEGABYTES].text, entries[MEMORY].text] == [DASH, DASH]
