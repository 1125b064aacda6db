"""What the figures of all studies share: how a method looks, bands over seeds, and what an epoch is in steps."""

from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes

from moonopt.runs.report.curves import Band
from moonopt.runs.report.drawing import line_style
from moonopt.runs.report.study import Row
from moonopt.runs.report.styles import DASHES, Style, method_styles


def method_style(method: str) -> Style:
    """The method's own; with Muon in the balancer's colour; ls is dashed, since famo lies below it."""
    base, _, optimizer = method.partition("+")
    style = method_styles([base])[base]
    if optimizer:
        return replace(style, marker="D")
    return replace(style, dash=DASHES[1]) if method == "ls" else style


def draw_band(band: Band, style: Style, unit: float, lowest: float, axes: Axes) -> None:
    """The mean in a band of one deviation, no lower than the axis can show; so many steps are a unit of the other axis."""
    places, low = band.places / unit, np.maximum(band.mean - band.spread, lowest)
    axes.fill_between(places, low, band.mean + band.spread, color=style.colour, alpha=0.15, linewidth=0)
    axes.plot(places, band.mean, color=style.colour, linestyle=line_style(style))


def steps_per_epoch(row: Row) -> float:
    result = row.outcomes[0].runs[0].result or {}
    return float(result["steps"]) / float(result["epochs"])
