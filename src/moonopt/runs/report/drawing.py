"""Plots as panels that draw themselves: together in one file, or each alone in a page, where it follows the page's theme."""

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moonopt.runs.report.styles import Style

#: Text and axes: nearly black in files, and the colour of the text in a page.
INK = "#010203"

#: In inches, at 72 units of SVG each: a panel, and in a legend the line with the space around it, and a letter.
PANEL = (4.6, 3.3)
TITLE_LETTERS = 42  # in a line of a panel's title
COLUMNS = 3
LEGEND_LINE, LETTER = 0.8, 0.09

LOOK: dict[Any, Any] = {
    "font.size": 10.0,
    "font.family": "sans-serif",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.7,
    "lines.markersize": 6.0,
    "svg.fonttype": "none",
    "text.parse_math": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color", "axes.titlecolor"), INK
    ),
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class Plot:
    """A figure: panels side by side, what the lines are, and a sentence that says how to read it."""

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    legend: Mapping[str, Style]
    markers: bool = False


def files(plot: Plot) -> dict[str, bytes]:
    """The plot whole, on white, by the suffix of a file."""
    with mpl.rc_context({**LOOK, "svg.hashsalt": plot.name}):
        figure = _whole(plot)
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.set_layout_engine("none")  # laid out already, and that takes as long as drawing
        figure.savefig(png, format="png", dpi=160)
    return {".svg": svg.getvalue(), ".png": png.getvalue()}


def inline(plot: Plot, prefix: str) -> list[str]:
    """Each panel as an SVG element for a page: transparent, in the page's colours, with ids that begin with the prefix."""
    found = []
    for number, panel in enumerate(plot.panels):
        with mpl.rc_context({**LOOK, "svg.hashsalt": f"{prefix}{number}"}):
            figure = Figure(figsize=PANEL, layout="constrained")
            _draw(panel, figure.add_subplot())
            text = io.StringIO()
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        found.append(_for_page(text.getvalue(), f"{prefix}-{number}-"))
    return found


def _whole(plot: Plot) -> Figure:
    columns = 2 if len(plot.panels) == 4 else min(len(plot.panels), COLUMNS)  # four make a square
    rows = math.ceil(len(plot.panels) / columns)
    width = PANEL[0] * max(columns, 1.5)
    legend_columns = max(1, int(width / (LEGEND_LINE + LETTER * max(map(len, plot.legend), default=0))))
    legend_rows = math.ceil(len(plot.legend) / legend_columns)
    figure = Figure(figsize=(width, PANEL[1] * rows + 0.5 + 0.25 * legend_rows), layout="constrained")
    figure.set_facecolor("white")
    figure.suptitle(plot.title)
    for number, panel in enumerate(plot.panels):
        _draw(panel, figure.add_subplot(rows, columns, number + 1))
    if plot.legend:
        lines = [line_of(style, plot.markers) for style in plot.legend.values()]
        figure.legend(lines, list(plot.legend), loc="outside lower center", ncols=legend_columns, frameon=False)
    return figure


def line_of(style: Style, marker: bool = False) -> Line2D:
    """A line for a legend."""
    if marker:
        return Line2D([], [], color=style.colour, marker=style.marker, linestyle="none")
    return Line2D([], [], color=style.colour, linestyle=line_style(style))


def line_style(style: Style) -> Literal["solid"] | tuple[float, tuple[float, ...]]:
    """As matplotlib wants it."""
    return (0.0, style.dash) if style.dash else "solid"


def _draw(panel: Panel, axes: Axes) -> None:
    axes.set_facecolor("none")
    axes.set_title(textwrap.fill(panel.title, TITLE_LETTERS, break_long_words=False))
    panel.draw(axes)


def _for_page(svg: str, prefix: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 aria-hidden="true"', svg, count=1)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}", svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    return svg.replace(INK, "currentColor")
