"""The paper's figure: the average loss over steps, beside the relative loss where scales differ."""

from collections.abc import Mapping
from functools import partial

from matplotlib.axes import Axes

from moonopt.runs.report.curves import metric_band
from moonopt.runs.report.drawing import Panel, Plot
from moonopt.runs.report.study import Row
from moonopt.runs.report.styles import Style
from studies.entries import variant
from studies.figures import draw_band, variant_style
from studies.results import Variant
from studies.synthetic30.results import MOON, ROBUST, Problem

FIGURE = "synthetic30-loss"
DRAWN: tuple[Variant, ...] = (MOON, ROBUST, *((name, {}) for name in ("muon", "famo+muon", "famo", "ls", "mgda")))
SHOWN = {"synthetic30": ("average loss", "one scale"), "synthetic30-spread": ("relative loss", "scales that differ")}


def plots(problems: Mapping[str, Problem]) -> list[Plot]:
    """None where nothing was run."""
    legend: dict[str, Style] = {}
    panels = []
    for name, problem in problems.items():
        metric, title = SHOWN[name]
        rows = {variant(*each): (row, variant_style(*each)) for each in DRAWN if (row := problem.row(*each)) is not None}
        legend |= {label: style for label, (_, style) in rows.items()}
        if rows:
            panels.append(Panel(title, partial(_draw, rows, metric)))
    return [Plot(FIGURE, "Loss over steps, lower is better", "", panels, legend)] if panels else []


def _draw(rows: Mapping[str, tuple[Row, Style]], metric: str, axes: Axes) -> None:
    for row, style in reversed(list(rows.values())):  # the first on top
        if (band := metric_band(row, metric)) is not None:
            draw_band(band, style, 1.0, 1e-3, axes)
    axes.set(xlabel="step", ylabel=metric, yscale="log")
