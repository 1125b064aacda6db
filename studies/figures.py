"""What the figures of all studies share: how a method looks, bands over seeds, task weights, and what an epoch is in steps."""

from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes

from moonopt.runs.report.curves import Band, weight_bands
from moonopt.runs.report.drawing import INK, line_style
from moonopt.runs.report.study import Row
from moonopt.runs.report.styles import DASHES, Style, method_styles, task_styles
from studies.results import Changes


def method_style(method: str) -> Style:
    """The method's own; with Muon in the balancer's colour; ls is dashed, since famo lies below it."""
    base, _, optimizer = method.partition("+")
    style = method_styles([base])[base]
    if optimizer:
        return replace(style, marker="D")
    return replace(style, dash=DASHES[1]) if method == "ls" else style


def variant_style(method: str, changes: Changes) -> Style:
    """Dashed in the method's colour with other settings than in the main table, and for a balancer with Muon."""
    style = method_style(method)
    return replace(style, dash=DASHES[1]) if changes or "+" in method else style


def draw_band(band: Band, style: Style, unit: float, lowest: float, axes: Axes) -> None:
    """The mean in a band of one deviation, no lower than the axis can show; so many steps are a unit of the other axis."""
    places, low = band.places / unit, np.maximum(band.mean - band.spread, lowest)
    axes.fill_between(places, low, band.mean + band.spread, color=style.colour, alpha=0.15, linewidth=0)
    axes.plot(places, band.mean, color=style.colour, linestyle=line_style(style))


def steps_per_epoch(row: Row) -> float:
    result = row.outcomes[0].runs[0].result or {}
    return float(result["steps"]) / float(result["epochs"])


def draw_weights(row: Row, unit: float, name: str, axes: Axes) -> None:
    """The weight of every task, and that of each if all are equal; so many steps are a unit of this name on the other axis."""
    tasks = row.outcomes[0].tasks
    styles = task_styles(tasks)
    for task, band in weight_bands(row, tasks).items():
        axes.plot(band.places / unit, band.mean, color=styles[task].colour, linestyle=line_style(styles[task]), linewidth=1.2)
    axes.axhline(1 / len(tasks), color=INK, linewidth=0.8, linestyle="dotted")
    axes.set(xlabel=name, ylabel="weight", ylim=(0, None))
