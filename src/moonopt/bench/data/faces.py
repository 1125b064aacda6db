"""Made-up faces in the layout of CelebA, so that everything can be tried where CelebA is not."""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from moonopt.bench.data import celeba
from moonopt.bench.data.celeba_images import in_threads, require_pillow
from moonopt.bench.data.faces_attributes import person
from moonopt.bench.data.made_up import check_empty
from moonopt.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

COUNT = 2000
#: The shares of the faces that are validated and tested on, about those of CelebA.
HELD_OUT = 0.1
QUALITY = 90  # of the jpg files


def make_faces(place: Path, count: int = COUNT, seed: int = 0) -> None:
    """Write drawn faces with their attributes and splits into an empty folder; the first of more are those of fewer."""
    held_out = max(1, round(HELD_OUT * count))
    if count < 2 * held_out + 1:
        raise UserError(f"At least 3 faces make a split to train on, one to validate on and one to test on; found {count}.")
    check_empty(place, "faces")
    require_pillow()
    (place / celeba.IMAGES).mkdir(parents=True, exist_ok=True)
    names = [f"{number:06}.jpg" for number in range(1, count + 1)]

    def draw(numbers: range) -> list[list[bool]]:
        rows = []
        for number in numbers:
            image, attributes = face(seed, number)
            image.save(place / celeba.IMAGES / names[number], quality=QUALITY)
            rows.append([attributes[name] for name in celeba.ATTRIBUTES])
        return rows

    rows = [row for some in in_threads(draw, count, "Drawing faces") for row in some]
    splits = [0] * (count - 2 * held_out) + [1] * held_out + [2] * held_out
    celeba.write_lists(place, names, rows, splits)


def face(seed: int, number: int) -> tuple["Image", Mapping[str, bool]]:
    """One drawn face and its attributes; the same for the same numbers."""
    from moonopt.bench.data.faces_drawing import draw

    random = Random(f"faces {seed} {number}")
    attributes = person(random)
    return draw(attributes, random), attributes


def sheet(path: Path, rows: int = 4, columns: int = 10, seed: int = 0) -> None:
    """Write the first faces side by side as one image."""
    require_pillow()
    from PIL import Image

    width, height = celeba.SIZE
    whole = Image.new("RGB", (columns * width, rows * height))
    for number in range(rows * columns):
        whole.paste(face(seed, number)[0], (number % columns * width, number // columns * height))
    whole.save(path)
