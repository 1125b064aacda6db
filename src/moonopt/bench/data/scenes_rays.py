"""A pinhole camera among boxes: what it sees of every pixel, by casting one ray each.

The camera looks along -z with x to the right and y up, and so do the normals that it sees. A box around the camera is a
room. Rays have z = -1, so that the way along a ray is the depth of a pixel.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

#: The focal length over the width of the picture, about that of a Kinect.
FOCAL = 0.81
#: Where light comes from, and what share of it reaches every side.
LIGHT = (0.0, 0.8, 0.6)
AMBIENT = 0.45
#: How much darker and lighter the stripes of a surface are.
STRIPES = 0.12


@dataclass(frozen=True)
class World:
    """Boxes that stand upright, and a camera in the origin that may look to the side and down.

    ``label`` and ``colour`` have the two faces of every axis: (boxes, 3, 2) and (boxes, 3, 2, 3).
    """

    centre: Tensor  # (boxes, 3)
    half: Tensor  # (boxes, 3), half of their edges
    turn: Tensor  # (boxes,), around the vertical, in radians
    label: Tensor
    colour: Tensor
    stripes: Tensor  # (boxes,), per unit of length
    yaw: float = 0.0  # of the camera, to the left
    pitch: float = 0.0  # upwards

    def mirrored(self) -> "World":
        """Left and right exchanged."""
        return replace(
            self,
            centre=self.centre * torch.tensor([-1.0, 1.0, 1.0]),
            turn=-self.turn,
            label=torch.cat([self.label[:, :1].flip(2), self.label[:, 1:]], 1),
            colour=torch.cat([self.colour[:, :1].flip(2), self.colour[:, 1:]], 1),
            yaw=-self.yaw,
        )


class View(NamedTuple):
    """What the camera sees. Where there is no box, the label is -1 and all else 0."""

    hit: Tensor  # (height, width), bool
    label: Tensor  # (height, width)
    depth: Tensor  # (height, width)
    normal: Tensor  # (height, width, 3), of length 1, towards the camera
    colour: Tensor  # (height, width, 3), from 0 to 1
    slant: Tensor  # (height, width), the cosine between normal and ray


def rays(height: int, width: int) -> Tensor:
    """The directions of all pixels from the camera, (height, width, 3)."""
    across = (torch.arange(width) + 0.5 - width / 2) / (FOCAL * width)
    down = (torch.arange(height) + 0.5 - height / 2) / (FOCAL * width)
    y, x = torch.meshgrid(-down, across, indexing="ij")
    return torch.stack([x, y, -torch.ones_like(x)], 2)


def look(world: World, height: int, width: int) -> View:
    """Cast a ray through every pixel."""
    seen = rays(height, width).view(-1, 3)
    camera = _around_y(torch.tensor(world.yaw)) @ _around_x(world.pitch)
    boxes = _around_y(world.turn)  # (boxes, 3, 3), from a box to the world
    to_box = boxes.transpose(1, 2) @ camera
    direction = seen @ to_box.transpose(1, 2)  # (boxes, rays, 3)
    origin = -(boxes.transpose(1, 2) @ world.centre.unsqueeze(2)).transpose(1, 2)  # the camera, seen from every box
    # Between the two planes of an axis a ray is from the smaller to the larger of these ways.
    steep = torch.where(direction.abs() < 1e-9, 1e-9, direction)
    one, other = (-world.half.unsqueeze(1) - origin) / steep, (world.half.unsqueeze(1) - origin) / steep
    entry, entry_axis = torch.minimum(one, other).max(2)
    leave, leave_axis = torch.maximum(one, other).min(2)
    outside = entry > 0
    way = torch.where(outside, entry, leave)
    way = torch.where((leave > entry) & (leave > 0), way, torch.inf)
    depth, box = way.min(0)
    axis = torch.where(outside, entry_axis, leave_axis).gather(0, box.unsqueeze(0)).squeeze(0)
    hit = depth.isfinite()

    ray = torch.arange(len(seen))
    forward = direction[box, ray, axis]
    towards = torch.zeros(len(seen), 3)
    towards[ray, axis] = -forward.sign()
    normal = (to_box[box].transpose(1, 2) @ towards.unsqueeze(2)).squeeze(2)
    place = origin[box, 0] + torch.where(hit, depth, 0).unsqueeze(1) * direction[box, ray]
    side = (place[ray, axis] > 0).long()
    slant = -(normal * torch.nn.functional.normalize(seen, dim=1)).sum(1)
    colour = world.colour[box, axis, side] * _shade(world, camera, box, axis, normal, place).unsqueeze(1)
    found = (
        torch.where(hit, world.label[box, axis, side], -1),
        torch.where(hit, depth, 0),
        normal * hit.unsqueeze(1),
        colour.clamp(0, 1) * hit.unsqueeze(1),
        slant * hit,
    )
    return View(*(each.view(height, width, *each.shape[1:]) for each in (hit, *found)))


def _shade(world: World, camera: Tensor, box: Tensor, axis: Tensor, normal: Tensor, place: Tensor) -> Tensor:
    """How bright every pixel is: light from above and the camera's side, and stripes, alike to the left and the right."""
    light = camera.T @ torch.nn.functional.normalize(torch.tensor(LIGHT), dim=0)
    along = place.masked_fill(torch.arange(3) == axis.unsqueeze(1), 0)
    waves = torch.cos(along * world.stripes[box].unsqueeze(1)).prod(1)
    return (AMBIENT + (1 - AMBIENT) * (normal @ light).clamp(min=0)) * (1 + STRIPES * waves)


def _around_y(angle: Tensor) -> Tensor:
    """Rotations (..., 3, 3) that turn -z to the left."""
    sin, cos, one, zero = angle.sin(), angle.cos(), torch.ones_like(angle), torch.zeros_like(angle)
    return torch.stack([cos, zero, sin, zero, one, zero, -sin, zero, cos], -1).view(*angle.shape, 3, 3)


def _around_x(angle: float) -> Tensor:
    sin, cos = torch.tensor(angle).sin(), torch.tensor(angle).cos()
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    return torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos]).view(3, 3)
