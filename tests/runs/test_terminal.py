"""Tables in a terminal."""

import io

import pytest
from rich.console import Console

from moonopt.bench import Metric
from moonopt.runs.report.layout import Column, Entry, Table, TableRow
from moonopt.runs.terminal import MOST_COLUMNS, print_results, print_trials


@pytest.mark.parametrize("metrics", [2, MOST_COLUMNS, 42])
def test_of_many_columns_the_first_and_the_seeds_are_shown(metrics):
    columns = [*(Column(f"m{number}") for number in range(metrics)), Column("seeds")]
    entries = [*(Entry(f"v{number}") for number in range(metrics)), Entry("three")]
    told = io.StringIO()
    print_results(Console(file=told, width=400), Table("study", "method", columns, [TableRow("moon", entries, 3)], ["A note."]))
    words = told.getvalue().split()
    assert [word for word in words if word[0] == "v"] == [f"v{number}" for number in range(min(metrics, MOST_COLUMNS))]
    assert "three" in words
    assert "A note." in told.getvalue()
    assert ("28 more columns are in the report." in told.getvalue()) == (metrics == 42)


@pytest.mark.parametrize(
    ("higher", "shown"), [(True, "accuracy ↑ 93.5 0.02 * failed"), (False, "accuracy ↓ -93.5 -0.02 * failed")]
)
def test_trials_are_shown_by_the_metric_that_people_know(higher, shown):
    rows = [("ls", 1, -93.5), ("ls", 2, -0.02), ("uw", 1, None)]
    tuned = {
        "grids": {"ls": {"lr": [1, 2]}, "uw": {"lr": [1]}},
        "trials": [{"method": method, "settings": {"lr": rate}, "score": score} for method, rate, score in rows],
        "chosen": {"ls": {"lr": 2}},
        "score": "accuracy on validation data, mean over the seeds; lower is better",
        "notes": [],
    }
    told = io.StringIO()
    print_trials(Console(file=told, width=400), tuned, Metric("accuracy", higher=higher))
    table, _, sentence = told.getvalue().rstrip().rpartition("\n")
    words = [word for word in table.split() if word not in ("method", "lr", "ls", "uw", "1", "2") and "─" not in word]
    assert " ".join(words) == shown
    assert sentence == "accuracy on validation data, mean over the seeds; the chosen ones have a *"
