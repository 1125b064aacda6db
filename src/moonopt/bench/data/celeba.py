"""CelebA: 202,599 aligned faces of 178 x 218 pixels with 40 yes-or-no attributes each (Liu and others, 2015).

Read from its own layout: ``Img/img_align_celeba/*.jpg``, ``Anno/list_attr_celeba.txt`` (1 is yes, -1 no) and
``Eval/list_eval_partition.txt`` (0 to train on, 1 for validation, 2 for the test). Any faces in that layout can stand in.
"""

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moonopt.bench.data import celeba_cache, celeba_images
from moonopt.bench.paper import CELEBA_STL
from moonopt.errors import UserError

FOLDER = "celeba"
IMAGES = Path("Img/img_align_celeba")
ATTRIBUTE_LIST = Path("Anno/list_attr_celeba.txt")
PARTITION_LIST = Path("Eval/list_eval_partition.txt")

#: The attributes, in the order of CelebA's list.
ATTRIBUTES = tuple(CELEBA_STL)
#: The splits, in the order of their numbers in the partition list, with how many faces of CelebA each has.
SPLITS = {"train": 162_770, "valid": 19_867, "test": 19_962}
#: Width and height of CelebA's images, in pixels.
SIZE = (178, 218)
#: How many faults of one kind ``verify`` names before it only counts.
NAMED = 5

VALUES = {"1": 1, "-1": 0}


@dataclass(frozen=True)
class Faces:
    """Faces of one split: images (n, 3, height, width) and attributes (n, 40), both as bytes."""

    images: Tensor
    attributes: Tensor


@dataclass(frozen=True)
class Listed:
    """What the two lists say, in the order of the splits, and within them in that of the partition list."""

    names: list[str]
    attributes: Tensor
    counts: list[int]  # of the faces in each split


def read(folder: Path, size: int) -> dict[str, Faces]:
    """The faces of every split, resized to ``size`` x ``size``.

    Decoded images are kept in one file beside the lists, which is made anew when it is damaged or an image has changed since.
    """
    if (absent := missing(folder)) is not None:
        raise UserError(absent)
    place = _place(folder)
    listed = _listed(place)
    images = _images(place, listed.names, size)
    parts = zip(SPLITS, torch.split(images, listed.counts), torch.split(listed.attributes, listed.counts), strict=True)
    return {split: Faces(pictures, attributes) for split, pictures, attributes in parts}


def missing(folder: Path) -> str | None:
    """What of the layout is not there, in a sentence."""
    place = _place(folder)
    absent = [] if (place / IMAGES).is_dir() else [str(IMAGES)]
    absent += [str(path) for path in (ATTRIBUTE_LIST, PARTITION_LIST) if not (place / path).is_file()]
    if not absent:
        return None
    return (
        f"Not in {place}: {', '.join(absent)}. Get CelebA's aligned images and both lists from its authors "
        "(https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html) and lay them out so, or make up faces with "
        "`moonopt data make celeba`."
    )


def verify(folder: Path) -> None:
    """Raise ``UserError`` with all that is missing, damaged or other than CelebA's; this decodes every image."""
    if (absent := missing(folder)) is not None:
        raise UserError(absent)
    place = _place(folder)
    listed = _listed(place)
    faults = _unlike_celeba(listed)
    present = {entry.name for entry in os.scandir(place / IMAGES)}
    if absentees := [name for name in listed.names if name not in present]:
        faults.append(f"{place / IMAGES} lacks {_some(absentees)}")
    if strangers := sorted(present.difference(listed.names)):
        faults.append(f"{place / IMAGES} has {_some(strangers)}, which no list has")
    paths = [place / IMAGES / name for name in listed.names if name in present]
    faults += celeba_images.faults(paths, SIZE, NAMED)
    if faults:
        raise UserError(
            f"{place} is not CelebA as published: {'; '.join(faults)}. Unless these faces are meant to stand in, get it again "
            "from its authors."
        )


def write_lists(place: Path, names: list[str], attributes: Iterable[Iterable[bool]], splits: Iterable[int]) -> None:
    """Write both lists in CelebA's format."""
    rows = [f"{name} " + " ".join(" 1" if yes else "-1" for yes in row) for name, row in zip(names, attributes, strict=True)]
    partition = [f"{name} {split}" for name, split in zip(names, splits, strict=True)]
    header = [str(len(names)), " ".join(ATTRIBUTES) + " "]
    for path, lines in ((ATTRIBUTE_LIST, header + rows), (PARTITION_LIST, partition)):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text("\n".join(lines) + "\n")


def _place(folder: Path) -> Path:
    """Where the layout begins: in a folder ``celeba``, or right there."""
    return folder if (folder / "Img").is_dir() and not (folder / FOLDER).is_dir() else folder / FOLDER


