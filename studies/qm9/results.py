"""What was run, by how long it was trained: the budget of the main table, the sweep over beta, the paper's protocol."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from moonopt.bench.metrics import delta_m
from moonopt.bench.paper import QM9_METRICS, QM9_STL
from moonopt.bench.qm9 import QM9
from moonopt.runs.report.reading import Line
from moonopt.runs.report.study import Outcome, Row, Study, number
from studies.entries import variant
from studies.results import (
    BETA,
    LOG_AUTO,
    LOSS,
    Results,
    Speed,
    Tuning,
    Variant,
    read_exports,
    read_speed,
    read_tuning,
    setting,
    study_of,
)

EPOCHS, SCHEDULE = "train.epochs", "train.schedule"
DELTA = "Δm"

#: Epochs of the stages; of the budget where nothing else was run.
BUDGET, SWEEP, PROTOCOL = 60, 12, 300

PLAIN: Variant = ("moon", {})
ROBUST: Variant = ("moon", LOG_AUTO)
#: Those that are tuned; the rest have the rate of ls.
TUNED = ("muon", "famo+muon", "famo", "ls")
OTHERS: tuple[Variant, ...] = tuple(
    (name, {})
    for name in (
        "muon", "famo+muon", "famo", "ls", "nash-mtl", "si", "rlw", "dwa", "uw", "mgda", "pcgrad", "cagrad", "imtl-g",
    )
)  # fmt: skip
IN_PROTOCOL: tuple[Variant, ...] = (PLAIN, ROBUST, ("muon", {}), ("famo+muon", {}), ("famo", {}))

LOSSES = ("plain", "log")
BETAS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, "auto")
#: Methods without a beta, run as long as the sweep.
BESIDE = ("muon", "famo+muon")
#: What MOON has where nothing is said.
DEFAULTS = {BETA: 1e-4, LOSS: "plain"}


@dataclass(frozen=True)
class Stage(Results):
    """Runs of equally many epochs, with Δm beside their errors."""

    epochs: int

    tuned_apart: ClassVar = {"moon-log-auto": LOG_AUTO}
    given: ClassVar = (EPOCHS, SCHEDULE, "model.half_messages", "method.engine")  # the last two change rounding alone

    def moon(self, loss: str, beta: float | str) -> Row | None:
        wanted = {BETA: beta, LOSS: loss}
        return self.row("moon", {key: value for key, value in wanted.items() if value != DEFAULTS[key]})

    def named(self, variants: Iterable[Variant]) -> dict[str, Row]:
        """Those of the variants that were run, by name."""
        return {variant(*each): row for each in variants if (row := self.row(*each)) is not None}


@dataclass(frozen=True)
class Stages:
    """The whole study: its stages, all tuning files, what ``moonopt.speed.molecules`` measured, and earlier rounds of trials.

    These are by the names of their folders, each with what was run at the rates that it chose.
    """

    budget: Stage
    sweep: Stage
    protocol: Stage
    tuning: Mapping[str, Tuning]
    speed: Speed | None
    earlier: Mapping[str, Stage]


def read(folder: Path) -> Stages:
    """The runs and tuning files of a folder, which need not be there, and the file of speed beside it."""
    study, tuning = study_of(read_exports(folder), QM9), read_tuning(folder)
    return Stages(
        budget=_budget(study, tuning),
        sweep=_stage(study, {name: each for name, each in tuning.items() if name not in Stage.tuned_apart}, SWEEP),
        protocol=_stage(study, tuning, PROTOCOL),
        tuning=tuning,
        speed=next(iter(read_speed(folder.parent / "speed", "qm9-h200.json")), None),
        earlier={
            each.name: _budget(study_of(read_exports(each), QM9), read_tuning(each))
            for each in sorted(folder.glob("*"))
            if each.is_dir()
        },
    )


def _budget(study: Study, tuning: Mapping[str, Tuning]) -> Stage:
    lengths = {setting(row, EPOCHS) for row in study.rows} - {SWEEP, PROTOCOL}
    return _stage(study, tuning, max(lengths, default=BUDGET))


def _stage(study: Study, tuning: Mapping[str, Tuning], epochs: int) -> Stage:
    rows = [row for row in study.rows if setting(row, EPOCHS) == epochs]
    rows = [replace(row, outcomes=[_with_delta(each) for each in row.outcomes]) for row in rows]
    return Stage(replace(study, rows=rows), tuning, epochs)


def _with_delta(outcome: Outcome) -> Outcome:
    """Δm in the result, and in every evaluation on test data."""
    lines: list[Line] = [{**line, "test": _and_delta(line["test"])} for line in outcome.evaluation if line.get("test")]
    return replace(outcome, metrics=_and_delta(outcome.metrics), evaluation=lines)


def _and_delta(errors: Mapping[str, Any]) -> dict[str, float]:
    """Errors that are no numbers make Δm none."""
    numbers = {metric.name: number(errors.get(metric.name)) for metric in QM9_METRICS}
    return {**numbers, DELTA: delta_m(numbers, QM9_STL, QM9_METRICS)}
