"""What methods made of the same examples, beside one another."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moonopt.bench.base import Example
from moonopt.runs.report.layout import DASH, Column, Entry, Table, TableRow
from moonopt.runs.report.study import Row, Study


@dataclass(frozen=True)
class Shown:
    """What was given, by its name, and a table of what each method has made of it."""

    given: Mapping[str, str]
    made: Table


def examples_of(study: Study) -> list[Shown]:
    """Of the last evaluation of every row, with its first seed: rows that were given the same are in one table."""
    found: dict[tuple[tuple[str, str], ...], dict[str, Mapping[str, str]]] = {}
    for row in study.rows:
        for example in _last(row):
            given, made = (tuple((name, str(value)) for name, value in example[part].items()) for part in ("given", "made"))
            found.setdefault(given, {})[row.label] = dict(made)
    return [
        Shown(dict(given), _table(f"Example {number}", made)) for number, (given, made) in enumerate(found.items(), start=1)
    ]


def _last(row: Row) -> Iterator[Example]:
    evaluations = row.outcomes[0].evaluation
    yield from evaluations[-1].get("examples", ()) if evaluations else ()


def _table(title: str, made: Mapping[str, Mapping[str, str]]) -> Table:
    names = list(dict.fromkeys(name for each in made.values() for name in each))
    rows = [TableRow(label, [Entry(each.get(name, DASH)) for name in names]) for label, each in made.items()]
    return Table(title, "method", [Column(name, numeric=False) for name in names], rows)
