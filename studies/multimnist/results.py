"""What was run: the study, its tuning, and the runs that had the GPU to themselves."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moonopt.bench.paper import MULTIMNIST_BETA, MULTIMNIST_GAMMA
from moonopt.runs.report.reading import read_runs
from moonopt.runs.report.statistics import Comparison, compare_rows
from moonopt.runs.report.study import Row, Study, studies
from studies.multimnist.curves import with_curves

Changes = Mapping[str, Any]
#: A method, and what of its settings is not as in the main table.
Variant = tuple[str, Changes]

RATE, BETA, GAMMA = "optimizer.lr", "optimizer.beta", "optimizer.gamma"
LEFT, RIGHT, AVERAGE = METRICS = ("left accuracy", "right accuracy", "average accuracy")
SEEDS = 3

#: The methods of the paper's main table, then those that issue 7 adds.
PAPERS = ("mgda", "pcgrad", "cagrad", "imtl-g", "nash-mtl", "famo")
ADDED = ("ls", "si", "rlw", "dwa", "uw", "gradnorm", "graddrop")
DRAWN = ("moon", "muon", "ls", "famo", "mgda")

#: The components that MOON is tested without, under the names of their tuning files and of the paper's rows.
COMPONENTS: Mapping[str, tuple[str, Changes]] = {
    "euclidean": ("with-euclidean-update", {"optimizer.schedule": "none"}),
    "no-momentum": ("without-momentum", {"optimizer.momentum": 0}),
}

GAMMAS = tuple(sorted(MULTIMNIST_GAMMA))
BETAS = tuple(sorted({*MULTIMNIST_BETA, 1e-2, 1e-1, 1.0, 10.0}))

#: The exports of runs with the GPU to themselves, by how their folder's name goes on.
ALONE = {"alone": "without autocast and compilation", "alone-compiled": "with autocast and compilation"}


@dataclass(frozen=True)
class Results:
    """The study, with metrics of the curves beside the accuracies; tuning files by name ("adam", ...); rows of ``ALONE``."""

    study: Study
    tuning: Mapping[str, Mapping[str, Any]]
    alone: Mapping[str, Mapping[str, Row]] = field(default_factory=dict)

    def row(self, method: str, changes: Changes | None = None) -> Row | None:
        """The runs of a method at the rate that was chosen for it, with these settings changed and no others."""
        wanted = changes or {}
        return next((row for row in self.study.rows if row.method == method and self.changes(row) == wanted), None)

    def rows(self, methods: Iterable[str]) -> list[Row]:
        """Those of the methods that were run."""
        return [row for row in map(self.row, methods) if row is not None]

    def moon_with(self, key: str, value: Any) -> Row | None:
        """MOON with one setting changed, or as it is where that is its value."""
        row = self.row("moon")
        return row if row is not None and setting(row, key) == value else self.row("moon", {key: value})

    def changes(self, row: Row) -> Changes:
        """What is not as in the main table; a rate counts where another was chosen."""
        overrides = row.outcomes[0].runs[0].config["overrides"]
        changes = {key: value for key, value in overrides.items() if key != RATE}
        rate = setting(row, RATE)
        return changes if rate == self.chosen(row.method, changes, rate) else {**changes, RATE: rate}

    def chosen(self, method: str, changes: Changes, default: float) -> float:
        """The rate that tuning chose for a method, or for MOON without a component."""
        component = [name for name, (_, without) in COMPONENTS.items() if without == changes and name in self.tuning]
        for name in component or ("adam", "muon"):
            if method in (found := self.tuning.get(name, {}).get("chosen", {})):
                return float(found[method][RATE])
        return default

    def compare(self, first: Variant, other: Variant, metric: str) -> Comparison | None:
        """The paired test between two variants; None where one was not run."""
        rows = [self.row(*first), self.row(*other)]
        if None in rows:
            return None
        (found,) = compare_rows(replace(self.study, rows=[row for row in rows if row is not None]), metric)
        return found


def read(folder: Path) -> Results:
    """The runs and tuning files of a folder, and the exports of ``ALONE`` that are beside it."""
    tuning = {path.stem.removeprefix("tuned-"): json.loads(path.read_text()) for path in sorted(folder.glob("tuned-*.json"))}
    beside = {name: folder.with_name(f"{folder.name}-{name}") for name in ALONE}
    alone = {name: {row.method: row for row in _study(path).rows} for name, path in beside.items() if path.is_dir()}
    return Results(_study(folder), tuning, alone)


def setting(row: Row, key: str) -> Any:
    return row.outcomes[0].runs[0].config["settings"][key]


def _study(folder: Path) -> Study:
    (study,) = studies(read_runs([folder]))
    return replace(study, rows=[replace(row, outcomes=[with_curves(each) for each in row.outcomes]) for row in study.rows])
