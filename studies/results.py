"""What was run: the rows of a study by method and by what was changed, what tuning chose, and paired tests."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from moonopt.bench import Benchmark
from moonopt.runs.cell import word
from moonopt.runs.report.reading import Run, read_runs
from moonopt.runs.report.statistics import Comparison, compare_rows
from moonopt.runs.report.study import Row, Study, studies

Changes = Mapping[str, Any]
#: A method, and what of its settings is not as in the main table.
Variant = tuple[str, Changes]
Tuning = Mapping[str, Any]
Speed = Mapping[str, Any]

RATE, BETA, GAMMA, LOSS = "optimizer.lr", "optimizer.beta", "optimizer.gamma", "optimizer.loss"
#: MOON with log-losses and a beta that has no unit.
LOG_AUTO: Changes = {BETA: "auto", LOSS: "log"}
SEEDS = 3


@dataclass(frozen=True)
class Results:
    """The study, and its tuning files by name ("adam", ...)."""

    study: Study
    tuning: Mapping[str, Tuning]

    #: What the tuning files of a name are for: a method with these changes, or what is no part of the main table (None).
    tuned_apart: ClassVar[Mapping[str, Changes | None]] = {}
    #: Settings that are no change, whatever they are.
    given: ClassVar[Sequence[str]] = ()

    def row(self, method: str, changes: Changes | None = None) -> Row | None:
        """The runs of a method at the rate that was chosen for it, with these settings changed and no others."""
        wanted = changes or {}
        return next((row for row in self.study.rows if row.method == method and self.changes(row) == wanted), None)

    def rows(self, methods: Iterable[str]) -> list[Row]:
        """Those of the methods that were run."""
        return [row for row in map(self.row, methods) if row is not None]

    def changes(self, row: Row) -> Changes:
        """What is not as in the main table, and not as in all rows; a rate counts where another was chosen."""
        overrides = row.outcomes[0].runs[0].config["overrides"]
        own = {key: value for key, value in overrides.items() if f"{key}={word(value)}" not in self.study.shared}
        changes = {key: value for key, value in own.items() if key not in (RATE, *self.given)}
        rate = setting(row, RATE)
        return changes if rate == self.chosen(row.method, changes, rate) else {**changes, RATE: rate}

    def chosen(self, method: str, changes: Changes, default: float) -> float:
        """The rate that tuning chose for a method, or for one with these changes where that was tuned apart."""
        apart = [name for name, others in self.tuned_apart.items() if others == changes and name in self.tuning]
        for name in apart or (name for name in self.tuning if name not in self.tuned_apart):
            if method in (found := self.tuning[name]["chosen"]):
                return float(found[method][RATE])
        return default

    def compare(self, first: Variant, other: Variant, metric: str) -> Comparison | None:
        """The paired test between two variants; None where one was not run."""
        rows = [self.row(*first), self.row(*other)]
        if None in rows:
            return None
        (found,) = compare_rows(replace(self.study, rows=[row for row in rows if row is not None]), metric)
        return found


def read_tuning(folder: Path) -> dict[str, Tuning]:
    return {path.stem.removeprefix("tuned-"): json.loads(path.read_text()) for path in sorted(folder.glob("tuned-*.json"))}


def read_exports(folder: Path) -> list[Run]:
    """What ``moonopt export`` wrote into a folder, which need not be there and may have tuning files."""
    return read_runs([path for path in sorted(folder.glob("*.json")) if not path.name.startswith("tuned-")])


def study_of(runs: Sequence[Run], benchmark: type[Benchmark]) -> Study:
    """Runs of one benchmark, or none."""
    return next(iter(studies(runs)), Study(benchmark.name, benchmark, [], []))


def read_speed(folder: Path, pattern: str) -> list[Speed]:
    """What the files of such a name, which ``moonopt speed`` printed, have measured; each result with its environment."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]
    return [{**result, "environment": content["environment"]} for content in contents for result in content["results"]]


def setting(row: Row, key: str) -> Any:
    return row.outcomes[0].runs[0].config["settings"][key]
