"""Made-up scenes in the layout of the real ones: rooms with furniture, and streets with houses, trees, people and cars.

Colour, class, depth and normals are of one world of boxes under one camera. As in real data, some of the pixels have no class,
and depth is unknown where a surface is seen at a glancing angle or there is none.
"""

import io
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moonopt.bench.data.download import write_whole
from moonopt.bench.data.made_up import check_empty
from moonopt.bench.data.scenes import IGNORED, SPLITS, Layout
from moonopt.bench.data.scenes_rays import World, look
from moonopt.bench.models.segnet import check_size
from moonopt.errors import UserError

#: Below this cosine between surface and ray nothing is known of its depth.
GLANCING = 0.1
#: Standard deviation of the noise on colours between 0 and 1.
NOISE = 0.02
SKY = 4

Range = tuple[float, float]


class Thing(NamedTuple):
    """A kind of box: its class, how large it is, and where it may stand, in metres."""

    label: int
    colour: tuple[float, float, float]
    edges: tuple[Range, Range, Range]
    bottom: Range  # above the ground
    across: Range  # its distance to the left or right
    ahead: Range
    often: float  # how probable it is that there is one


#: What stands in a room, and what hangs on the wall ahead, wherever that is.
FURNITURE = (
    Thing(0, (0.55, 0.25, 0.30), ((1.4, 2.0), (0.4, 0.6), (1.8, 2.1)), (0.0, 0.0), (0.6, 1.8), (2.2, 4.0), 0.4),  # bed
    Thing(1, (0.85, 0.70, 0.25), ((0.3, 0.8), (0.25, 0.5), (0.2, 0.3)), (0.6, 1.4), (0.4, 2.0), (2.0, 4.5), 0.5),  # books
    Thing(3, (0.30, 0.45, 0.70), ((0.4, 0.6), (0.8, 1.0), (0.4, 0.6)), (0.0, 0.0), (0.2, 1.6), (1.6, 3.5), 0.6),  # chair
    Thing(5, (0.45, 0.30, 0.18), ((0.8, 1.4), (1.2, 2.0), (0.4, 0.6)), (0.0, 0.0), (1.2, 2.2), (2.5, 4.8), 0.6),  # furniture
    Thing(6, (0.80, 0.40, 0.60), ((0.15, 0.4), (0.15, 0.5), (0.15, 0.4)), (0.0, 1.0), (0.1, 1.8), (1.4, 3.5), 0.7),  # objects
    Thing(8, (0.25, 0.55, 0.40), ((1.4, 2.0), (0.6, 0.8), (0.8, 1.0)), (0.0, 0.0), (0.2, 1.6), (2.2, 4.2), 0.4),  # sofa
    Thing(9, (0.65, 0.45, 0.25), ((0.8, 1.5), (0.6, 0.8), (0.6, 1.0)), (0.0, 0.0), (0.1, 1.4), (1.8, 3.6), 0.5),  # table
    Thing(IGNORED, (0.5, 0.5, 0.5), ((0.3, 0.6), (0.3, 0.9), (0.3, 0.6)), (0.0, 0.4), (0.3, 2.0), (1.6, 4.0), 0.5),
)
ON_THE_WALL = (
    Thing(7, (0.75, 0.60, 0.45), ((0.4, 0.9), (0.4, 0.7), (0.04, 0.06)), (1.3, 1.6), (0.2, 1.8), (0.0, 0.0), 0.6),  # picture
    Thing(10, (0.08, 0.08, 0.12), ((0.8, 1.3), (0.5, 0.7), (0.08, 0.12)), (0.9, 1.3), (0.1, 1.4), (0.0, 0.0), 0.4),  # tv
    Thing(12, (0.75, 0.90, 1.00), ((0.8, 1.3), (0.8, 1.2), (0.04, 0.06)), (0.9, 1.2), (0.4, 1.8), (0.0, 0.0), 0.6),  # window
)
CEILING, FLOOR, WALL = 2, 4, 11
PAINT = {CEILING: (0.95, 0.95, 0.92), FLOOR: (0.50, 0.38, 0.28), WALL: (0.78, 0.74, 0.66)}

