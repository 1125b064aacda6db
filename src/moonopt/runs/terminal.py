"""Tables in a terminal, or as plain text where it is a pipe."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from moonopt.bench import Metric
from moonopt.runs.report.delta import DELTA
from moonopt.runs.report.tables import BEST, Table

#: Names of methods are broken where there is no room, but not below this width for the sake of more columns.
UNBROKEN = 24
#: What a table takes between two columns, and at its sides.
GAP, SIDES = 3, 2
#: Of columns that do not fit, so many are named.
NAMED = 4


def grid(*headings: str) -> Grid:
    """An empty table."""
    table = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def print_results(console: Console, table: Table, headline: Metric) -> None:
    """The results of a study, as many columns as fit; the best are bold, or have a star where there is no bold."""
    star = "" if console.is_terminal else " *"
    labels = [f"{row.label} (paper)" if row.published else row.label for row in table.rows]
    texts = [[entry.text + star * entry.best for entry in row.entries] for row in table.rows]
    longest, room = max(map(cell_len, [table.corner, *labels])), console.width - SIDES
    widths = _widths(table, texts, room - longest)
    kept = _fitting(table, widths, room - min(longest, UNBROKEN), headline)
    shown = grid(table.corner)
    for index in kept:
        shown.add_column(table.columns[index].heading, justify="right", width=widths[index])
    for row, label, entries in zip(table.rows, labels, texts, strict=True):
        numbers = [Text(entries[index], "bold" if row.entries[index].best else "") for index in kept]
        shown.add_row(Text(label), *numbers, style="dim" if row.published else "")
    least = SIDES + 1 + sum(widths[index] + GAP for index in kept)
    shown.width = least if least > console.width else None  # then lines are broken by the terminal, which crops no number
    console.print()
    console.print(Text(table.title, "bold"))
    console.print(shown, crop=False)
    for note in [*table.notes, *_left_out(table, kept)]:
        told = note.replace(BEST, "The best mean has a *") if star else note
        console.print(Text(told, "dim"), soft_wrap=True)


def _widths(table: Table, texts: Sequence[Sequence[str]], room: int) -> list[int]:
    """Of every column: numbers are never broken; headings are, between words, where all columns would not fit else."""
    headings = [column.heading for column in table.columns]
    numbers = [max((cell_len(row[index]) for row in texts), default=0) for index in range(len(headings))]
    whole = [max(number, cell_len(heading)) for number, heading in zip(numbers, headings, strict=True)]
    if sum(whole) + GAP * len(whole) <= room:
        return whole
    return [max(number, *map(cell_len, heading.split())) for number, heading in zip(numbers, headings, strict=True)]


def _fitting(table: Table, widths: Sequence[int], room: int, headline: Metric) -> list[int]:
    """Which columns are shown: the headline and Δm in any case, then the number of seeds, then the others from the first on."""
    headings = [column.heading for column in table.columns]
    first = [headline.heading, DELTA.heading, headings[-1]]
    order = sorted(range(len(headings)), key=lambda index: [*first, headings[index]].index(headings[index]))
    ends = accumulate(widths[index] + GAP for index in order)
    return sorted(index for index, end in zip(order, ends, strict=True) if end <= room or headings[index] in first[:2])


def _left_out(table: Table, kept: Sequence[int]) -> list[str]:
    """A sentence about the columns that are not shown, if any."""
    names = [column.heading for index, column in enumerate(table.columns) if index not in kept]
    if not names:
        return []
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"No room for {', '.join(names[:NAMED])}{more}: `moonopt report` has all columns, also as CSV."]


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
