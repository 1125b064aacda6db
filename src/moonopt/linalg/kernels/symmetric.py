"""A B' where it is known to be symmetric, in Triton: only tiles on and below the diagonal are computed, then mirrored."""

import triton
import triton.language as tl
from torch import Tensor

from moonopt.linalg.kernels.products import DEPTH, TILE

#: With these, two programs share a multiprocessor, and one computes while the other stores (measured on an H200).
WARPS, STAGES = 4, 3


def symmetric_product(
    a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0, addend: Tensor | None = None
) -> None:
    """alpha A B' + beta C over stacks (n, p, q), (n, p, q), (n, p, p); the last one and ``out`` are contiguous."""
    n, p, q = a.shape
    rows = p // TILE
    _lower_tiles[rows * (rows + 1) // 2, n](
        a, b, out if addend is None else addend, out, *a.stride(), *b.stride(), p, q, alpha, beta,
        TILE=TILE, DEPTH=DEPTH, ADD=addend is not None, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _lower_tiles(  # type: ignore[no-untyped-def]
    a, b, addend, out, a_matrix, a_row, a_column, b_matrix, b_row, b_column, p, q, alpha, beta,
    TILE: tl.constexpr, DEPTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64)
    # Tiles are counted row by row: row i begins at i (i + 1) / 2. The root is rounded, so that it may be off by one.
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    j = tile - i * (i + 1) // 2
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    a_part = a + matrix * a_matrix + rows[:, None] * a_row + depth[None, :] * a_column
    b_part = b + matrix * b_matrix + columns[:, None] * b_row + depth[None, :] * b_column
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for _ in range(0, q, DEPTH):
        total = tl.dot(tl.load(a_part), tl.load(b_part).T, total)
        a_part += DEPTH * a_column
        b_part += DEPTH * b_column
    total *= alpha
    here = (matrix * p + rows)[:, None] * p + columns[None, :]
    if ADD:
        total += beta * tl.load(addend + here).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + here, result)
    if i != j:
        tl.store(out + (matrix * p + columns)[:, None] * p + rows[None, :], result.T)
