"""Updates that go over memory once, in Triton: torch would take several passes, or a slow one where dtypes differ."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


def advance(momentum: Tensor, gradient: Tensor, rate: float, finite: Tensor) -> None:
    """M <- rate * M + (1 - rate) * G where ``finite``, a flag on the device, is true."""
    _advance[_grid(momentum)](momentum, gradient, finite, momentum.numel(), rate, BLOCK=BLOCK, num_warps=WARPS)


def divide(matrix: Tensor, divisor: Tensor, out: Tensor) -> None:
    """M / divisor, a number on the device, in the dtype of ``out``."""
    _divide[_grid(matrix)](matrix, divisor, out, matrix.numel(), BLOCK=BLOCK, num_warps=WARPS)


def move(parameter: Tensor, direction: Tensor, rate: Tensor) -> None:
    """Theta <- Theta - rate * D, in float32."""
    _move[_grid(parameter)](parameter, direction, rate, parameter.numel(), BLOCK=BLOCK, num_warps=WARPS)


def _grid(tensor: Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)


@triton.jit  # type: ignore[untyped-decorator]
def _advance(momentum, gradient, finite, count, rate, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    before = tl.load(momentum + here, mask=inside)
    now = tl.load(gradient + here, mask=inside).to(tl.float32)
    after = now + rate * (before - now)
    tl.store(momentum + here, tl.where(tl.load(finite) != 0, after, before), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(matrix, divisor, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    result = tl.div_rn(tl.load(matrix + here, mask=inside), tl.load(divisor))  # exact for a power of two
    tl.store(out + here, result.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _move(parameter, direction, rate, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    before = tl.load(parameter + here, mask=inside).to(tl.float32)
    step = tl.load(rate).to(tl.float32) * tl.load(direction + here, mask=inside).to(tl.float32)
    tl.store(parameter + here, (before - step).to(parameter.dtype.element_ty), mask=inside)
