"""Pictures of scenes with what is to be told of every pixel, as trees of npy files: NYU-v2 and CityScapes.

A tree has folders ``train`` and ``val``, each with ``image``, ``label``, ``depth`` and perhaps ``normal``, and in each of these
``0.npy``, ``1.npy`` and so on: the layout of the archives that come with MTAN (Liu, Johns and Davison, 2019).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moonopt.errors import UserError

SPLITS = ("train", "val")
#: The class of a pixel that nobody has labelled; it counts neither in losses nor in metrics.
IGNORED = -1
#: Samples at a time where all are looked through, which bounds the memory that this takes.
CHUNK = 64


@dataclass(frozen=True)
class Layout:
    """What a tree of a data set holds.

    Args:
        title: of the data set.
        classes: how many there are.
        labels: the folder of the classes; the first of these that is there.
        normals: whether there are surface normals.
        counts: of the samples of every split.
        size: height and width of the published images.

    """

    title: str
    classes: int
    labels: tuple[str, ...]
    normals: bool
    counts: Mapping[str, int]
    size: tuple[int, int]

    def folders(self, split: Path) -> dict[str, Path]:
        """Where each kind of file lies."""
        label = next((name for name in self.labels if (split / name).is_dir()), self.labels[0])
        names = {"image": "image", "label": label, "depth": "depth"} | ({"normal": "normal"} if self.normals else {})
        return {kind: split / name for kind, name in names.items()}


NYUV2 = Layout("NYU-v2", 13, ("label",), True, {"train": 795, "val": 654}, (288, 384))
NYUV2_SMALL = replace(NYUV2, title="NYU-v2 at 96 x 128", size=(96, 128))
CITYSCAPES = Layout("CityScapes", 7, ("label_7", "label"), False, {"train": 2975, "val": 500}, (128, 256))


class SceneTensors(NamedTuple):
    """All samples of a split. Images are bytes wherever bytes over the divisor are what the files say, to the last bit."""

    image: Tensor  # (n, 3, height, width), bytes or float32
    divisor: float
    label: Tensor  # (n, height, width), int8
    depth: Tensor  # (n, 1, height, width), float32; 0 where unknown
    normal: Tensor | None  # (n, 3, height, width), float32; 0 where unknown

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.image.shape[2], self.image.shape[3]


def missing(tree: Path, layout: Layout) -> str | None:
    """Which folders are not there or empty, in a sentence."""
    folders = [folder for split in SPLITS for folder in layout.folders(tree / split).values()]
    absent = [str(folder.relative_to(tree)) for folder in folders if not (folder / "0.npy").exists()]
    if not absent:
        return None
    return f"Not in {tree}: {', '.join(f'{folder}/0.npy' for folder in absent)} and what follows."


def read(tree: Path, split: str, layout: Layout) -> SceneTensors:
    """A split, whose samples all have the size of the first; ``UserError`` names the file that is missing or not sound."""
    folders = layout.folders(tree / split)
    count = len(list(folders["image"].glob("*.npy")))
    if not count:
        raise UserError(f"{folders['image']} has no samples: expected 0.npy, 1.npy and so on.")
    height, width = _array(folders["image"] / "0.npy").shape[:2]
    image = _stacked(folders["image"], count, (height, width, 3), torch.float32)
    compact, divisor = _compact(image.movedim(3, 1).contiguous())
    label = _stacked(folders["label"], count, (height, width), torch.int8, _check_classes(layout.classes))
    depth = _stacked(folders["depth"], count, (height, width, 1), torch.float32).movedim(3, 1)
    normal = None
    if layout.normals:
        normal = _stacked(folders["normal"], count, (height, width, 3), torch.float32).movedim(3, 1).contiguous()
    return SceneTensors(compact, divisor, label, depth.contiguous(), normal)


def verify(tree: Path, layout: Layout) -> None:
    """Raise ``UserError`` where files are missing or damaged, values are none of their kind, or the data are other ones."""
    if (absent := missing(tree, layout)) is not None:
        raise UserError(absent)
    found: list[tuple[Path, str, object, object]] = []
    for split in SPLITS:
        folders, scenes = layout.folders(tree / split), read(tree, split, layout)
        count = len(scenes.image)
        _check_ranges(folders, scenes)
        for folder in folders.values():
            if (more := len(list(folder.glob("*.npy")))) != count:
                raise UserError(f"{folder} must have {count} samples, as many as {folders['image']}; found {more}.")
        found.append((tree / split, "samples", count, layout.counts[split]))
        found.append((tree / split, "pixels", "{} x {}".format(*scenes.size), "{} x {}".format(*layout.size)))
    for place, what, here, expected in found:
        if here != expected:
            raise UserError(
                f"{place} is sound, but not {layout.title}'s: it has {here} {what}, expected {expected}. Data that are meant "
                "to stand in can be trained on as they are."
            )


def _array(path: Path) -> "np.ndarray[Any, Any]":
    """The array of a file."""
    try:
        loaded = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: every folder must have the samples that image has. Copy it again.") from None
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, OverflowError) as error:
        reason = (str(error).strip().splitlines() or ["without a word"])[0].rstrip(".")
        raise UserError(f"{path} is truncated or no npy file ({reason}). Copy it again.") from error
    if not isinstance(loaded, np.ndarray) or loaded.dtype.kind not in "biuf":
        raise UserError(f"{path} must hold an array of numbers, found {getattr(loaded, 'dtype', type(loaded).__name__)}.")
    if loaded.ndim < 2 or 0 in loaded.shape:
        raise UserError(f"{path} must hold a picture, found an array of shape {loaded.shape}.")
    return loaded.astype(loaded.dtype.newbyteorder("="), copy=False)


Check = Callable[[Path, "np.ndarray[Any, Any]"], None]


def _stacked(folder: Path, count: int, shape: Sequence[int], dtype: torch.dtype, check: Check | None = None) -> Tensor:
    """The samples of a folder, each of this shape and finite, as one tensor."""
    every = torch.empty(count, *shape, dtype=dtype)
    for number in range(count):
        path = folder / f"{number}.npy"
        array = _array(path)
        if array.shape != tuple(shape):
            raise UserError(f"{path} has shape {array.shape}, expected {tuple(shape)}: all samples of a split have one size.")
        if not np.isfinite(array).all():
            raise UserError(f"{path} has values that are not finite.")
        if check is not None:
            check(path, array)
        every[number] = torch.from_numpy(np.ascontiguousarray(array))
    return every


def _check_classes(classes: int) -> Check:
    def check(path: Path, array: "np.ndarray[Any, Any]") -> None:
        wrong = (array < IGNORED) | (array >= classes) | (array != np.rint(array))
        if wrong.any():
            raise UserError(
                f"{path} has {array[wrong][0]} as a class: expected whole numbers from 0 to {classes - 1}, or {IGNORED} where "
                "a pixel has none."
            )

    return check


def _compact(image: Tensor) -> tuple[Tensor, float]:
    """Images as bytes with what to divide them by, or as they are with 1."""
    for divisor in (255.0, 1.0):
        if all(_are_bytes(part, divisor) for part in torch.split(image, CHUNK)):
            packed = torch.empty(image.shape, dtype=torch.uint8)
            for into, part in zip(torch.split(packed, CHUNK), torch.split(image, CHUNK), strict=True):
                into.copy_((part * divisor).round())
            return packed, divisor
    return image, 1.0


def _are_bytes(image: Tensor, divisor: float) -> bool:
    """Whether whole numbers from 0 to 255 over a divisor are these floats exactly."""
    whole = (image * divisor).round()
    return bool(((whole >= 0) & (whole <= 255) & (whole / divisor == image)).all())


def _check_ranges(folders: Mapping[str, Path], scenes: SceneTensors) -> None:
    """Raise ``UserError`` that names the first file whose values are none of their kind."""
    lowest, highest = scenes.image.flatten(1).amin(1) / scenes.divisor, scenes.image.flatten(1).amax(1) / scenes.divisor
    _refuse(folders["image"], (lowest < 0) | (highest > 255), "colours from 0 to 1, or from 0 to 255")
    _refuse(folders["depth"], scenes.depth.flatten(1).amin(1) < 0, "depths that are positive, or 0 where unknown")
    if scenes.normal is not None:
        parts = [torch.linalg.vector_norm(part, dim=1).flatten(1) for part in torch.split(scenes.normal, CHUNK)]
        longest = torch.cat([part.amax(1) for part in parts])
        mean = torch.cat([part.sum(1) / (part > 0).sum(1).clamp(min=1) for part in parts])
        # Not exactly 1: resizing may have mixed the normals of neighbours.
        _refuse(folders["normal"], (longest > 1.1) | ((longest > 0) & (mean < 0.9)), "normals of length 1, or 0 where unknown")


def _refuse(folder: Path, wrong: Tensor, expected: str) -> None:
    if bool(wrong.any()):
        raise UserError(f"{folder / f'{int(wrong.nonzero()[0])}.npy'} has other values than it should: expected {expected}.")
