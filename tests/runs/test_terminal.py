"""Tables in a terminal."""

import io
import re

import pytest
from rich.console import Console

from moonopt.bench import Metric
from moonopt.runs.report.layout import DASH, Column, Entry, Table, TableRow
from moonopt.runs.terminal import print_results, print_trials

HEADLINE = Metric("mean error", higher=False)


def results(width, metrics, label="moon", terminal=False):
    """The lines that are printed of a row with so many metrics beside the headline and Δm, and the numbers in them."""
    columns = [*(Column(f"m{number} (meV) ↓") for number in range(metrics)), Column("mean error ↓"), Column("Δm (%) ↓")]
    numbers = [*(Entry(f"{number}.5 ± 1088.4", best=number == 0) for number in range(metrics)), Entry("7777.7"), Entry("-8.88")]
    row, paper = TableRow(label, [*numbers, Entry("3")], 3), TableRow("LS", [Entry("9.9")] * (metrics + 2) + [Entry(DASH)])
    told = io.StringIO()
    table = Table("study", "method", [*columns, Column("seeds")], [row, paper], ["A note."])
    print_results(Console(file=told, width=width, force_terminal=terminal, color_system=None), table, HEADLINE)
    lines = told.getvalue().splitlines()
    return lines, re.findall(r"(\d+)\.5 ± 1088\.4(?!\d)", "\n".join(lines))


@pytest.mark.parametrize("label", ["moon", "moon,optimizer.beta=auto,optimizer.loss=log,optimizer.lr=0.001"])
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("metrics", "width"), [(n, width) for n in (2, 11, 40) for width in (60, 80, 120, 200, 1000)])
def test_as_many_columns_as_fit_are_shown_whole_and_the_others_are_told(metrics, width, terminal, label):
    lines, numbers = results(width, metrics, label, terminal)
    table, notes = lines[: lines.index("A note.")], lines[lines.index("A note.") + 1 :]
    assert max(map(len, table)) <= width
    assert numbers == [str(number) for number in range(len(numbers))]
    assert sum("7777.7" in line and "-8.88" in line and re.search(r" 3 *$", line) is not None for line in table) == 1
    assert width - max(len(line.rstrip()) for line in table) < 18 or len(numbers) == metrics  # there is no room for another
    left_out = [f"m{number} (meV) ↓" for number in range(len(numbers), metrics)]
    more = f" and {len(left_out) - 4} more" if len(left_out) > 4 else ""
    told = f"No room for {', '.join(left_out[:4])}{more}: `moonopt report` has all columns, also as CSV."
    assert notes == ([told] if left_out else [])


def test_headings_are_broken_between_words_before_a_column_is_left_out():
    (whole, _), (broken, numbers) = results(120, 4, terminal=True), results(100, 4, terminal=True)
    assert whole[3].split("  ")[-3:] == [" mean error ↓", " Δm (%) ↓", " seeds "]
    assert [line.split() for line in broken[3:5]] == [["mean"], ["error", "Δm"]]
    assert numbers == ["0", "1", "2", "3"]


def test_the_headline_and_delta_are_never_left_out_nor_cropped():
    for width in (60, 40, 30, 10):
        lines, _ = results(width, 11, "moon,optimizer.lr=0.001")
        assert any("7777.7" in line and "-8.88" in line for line in lines)


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
