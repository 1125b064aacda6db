"""What was run: the study, its tuning, the runs that had the GPU to themselves, and those with the exact dual."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from moonopt.bench.paper import MULTIMNIST_BETA, MULTIMNIST_GAMMA
from moonopt.runs.report.reading import read_runs
from moonopt.runs.report.study import Row, Study, studies
from studies.entries import variant
from studies.multimnist.curves import with_curves
from studies.results import Changes, Results, read_tuning, setting

LEFT, RIGHT, AVERAGE = METRICS = ("left accuracy", "right accuracy", "average accuracy")

#: The methods of the paper's main table, then those that we add.
PAPERS = ("mgda", "pcgrad", "cagrad", "imtl-g", "nash-mtl", "famo")
ADDED = ("ls", "si", "rlw", "dwa", "uw", "gradnorm", "graddrop")
DRAWN = ("moon", "muon", "ls", "famo", "mgda")

#: The components that MOON is tested without, under the names of their tuning files and of the paper's rows.
COMPONENTS: Mapping[str, tuple[str, Changes]] = {
    "euclidean": ("with-euclidean-update", {"optimizer.schedule": "none"}),
    "no-momentum": ("without-momentum", {"optimizer.momentum": 0}),
}

#: The tuning files of the methods' own parameters, and for which methods they are.
OWN: Mapping[str, str] = {"own": "MOON, Muon, balancers with Adam", "own-muon": "balancers with Muon"}

GAMMAS = tuple(sorted(MULTIMNIST_GAMMA))
BETAS = tuple(sorted({*MULTIMNIST_BETA, 1e-2, 1e-1, 1.0, 10.0}))


@dataclass(frozen=True)
class MultiMNIST(Results):
    """The study, with metrics of the curves beside the accuracies.

    ``alone`` are runs that had the GPU to themselves, by name, and ``first`` such as were the first on a machine that had just
    started; ``exact`` those of one epoch with the exact dual and without.
    """

    alone: Mapping[str, Row] = field(default_factory=dict)
    first: Mapping[str, Row] = field(default_factory=dict)
    exact: Sequence[Row] = ()

    tuned_apart: ClassVar = {**dict.fromkeys(OWN), **{name: changes for name, (_, changes) in COMPONENTS.items()}}

    def name(self, row: Row) -> str:
        """The method, and what of its settings is not as in the main table, but for those of the training loop."""
        return variant(row.method, {key: value for key, value in self.changes(row).items() if not key.startswith("train.")})

    def moon_with(self, key: str, value: Any) -> Row | None:
        """MOON with one setting changed, or as it is where that is its value."""
        row = self.row("moon")
        return row if row is not None and setting(row, key) == value else self.row("moon", {key: value})


def read(folder: Path) -> MultiMNIST:
    """The runs and tuning files of a folder, and the exports beside it, of names with "-alone", "-first" and "-exact" added."""
    beside = [folder.with_name(f"{folder.name}-{name}") for name in ("alone", "first", "exact")]
    alone, first, exact = (_study(path).rows if path.is_dir() else [] for path in beside)
    results = MultiMNIST(_study(folder), read_tuning(folder), exact=exact)
    named = [{results.name(row): row for row in rows} for rows in (alone, first)]
    return replace(results, alone=named[0], first=named[1])


def _study(folder: Path) -> Study:
    (study,) = studies(read_runs([folder]))
    return replace(study, rows=[replace(row, outcomes=[with_curves(each) for each in row.outcomes]) for row in study.rows])
