"""Runs of one benchmark in rows: a row is a method with its overrides, and has an outcome for every seed."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonopt.bench import Benchmark, Metric, find
from moonopt.errors import UserError, unknown_name
from moonopt.methods import BALANCERS
from moonopt.runs.cell import in_all, seeds_text, word
from moonopt.runs.report.reading import Line, Run, read_runs
from moonopt.runs.single import is_single, task_of, without_task

__all__ = ["Outcome", "Row", "Run", "Study", "number", "read_runs", "row_label", "studies"]

#: Rows come in this order where the caller gives none: ours, what it is compared with first, then the balancers as listed.
ORDER = ("moon", "muon", *BALANCERS)


@dataclass(frozen=True)
class Outcome:
    """What a row gave with one seed. That of a single-task method is made of one run per task; seconds are then their sum."""

    seed: int
    tasks: Sequence[str]
    metrics: Mapping[str, float]
    train: Sequence[Line]
    evaluation: Sequence[Line]
    seconds_per_step: float
    peak_memory_mb: float
    runs: Sequence[Run]


@dataclass(frozen=True)
class Row:
    """A method with its overrides, and its finished outcomes by seed. ``label`` leaves out what all rows of a study share."""

    label: str
    method: str
    outcomes: Sequence[Outcome]

    @property
    def is_single(self) -> bool:
        """Whether it is of one model per task, and so does not compete."""
        return is_single(self.method)

    def values(self, metric: str) -> dict[int, float]:
        """A metric by seed, where there is one."""
        return {each.seed: each.metrics[metric] for each in self.outcomes if metric in each.metrics}


@dataclass(frozen=True)
class Study:
    """The runs of one benchmark. ``left_out`` has a line for everything that gave no numbers; all rows have ``shared``."""

    name: str
    benchmark: type[Benchmark]
    rows: Sequence[Row]
    left_out: Sequence[str]
    shared: Sequence[str] = ()

    @property
    def runs(self) -> list[Run]:
        """Those that its rows are made of."""
        return [run for row in self.rows for outcome in row.outcomes for run in outcome.runs]

    @property
    def on_made_up_data(self) -> bool:
        """Whether a run was, so that nothing here can be set beside published numbers."""
        return any(run.on_made_up_data for run in self.runs)

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks, in the order in which runs have them."""
        return list(dict.fromkeys(task for row in self.rows for outcome in row.outcomes for task in outcome.tasks))

    @property
    def headline(self) -> Metric:
        """The metric that sums a run up."""
        return self.benchmark.headline_metric()


def studies(runs: Iterable[Run], order: Sequence[str] | None = None) -> list[Study]:
    """One study per benchmark. ``order`` names methods or labels that come first, in this order."""
    by_benchmark: dict[str, list[Run]] = {}
    for run in runs:
        by_benchmark.setdefault(run.benchmark, []).append(run)
    shared = {name: _shared(found) for name, found in by_benchmark.items()}
    known = {name: None for found in by_benchmark.values() for run in found for name in _names(run, shared[run.benchmark])}
    if known and (unknown := [name for name in order or () if name not in known]):
        raise UserError(unknown_name(unknown[0], known, "row"))
    return [_study(name, found, order or (), shared[name]) for name, found in by_benchmark.items()]


def row_label(run: Run, shared: Collection[str] = ()) -> str:
    """The method with its overrides, "moon, optimizer.lr=0.01"; without the task of a single-task run, and what is shared."""
    return ", ".join([run.method, *(each for each in _overrides(run) if each not in shared)])


def number(value: Any) -> float:
    """A number of a run; what is not one, such as null for a loss that overflowed, is NaN."""
    return float(value) if isinstance(value, int | float) else math.nan


def _overrides(run: Run) -> list[str]:
    return [f"{key}={word(value)}" for key, value in without_task(run.method, run.overrides).items()]


def _shared(runs: Sequence[Run]) -> list[str]:
    """The overrides that all rows have, if there are several rows. What is left of their labels still differs."""
    if len({row_label(run) for run in runs}) == 1:
        return []
    return in_all([_overrides(run) for run in runs])


def _names(run: Run, shared: Collection[str]) -> tuple[str, str, str]:
    """What the row of a run may be called by a caller."""
    return run.method, row_label(run, shared), row_label(run)


