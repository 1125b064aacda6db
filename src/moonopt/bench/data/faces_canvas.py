"""What made-up faces are drawn on: shapes in pixels of CelebA's images, a pose, a background.

The figure is drawn larger than it will be, which smooths its edges, and on more than will be seen of it, as it may be moved.
"""

import math
from collections.abc import Sequence
from random import Random

from PIL import Image, ImageDraw

from moonopt.bench.data.celeba import SIZE

SHARPER = 2
BELOW = 30  # pixels below the picture that are drawn, too

Colour = tuple[int, int, int]
Point = tuple[float, float]

MIDDLE = SIZE[0] / 2


class Canvas:
    """A transparent picture with shapes on it. Points are (x, y); what is across or down is half a width or height."""

    def __init__(self) -> None:
        self.picture = Image.new("RGBA", (SHARPER * SIZE[0], SHARPER * (SIZE[1] + BELOW)))
        self._pen = ImageDraw.Draw(self.picture)

    def ellipse(self, centre: Point, across: float, down: float, colour: Colour) -> None:
        self._pen.ellipse(_box(centre, across, down), fill=colour)

    def ring(self, centre: Point, across: float, down: float, colour: Colour, thick: float) -> None:
        self._pen.ellipse(_box(centre, across, down), outline=colour, width=round(SHARPER * thick))

    def polygon(self, points: Sequence[Point], colour: Colour) -> None:
        self._pen.polygon(_scaled(points), fill=colour)

    def line(self, points: Sequence[Point], colour: Colour, thick: float) -> None:
        self._pen.line(_scaled(points), fill=colour, width=max(1, round(SHARPER * thick)), joint="curve")

    def curve(self, start: Point, bend: Point, end: Point, colour: Colour, thick: float) -> None:
        """A line from start to end that is pulled towards a point."""
        self.line([_bezier(start, bend, end, step / 12) for step in range(13)], colour, thick)

    def finished(self, random: Random) -> Image.Image:
        """The figure before a background, in the size of CelebA's images, turned, scaled and moved a little."""
        figure = _posed(self.picture.reduce(SHARPER), random)
        picture = _background(random)
        picture.paste(figure, mask=figure)
        return picture


def at(side: int, x: float, y: float) -> Point:
    """The point so far to the right (side 1) or to the left (-1) of the middle."""
    return MIDDLE + side * x, y


def both_sides(points: Sequence[Point]) -> list[Point]:
    """Points to the right of the middle, by their distance from it, then their mirror images."""
    return [*(at(1, x, y) for x, y in points), *(at(-1, x, y) for x, y in reversed(points))]


def mixed(first: Colour, second: Colour, share: float) -> Colour:
    """The first colour with a share of the second.

    >>> mixed((0, 100, 200), (100, 100, 100), 0.25)
    (25, 100, 175)
    """
    red, green, blue = (round((1 - share) * a + share * b) for a, b in zip(first, second, strict=True))
    return red, green, blue


def varied(colour: Colour, random: Random, most: int) -> Colour:
    """A colour of which every part is more or less by so much at most."""
    red, green, blue = (min(255, max(0, value + random.randint(-most, most))) for value in colour)
    return red, green, blue


def _scaled(points: Sequence[Point]) -> list[Point]:
    return [(SHARPER * x, SHARPER * y) for x, y in points]


def _box(centre: Point, across: float, down: float) -> list[Point]:
    x, y = centre
    return _scaled([(x - across, y - down), (x + across, y + down)])


def _bezier(start: Point, bend: Point, end: Point, share: float) -> Point:
    x, y = ((1 - share) ** 2 * a + 2 * share * (1 - share) * b + share**2 * c for a, b, c in zip(start, bend, end, strict=True))
    return x, y


def _background(random: Random) -> Image.Image:
    """One colour that fades into another, from the top or from a side."""
    first, second = (Image.new("RGB", SIZE, varied((140, 140, 140), random, 80)) for _ in range(2))
    return Image.composite(first, second, Image.linear_gradient("L").rotate(random.choice((0, 90))).resize(SIZE))


def _posed(picture: Image.Image, random: Random) -> Image.Image:
    turn, scale = math.radians(random.uniform(-5, 5)), random.uniform(0.93, 1.07)
    right, down = random.uniform(-8, 8), random.uniform(-8, 8)
    x, y = SIZE[0] / 2, SIZE[1] / 2
    cosine, sine = math.cos(turn) / scale, math.sin(turn) / scale
    across = (cosine, sine, x - cosine * (x + right) - sine * (y + down))
    along = (-sine, cosine, y + sine * (x + right) - cosine * (y + down))
    return picture.transform(SIZE, Image.Transform.AFFINE, across + along, Image.Resampling.BILINEAR)
