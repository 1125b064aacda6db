"""Tuning: every method gets the same number of trials, judged on validation data, and all of them are written down."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from moonopt.bench import Benchmark, Metric, find
from moonopt.bench.metrics import lower_is_better
from moonopt.errors import UserError, unknown_name
from moonopt.runs.cell import CPU, FORMAT, Cell, Machine
from moonopt.runs.compare import Comparison, Plan, Screen, compare, make_cells
from moonopt.runs.interrupt import Stop
from moonopt.runs.provenance import commit, hardware, versions
from moonopt.runs.settings import Layer, read_value
from moonopt.runs.single import is_single, task_of
from moonopt.runs.store import RunFolder, read_json

Grid = Mapping[str, Sequence[Any]]  # values by key


@dataclass(frozen=True)
class Trial:
    """One setting of a method, with its cells, one per seed."""

    method: str
    settings: Mapping[str, Any]
    cells: Sequence[Cell]


def read_grids(texts: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """The grid of every method from ``key=value,value`` (for all of them) and ``METHOD/key=value,value`` (for one).

    >>> read_grids(["optimizer.lr=0.1,0.2", "moon/optimizer.lr=0.01,0.02"], ["ls", "moon"])["moon"]
    {'optimizer.lr': [0.01, 0.02]}
    """
    grids: dict[str, dict[str, list[Any]]] = {method: {} for method in methods}
    special: dict[str, dict[str, list[Any]]] = {method: {} for method in methods}
    for text in texts:
        key, equals, values = text.partition("=")
        method, slash, own = key.rpartition("/")
        if not (equals and values and (own if slash else key)):
            raise UserError(f"A grid is written key=value,value or METHOD/key=value,value; found {text!r}.")
        if slash and method not in methods:
            raise UserError(f"The grid {text!r} is for {method!r}, which is not among the methods {', '.join(methods)}.")
        found = _values(values)
        if any(value in found[:number] for number, value in enumerate(found)):
            raise UserError(f"The grid {text!r} has one value twice: every trial must be another.")
        for each in [special[method]] if slash else grids.values():
            each[own if slash else key] = found
    grids = {method: grids[method] | special[method] for method in methods}
    sizes = {method: len(_settings(grid)) for method, grid in grids.items()}
    if not all(grids.values()) or len(set(sizes.values())) > 1:
        counted = ", ".join(f"{method} {size if grids[method] else 0}" for method, size in sizes.items())
        raise UserError(f"Every method must get the same number of trials, at least one; found {counted}.")
    return grids


def find_judge(bench: type[Benchmark], name: str, methods: Sequence[str]) -> Metric:
    """The metric of this name, which trials of the methods can be judged by."""
    found = next((metric for metric in bench.metrics if metric.name == name), None)
    if found is None:
        raise UserError(unknown_name(name, [metric.name for metric in bench.metrics], "metric"))
    if alone := [method for method in methods if is_single(method)]:
        raise UserError(f"One metric cannot judge {' and '.join(alone)}: each of its runs has the metrics of one task.")
    return found


def tune(
    benchmark: str,
    grids: Mapping[str, Grid],
    seeds: Sequence[int],
    layers: Sequence[Layer],
    plan: Plan,
    stop: Stop,
    screen: Screen,
    machine: Machine = CPU,
    judge: Metric | None = None,
) -> tuple[Comparison, dict[str, Any]]:
    """Run every trial, and choose for each method the one with the best mean score over the seeds, or of a metric."""
    bench = find(benchmark)
    trials = [
        Trial(method, settings, make_cells(benchmark, [method], seeds, {method: [*layers, ("--grid", settings)]}, machine))
        for method, grid in grids.items()
        for settings in _settings(grid)
    ]
    cells = list({cell.label + f"/{cell.seed}": cell for trial in trials for cell in trial.cells}.values())
    _check_validation(cells[0], plan.data_folder)
    comparison = compare(cells, plan, stop, screen)
    rows = [_row(trial, bench, plan.root, judge) for trial in trials]
    chosen, notes = {}, []
    for method, grid in grids.items():
        good = [row for row in rows if row["method"] == method and row["score"] is not None]
        if not good:
            continue
        best = min(good, key=lambda row: row["score"])
        chosen[method] = best["settings"]
        notes += [f"{method}: {key}={value} is at the edge of its grid" for key, value in _edges(best["settings"], grid)]
    return comparison, {
        "format": FORMAT,
        "benchmark": benchmark,
        "seeds": list(seeds),
        "score": _judged_on(rows, judge or bench.headline_metric()),
        "trials_per_method": len(trials) // len(grids),
        "grids": {method: dict(grid) for method, grid in grids.items()},
        "chosen": chosen,
        "notes": notes,
        "trials": rows,
        "versions": versions(),
        "hardware": hardware(torch.device(machine.device)),
        "commit": commit(),
    }


def read_tuned(path: Path, benchmark: str, methods: Sequence[str]) -> dict[str, Layer]:
    """For each method a layer of the settings that were chosen for it."""
    tuned = read_json(path)
    if tuned.get("format") != FORMAT or not isinstance(tuned.get("chosen"), dict):
        raise UserError(f"{path} is not a file of `moonopt tune`.")
    if tuned.get("benchmark") != benchmark:
        raise UserError(f"{path} was tuned on {tuned.get('benchmark')}, not on {benchmark}.")
    missing = [method for method in methods if method not in tuned["chosen"]]
    if missing:
        raise UserError(f"{path} has nothing for {', '.join(missing)}: it has {', '.join(tuned['chosen']) or 'nothing'}.")
    return {method: (f"--tuned {path}", tuned["chosen"][method]) for method in methods}


def _values(text: str) -> list[Any]:
    """Values separated by commas: all JSON, so that they may be lists, or each JSON or a word."""
    found = read_value(f"[{text}]")
    return found if isinstance(found, list) else [read_value(value) for value in text.split(",")]


def _settings(grid: Grid) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _row(trial: Trial, bench: type[Benchmark], root: Path, judge: Metric | None) -> dict[str, Any]:
    """A trial as tuned.json has it. One that did not end with every seed, or diverged with one, has no score."""
    scores: dict[str, float | None] = {}
    on = None
    for cell in trial.cells:
        result = RunFolder(cell.folder(root)).result()
        task = task_of(cell.method, cell.settings)
        name = f"{cell.seed}" if task is None else f"{cell.seed}/{task}"
        score = math.nan if result is None else _score(bench(cell.settings), result, task, judge)
        scores[name] = score if math.isfinite(score) else None
        on = on or (result and ("validation" if result["valid"] is not None else "training"))
    whole = [score for score in scores.values() if score is not None]
    mean = fmean(whole) if whole and len(whole) == len(scores) else None
    return {"method": trial.method, "settings": dict(trial.settings), "score": mean, "by_seed": scores, "on": on}


def _score(bench: Benchmark, result: Mapping[str, Any], task: str | None, judge: Metric | None) -> float:
    """The score of what was measured; null stands for what is not a number."""
    found = result["metrics"] if result["valid"] is None else result["valid"]
    metrics = {name: math.nan if value is None else value for name, value in found.items()}
    if judge is not None:
        return lower_is_better(metrics, [judge])
    return bench.score(metrics) if task is None else bench.score_of_task(metrics, task)


def _check_validation(cell: Cell, data_folder: Path) -> None:
    """Without validation data, training data do where they are what is reported; test data never do."""
    bench = find(cell.benchmark)(cell.settings)
    if (missing := bench.missing(data_folder)) is not None:
        raise UserError(missing)
    splits = bench.load(data_folder, cell.seed)
    if splits.valid is None and splits.test is not None:
        raise UserError(f"{bench.name} has test data and no validation data: moonopt does not tune on test data.")


def _judged_on(rows: Sequence[Mapping[str, Any]], metric: Metric) -> str:
    on = next((row["on"] for row in rows if row["on"]), "validation")
    return f"{metric.name} on {on} data, mean over the seeds; lower is better (a metric that should be high is negated)"


def _edges(settings: Mapping[str, Any], grid: Grid) -> list[tuple[str, Any]]:
    """The settings whose best value is the first or the last of three or more numbers."""
    found = []
    for key, values in grid.items():
        numbers = sorted(value for value in values if isinstance(value, int | float))
        if len(numbers) == len(values) >= 3 and settings[key] in (numbers[0], numbers[-1]):
            found.append((key, settings[key]))
    return found
