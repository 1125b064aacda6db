"""Scenes as training sees them: a part of the picture, enlarged, and half of the time mirrored.

The augmentation of MTAN's data: a scale of 1, 1.2 or 1.5, a part of the picture so many times smaller, at a random place,
resized to the whole, with depths divided by the scale, as if the camera stood closer; then a mirror image, in which normals
point to the other side.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moonopt.bench.base import Tensors
from moonopt.bench.data.scenes import SceneTensors

SCALES = (1.0, 1.2, 1.5)

#: Images, labels, depths and, where there are some, normals.
Batch = tuple[Tensor, ...]


class Scenes(Tensors):
    """Scenes in memory, of which a batch has images as floats, labels as int8, depths and perhaps normals.

    Args:
        scenes: all of a split.
        chosen: the numbers of those that are meant; None for all.
        augment: whether every batch has new views of them.

    """

    def __init__(self, scenes: SceneTensors, chosen: Tensor | None = None, augment: bool = False) -> None:
        given = [scenes.image, scenes.label, scenes.depth, *([] if scenes.normal is None else [scenes.normal])]
        super().__init__(*(given if chosen is None else [each[chosen] for each in given]))
        self.divisor = scenes.divisor
        self.augment = augment

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        image, *targets = super().batch(indices, generator)
        scenes = image.float() / self.divisor, *targets
        if not self.augment:
            return scenes
        return seen(scenes, drawn_views(len(indices), image.shape[2], image.shape[3], generator))


class Views(NamedTuple):
    """Where every pixel of some views comes from: of a view b, row i is row ``near_rows[b, i]`` of its scene, and so on.

    They are kept on the host.
    """

    scale: Tensor  # (views,)
    mirrored: Tensor  # (views,), bool
    near_rows: Tensor  # (views, height)
    near_columns: Tensor  # (views, width)
    rows: Tensor  # the same between the pixels, where colours and normals are mixed
    columns: Tensor


def drawn_views(count: int, height: int, width: int, generator: torch.Generator) -> Views:
    """Views of so many scenes, from nothing but the generator."""
    number = torch.randint(len(SCALES), (count,), generator=generator)
    places = torch.rand(2, count, generator=generator, dtype=torch.float64)
    mirrored = torch.rand(count, generator=generator) < 0.5
    near_rows, rows = _origins(height, number, places[0])
    near_columns, columns = (
        torch.where(mirrored.unsqueeze(1), each.flip(1), each) for each in _origins(width, number, places[1])
    )
    return Views(torch.tensor(SCALES)[number], mirrored, near_rows, near_columns, rows, columns)


def seen(scenes: Sequence[Tensor], views: Views) -> Batch:
    """Each scene in its view; colours and normals are mixed, while labels and depths are those of the nearest pixel.

    What the views alone decide is computed on the host and sent in two pieces: on a GPU, launches are what this costs.
    """
    image, label, depth, *normals = scenes
    mixed, colours = torch.cat([image, *normals], 1) if normals else image, image.shape[1]
    sides = torch.ones(len(label), 3, dtype=mixed.dtype)
    sides[:, 0] -= 2 * views.mirrored  # to the left and to the right
    top, bottom, down = _between(views.rows, mixed.dtype)
    left, right, across = _between(views.columns, mixed.dtype)
    scene = torch.arange(len(label)).unsqueeze(1)
    scene, rows, columns, top, bottom, left, right = _sent(
        [scene, views.near_rows, views.near_columns, top, bottom, left, right], label.device
    )
    scale = views.scale.unsqueeze(1).to(mixed.dtype)
    scale, sides, down, across = _sent([scale, sides, down, across], label.device)

    nearest = scene.unsqueeze(2), rows.unsqueeze(2), columns.unsqueeze(1)
    depth = depth[:, 0][nearest].unsqueeze(1) / scale[:, :, None, None]
    mixed = _mixed_along(3, _mixed_along(2, mixed, top, bottom, down), left, right, across)
    turned = [mixed[:, colours:] * sides[:, :, None, None] for _ in normals]
    return mixed[:, :colours], label[nearest], depth, *turned


def _origins(size: int, number: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """For every scale and place, from which old pixel each of ``size`` new ones comes, as whole numbers and between them."""
    part = torch.tensor([int(size / scale) for scale in SCALES])[number].unsqueeze(1)
    begin = (place.unsqueeze(1) * (size - part + 1)).long()
    new = torch.arange(size)
    # In float32, as torch.nn.functional.interpolate has it: a whole number may come out just below itself.
    near = (new.float() * (part.float() / size)).floor().long()
    return begin + near.clamp(max=part - 1), begin + new.double() * ((part - 1) / max(size - 1, 1))


def _sent(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Tensors (views, any length) of one type on a device, by one copy."""
    moved = torch.cat(list(tensors), 1).to(device, non_blocking=True)
    return torch.split(moved, [each.shape[1] for each in tensors], 1)


def _between(origins: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The pixels before and after each origin, and the share of the second."""
    low = origins.floor()
    whole = low.long()
    return whole, (whole + 1).clamp(max=origins.shape[1] - 1), (origins - low).to(dtype)


def _mixed_along(dim: int, values: Tensor, before: Tensor, after: Tensor, share: Tensor) -> Tensor:
    """Values (views, channels, height, width) between the pixels of one direction, linear."""
    shape = [len(values), 1, 1, 1]
    shape[dim] = -1
    first, second = (values.gather(dim, each.view(shape).expand_as(values)) for each in (before, after))
    return torch.lerp(first, second, share.view(shape))