#: Of streets; the ground is flat, and what no ray meets is sky.
STREET = (
    *3 * (Thing(1, (0.60, 0.50, 0.45), ((3.0, 5.0), (5.0, 12.0), (6.0, 14.0)), (0.0, 0.0), (8.5, 11.0), (5.0, 60.0), 0.9),),
    *2 * (Thing(3, (0.20, 0.50, 0.18), ((1.5, 3.0), (2.0, 5.0), (1.5, 3.0)), (0.0, 1.5), (5.0, 7.5), (8.0, 45.0), 0.7),),
    *2 * (Thing(2, (0.45, 0.45, 0.50), ((0.15, 0.3), (2.5, 5.0), (0.15, 0.3)), (0.0, 0.0), (3.8, 5.0), (6.0, 30.0), 0.7),),
    *2 * (Thing(5, (0.75, 0.35, 0.30), ((0.4, 0.6), (1.5, 1.9), (0.3, 0.5)), (0.0, 0.0), (2.5, 5.0), (6.0, 20.0), 0.6),),
    *2 * (Thing(6, (0.25, 0.30, 0.65), ((1.7, 2.0), (1.4, 1.8), (3.5, 4.8)), (0.0, 0.0), (1.5, 4.0), (8.0, 35.0), 0.7),),
    Thing(IGNORED, (0.4, 0.4, 0.4), ((0.8, 1.5), (0.8, 1.2), (0.8, 1.5)), (0.0, 0.0), (4.0, 6.0), (6.0, 25.0), 0.6),
)
FLAT, ASPHALT, AIR = 0, (0.35, 0.34, 0.36), (0.62, 0.76, 0.92)


def make_scenes(tree: Path, layout: Layout, count: int, seed: int, size: tuple[int, int]) -> None:
    """Write a tree of ``count`` training scenes and half as many to test on, of a size (height, width).

    A scene depends on the seed, its split and its number alone. A folder that has files already is left alone.
    """
    if count < 1:
        raise UserError(f"The number of made-up scenes must be at least 1, found {count}.")
    check_size(*size)
    check_empty(tree, "scenes")
    for split, many in zip(SPLITS, (count, math.ceil(count / 2)), strict=True):
        folders = layout.folders(tree / split)
        for number in range(many):
            for kind, values in numbered_scene(layout, seed, split, number, size).items():
                stream = io.BytesIO()
                np.save(stream, values.float().numpy())
                write_whole(folders[kind] / f"{number}.npy", stream.getvalue())


def numbered_scene(layout: Layout, seed: int, split: str, number: int, size: tuple[int, int]) -> dict[str, Tensor]:
    """One scene of a tree, as ``made_scene`` has it."""
    # One number of 32 bits: torch's generator on the CPU takes no notice of more.
    return made_scene(layout, torch.Generator().manual_seed(zlib.crc32(f"{seed} {split} {number}".encode())), size)


def made_scene(layout: Layout, generator: torch.Generator, size: tuple[int, int]) -> dict[str, Tensor]:
    """One scene, by kind of file and in the shapes of the files."""
    return room(generator, size) if layout.normals else street(generator, size)


def room(generator: torch.Generator, size: tuple[int, int]) -> dict[str, Tensor]:
    """A room with furniture: image, label, depth in metres, normals."""
    view = look(room_world(generator), *size)
    known = (view.slant > GLANCING).unsqueeze(2)
    return {
        "image": _printed(view.colour, generator),
        "label": view.label,
        "depth": view.depth.unsqueeze(2) * known,
        "normal": view.normal * known,
    }


