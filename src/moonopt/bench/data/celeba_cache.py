"""Decoded images in one file: their bytes, then a line with what they were made of and the checksum of all bytes.

The file is mapped into memory, which several processes that read it then share.
"""

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor

from moonopt.bench.data.download import whole

#: The line begins with it; another layout of the file gets another number.
HEADER = b"moonopt faces 1 "
CHUNK = 1 << 24  # bytes that are written or summed up at a time


def write(path: Path, images: Tensor, source: str) -> None:
    """Write a file, whole or not at all; ``OSError`` where there is no room or no permission."""
    content = images.flatten().numpy().data
    with whole(path) as temporary, temporary.open("wb") as file:
        for start in range(0, len(content), CHUNK):
            file.write(content[start : start + CHUNK])
        file.write(_line(source, _checksum(content)))


def read(path: Path, shape: tuple[int, ...], source: str) -> Tensor | None:
    """The images in a file, or None unless it is there, was made of this source, and has every byte as it was written."""
    size = math.prod(shape)
    ending = len(_line(source, hashlib.sha256().hexdigest()))
    if not path.is_file() or path.stat().st_size != size + ending:
        return None
    with path.open("rb") as file:
        file.seek(size)
        line = file.read()
    if not line.startswith(_line(source, "").rstrip(b"\n")):
        return None
    images = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return images.view(shape) if line == _line(source, _checksum(images.numpy().data)) else None


def _line(source: str, checksum: str) -> bytes:
    return HEADER + f"{source} {checksum}\n".encode()


def _checksum(content: memoryview) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(content), CHUNK):
        digest.update(content[start : start + CHUNK])
    return digest.hexdigest()
