"""Tables in a terminal."""

import io

import pytest
from rich.console import Console

from moonopt.runs.report.layout import Column, Entry, Table, TableRow
from moonopt.runs.terminal import MOST_COLUMNS, print_results


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
