"""The figures of the page: losses, task weights, and the cosines between the gradients of the tasks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle

from matplotlib.axes import Axes

from moonopt.runs.report.curves import loss_band
from moonopt.runs.report.drawing import INK, Panel, Plot, line_style
from moonopt.runs.report.study import Row
from moonopt.runs.report.styles import DASHES
from studies.figures import draw_band, method_style, steps_per_epoch
from studies.multimnist.curves import TASKS, THRESHOLD, cosines, left_weights
from studies.multimnist.results import DRAWN, MultiMNIST

SHOWN_EPOCHS = 6


def plots(results: MultiMNIST) -> list[Plot]:
    """Every figure of the page."""
    drawn = results.rows(DRAWN)
    styles = {row.method: method_style(row.method) for row in drawn}
    losses = [Panel(task, partial(_draw_losses, drawn, [task])) for task in TASKS]
    weighted = results.rows(["moon", "famo", "famo+muon", "mgda+muon"])
    weights = [Panel(row.method, partial(_draw_weights, row)) for row in weighted]
    compared = results.rows(["moon", "muon", "famo+muon", "mgda+muon", "ls", "famo", "mgda"])
    conflict = [Panel("", partial(_draw_cosines, compared))]
    markers = {row.method: method_style(row.method) for row in compared}
    return [
        Plot("multimnist-losses", "Training loss by task", "", losses, styles),
        Plot("multimnist-ce", "Training loss, mean of both tasks", "", [Panel("", partial(_draw_threshold, drawn))], styles),
        Plot("multimnist-weights", "Weight of the left task", "", weights, {}),
        Plot("multimnist-conflict", "Cosine between the gradients of the tasks", "", conflict, markers, True),
    ]


def _draw_losses(rows: Sequence[Row], tasks: Sequence[str], axes: Axes) -> None:
    _draw_bands(rows, tasks, steps_per_epoch(rows[0]), axes)
    axes.set(yscale="log", ylim=(5e-5, 3), xlabel="epoch", ylabel="cross-entropy", xticks=range(0, 13, 2))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def _draw_threshold(rows: Sequence[Row], axes: Axes) -> None:
    _draw_bands(rows, TASKS, 1, axes)
    end = SHOWN_EPOCHS * steps_per_epoch(rows[0])
    axes.axhline(THRESHOLD, color=INK, linewidth=1, linestyle="dotted")
    axes.annotate(f"{THRESHOLD}", (end, THRESHOLD), (-2, 3), textcoords="offset points", ha="right")
    axes.set(xlim=(0, end), ylim=(0, 0.7), xlabel="step", ylabel="cross-entropy")


def _draw_bands(rows: Sequence[Row], tasks: Sequence[str], unit: float, axes: Axes) -> None:
    """Mean losses over seeds; so many steps are a unit of the axis."""
    for row in reversed(rows):  # the first on top
        band = loss_band(row, tasks)
        if band is not None:
            draw_band(band, method_style(row.method), unit, 1e-6, axes)  # a logarithm needs it


def _draw_weights(row: Row, axes: Axes) -> None:
    """A kind of line per seed."""
    for outcome, dash in zip(row.outcomes, cycle(DASHES), strict=False):
        style = replace(method_style(row.method), dash=dash)
        axes.plot(*left_weights(outcome), color=style.colour, linewidth=1.2, linestyle=line_style(style))
    axes.axhline(0.5, color=INK, linewidth=0.8, alpha=0.4)
    axes.set(ylim=(-0.02, 1.02), xlabel="step", ylabel="weight")


def _draw_cosines(rows: Sequence[Row], axes: Axes) -> None:
    """A point per seed and evaluation, the methods side by side."""
    epochs = set()
    for place, row in enumerate(rows):
        style, shift = method_style(row.method), 0.8 * ((place + 0.5) / len(rows) - 0.5)
        for epoch, cosine in (point for outcome in row.outcomes for point in cosines(outcome)):
            axes.plot(epoch + shift, cosine, color=style.colour, marker=style.marker, markersize=5, alpha=0.8, linestyle="none")
            epochs.add(epoch)
    axes.axhline(0, color=INK, linewidth=0.8, alpha=0.4)
    axes.set(ylim=(-1, 1), xlabel="epoch", ylabel="cosine", xticks=sorted(epochs))
    axes.grid(visible=False, axis="x")
