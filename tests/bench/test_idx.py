"""Reading files in the idx format."""

import gzip
import struct

import pytest
import torch
from hypothesis import given, settings, strategies as st

from moonopt.bench.data.idx import read_idx, write_idx
from moonopt.errors import UserError

IMAGES = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
CONTENT = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 3, 4) + bytes(range(24))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_file_is_read_whether_compressed_or_not(pack, tmp_path):
    (tmp_path / "file").write_bytes(pack(CONTENT))
    assert torch.equal(read_idx(tmp_path / "file", 3), IMAGES)


def test_what_is_written_is_the_format_of_mnist(tmp_path):
    write_idx(tmp_path / "plain", IMAGES)
    write_idx(tmp_path / "packed.gz", IMAGES)
    assert (tmp_path / "plain").read_bytes() == CONTENT
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == CONTENT


@settings(max_examples=30, deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_what_is_written_is_read_again(shape, seed, tmp_path_factory):
    values = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    path = tmp_path_factory.mktemp("idx") / "file"
    write_idx(path, values)
    assert torch.equal(read_idx(path, len(shape)), values)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "file is not an idx file of bytes: it begins with nothing, expected 00 00 08."),
        (b"\x89PNG....", "begins with 89 50 4e 47, expected 00 00 08."),
        (bytes([0, 0, 13, 3]) + CONTENT[4:], "begins with 00 00 0d 03"),  # floats
        (bytes([0, 0, 8, 1]) + CONTENT[4:], "has the wrong number of dimensions: found 1, expected 3."),
        (CONTENT[:10], "is truncated: it ends within its header."),
        (CONTENT[:-1], "is truncated: expected 2 x 3 x 4 bytes after its header, found 23. Copy or fetch it again."),
        (CONTENT + b"!", "is too long: expected 2 x 3 x 4 bytes after its header, found 25."),
        (CONTENT[:4] + struct.pack(">3I", 0, 3, 4), "holds nothing: its header says 0 x 3 x 4."),
        (gzip.compress(CONTENT)[:-12], "file is truncated or damaged (.*). Copy or fetch it again."),
        (gzip.compress(CONTENT)[:-8] + b"12345678", "is truncated or damaged (CRC check failed"),
    ],
    ids=["empty", "png", "floats", "dimensions", "header", "short", "long", "nothing", "short gzip", "damaged gzip"],
)
def test_a_bad_file_is_named_with_what_is_wrong(content, text, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=text.replace("(", r"\(").replace(")", r"\)")):
        read_idx(tmp_path / "file", 3)
