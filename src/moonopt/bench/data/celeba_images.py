"""Many small images with Pillow, in threads: it lets go of the interpreter while it decodes and resizes."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from moonopt.bench.data.progress import tracked
from moonopt.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

CHUNK = 64  # images that a thread has at a time

Answer = TypeVar("Answer")


def decoded(paths: Sequence[Path], size: int) -> Tensor:
    """Images in colour as bytes (n, 3, size, size), resized as torchvision does by default: bilinear, antialiased, squeezed."""
    images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)

    def decode(numbers: range) -> None:
        from PIL import Image

        for number in numbers:
            picture = _opened(paths[number]).resize((size, size), Image.Resampling.BILINEAR)
            pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
            images[number] = pixels.view(size, size, 3).permute(2, 0, 1)

    for _ in in_threads(decode, len(paths), "Decoding images"):
        pass
    return images


def faults(paths: Sequence[Path], size: tuple[int, int], most: int) -> list[str]:
    """What is wrong with images that must be readable and of one size (width, height); after so many only a count."""

    def look(numbers: range) -> list[str]:
        found = []
        for number in numbers:
            try:
                if (other := _opened(paths[number]).size) != size:
                    found.append(f"{paths[number]} has {other[0]} x {other[1]} pixels, expected {size[0]} x {size[1]}")
            except UserError as error:
                found.append(str(error).rstrip("."))
        return found

    found = [fault for some in in_threads(look, len(paths), "Looking at images") for fault in some]
    return found[:most] + ([f"{len(found) - most:,} more images are wrong"] if len(found) > most else [])


def require_pillow() -> None:
    """Raise ``UserError`` where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UserError("Faces need the package Pillow, which is not installed: pip install pillow.") from error


def in_threads(work: Callable[[range], Answer], count: int, what: str) -> Iterator[Answer]:
    """What work returns for chunks of so many numbers, in their order, with a bar in a terminal where rich is there."""
    require_pillow()
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    with ThreadPoolExecutor() as threads:
        yield from tracked(threads.map(work, chunks), what, len(chunks))


def _opened(path: Path) -> "Image":
    """A decoded image, in colour."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing.") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} is no image or a damaged one ({str(error).rstrip('.')}).") from error
