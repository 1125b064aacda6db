"""A fixed look for every method, so that a reader who knows one figure knows the next: colour, line and marker together.

The colours are Okabe and Ito's, which colour-blind readers tell apart, without black and yellow, which vanish on dark and on
light pages, with a lighter blue for the same reason, and with a grey.
"""

from collections.abc import Sequence
from dataclasses import dataclass

VERMILION, BLUE, GREEN, ORANGE, SKY, PURPLE, GREY = "#D55E00", "#1B7FC4", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#8A8A8A"
COLOURS = (VERMILION, BLUE, GREEN, ORANGE, SKY, PURPLE, GREY)

#: Lengths of dash and gap in points; () is a solid line.
DASHES = ((), (5.0, 2.0), (1.5, 1.5), (6.0, 1.5, 1.5, 1.5))

#: A square, a triangle and so on, each with its outline in a box of 10 by 10 for legends in a page; "o" is a circle.
MARKERS = {
    "o": "M5 1a4 4 0 1 0 0.01 0z",
    "s": "M1.3 1.3h7.4v7.4h-7.4z",
    "^": "M5 0.8l4.4 8h-8.8z",
    "D": "M5 0l5 5-5 5-5-5z",
    "v": "M5 9.2l4.4-8h-8.8z",
    "P": "M3.4 0.6h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2v-2.8h-2.8v-3.2h2.8z",
    "X": "M2.6 0.4L5 2.8 7.4 0.4 9.6 2.6 7.2 5l2.4 2.4-2.2 2.2L5 7.2 2.6 9.6 0.4 7.4 2.8 5 0.4 2.6z",
}


@dataclass(frozen=True)
class Style:
    """How a line or a point looks."""

    colour: str
    dash: tuple[float, ...]
    marker: str

    @property
    def outline(self) -> str:
        """The marker as the data of an SVG path."""
        return MARKERS[self.marker]


#: Neighbours differ in all: colour and marker go round, the marker one further for every kind of line.
STYLES = tuple(
    Style(colour, dash, list(MARKERS)[(place + turn) % len(MARKERS)])
    for turn, dash in enumerate(DASHES)
    for place, colour in enumerate(COLOURS)
)

#: The place of each method in STYLES: those most often compared come first, with solid lines.
METHODS = (
    "moon", "muon", "famo", "cagrad", "mgda", "nash-mtl", "ls",
    "imtl-g", "pcgrad", "graddrop", "gradnorm", "rlw", "uw", "stl", "dwa", "si",
)  # fmt: skip


def method_styles(labels: Sequence[str]) -> dict[str, Style]:
    """Known methods have their own style; other labels take what is left, in their order.

    >>> method_styles(["moon, optimizer.lr=0.01", "moon"])["moon"].colour == VERMILION
    True
    """
    places = {label: METHODS.index(label) for label in labels if label in METHODS}
    free = [place for place in range(len(STYLES)) if place not in places.values()]
    others = [label for label in labels if label not in places]
    places |= {label: free[index % len(free)] for index, label in enumerate(others)}
    return {label: STYLES[places[label]] for label in labels}


def task_styles(tasks: Sequence[str]) -> dict[str, Style]:
    """Styles of tasks, in their order; blue first, since the first colour is that of a method."""
    return {task: STYLES[(index + 1) % len(STYLES)] for index, task in enumerate(tasks)}
