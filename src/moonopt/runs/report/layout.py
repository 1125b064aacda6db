"""A table as plain data, raw values beside what is shown, and its form as CSV, Markdown and LaTeX."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

#: Shown where there is no value.
DASH = "\N{EN DASH}"

PLUS_MINUS = " ± "


@dataclass(frozen=True)
class Column:
    """A heading; ``higher`` says which direction is good, if one is. ``numeric`` columns are aligned and sorted as numbers."""

    heading: str
    higher: bool | None = None
    numeric: bool = True


@dataclass(frozen=True)
class Entry:
    """What is shown, the number behind it (None where there is none), its standard deviation, and whether it is the best."""

    text: str
    value: float | None = None
    spread: float | None = None
    best: bool = False


@dataclass(frozen=True)
class TableRow:
    """A label with an entry per column. ``published`` rows are a paper's; ``seeds`` is how many the numbers are of."""

    label: str
    entries: Sequence[Entry]
    seeds: int = 0
    published: bool = False


@dataclass(frozen=True)
class Table:
    """``corner`` heads the labels; ``notes`` are sentences that belong below."""

    title: str
    corner: str
    columns: Sequence[Column]
    rows: Sequence[TableRow]
    notes: Sequence[str] = ()


def to_csv(table: Table) -> str:
    """Raw values: every numeric column that has a spread gives two, the mean and "... std"."""
    spread = [any(row.entries[index].spread is not None for row in table.rows) for index in range(len(table.columns))]
    heading = [table.corner, "source"]
    for column, has_spread in zip(table.columns, spread, strict=True):
        heading += [column.heading, f"{column.heading} std"] if has_spread else [column.heading]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    for row in table.rows:
        cells: list[object] = [row.label, "published" if row.published else "runs"]
        for entry, column, has_spread in zip(row.entries, table.columns, spread, strict=True):
            cells.append(_raw(entry.value) if column.numeric else entry.text)
            cells += [_raw(entry.spread)] if has_spread else []
        writer.writerow(cells)
    return text.getvalue()


def to_markdown(table: Table) -> str:
    """A table of GitHub's Markdown, with its notes below."""
    lines = [
        _markdown_line([table.corner, *(column.heading for column in table.columns)]),
        _markdown_line(["---", *("---:" if column.numeric else "---" for column in table.columns)]),
    ]
    for row in table.rows:
        entries = [f"**{_markdown(entry.text)}**" if entry.best else _markdown(entry.text) for entry in row.entries]
        label = f"*{_markdown(row.label)} (paper)*" if row.published else _markdown(row.label)
        lines.append(f"| {' | '.join([label, *entries])} |")
    notes = [f"- {_markdown(note)}" for note in table.notes]
    return "\n".join([f"### {_markdown(table.title)}", "", *lines, *([""] if notes else []), *notes]) + "\n"


def to_latex(table: Table) -> str:
    """A tabular with the rules of booktabs; the notes are comments."""
    alignment = "l" + "".join("r" if column.numeric else "l" for column in table.columns)
    lines = ["% " + note.replace("\n", " ") for note in (table.title, *table.notes, r"Needs \usepackage{booktabs}.")]
    lines += [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
    lines += [_latex_line([_latex(table.corner), *(_latex(column.heading) for column in table.columns)]), r"\midrule"]
    for row in table.rows:
        entries = [rf"\textbf{{{_latex(entry.text)}}}" if entry.best else _latex(entry.text) for entry in row.entries]
        label = rf"\textit{{{_latex(row.label)} (paper)}}" if row.published else _latex(row.label)
        lines.append(_latex_line([label, *entries]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _raw(value: float | None) -> str:
    return "" if value is None else repr(value)


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell if cell.startswith('---') else _markdown(cell) for cell in cells)} |"


def _markdown(text: str) -> str:
    for letter in "\\`*_|":
        text = text.replace(letter, f"\\{letter}")
    return text.replace("<", "&lt;").replace("\n", " ")


_LATEX = str.maketrans(
    {
        **{letter: rf"\{letter}" for letter in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "±": r"$\pm$",
        "↑": r"$\uparrow$",
        "↓": r"$\downarrow$",
        "Δ": r"$\Delta$",
        DASH: "--",
        "\n": " ",
    }
)


def _latex(text: str) -> str:
    return text.translate(_LATEX)


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
