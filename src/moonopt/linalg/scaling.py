"""The scale of a matrix, which its polar factor does not depend on: a power of two takes it away before all else."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moonopt.linalg.kernels import can_stream

#: On a CPU, matrices of so many entries are brought into their stack one by one, for one pass over fresh memory less.
ONE_BY_ONE = 2**16


def without_scale(stack: Tensor, dtype: torch.dtype) -> Tensor:
    """Every matrix divided by a power of two, so that neither it nor its Gram matrix leaves the range of ``dtype``.

    The division is exact: matrices that differ by a power of two become equal. The largest entry ends near 1 / sqrt(q); in
    float16, whose range has two short ends, near q^(-1/4), so that the Gram matrix lies between 1 / sqrt(q) and sqrt(q).
    """
    if stack.numel() == 0:
        return stack.to(dtype)
    stack = stack.to(torch.promote_types(stack.dtype, torch.float32))
    # On CPUs this is 20 times faster than the norm that it is, and needs no memory, as abs() would.
    largest = torch.maximum(stack.amax(dim=(-2, -1), keepdim=True), -stack.amin(dim=(-2, -1), keepdim=True))
    return stack.div_(_power_of_two(largest, max(stack.shape[-2:]), dtype)).to(dtype)


def _power_of_two(largest: Tensor, side: int, dtype: torch.dtype) -> Tensor:
    """By what a matrix with that largest entry and that long side is divided."""
    bits, mantissa, highest = (torch.int64, 52, 0x7FE) if largest.dtype == torch.float64 else (torch.int32, 23, 0xFE)
    # The bits of the exponent alone are those of a power of two. Zero is divided by a tiny one, and stays zero.
    exponent = (largest.view(bits) >> mantissa) + headroom(side, dtype)
    return (exponent.clamp(1, highest) << mantissa).view(largest.dtype)


def headroom(side: int, dtype: torch.dtype) -> int:
    """How many powers of two below 1 the largest entry of a matrix with that long side ends."""
    return math.ceil(math.log2(side) / (4 if dtype == torch.float16 else 2))


def scaled_stack(matrices: Sequence[Tensor], dtype: torch.dtype, largest: Tensor | None = None) -> Tensor:
    """The matrices without their scale, in one stack of that dtype, in as few passes as can be.

    ``largest`` has their largest absolute entries, if they are known.
    """
    first = matrices[0]
    if first.device.type == "cpu" and first.dtype == torch.float32 and dtype != torch.float16 and first.numel() >= ONE_BY_ONE:
        return _scaled_one_by_one(matrices, dtype)
    if first.dtype != torch.float32 or not can_stream(*matrices):
        return without_scale(torch.stack(list(matrices)), dtype)
    from moonopt.linalg.kernels.streaming import divide  # needs triton

    if largest is None or len(largest) != len(matrices):
        largest = torch.stack(torch._foreach_norm(list(matrices), math.inf))
    stack = first.new_empty(len(matrices), *first.shape, dtype=dtype)
    divide(matrices, _power_of_two(largest, max(first.shape), dtype), stack)
    return stack


def _scaled_one_by_one(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The same for large float32 matrices on a CPU, where ``dtype`` has their range but for its last percent."""
    largest = torch.stack([torch.maximum(high, -low) for low, high in map(torch.aminmax, matrices)])
    divisors = _power_of_two(largest, max(matrices[0].shape), dtype)
    stack = matrices[0].new_empty(len(matrices), *matrices[0].shape, dtype=dtype)
    for matrix, divisor, place in zip(matrices, divisors, stack, strict=True):
        place.copy_(matrix).div_(divisor)
    return stack
