"""Tables in a terminal, or as plain text where it is a pipe."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from moonopt.bench import Metric
from moonopt.runs.report.tables import BEST, Table

#: Of metrics: more do not fit side by side. Summaries come first.
MOST_COLUMNS = 14
#: Up to this width, names of methods are not broken.
UNBROKEN = 24


def grid(*headings: str) -> Grid:
    """An empty table."""
    table = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def print_results(console: Console, table: Table) -> None:
    """The results of a study; the best are bold, or have a star where there is no bold. Of many columns the first are shown."""
    last = len(table.columns) - 1  # how many seeds there are
    kept = [index for index in range(last + 1) if last <= MOST_COLUMNS or index < MOST_COLUMNS or index == last]
    shown = grid(table.corner, *(table.columns[index].heading for index in kept))
    star = "" if console.is_terminal else " *"
    labels = [f"{row.label} (paper)" if row.published else row.label for row in table.rows]
    shown.columns[0].min_width = min(UNBROKEN, max(map(len, labels), default=0))
    for column in shown.columns[1:]:
        column.justify = "right"
    for row, label in zip(table.rows, labels, strict=True):
        chosen = [row.entries[index] for index in kept]
        entries = [Text(entry.text + star * entry.best, "bold" if entry.best else "") for entry in chosen]
        shown.add_row(Text(label), *entries, style="dim" if row.published else "")
    console.print()
    console.print(Text(table.title, "bold"))
    console.print(shown)
    left_out = len(table.columns) - len(kept)
    for note in [*table.notes, *([f"{left_out} more columns are in the report."] if left_out else [])]:
        told = note.replace(BEST, "The best mean has a *") if star else note
        console.print(Text(told, "dim"), soft_wrap=True)


def print_trials(console: Console, tuned: Mapping[str, Any], judged_by: Metric) -> None:
    """Every trial with what it was judged by; the chosen ones are bold."""
    keys = list(dict.fromkeys(key for values in tuned["grids"].values() for key in values))
    shown = grid("method", *keys, judged_by.heading)
    sign = -1 if judged_by.higher else 1  # scores are for a minimum
    for row in tuned["trials"]:
        chosen = tuned["chosen"].get(row["method"]) == row["settings"]
        score = "failed" if row["score"] is None else f"{sign * row['score']:.6g}"
        mark = " *" if chosen and not console.is_terminal else ""
        values = [str(row["settings"].get(key, "")) for key in keys]
        shown.add_row(row["method"], *values, score + mark, style="bold" if chosen else "")
    console.print(shown)
    marked = "are bold" if console.is_terminal else "have a *"
    console.print(f"{tuned['score'].partition(';')[0]}; the chosen ones {marked}", soft_wrap=True, highlight=False)
    for note in tuned["notes"]:
        console.print(note, style="yellow", soft_wrap=True, highlight=False)
