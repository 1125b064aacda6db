"""The figures of a study: losses, progress, task weights, two tasks against each other, conflict, and cost."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from moonopt.bench import Metric
from moonopt.runs.report.costs import base_row, cost_ratio
from moonopt.runs.report.curves import Array, Band, conflict_matrix, loss_band, metric_band, timed_loss_band, weight_bands
from moonopt.runs.report.drawing import INK, Panel, Plot, line_style
from moonopt.runs.report.study import Study
from moonopt.runs.report.styles import BLUE, Style, method_styles, task_styles

#: More tasks than these are drawn together: in panels, as lines, as numbers in a heat map, as names beside it.
MOST_PANELS, MOST_LINES, MOST_NUMBERS, MOST_NAMES = 6, 8, 6, 12

#: Losses that fall by more than this factor get a logarithmic axis, which shows no more than so many powers of ten.
LOGARITHMIC, MOST_DECADES = 20.0, 5

#: Where one method takes longer than another by more than this factor, time has a logarithmic axis.
MUCH_LONGER = 5.0

#: Relative changes below this are rounding.
CONSTANT = 1e-9


def plots(study: Study) -> list[Plot]:
    """Every figure for which the study has data."""
    made = [make(study) for make in (losses, progress, weights, pareto, conflict, costs)]
    return [plot for plot in made if plot.panels]


def losses(study: Study) -> Plot:
    """Training losses with bands over seeds: the mean over tasks by step and by time, and each task where they are few."""
    tasks = study.tasks
    mean = f"mean of {len(tasks)} tasks"
    shown = [(f"{mean}, by step", tasks, loss_band, _draw_losses), (f"{mean}, by time", tasks, timed_loss_band, _draw_timed)]
    shown += [(task, [task], loss_band, _draw_losses) for task in tasks] if len(tasks) <= MOST_PANELS else []
    panels = []
    for title, chosen, read, draw in shown:
        bands = {row.label: band for row in study.rows if (band := read(row, chosen)) is not None}
        panels += [Panel(title, partial(draw, bands, _styles(study), "training loss"))] if bands else []
    caption = "Training loss: the mean over seeds, in a band of one standard deviation to each side."
    caption += " Time is the mean time of a step since training began, without evaluations"
    single = [row.label for row in study.rows if row.is_single]
    caption += f"; of {' and '.join(single)} the sum over the models of all tasks." if single else "."
    return Plot("losses", "Loss curves", caption, panels, _styles(study))


def progress(study: Study) -> Plot:
    """The headline metric at every evaluation."""
    metric = study.headline
    bands = {row.label: band for row in study.rows if (band := metric_band(row, metric.name)) is not None}
    draw = _draw_bands if metric.higher else _draw_losses
    panels = [Panel(metric.heading, partial(draw, bands, _styles(study), metric.heading))] if bands else []
    caption = f"{metric.name} at every evaluation during training: mean over seeds, in a band of one standard deviation."
    styles = {label: style for label, style in _styles(study).items() if label in bands}
    return Plot("progress", "Progress", caption, panels, styles)


def weights(study: Study) -> Plot:
    """How each method weighs the tasks over time."""
    tasks = study.tasks
    panels, constant = [], []
    for row in study.rows:
        bands = weight_bands(row, tasks)
        if bands and all(np.allclose(band.mean, band.mean[0], rtol=CONSTANT, atol=0) for band in bands.values()):
            constant.append(row.label)
        elif bands:
            draw = partial(_draw_bands, bands, task_styles(tasks)) if len(tasks) <= MOST_LINES else partial(_draw_range, bands)
            panels.append(Panel(row.label, partial(draw, "task weight")))
    if len(tasks) <= MOST_LINES:
        caption = "Weight of every task by step, mean over seeds with a band of one standard deviation."
    else:
        caption = f"Weights of {len(tasks)} tasks by step, mean over seeds: the median task, the middle half, and all of them."
    caption += f" Constant and not drawn: {', '.join(constant)}." if constant else ""
    return Plot("weights", "Task weights", caption, panels, task_styles(tasks) if len(tasks) <= MOST_LINES else {})


def pareto(study: Study) -> Plot:
    """Two tasks against each other: those two, or of more the pair whose gradients disagree most."""
    metrics = {metric.task: metric for metric in reversed(study.benchmark.metrics) if metric.task in study.tasks}
    tasks = [task for task in study.tasks if task in metrics]
    if len(tasks) < 2:
        return Plot("pareto", "Two tasks", "", [], {})
    first, second, why = _pair(study, tasks)
    draw = partial(_draw_points, study, metrics[first], metrics[second])
    caption = f"Every seed as a small point and the mean as a large one; {_corner(metrics[first], metrics[second])} is better."
    if len(tasks) > 2:
        caption += f" Of {len(tasks)} tasks, {first} and {second} are drawn: {why}."
    return Plot("pareto", "Two tasks against each other", caption, [Panel(f"{first} and {second}", draw)], _styles(study), True)


def conflict(study: Study) -> Plot:
    """Cosines between the gradients of the tasks."""
    matrices = {row.label: matrix for row in study.rows if (matrix := conflict_matrix(row)) is not None}
    panels = [Panel(label, partial(_draw_matrix, matrix, study.tasks)) for label, matrix in matrices.items()]
    caption = "Cosine between the gradients of two tasks at the last evaluation, mean over seeds; orange is conflict."
    return Plot("conflict", "Conflict", caption, panels, {})


def costs(study: Study) -> Plot:
    """Time and memory of a step as ratios to those of ls."""
    base, panels = base_row(study), []
    for key, title in (("seconds_per_step", "time per step"), ("peak_memory_mb", "peak memory")):
        ratios = {row.label: ratio for row in study.rows if (ratio := cost_ratio(row, base, key)) is not None}
        draw = partial(_draw_ratios, ratios, _styles(study), f"ratio to {_short(base.label) if base else ''}")
        panels += [Panel(title, draw)] if ratios else []
    name = "ls" if base is None else base.label
    caption = f"Seconds and memory of a training step against those of {name}, means over seeds; the line is {name} itself."
    if base is not None and base.method != "ls":
        caption += " There is no run of ls here."
    return Plot("costs", "Cost of a step", caption, panels, {})


def _draw_timed(bands: Mapping[str, Band], styles: Mapping[str, Style], label: str, axes: Axes) -> None:
    _draw_losses(bands, styles, label, axes)
    axes.set_xlabel("seconds of training")
    ends = [band.places[-1] for band in bands.values()]
    if min(band.places[0] for band in bands.values()) > 0 and max(ends) > MUCH_LONGER * min(ends):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")


def _draw_losses(bands: Mapping[str, Band], styles: Mapping[str, Style], label: str, axes: Axes) -> None:
    _draw_bands(bands, styles, label, axes)
    means = np.concatenate([band.mean for band in bands.values()])
    means = means[np.isfinite(means)]
    if len(means) and means.min() > 0 and means.max() > LOGARITHMIC * means.min():
        axes.set_yscale("log")
        axes.set_ylim(max(means.min() / 1.3, means.max() / 10**MOST_DECADES), means.max() * 1.3)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def _draw_bands(bands: Mapping[str, Band], styles: Mapping[str, Style], label: str, axes: Axes) -> None:
    for name, band in reversed(list(bands.items())):  # the first on top
        style = styles[name]
        marker = style.marker if len(band.places) == 1 else None
        axes.plot(band.places, band.mean, color=style.colour, linestyle=line_style(style), marker=marker)
        if band.spread.any():
            low, high = band.mean - band.spread, band.mean + band.spread
            axes.fill_between(band.places, low, high, color=style.colour, alpha=0.18 if len(bands) <= 8 else 0.1, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel(label)


def _draw_range(bands: Mapping[str, Band], label: str, axes: Axes) -> None:
    steps = next(iter(bands.values())).places
    means = np.stack([band.mean for band in bands.values()])
    low, lower, median, upper, high = np.nanquantile(means, [0, 0.25, 0.5, 0.75, 1], axis=0)
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.fill_between(steps, lower, upper, color=BLUE, alpha=0.3, linewidth=0)
    axes.plot(steps, median, color=BLUE)
    axes.set_xlabel("step")
    axes.set_ylabel(label)


def _draw_points(study: Study, first: Metric, second: Metric, axes: Axes) -> None:
    for row in reversed(study.rows):
        style = _styles(study)[row.label]
        xs, ys = row.values(first.name), row.values(second.name)
        seeds = [seed for seed in xs if seed in ys and np.isfinite([xs[seed], ys[seed]]).all()]
        if not seeds:
            continue
        x, y = [xs[seed] for seed in seeds], [ys[seed] for seed in seeds]
        axes.scatter(x, y, s=16, color=style.colour, marker=style.marker, alpha=0.55, linewidths=0)
        axes.scatter(np.mean(x), np.mean(y), s=80, color=style.colour, marker=style.marker, alpha=0.9, linewidths=0, zorder=3)
    axes.set_xlabel(first.heading)
    axes.set_ylabel(second.heading)


def _draw_matrix(matrix: Array, tasks: Sequence[str], axes: Axes) -> None:
    # A task agrees with itself, which would outshine the rest.
    others = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
    image = axes.imshow(others, cmap="PuOr", vmin=-1, vmax=1, interpolation="none")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    count = len(matrix)
    if count <= MOST_NAMES and count == len(tasks):
        names = [_short(task, 14) for task in tasks]
        axes.set_xticks(range(count), names, rotation=0 if count <= 3 else 45, ha="center" if count <= 3 else "right")
        axes.set_yticks(range(count), names)
        axes.tick_params(length=0)
    else:
        axes.set_xlabel("task, by number")
    if count <= MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(others):
            if np.isfinite(value):
                colour = "#ffffff" if abs(value) > 0.6 else "#111111"
                axes.text(column, row, f"{value:z.2f}", ha="center", va="center", color=colour)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.9)
    bar.set_label("cosine")
    bar.outline.set_visible(False)


def _draw_ratios(ratios: Mapping[str, float], styles: Mapping[str, Style], label: str, axes: Axes) -> None:
    places = range(len(ratios))
    axes.barh(places, list(ratios.values()), color=[styles[name].colour for name in ratios], height=0.62)
    size = 8.0 if len(ratios) > 8 else 9.0
    for place, ratio in zip(places, ratios.values(), strict=True):
        axes.annotate(f"{ratio:.2f}", (ratio, place), (3, 0), textcoords="offset points", va="center", fontsize=size)
    axes.axvline(1, color=INK, linewidth=1, linestyle="dashed", alpha=0.6)
    axes.set_yticks(places, [_short(name) for name in ratios], fontsize=size)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)


def _styles(study: Study) -> dict[str, Style]:
    return method_styles([row.label for row in study.rows])


def _pair(study: Study, tasks: Sequence[str]) -> tuple[str, str, str]:
    """The two tasks with the lowest cosine, averaged over rows, and why; the first two where none was measured."""
    found = [matrix for row in study.rows if (matrix := conflict_matrix(row)) is not None]
    matrices = [each for each in found if len(each) == len(study.tasks)]
    if len(tasks) == 2 or not matrices:
        return tasks[0], tasks[1], "the first two, since conflict was not measured"
    places = [study.tasks.index(task) for task in tasks]
    mean = np.nan_to_num(np.mean(matrices, axis=0)[np.ix_(places, places)], nan=np.inf)
    mean = np.where(np.triu(np.ones_like(mean), k=1) > 0, mean, np.inf)
    first, second = np.unravel_index(np.argmin(mean), mean.shape)
    return tasks[int(first)], tasks[int(second)], "their gradients disagree most"


def _corner(first: Metric, second: Metric) -> str:
    return f"{'up' if second.higher else 'down'} and to the {'right' if first.higher else 'left'}"


def _short(text: str, length: int = 26) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
