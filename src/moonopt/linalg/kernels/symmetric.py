"""A B' where it is known to be symmetric, in Triton: only tiles that reach the diagonal are computed, then mirrored."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moonopt.linalg.kernels.products import DEPTH, TILE

#: Rows of a tile, which has twice as many columns (measured on an H200, and so are the warps and stages).
ROWS = TILE // 2
WARPS = 8


def symmetric_product(
    a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0, addend: Tensor | None = None
) -> None:
    """alpha A B' + beta C over stacks (n, p, q), (n, p, q), (n, p, p); the last one and ``out`` are contiguous."""
    n, p, q = a.shape
    pairs = p // TILE  # of rows of tiles: the first two have one tile each, the next two have two
    halves = _blocks(out, ROWS, ROWS)
    _lower_tiles[pairs * (pairs + 1), n](
        _operand(a, ROWS), _operand(b, TILE), halves if addend is None else _blocks(addend, ROWS, ROWS), halves,
        p, q, alpha, beta, ROWS=ROWS, DEPTH=DEPTH, ADD=addend is not None, TALL_A=_is_tall(a), TALL_B=_is_tall(b),
        num_warps=WARPS, num_stages=4 if p >= 4096 else 3,
    )  # fmt: skip


def _is_tall(x: Tensor) -> bool:
    """Whether it is the columns that lie in one piece."""
    return x.stride(-1) != 1


def _operand(x: Tensor, rows: int) -> TensorDescriptor:
    return _blocks(x.mT, DEPTH, rows) if _is_tall(x) else _blocks(x, rows, DEPTH)


def _blocks(stack: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A contiguous stack as one tall matrix that is read in blocks."""
    n, height, width = stack.shape
    return TensorDescriptor(stack, [n * height, width], [width, 1], [rows, columns])


@triton.jit  # type: ignore[untyped-decorator]
def _lower_tiles(  # type: ignore[no-untyped-def]
    a, b, addend, out, p, q, alpha, beta,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, ADD: tl.constexpr, TALL_A: tl.constexpr, TALL_B: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    matrix = tl.program_id(1)
    # Before the k-th pair of rows there are k (k + 1) tiles. The root is rounded, so that it may be off by one.
    pair = ((tl.sqrt(4.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    pair = tl.where((pair + 1) * (pair + 2) <= tile, pair + 1, pair)
    pair = tl.where(pair * (pair + 1) > tile, pair - 1, pair)
    rest = tile - pair * (pair + 1)
    second = rest // (pair + 1)
    row = (2 * pair + second) * ROWS
    column = (rest - second * (pair + 1)) * 2 * ROWS
    total = tl.zeros((ROWS, 2 * ROWS), dtype=tl.float32)
    for k in range(0, q, DEPTH):
        left = a.load([matrix * q + k, row]).T if TALL_A else a.load([matrix * p + row, k])
        right = b.load([matrix * q + k, column]) if TALL_B else b.load([matrix * p + column, k]).T
        total = tl.dot(left, right, total)
    left_half, right_half = tl.split(tl.permute(tl.reshape(total * alpha, (ROWS, 2, ROWS)), (0, 2, 1)))
    if ADD:
        left_half += beta * addend.load([matrix * p + row, column]).to(tl.float32)
        right_half += beta * addend.load([matrix * p + row, column + ROWS]).to(tl.float32)
    left_result = left_half.to(out.dtype)
    right_result = right_half.to(out.dtype)
    out.store([matrix * p + row, column], left_result)
    out.store([matrix * p + row, column + ROWS], right_result)
    if column < pair * 2 * ROWS:  # the two tiles of a pair that reach the diagonal mirror each other
        out.store([matrix * p + column, row], left_result.T)
        out.store([matrix * p + column + ROWS, row], right_result.T)