def _listed(place: Path) -> Listed:
    attributes = _attributes(place / ATTRIBUTE_LIST)
    split_of = _partition(place / PARTITION_LIST)
    if absent := [name for name in attributes if name not in split_of]:
        raise UserError(f"{place / PARTITION_LIST} lacks {_some(absent)}, which {ATTRIBUTE_LIST.name} has.")
    if absent := [name for name in split_of if name not in attributes]:
        raise UserError(f"{place / ATTRIBUTE_LIST} lacks {_some(absent)}, which {PARTITION_LIST.name} has.")
    names = sorted(split_of, key=split_of.__getitem__)  # stable
    values = torch.frombuffer(bytearray().join(attributes[name] for name in names), dtype=torch.uint8)
    counts = [list(split_of.values()).count(split) for split in range(len(SPLITS))]
    return Listed(names, values.view(len(names), len(ATTRIBUTES)), counts)


def _attributes(path: Path) -> dict[str, bytes]:
    """The attributes of every face by the name of its file; a byte of 0 or 1 for each."""
    lines = _lines(path)
    (_, count), (_, header) = next(lines, (1, [])), next(lines, (2, []))
    if tuple(header) != ATTRIBUTES:
        raise UserError(f"Line 2 of {path} must name CelebA's 40 attributes in their order, found {' '.join(header[:3])!r} ...")
    rows: dict[str, bytes] = {}
    for number, (name, *words) in lines:
        if len(words) != len(ATTRIBUTES) or not VALUES.keys() >= set(words):
            raise _bad_line(path, number, f"a file name and {len(ATTRIBUTES)} of 1 and -1", [name, *words])
        rows[name] = bytes(map(VALUES.__getitem__, words))
    if not rows:
        raise UserError(f"{path} lists no faces.")
    if count != [str(len(rows))]:
        raise UserError(
            f"{path} is truncated or damaged: its first line says {' '.join(count)}, but it lists {len(rows)} faces."
        )
    return rows


def _partition(path: Path) -> dict[str, int]:
    """The number of the split of every face, by the name of its file."""
    splits: dict[str, int] = {}
    for number, words in _lines(path):
        if len(words) != 2 or words[1] not in ("0", "1", "2"):
            raise _bad_line(path, number, "a file name and 0, 1 or 2", words)
        if words[0] in splits:
            raise UserError(f"Line {number} of {path}: {words[0]} is there for the second time.")
        splits[words[0]] = int(words[1])
    return splits


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The words of every line that has any, with its number."""
    with path.open(encoding="ascii", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if words := line.split():
                yield number, words


def _bad_line(path: Path, number: int, expected: str, words: list[str]) -> UserError:
    found = " ".join(words[:4]) + (f" ... ({len(words)} words)" if len(words) > 4 else "")
    return UserError(f"Line {number} of {path}: expected {expected}, found {found!r}.")


def _images(place: Path, names: list[str], size: int) -> Tensor:
    """The images by name, from the cache if it is sound."""
    shape = (len(names), 3, size, size)
    cache = place / f"faces_{size}x{size}.bytes"
    source = _fingerprint(place / IMAGES, names, size)
    if (kept := celeba_cache.read(cache, shape, source)) is not None:
        return kept
    images = celeba_images.decoded([place / IMAGES / name for name in names], size)
    try:
        celeba_cache.write(cache, images, source)
    except OSError as error:
        warnings.warn(f"{cache} cannot be written ({error.strerror}): every run decodes all images again.", stacklevel=3)
    return images


def _fingerprint(images: Path, names: list[str], size: int) -> str:
    """A checksum of which images there are, in their order, with size and time of each file."""
    found = {entry.name: entry.stat() for entry in os.scandir(images)}
    digest = hashlib.sha256(f"{size}\n".encode())
    for name in names:
        if name not in found:
            raise UserError(f"{images / name} is missing, and {ATTRIBUTE_LIST} lists it.")
        digest.update(f"{name} {found[name].st_size} {found[name].st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _unlike_celeba(listed: Listed) -> list[str]:
    expected = list(SPLITS.values())
    faults = []
    if len(listed.names) != sum(expected):
        faults.append(f"found {len(listed.names):,} faces, expected {sum(expected):,}")
    if listed.counts != expected:
        faults.append(f"found splits {_numbers(listed.counts)}, expected {_numbers(expected)}")
    shares = listed.attributes.float().mean(0).tolist()
    if same := [name for name, share in zip(ATTRIBUTES, shares, strict=True) if share in (0, 1)]:
        faults.append(f"all faces have the same value of {', '.join(same)}")
    return faults


def _numbers(numbers: Iterable[int]) -> str:
    return " / ".join(f"{number:,}" for number in numbers)


def _some(names: list[str]) -> str:
    """The first of several names, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")
