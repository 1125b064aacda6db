"""What the lines of runs say over time, as arrays: losses, metrics, task weights, with mean and deviation over seeds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moonopt.runs.report.reading import Line
from moonopt.runs.report.study import Outcome, Row, number

Array = NDArray[np.float64]

#: A curve of more points than this is drawn through the means of consecutive ones.
MOST_POINTS = 200


@dataclass(frozen=True)
class Band:
    """Mean and sample standard deviation over seeds at some steps or seconds; with one seed the deviation is zero."""

    places: Array
    mean: Array
    spread: Array


def loss_band(row: Row, tasks: Sequence[str]) -> Band | None:
    """The training loss, averaged over tasks; None if no run has a line of it."""
    return _band([_points(each.train, lambda line: _mean_of(line.get("loss") or {}, tasks)) for each in row.outcomes])


def timed_loss_band(row: Row, tasks: Sequence[str]) -> Band | None:
    """The same at seconds of training: every step stands at its mean time over seeds."""
    band = loss_band(row, tasks)
    timed = [[line for line in each.train if math.isfinite(number(line.get("seconds")))] for each in row.outcomes]
    clocks = [_points(lines, lambda line: number(line["seconds"])) for lines in timed if lines]
    if band is None or not clocks:
        return None
    return replace(band, places=np.mean([np.interp(band.places, *clock) for clock in clocks], axis=0))


def metric_band(row: Row, metric: str) -> Band | None:
    """A metric at every evaluation: on test data, or on validation data where a benchmark keeps those for the end."""

    def found(line: Line) -> float:
        return number((line.get("test") or line.get("valid") or {}).get(metric))

    return _band([_points(each.evaluation, found) for each in row.outcomes])


def weight_bands(row: Row, tasks: Sequence[str]) -> dict[str, Band]:
    """The weight of every task, for a method that has weights."""
    bands = {}
    for task in tasks:
        band = _band([_points(_weighted(each), partial(_weight, task)) for each in row.outcomes])
        if band is not None:
            bands[task] = band
    return bands


def conflict_matrix(row: Row) -> Array | None:
    """The cosines between task gradients at the last evaluation that has them, averaged over seeds."""
    last = [matrix for outcome in row.outcomes if (matrix := _last_conflict(outcome)) is not None]
    last = [matrix for matrix in last if matrix.shape == last[0].shape]
    return np.mean(last, axis=0) if last else None


def _last_conflict(outcome: Outcome) -> Array | None:
    measured = [line["conflict"] for line in outcome.evaluation if line.get("conflict")]
    return np.array([[number(value) for value in row] for row in measured[-1]]) if measured else None


def _weighted(outcome: Outcome) -> list[Line]:
    return [line for line in outcome.train if line.get("weight")]


def _weight(task: str, line: Line) -> float:
    return number(line["weight"].get(task))


def _points(lines: Sequence[Line], value: Callable[[Line], float]) -> tuple[Array, Array]:
    """Steps and values, in bins of consecutive lines where there are many."""
    steps = np.array([float(line["step"]) for line in lines])
    values = np.array([value(line) for line in lines])
    if len(steps) <= MOST_POINTS:
        return steps, values
    bins = np.array_split(np.arange(len(steps)), MOST_POINTS)
    return np.array([steps[each].mean() for each in bins]), np.array([values[each].mean() for each in bins])


def _band(curves: Sequence[tuple[Array, Array]]) -> Band | None:
    """Seeds that were logged at other steps are read between their points, on the steps of the shortest."""
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return None
    steps = min((curve[0] for curve in curves), key=lambda each: (len(each), each[-1]))
    values = np.stack([np.interp(steps, *curve) for curve in curves])
    spread = values.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros_like(steps)
    return Band(steps, values.mean(axis=0), spread)


def _mean_of(losses: Mapping[str, object], tasks: Sequence[str]) -> float:
    """Over those of the tasks that the line has."""
    present = [number(losses[task]) for task in tasks if task in losses]
    return sum(present) / len(present) if present else float("nan")