def _study(name: str, runs: Sequence[Run], order: Sequence[str], shared: Sequence[str]) -> Study:
    benchmark = find(name)
    rows: dict[str, dict[int, list[Run]]] = {}
    places: dict[str, tuple[float, int, str]] = {}
    for run in runs:
        label = row_label(run, shared)
        rows.setdefault(label, {}).setdefault(run.seed, []).append(run)
        places[label] = _place(run.method, label, [index for index, each in enumerate(order) if each in _names(run, shared)])
    finished, left_out = [], []
    for label in sorted(rows, key=places.__getitem__):
        outcomes: list[Outcome] = []
        troubles: dict[str, list[int]] = {}
        for seed, found in sorted(rows[label].items()):
            _check_once(label, seed, found)
            outcome, trouble = _merged(found, benchmark) if is_single(found[0].method) else _alone(found[0])
            outcomes += [] if outcome is None else [outcome]
            for each in trouble:
                troubles.setdefault(each, []).append(seed)
        left_out += [f"{label}, {seeds_text(seeds)}: {each}" for each, seeds in troubles.items()]
        if outcomes:
            finished.append(Row(label, outcomes[0].runs[0].method, outcomes))
    return Study(name, benchmark, finished, left_out, shared)


def _place(method: str, label: str, given: Sequence[int]) -> tuple[float, int, str]:
    """Where a row stands: by the caller's order, then by ours; "famo+muon" follows "famo"."""
    base = method.partition("+")[0]
    known = ORDER.index(base) if base in ORDER else len(ORDER)
    return (given[0] if given else math.inf, known, label)


def _check_once(label: str, seed: int, runs: Sequence[Run]) -> None:
    cells: dict[Any, Run] = {}
    for run in runs:
        task = task_of(run.method, run.config["settings"])
        if task in cells:
            raise UserError(f"{label} with seed {seed} is there twice: in {cells[task].source} and {run.source}. Give one.")
        cells[task] = run


def _alone(run: Run) -> tuple[Outcome | None, list[str]]:
    if run.result is None:
        return None, [str(run.trouble)]
    metrics = {key: number(value) for key, value in run.result["metrics"].items()}
    seconds, memory = (number(run.result.get(key)) for key in ("seconds_per_step", "peak_memory_mb"))
    return Outcome(run.seed, run.result["tasks"], metrics, run.train, run.evaluation, seconds, memory, [run]), []


def _merged(runs: Sequence[Run], benchmark: type[Benchmark]) -> tuple[Outcome | None, list[str]]:
    """Of single-task runs, each metric from that of its task; nothing unless all of them are there."""
    results = {task_of(run.method, run.config["settings"]): run for run in runs}
    needed = list(dict.fromkeys(metric.task for metric in benchmark.metrics if metric.task is not None))
    trouble = [f"task {task} {run.trouble}" for task, run in results.items() if run.result is None]
    trouble += [f"task {task} not run" for task in needed if task not in results]
    if trouble:
        return None, trouble
    finished = {str(task): (run, run.result) for task, run in results.items() if run.result is not None}
    order = next(iter(finished.values()))[1]["tasks"]
    return Outcome(
        runs[0].seed,
        sorted(finished, key=lambda task: order.index(task) if task in order else len(order)),
        {
            metric.name: number(finished[metric.task][1]["metrics"].get(metric.name))
            for metric in benchmark.metrics
            if metric.task is not None
        },
        _lines_by_task({task: run for task, (run, _) in finished.items()}),
        [],
        sum(number(result.get("seconds_per_step")) for _, result in finished.values()),
        max(number(result.get("peak_memory_mb")) for _, result in finished.values()),
        runs,
    ), []


def _lines_by_task(runs: Mapping[str, Run]) -> list[Line]:
    """Training lines in which each task's loss is that of its own run, at the steps that all have; seconds are their sum."""
    lines = {task: {line["step"]: line for line in run.train} for task, run in runs.items()}
    common = sorted(set.intersection(*(set(each) for each in lines.values())))
    return [
        {
            "step": step,
            "loss": {task: (each[step].get("loss") or {}).get(task) for task, each in lines.items()},
            "weight": None,
            "seconds": sum(number(each[step].get("seconds")) for each in lines.values()),
        }
        for step in common
    ]
