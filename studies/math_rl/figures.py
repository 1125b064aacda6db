"""The figures of the page: the three objectives on validation data, those of the samples of training, and task weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from matplotlib.axes import Axes

from moonopt.runs.report.curves import metric_band, weight_bands
from moonopt.runs.report.drawing import Panel, Plot
from moonopt.runs.report.reading import Line
from moonopt.runs.report.study import Row, number
from moonopt.runs.report.styles import task_styles
from studies.figures import draw_band, draw_weights, method_style
from studies.math_rl.results import METHODS, Language

FIGURES = ("math-rl-objectives", "math-rl-sampled", "math-rl-weights")
OBJECTIVES = {"accuracy": "accuracy", "length": "length (tokens)", "clarity": "clarity"}
#: Lines of training whose mean is a point of a curve.
AT_ONCE = 5


def plots(results: Language) -> list[Plot]:
    """Those of which something was run."""
    rows = {row.method: row for row in results.rows(METHODS)}
    sampled = {method: sampled_row(row, AT_ONCE) for method, row in rows.items()}
    legend = {method: method_style(method) for method in rows}
    weighted = {method: row for method, row in rows.items() if _moving(row)}
    weights = [Panel(method, partial(draw_weights, row, 1.0, "update")) for method, row in weighted.items()]
    validation, training = "Validation data over updates", "Sampled responses of training over updates"
    found = [
        Plot(FIGURES[0], validation, "", _panels(rows), legend),
        Plot(FIGURES[1], training, "", _panels(sampled), legend),
        Plot(FIGURES[2], "Weights of the tasks", "", weights, task_styles(results.study.tasks)),
    ]
    return [plot for plot in found if plot.panels]


def sampled_row(row: Row, at_once: int = 1) -> Row:
    """A row whose evaluations are what was measured of samples, the means of so many lines of training each."""
    lines = [[line for line in outcome.train if line.get("measured")] for outcome in row.outcomes]
    parts = [[each[start : start + at_once] for start in range(0, len(each), at_once)] for each in lines]
    outcomes = zip(row.outcomes, parts, strict=True)
    return replace(row, outcomes=[replace(each, evaluation=[_mean(part) for part in found]) for each, found in outcomes])


def _mean(lines: Sequence[Line]) -> Line:
    names = lines[0]["measured"]
    return {
        "step": fmean(line["step"] for line in lines),
        "valid": {name: fmean(number(line["measured"][name]) for line in lines) for name in names},
    }


def _panels(rows: Mapping[str, Row]) -> list[Panel]:
    shown = {method: row for method, row in rows.items() if metric_band(row, "length") is not None}
    return [Panel(title, partial(_draw, shown, name)) for name, title in OBJECTIVES.items()] if shown else []


def _draw(rows: Mapping[str, Row], metric: str, axes: Axes) -> None:
    for method, row in reversed(list(rows.items())):  # the first on top
        if (band := metric_band(row, metric)) is not None:
            draw_band(band, method_style(method), 1.0, 0.0, axes)
    axes.set(xlabel="update")


def _moving(row: Row) -> bool:
    """Whether the method has weights that change."""
    return any(band.mean.min() < band.mean.max() for band in weight_bands(row, row.outcomes[0].tasks).values())
