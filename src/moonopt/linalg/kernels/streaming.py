"""Updates of many tensors of one shape that go over memory once, in Triton, one launch for all of them.

Torch would take several passes, a slow one where dtypes differ, or a launch for every tensor. The kernels find their tensors
by a table of addresses on the device.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8
#: Addresses are written to their table so many at a time, as arguments of a kernel: nothing has to be sent to the device.
ADDRESSES = 64
#: Tables of lasting addresses, and how many are kept.
_TABLES: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
MOST_TABLES = 4096
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def advance(momenta: Sequence[Tensor], gradients: Sequence[Tensor], rate: float, finite: Tensor) -> Tensor:
    """M <- rate * M + (1 - rate) * G where ``finite``, a flag on the device, is true; returns max |M| of each."""
    largest = momenta[0].new_zeros(len(momenta))
    _advance[_grid(momenta)](
        _lasting_table(momenta), _table(gradients), finite, largest,
        momenta[0].numel(), rate, GRADIENT=TYPES[gradients[0].dtype], BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return largest


def divide(matrices: Sequence[Tensor], divisors: Tensor, stack: Tensor) -> None:
    """M / divisor in the dtype of the stack; matrices of float32."""
    _divide[_grid(matrices)](_table(matrices), divisors, stack, matrices[0].numel(), BLOCK=BLOCK, num_warps=WARPS)


def move(parameters: Sequence[Tensor], directions: Sequence[Tensor], rate: Tensor) -> None:
    """Theta <- Theta - rate * D, in float32."""
    first, along = parameters[0], directions[0]
    _move[_grid(parameters)](
        _lasting_table(parameters), _table(directions), rate, first.numel(),
        PARAMETER=TYPES[first.dtype], DIRECTION=TYPES[along.dtype], BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def rescale(stack: Tensor, factors: Tensor) -> None:
    """Multiply every matrix of a stack, which lies in one piece in any order, by its factor."""
    size = stack[0].numel()
    _rescale[triton.cdiv(size, BLOCK), len(stack)](stack, factors, size, BLOCK=BLOCK, num_warps=WARPS)


def _grid(tensors: Sequence[Tensor]) -> tuple[int, int]:
    return triton.cdiv(tensors[0].numel(), BLOCK), len(tensors)


def _table(tensors: Sequence[Tensor]) -> Tensor:
    """The addresses of tensors that may lie elsewhere in the next step."""
    addresses = tuple(each.data_ptr() for each in tensors)
    table = torch.empty(len(addresses), dtype=torch.int64, device=tensors[0].device)
    for start in range(0, len(addresses), ADDRESSES):
        some = addresses[start : start + ADDRESSES]
        _write[(1,)](table, start, some + (some[-1],) * (ADDRESSES - len(some)), len(some), COUNT=ADDRESSES, num_warps=1)
    return table


def _lasting_table(tensors: Sequence[Tensor]) -> Tensor:
    """Of tensors that stay where they are. It is never freed: a captured step may go on using it.

    What is written in a capture is written at every replay, and belongs to its graph.
    """
    first = tensors[0]
    key = first.device, tuple(each.data_ptr() for each in tensors)
    table = _TABLES.get(key)
    if table is None:
        table = _table(tensors)
        capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
        if len(_TABLES) < MOST_TABLES and not capturing:
            _TABLES[key] = table
    return table


@triton.jit  # type: ignore[untyped-decorator]
def _write(table, start, addresses, count, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    for index in tl.static_range(COUNT):
        if index < count:
            tl.store(table + start + index, addresses[index])


@triton.jit  # type: ignore[untyped-decorator]
def _find(table, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tensor of this program."""
    address = tl.multiple_of(tl.load(table + tl.program_id(1)), 16)
    return address.to(tl.pointer_type(TYPE))


@triton.jit  # type: ignore[untyped-decorator]
def _advance(  # type: ignore[no-untyped-def]
    momenta, gradients, finite, largest, count, rate, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    momentum, gradient = _find(momenta, tl.float32), _find(gradients, GRADIENT)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    before = tl.load(momentum + here, mask=inside, other=0.0)
    now = tl.load(gradient + here, mask=inside, other=0.0).to(tl.float32)
    after = tl.where(tl.load(finite) != 0, now + rate * (before - now), before)
    tl.store(momentum + here, after, mask=inside)
    tl.atomic_max(largest + tl.program_id(1), tl.max(tl.abs(after)), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _divide(matrices, divisors, stack, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    matrix = _find(matrices, tl.float32)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    result = tl.div_rn(tl.load(matrix + here, mask=inside), tl.load(divisors + tl.program_id(1)))  # exact: a power of two
    place = stack + tl.program_id(1).to(tl.int64) * count + here
    tl.store(place, result.to(stack.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    parameters, directions, rate, count, PARAMETER: tl.constexpr, DIRECTION: tl.constexpr, BLOCK: tl.constexpr
):
    parameter, direction = _find(parameters, PARAMETER), _find(directions, DIRECTION)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    before = tl.load(parameter + here, mask=inside).to(tl.float32)
    step = tl.load(rate).to(tl.float32) * tl.load(direction + here, mask=inside).to(tl.float32)
    tl.store(parameter + here, (before - step).to(PARAMETER), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rescale(stack, factors, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    matrix = tl.program_id(1).to(tl.int64)
    within = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = within < size
    here = stack + matrix * size + within
    result = tl.load(here, mask=inside).to(tl.float32) * tl.load(factors + matrix)
    tl.store(here, result.to(stack.dtype.element_ty), mask=inside)
