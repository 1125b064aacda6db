"""The average loss over steps, as in the paper's figure, beside the relative loss where scales differ."""

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
from studies.synthetic30.results import EQUAL, MOON, ROBUST, SPREAD, Problem

FIGURE = "synthetic30-loss"
DRAWN: tuple[Variant, ...] = (MOON, ROBUST, *((name, {}) for name in ("muon", "famo+muon", "famo", "ls", "nash-mtl")))
#: What the axes show.
LOWEST, HIGHEST = 0.01, 0.2
SHOWN = {EQUAL: ("average loss", "one scale"), SPREAD: ("relative loss", "scales that differ")}


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
            draw_band(band, style, 1.0, LOWEST, axes)
    axes.set(xlabel="step", ylabel=metric, yscale="log", ylim=(LOWEST, HIGHEST))
    axes.set_yticks([LOWEST, 0.02, 0.05, 0.1, HIGHEST])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
