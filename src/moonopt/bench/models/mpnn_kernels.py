"""What of ``mpnn_rounds_several`` torch has no fast operation for, in Triton.

The largest product of all is written in the order in which the next one reads it. What edges hide is masked and summed up in
one pass over memory. A GRU's gates, of which there is one set for all gradients, are not repeated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

#: What a program has at a time: rows of the products, edges of the sums, numbers of the gates.
ROWS, EDGES, NUMBERS = 128, 32, 1024
#: The shortest side of a product.
SHORTEST = 16


def spread(hidden: Tensor, values: Tensor) -> Tensor:
    """sum_s hidden[b, s, a, c] values[b, s, m, :] as (B, N, M, C, width), of (B, S, N, C) and (B, S, M, width)."""
    (batch, sources, atoms, channels), (count, width) = hidden.shape, values.shape[2:]
    out = values.new_empty(batch, atoms, count, channels, width)
    _spread[triton.cdiv(atoms * channels, ROWS), batch](
        hidden, values, out, sources, atoms, count, width, *hidden.stride(), *values.stride(),
        CHANNELS=channels, ROWS=ROWS, SOURCES=_padded(sources), WIDTH=_padded(width),
    )  # fmt: skip
    return out


def masked_sums(gradients: Tensor, hidden: Tensor, given: Tensor) -> Tensor:
    """sum_bij (hidden[b, i, j, c] > 0) gradients[b, i, k, j, c] given[b, i, j, f] as (K, C, F), added up in float32.

    All are contiguous. What stands where nothing is hidden is not looked at.
    """
    (batch, atoms, count, _, channels), features = gradients.shape, given.shape[3]
    out = gradients.new_empty(batch, count, features, channels, dtype=torch.float32)
    _masked_sums[count, batch](
        gradients, hidden, given, out, atoms, count, features,
        CHANNELS=channels, PADDED=_padded(channels), EDGES=EDGES, FEATURES=_padded(features), num_warps=8,
    )  # fmt: skip
    return out.sum(0).mT


def gru_backward(gradients: Tensor, gates: Tensor, out: Tensor) -> Tensor:
    """As ``mpnn_parts.gru_backward``, of contiguous (n, K, width) and (n, 5 width): the gates' into (n, K, 4 width)."""
    (_, count, width), total = gradients.shape, gradients.numel()
    of_state = torch.empty_like(gradients)
    _gru_backward[(triton.cdiv(total, NUMBERS),)](gradients, gates, out, of_state, total, count, width, NUMBERS=NUMBERS)
    return of_state


def _padded(side: int) -> int:
    return max(SHORTEST, 1 << (side - 1).bit_length())


@triton.jit  # type: ignore[untyped-decorator]
def _spread(  # type: ignore[no-untyped-def]
    hidden, values, out, sources, atoms, count, width,
    hidden_b, hidden_s, hidden_a, hidden_c, values_b, values_s, values_m, values_w,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, SOURCES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    atom, channel = row // CHANNELS, row % CHANNELS
    source, column = tl.arange(0, SOURCES), tl.arange(0, WIDTH)
    there, wide = row < atoms * CHANNELS, column < width
    place = hidden + batch * hidden_b + source[:, None] * hidden_s + (atom * hidden_a + channel * hidden_c)[None, :]
    factor = tl.trans(tl.load(place, mask=(source[:, None] < sources) & there[None, :], other=0.0))
    value = values + batch * values_b + source[:, None] * values_s + column[None, :] * values_w
    known = (source[:, None] < sources) & wide[None, :]
    to = out + (batch * atoms + atom)[:, None] * count * CHANNELS * width + channel[:, None] * width + column[None, :]
    for _ in range(count):
        product = tl.dot(factor, tl.load(value, mask=known, other=0.0), input_precision="ieee")
        tl.store(to, product.to(out.dtype.element_ty), mask=there[:, None] & wide[None, :])
        value += values_m
        to += CHANNELS * width


@triton.jit  # type: ignore[untyped-decorator]
def _masked_sums(  # type: ignore[no-untyped-def]
    gradients, hidden, given, out, atoms, count, features,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, EDGES: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    number, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel, feature = tl.arange(0, PADDED), tl.arange(0, FEATURES)
    gradients += (batch * atoms * count + number) * atoms * CHANNELS
    hidden += batch * atoms * atoms * CHANNELS
    given += batch * atoms * atoms * features
    total = tl.zeros((FEATURES, PADDED), dtype=tl.float32)
    for start in range(0, atoms * atoms, EDGES):
        edge = start + tl.arange(0, EDGES)
        there = edge < atoms * atoms
        inside = there[:, None] & (channel < CHANNELS)[None, :]
        place = (edge // atoms * count * atoms + edge % atoms)[:, None] * CHANNELS + channel[None, :]
        found = tl.load(gradients + place, mask=inside, other=0.0)
        shown = tl.load(hidden + edge[:, None] * CHANNELS + channel[None, :], mask=inside, other=0.0)
        known = there[None, :] & (feature < features)[:, None]
        of_edge = tl.load(given + edge[None, :] * features + feature[:, None], mask=known, other=0.0)
        # Not a number is above no number, and is kept.
        total = tl.dot(of_edge, tl.where(shown <= 0, 0.0, found).to(of_edge.dtype), total, input_precision="ieee")
    to = out + ((batch * count + number) * features + feature[:, None]) * CHANNELS + channel[None, :]
    tl.store(to, total, mask=(feature < features)[:, None] & (channel < CHANNELS)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _gru_backward(gradients, gates, of_gates, of_state, total, count, width, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    inside = number < total
    row, column = number // width, number % width
    gate = gates + (row // count) * 5 * width + column
    r = tl.load(gate, mask=inside)
    z = tl.load(gate + width, mask=inside)
    n = tl.load(gate + 2 * width, mask=inside)
    state = tl.load(gate + 3 * width, mask=inside)
    slope = tl.load(gate + 4 * width, mask=inside) * r * (1 - r)
    gradient = tl.load(gradients + number, mask=inside)
    of_n = gradient * (1 - z) * (1 - n * n)
    to = of_gates + row * 4 * width + column
    tl.store(to, of_n * slope, mask=inside)
    tl.store(to + width, gradient * (state - n) * z * (1 - z), mask=inside)
    tl.store(to + 2 * width, of_n, mask=inside)
    tl.store(to + 3 * width, of_n * r, mask=inside)
    tl.store(of_state + number, gradient * z, mask=inside)
