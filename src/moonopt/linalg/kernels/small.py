"""The whole Newton-Schulz iteration of small matrices in one launch, in Triton: each stays in the registers of one program.

Torch takes some forty launches for them, each of which lasts longer than its work. Products are in TensorFloat-32: in full
float32 they would take Triton a quarter of a minute to compile.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonopt.linalg.scaling import headroom
from moonopt.linalg.schedules import Schedule

#: The shortest side of a product.
SHORTEST = 16
WARPS = 8


def iterate(x: Tensor, schedule: Schedule) -> Tensor:
    """The polar factors of a stack (n, p, q) of float32 with p <= q, of any strides and scale, by the steps of the schedule."""
    (n, p, q), out = x.shape, torch.empty_like(x)
    numbers = tuple(number for triple in schedule.coefficients for number in triple)
    finfo = torch.finfo(x.dtype)
    _iterate[(n,)](
        x, out, p, q, *x.stride(), *out.stride(), numbers, 1 / schedule.safety, finfo.tiny, math.sqrt(finfo.max),
        STEPS=len(schedule.coefficients), BY_TRACE=schedule.norm == "frobenius", ROWS=_padded(p), COLUMNS=_padded(q),
        HEADROOM=headroom(q, x.dtype), num_warps=WARPS,
    )  # fmt: skip
    return out


def _padded(side: int) -> int:
    return max(SHORTEST, 1 << (side - 1).bit_length())


@triton.jit  # type: ignore[untyped-decorator]
def _iterate(  # type: ignore[no-untyped-def]
    x, out, p, q, x_n, x_p, x_q, out_n, out_p, out_q, numbers, inverse_safety, tiny, largest,
    STEPS: tl.constexpr, BY_TRACE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEADROOM: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row[:, None] < p) & (column < q)
    value = tl.load(x + matrix * x_n + row[:, None] * x_p + column * x_q, mask=inside, other=0.0)
    # Divided by a power of two, as in scaling.py: its bits are those of an exponent alone.
    exponent = (tl.max(tl.abs(value)).to(tl.int32, bitcast=True) >> 23) + HEADROOM
    value = tl.div_rn(value, (tl.minimum(tl.maximum(exponent, 1), 254) << 23).to(tl.float32, bitcast=True))
    gram = tl.dot(value, tl.trans(value), input_precision="tf32")
    squared = tl.sum(tl.where(row[:, None] == row[None, :], gram, 0.0)) if BY_TRACE else tl.sqrt(tl.sum(gram * gram))
    # Finite, and so is its square: zero times this is zero.
    inverse = tl.minimum(inverse_safety / tl.sqrt(tl.maximum(squared, tiny)), largest)
    value = value * inverse
    gram = gram * (inverse * inverse)
    for step in tl.static_range(STEPS):
        if step > 0:
            gram = tl.dot(value, tl.trans(value), input_precision="tf32")
        polynomial = numbers[3 * step + 1] * gram + numbers[3 * step + 2] * tl.dot(gram, gram, input_precision="tf32")
        value = numbers[3 * step] * value + tl.dot(polynomial, value, input_precision="tf32")
    tl.store(out + matrix * out_n + row[:, None] * out_p + column * out_q, value, mask=inside)
