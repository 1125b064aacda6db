"""The plots of docs/performance.md: ``python -m moonopt.speed.plots results/speed docs/images``.

They are drawn from the committed measurements, and need matplotlib.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, THEIRS, OTHER = "#2563eb", "#9ca3af", "#d97706"
LOOK: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.2,
    "svg.hashsalt": "moonopt",
    "svg.fonttype": "none",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="moonopt.speed.plots", description=__doc__)
    parser.add_argument("measurements", type=Path, help="the folder of the JSON files")
    parser.add_argument("images", type=Path, help="where to put the SVG files")
    options = parser.parse_args(arguments)
    options.images.mkdir(parents=True, exist_ok=True)
    for name, (source, draw) in PLOTS.items():
        results = json.loads((options.measurements / f"{source}.json").read_text())["results"]
        with mpl.rc_context(LOOK):
            figure = draw(results)
            figure.savefig(options.images / f"speed-{name}.svg", metadata={"Date": None})
        print(options.images / f"speed-{name}.svg")


def _polar(results: list[dict[str, Any]]) -> Figure:
    """Milliseconds of a matrix step on each set."""
    figure, axes = _panels(len(results))
    for axis, result in zip(axes, results, strict=True):
        _bars(axis, result["times"], lambda who: OURS if who == "moonopt captured" else THEIRS if "torch" in who else OTHER)
        axis.set_title(f"{result['set']}, {result['matrices']} matrices")
    return figure


def _sizes(results: list[dict[str, Any]]) -> Figure:
    """How many times faster than each of the others, over the short side."""
    figure, axes = _panels(2)
    for axis, (title, ratio) in zip(axes, (("squares", 1), ("1 : 3 rectangles", 3)), strict=True):
        chosen = [result for result in results if result["shape"][1] == ratio * result["shape"][0]]
        sides = [result["shape"][0] for result in chosen]
        for who, colour in (("torch.optim.Muon", THEIRS), ("plain loop", OTHER)):
            middle = [result["speedups"][who] for result in chosen]
            axis.plot(sides, middle, "o-", color=colour, label=f"against {who}")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=title, xlabel="short side", ylabel="times faster")
        labelled = [side for side in sides if side.bit_count() == 1]  # others would overlap
        axis.set_xticks(labelled, [str(side) for side in labelled], minor=False)
        axis.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
        axis.minorticks_off()
        axis.legend(frameon=False)
    return figure


def _step(results: list[dict[str, Any]]) -> Figure:
    """Milliseconds of a whole step, as a graph, and as a graph of a compiled model."""
    (result,) = results
    figure, axes = _panels(2)
    for axis, (title, ending) in zip(
        axes, (("captured", ", captured"), ("captured, compiled", ", captured, compiled")), strict=True
    ):
        chosen = {who.removesuffix(ending): found for who, found in result["times"].items() if who.endswith(ending)}
        _bars(axis, chosen, lambda who: OURS if who.startswith("moon") else THEIRS)
        axis.set_title(title)
    return figure


def _tasks(results: list[dict[str, Any]]) -> Figure:
    """Milliseconds of a step with few and with many tasks."""
    (result,) = results
    few, many = min(result["tasks"]), max(result["tasks"])
    modes = [mode for mode in result["growth"] if mode != "per_task"]  # whose bar would hide the others
    figure, (axis,) = _panels(1)
    for shift, (count, colour) in enumerate(((few, THEIRS), (many, OURS))):
        found = [result["times"][f"{mode}, {count}"]["ms"] for mode in modes]
        places = [index + 0.4 * shift - 0.2 for index in range(len(modes))]
        axis.barh(places, found, 0.36, color=colour, label=f"{count} tasks")
    for index, mode in enumerate(modes):
        _label(axis, result["times"][f"{mode}, {many}"]["ms"], index + 0.2, f"{result['growth'][mode]:.2f}x")
    axis.set_yticks(range(len(modes)), modes)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set(xlabel="milliseconds")
    axis.legend(frameon=False)
    return figure


PLOTS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Figure]]] = {
    "polar-h200": ("polar-h200", _polar),
    "sizes-cpu": ("sizes-cpu", _sizes),
    "step-h200": ("step-h200", _step),
    "tasks-h200": ("tasks-h200", _tasks),
    "tasks-cpu": ("tasks-cpu", _tasks),
}


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(6.0, 4.4 * count), 2.6 if count != 2 else 3.0), layout="constrained")
    return figure, [figure.add_subplot(1, count, index + 1) for index in range(count)]


def _bars(axis: Axes, times: dict[str, Any], colour: Callable[[str], str]) -> None:
    """Medians, with the quartiles as whiskers."""
    names = list(times)
    middle = [times[who]["ms"] for who in names]
    below = [times[who]["ms"] - times[who]["low_ms"] for who in names]
    above = [times[who]["high_ms"] - times[who]["ms"] for who in names]
    axis.barh(range(len(names)), middle, 0.62, color=[colour(who) for who in names], xerr=[below, above], ecolor="#374151")
    for index, who in enumerate(names):
        _label(axis, times[who]["high_ms"], index, f"{times[who]['ms']:.3g}")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.set(xlabel="milliseconds")
    axis.grid(axis="y", visible=False)


def _label(axis: Axes, x: float, y: float, text: str) -> None:
    axis.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center")


if __name__ == "__main__":
    main()
