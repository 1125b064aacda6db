"""What was run: the thirty regressions with one scale, and with scales that differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from moonopt.bench.synthetic import Synthetic30
from moonopt.runs.report.study import Row
from studies.results import BETA, LOG_AUTO, LOSS, RATE, Results, Variant, read_exports, read_tuning, setting, study_of

VECTOR_RATE = "optimizer.vector_lr"
#: The folders of the problems: of one scale, and of scales that differ.
EQUAL, SPREAD = "synthetic30", "synthetic30-spread"
MOON: Variant = ("moon", {})
ROBUST: Variant = ("moon", LOG_AUTO)
WITH_MUON: tuple[Variant, ...] = tuple((name, {}) for name in ("muon", "famo+muon", "mgda+muon"))
WITH_ADAM: tuple[Variant, ...] = tuple((name, {}) for name in ("famo", "ls", "uw", "si", "mgda", "nash-mtl"))
MAIN = (MOON, ROBUST, *WITH_MUON, *WITH_ADAM)


@dataclass(frozen=True)
class Problem(Results):
    """Thirty regressions, of one scale or of many."""

    tuned_apart: ClassVar = {"moon-log-auto": LOG_AUTO}
    given: ClassVar = (VECTOR_RATE,)

    def moon_with(self, beta: float | str, loss: str) -> Row | None:
        """MOON with another beta or loss, at the rates that were chosen for the plain one."""
        plain = self.row(*MOON)
        wanted = {
            BETA: beta,
            LOSS: loss,
            **({} if plain is None else {key: setting(plain, key) for key in (RATE, VECTOR_RATE)}),
        }
        rows = [row for row in self.study.rows if row.method == MOON[0]]
        return next((row for row in rows if all(setting(row, key) == value for key, value in wanted.items())), None)


def read(folder: Path) -> Mapping[str, Problem]:
    """By the names of their folders."""
    return {name: _problem(folder / name) for name in (EQUAL, SPREAD)}


def _problem(folder: Path) -> Problem:
    return Problem(study_of(read_exports(folder), Synthetic30), read_tuning(folder))
