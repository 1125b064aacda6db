"""Molecules in one compact file: a line that says what it is, with the checksum of all that follows, and packed tensors.

The tensors are what ``torch.save`` writes of a dict, made smaller with zlib, and the checksum of what they were made of.
"""

import hashlib
import io
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from moonopt.bench.data.download import write_whole
from moonopt.bench.data.qm9_molecules import Molecules
from moonopt.errors import UserError

#: The first line begins with it; another layout of the file gets another number.
HEADER = b"moonopt qm9 1 "


def write(path: Path, molecules: Molecules, source: str) -> None:
    """Write a file, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(vars(molecules) | {"source": source}, buffer)
    body = zlib.compress(buffer.getvalue())
    write_whole(path, HEADER + _checksum(body) + b"\n" + body)


def read(path: Path) -> tuple[Molecules, str]:
    """The molecules in a file, and what they were made of; ``UserError`` unless every byte is as it was written."""
    line, _, body = path.read_bytes().partition(b"\n")
    if not line.startswith(HEADER):
        raise UserError(f"{path} is not a file of molecules that this version of moonopt has written.")
    if line.removeprefix(HEADER) != _checksum(body):
        raise UserError(f"{path} is truncated or damaged: its content has another checksum than its first line says.")
    values = torch.load(io.BytesIO(zlib.decompress(body)), weights_only=True)
    return Molecules(**{name: value for name, value in values.items() if name != "source"}), values["source"]


def source_of(checksums: Mapping[str, str]) -> str:
    """One checksum for several."""
    return hashlib.sha256(" ".join(checksums.values()).encode()).hexdigest()


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
