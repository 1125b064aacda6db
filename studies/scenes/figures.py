"""Δm over epochs, the paper's figure."""

import math
from collections.abc import Mapping
from functools import partial

from matplotlib.axes import Axes

from moonopt.runs.report.curves import metric_band
from moonopt.runs.report.delta import DELTA
from moonopt.runs.report.drawing import INK, Panel, Plot
from moonopt.runs.report.study import Row
from moonopt.runs.report.styles import Style
from studies.entries import variant
from studies.figures import draw_band, steps_per_epoch, variant_style
from studies.scenes.results import Rooms

FIGURE = "nyuv2-delta"


def plots(rooms: Rooms) -> list[Plot]:
    """None where there is nothing that Δm could be against."""
    rows = [(row, rooms.changes(row)) for row in rooms.study.rows if not row.is_single]
    styles = {variant(row.method, changes): (row, variant_style(row.method, changes)) for row, changes in rows}
    drawn = {name: each for name, each in styles.items() if rooms.reference is not None and metric_band(each[0], DELTA.name)}
    title, legend = "Δm on test data over epochs, lower is better", {name: style for name, (_, style) in drawn.items()}
    return [Plot(FIGURE, title, "", [Panel("", partial(_draw, drawn))], legend)] if drawn else []


def _draw(drawn: Mapping[str, tuple[Row, Style]], axes: Axes) -> None:
    """The height is that of the second half: the first epochs are far above."""
    late = []
    for row, style in reversed(list(drawn.values())):  # the first on top
        if (band := metric_band(row, DELTA.name)) is not None:
            draw_band(band, style, steps_per_epoch(row), float("-inf"), axes)
            late += [value for value in band.mean[len(band.mean) // 2 :].tolist() if math.isfinite(value)]
    axes.axhline(0, color=INK, linewidth=0.8, alpha=0.4)
    axes.set(xlabel="epoch", ylabel=f"{DELTA.name} (%)")
    if late:
        margin = 0.1 * (max(late) - min(late)) or 1.0
        axes.set_ylim(min(late) - margin, max(late) + margin)
