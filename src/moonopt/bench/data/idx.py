"""Files in the idx format of MNIST: a tensor of bytes behind a short header, plain or compressed with gzip.

The header has two zero bytes, the type of the numbers (8: unsigned bytes), how many dimensions there are, and each of them as
four bytes, the highest first.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from moonopt.errors import UserError

UNSIGNED_BYTES = 8
GZIP = b"\x1f\x8b"


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The tensor of bytes in a file, which must have that many dimensions."""
    content = read_content(path)
    header = content[:4]
    if len(header) < 4 or header[:3] != bytes([0, 0, UNSIGNED_BYTES]):
        raise UserError(
            f"{path} is not an idx file of bytes: it begins with {header.hex(' ') or 'nothing'}, expected 00 00 08."
        )
    if header[3] != dimensions:
        raise UserError(f"{path} has the wrong number of dimensions: found {header[3]}, expected {dimensions}.")
    begin = 4 + 4 * dimensions
    if len(content) < begin:
        raise UserError(f"{path} is truncated: it ends within its header. Copy or fetch it again.")
    shape = struct.unpack(f">{dimensions}I", content[4:begin])
    if len(content) != begin + math.prod(shape):
        wrong = "truncated" if len(content) < begin + math.prod(shape) else "too long"
        size, found = " x ".join(map(str, shape)), len(content) - begin
        raise UserError(f"{path} is {wrong}: expected {size} bytes after its header, found {found}. Copy or fetch it again.")
    if 0 in shape:
        raise UserError(f"{path} holds nothing: its header says {' x '.join(map(str, shape))}.")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[begin:].view(shape)


def write_idx(path: Path, values: Tensor) -> None:
    """Write a tensor of bytes, compressed if the name ends in ``.gz``."""
    header = bytes([0, 0, UNSIGNED_BYTES, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    content = header + bytes(values.flatten().tolist())
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def read_content(path: Path) -> bytes:
    """What is in a file, uncompressed."""
    try:
        return unpacked(path.read_bytes())
    except UserError as error:
        raise UserError(f"{path} is {error}. Copy or fetch it again.") from error


def unpacked(content: bytes) -> bytes:
    """The content itself, or what gzip has made smaller."""
    if not content.startswith(GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"truncated or damaged ({error})") from error