def street(generator: torch.Generator, size: tuple[int, int]) -> dict[str, Tensor]:
    """A street: image, label, inverse depth."""
    view = look(street_world(generator), *size)
    inverse = torch.where(view.hit, 1 / view.depth, 0)
    return {
        "image": _printed(torch.where(view.hit.unsqueeze(2), view.colour, torch.tensor(AIR)), generator),
        "label": torch.where(view.hit, view.label, SKY),
        "depth": inverse.unsqueeze(2),
    }


def room_world(generator: torch.Generator) -> World:
    """Four walls, floor and ceiling, and what stands in between and hangs on the wall ahead."""
    draw = _Draw(generator)
    eye, height, ahead = draw(1.2, 1.6), draw(2.4, 3.0), draw(4.0, 6.0)
    left, right, behind = draw(2.2, 3.5), draw(2.2, 3.5), 1.0
    middle = ((right - left) / 2, height / 2 - eye, (behind - ahead) / 2)
    edges = (left + right, height, ahead + behind)
    faces = [[WALL, WALL], [FLOOR, CEILING], [WALL, WALL]]
    colours = [[draw.tint(PAINT[face]) for face in pair] for pair in faces]
    boxes = [_Box(middle, edges, 0.0, faces, colours, draw(3.0, 8.0))]
    boxes += [draw.box(thing, eye) for thing in FURNITURE if draw(0, 1) < thing.often]
    boxes += [draw.box(thing, eye, ahead) for thing in ON_THE_WALL if draw(0, 1) < thing.often]
    return _world(boxes, yaw=draw(-0.3, 0.3), pitch=draw(-0.3, 0.05))


def street_world(generator: torch.Generator) -> World:
    """The ground, and what stands on both sides of the road."""
    draw = _Draw(generator)
    eye, deep = draw(1.2, 1.6), 1.0
    faces, colours = 3 * [[FLAT] * 2], 3 * [2 * [draw.tint(ASPHALT)]]
    ground = _Box((0.0, -eye - deep / 2, -95.0), (400.0, deep, 200.0), 0.0, faces, colours, draw(1.0, 2.0))
    boxes = [draw.box(thing, eye) for thing in STREET if draw(0, 1) < thing.often]
    return _world([ground, *boxes], yaw=draw(-0.15, 0.15), pitch=draw(-0.08, 0.02))


class _Box(NamedTuple):
    centre: tuple[float, float, float]
    edges: tuple[float, float, float]
    turn: float
    labels: Sequence[Sequence[int]]  # of both faces of every axis
    colours: Sequence[Sequence[Sequence[float]]]
    stripes: float


class _Draw:
    """Random numbers of one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __call__(self, low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def tint(self, colour: Sequence[float]) -> list[float]:
        return [channel * self(0.8, 1.2) for channel in colour]

    def box(self, thing: Thing, eye: float, wall: float | None = None) -> _Box:
        """A thing somewhere ahead of eyes of this height, turned as it likes or flat on a wall so far ahead."""
        width, height, depth = (self(*edge) for edge in thing.edges)
        side = 1.0 if self(0, 1) < 0.5 else -1.0
        ahead = self(*thing.ahead) if wall is None else wall - depth / 2
        turn = self(-0.5, 0.5) if wall is None else 0.0
        centre = (side * self(*thing.across), self(*thing.bottom) - eye + height / 2, -ahead)
        faces, colours = 3 * [[thing.label] * 2], 3 * [2 * [self.tint(thing.colour)]]
        return _Box(centre, (width, height, depth), turn, faces, colours, self(4.0, 16.0))


def _world(boxes: Sequence[_Box], yaw: float, pitch: float) -> World:
    centre, edges, turn, labels, colours, stripes = (torch.tensor(column) for column in zip(*boxes, strict=True))
    return World(centre, edges / 2, turn, labels, colours, stripes, yaw, pitch)


def _printed(colour: Tensor, generator: torch.Generator) -> Tensor:
    """Colours with noise, in the 256 steps that a picture has."""
    noisy = colour + NOISE * torch.randn(colour.shape, generator=generator)
    return (noisy.clamp(0, 1) * 255).round() / 255
