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
        views = drawn_views(len(indices), image.shape[2], image.shape[3], generator)
        return seen(scenes, views.to(image.device))


class Views(NamedTuple):
    """Where every pixel of some views comes from: of a view b, row i is row ``near_rows[b, i]`` of its scene, and so on."""

    scale: Tensor  # (views,)
    mirrored: Tensor  # (views,), bool
    near_rows: Tensor  # (views, height)
    near_columns: Tensor  # (views, width)
    rows: Tensor  # the same between the pixels, where colours and normals are mixed
    columns: Tensor

    def to(self, device: torch.device) -> "Views":
        return Views(*(each.to(device, non_blocking=True) for each in self))


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
    """Each scene in its view; colours and normals are mixed, while labels and depths are those of the nearest pixel."""
    image, label, depth, *normals = scenes
    scene = torch.arange(len(label), device=label.device)[:, None, None]
    rows, columns = views.near_rows.unsqueeze(2), views.near_columns.unsqueeze(1)
    depth = depth[scene, 0, rows, columns].unsqueeze(1) / views.scale[:, None, None, None]
    sides = torch.stack([1 - 2 * views.mirrored.to(image.dtype), *2 * [torch.ones_like(views.scale)]], 1)
    turned = [_mixed(normal, views) * sides[:, :, None, None] for normal in normals]
    return _mixed(image, views), label[scene, rows, columns], depth, *turned


def _origins(size: int, number: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """For every scale and place, from which old pixel each of ``size`` new ones comes, as whole numbers and between them."""
    part = torch.tensor([int(size / scale) for scale in SCALES])[number].unsqueeze(1)
    begin = (place.unsqueeze(1) * (size - part + 1)).long()
    new = torch.arange(size)
    # In float32, as torch.nn.functional.interpolate has it: a whole number may come out just below itself.
    near = (new.float() * (part.float() / size)).floor().long()
    return begin + near.clamp(max=part - 1), begin + new.double() * ((part - 1) / max(size - 1, 1))


def _mixed(values: Tensor, views: Views) -> Tensor:
    """Values (views, channels, height, width) between the pixels, linear in both directions."""
    return _mixed_along(3, _mixed_along(2, values, views.rows), views.columns)


def _mixed_along(dim: int, values: Tensor, origins: Tensor) -> Tensor:
    shape = [len(origins), 1, 1, 1]
    shape[dim] = -1
    low = origins.floor()
    index = low.long().view(shape).expand_as(values)
    beyond = (index + 1).clamp(max=values.shape[dim] - 1)
    share = (origins - low).to(values.dtype).view(shape)
    return torch.lerp(values.gather(dim, index), values.gather(dim, beyond), share)
