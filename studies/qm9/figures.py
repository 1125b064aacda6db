"""The figures of the page: Δm over epochs, Δm by beta, and the weights of the tasks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from moonopt.runs.report.curves import Array, metric_band
from moonopt.runs.report.drawing import Panel, Plot, line_style
from moonopt.runs.report.study import Row
from moonopt.runs.report.styles import Style, task_styles
from studies.entries import average, variant
from studies.figures import draw_band, draw_weights, steps_per_epoch, variant_style
from studies.qm9.results import BESIDE, BETAS, DELTA, LOSSES, OTHERS, PLAIN, ROBUST, Stage, Stages
from studies.results import Variant

#: Values of Δm with how they look, by name.
Swept = Mapping[str, tuple[Style, Sequence[float]]]

FIGURES = ("qm9-delta", "qm9-beta", "qm9-weights")
DRAWN: tuple[Variant, ...] = (PLAIN, ROBUST, *OTHERS[:5])
WEIGHTED: tuple[Variant, ...] = (PLAIN, ROBUST, ("famo", {}), ("famo+muon", {}))
#: Of all epochs those that the figure begins with.
FROM = 0.1
#: Of Δm, at even distances of the error.
TICKS = (-25, 0, 25, 50, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600)


def plots(stages: Stages) -> list[Plot]:
    """Those of which something was run."""
    delta = {f"{stage.epochs} epochs": _evaluated(stage) for stage in (stages.budget, stages.protocol)}
    shown = [each for each in DRAWN if any(variant(*each) in rows for rows in delta.values())]
    panels = [Panel(title, partial(_draw_delta, rows)) for title, rows in delta.items() if rows]
    weighted = [
        Panel(name, partial(draw_weights, row, steps_per_epoch(row), "epoch"))
        for name, row in stages.budget.named(WEIGHTED).items()
    ]
    swept = _swept(stages.sweep)
    beta = [Panel("", partial(_draw_sweep, swept))] if swept else []
    methods = {variant(*each): variant_style(*each) for each in shown}
    curves = {name: style for name, (style, _) in swept.items()}
    found = [
        Plot("qm9-delta", "Δm on test data over epochs", "", panels, methods),
        Plot("qm9-beta", f"Δm by beta, {stages.sweep.epochs} epochs", "", beta, curves),
        Plot("qm9-weights", "Weights of the tasks", "", weighted, task_styles(stages.budget.study.tasks)),
    ]
    return [plot for plot in found if plot.panels]


def _evaluated(stage: Stage) -> dict[str, Row]:
    """Those of which Δm over epochs is known."""
    return {name: row for name, row in stage.named(DRAWN).items() if metric_band(row, DELTA) is not None}


def _draw_delta(rows: Mapping[str, Row], axes: Axes) -> None:
    styles = {variant(*each): variant_style(*each) for each in DRAWN}
    seen: list[float] = []
    for name, row in reversed(list(rows.items())):  # the first on top
        if (band := metric_band(row, DELTA)) is not None:
            draw_band(band, styles[name], steps_per_epoch(row), TICKS[0], axes)
            seen.extend(band.mean[band.places >= FROM * band.places[-1]])
    _by_error(axes, min(seen), max(seen))
    axes.set_xlabel("epoch")
    axes.set_xlim(FROM * axes.dataLim.x1, axes.dataLim.x1)


def _swept(sweep: Stage) -> Swept:
    """What was run of the sweep: MOON's Δm at each beta, and one Δm of methods without."""
    styles = zip(LOSSES, (variant_style(*PLAIN), replace(variant_style(*ROBUST), marker="s")), strict=True)
    found = {f"moon loss={loss}": (style, [average(sweep.moon(loss, beta), DELTA) for beta in BETAS]) for loss, style in styles}
    found |= {name: (variant_style(name, {}), [average(sweep.row(name), DELTA)]) for name in BESIDE}
    return {name: (style, values) for name, (style, values) in found.items() if any(map(math.isfinite, values))}


def _draw_sweep(swept: Swept, axes: Axes) -> None:
    """Values side by side; "auto" stands apart, since it has no unit."""
    for style, values in swept.values():
        if len(values) == 1:
            axes.axhline(values[0], color=style.colour, linestyle=line_style(style))
        else:
            axes.plot(values, color=style.colour, marker=style.marker, linestyle="none")
            axes.plot(values[:-1], color=style.colour, linestyle=line_style(style))
    axes.set_xticks(range(len(BETAS)), list(map(str, BETAS)))
    axes.set(xlabel="beta", ylabel=f"{DELTA} (%)")


def _by_error(axes: Axes, least: float, most: float) -> None:
    """Equal ratios of the mean relative error, 1 + Δm / 100, are equally high."""

    def up(delta: ArrayLike) -> Array:
        return np.log(np.maximum(1 + np.asarray(delta) / 100, 1e-3))

    def down(height: ArrayLike) -> Array:
        return 100 * np.expm1(height)

    low, high = up([least, most])
    margin = 0.05 * (high - low)
    axes.set_yscale("function", functions=(up, down))
    axes.set_ylim(*down([low - margin, high + margin]))
    axes.set_yticks([tick for tick in TICKS if low <= up(tick) <= high])
    axes.set_ylabel(f"{DELTA} (%)")
