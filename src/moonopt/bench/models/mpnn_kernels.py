"""What ``mpnn_parts`` has no fast operation of torch's for, in Triton.

Large tensors are written once, in the order in which they are read next.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

#: What a program has at a time: rows and columns of products, rows of all channels, edges of sums, numbers of gates.
ROWS, COLUMNS, DEPTH, WHOLE_ROWS, EDGES, NUMBERS = 128, 128, 32, 64, 32, 1024
#: How many programs keep a GPU busy.
BUSY = 512
#: The shortest side of a product.
SHORTEST = 16


def positive_products(rows: Tensor, weights: Tensor) -> Tensor:
    """relu(rows weights') of contiguous (E, F) and (C, F)."""
    (total, features), channels = rows.shape, len(weights)
    out = rows.new_empty(total, channels)
    _positive_products[(triton.cdiv(total, WHOLE_ROWS),)](
        rows, weights, out, total, features,
        CHANNELS=channels, PADDED=_padded(channels), FEATURES=_padded(features), ROWS=WHOLE_ROWS, num_warps=8,
    )  # fmt: skip
    return out


def masked_sums(gradients: Tensor, hidden: Tensor, given: Tensor) -> Tensor:
    """sum_bij (hidden[b, i, j, c] > 0) gradients[b, i, k, j, c] given[b, i, j, f] as (K, C, F), added up in float32.

    All are contiguous. What stands where nothing is hidden is not looked at.
    """
    (batch, atoms, count, _, channels), features = gradients.shape, given.shape[3]
    parts = triton.cdiv(BUSY, batch * count)
    out = gradients.new_empty(parts, batch, count, features, channels, dtype=torch.float32)
    _masked_sums[count, batch, parts](
        gradients, hidden, given, out, atoms, count, features,
        CHANNELS=channels, PADDED=_padded(channels), EDGES=EDGES, FEATURES=_padded(features), num_warps=8,
    )  # fmt: skip
    return out.sum((0, 1)).mT


def spread(hidden: Tensor, values: Tensor) -> Tensor:
    """sum_s hidden[b, s, a, c] values[b, s, m, :] as (B, N, M, C, width), of (B, S, N, C) and (B, S, M, width)."""
    (batch, sources, atoms, channels), (count, width) = hidden.shape, values.shape[2:]
    out = values.new_empty(batch, atoms, count, channels, width)
    _spread[triton.cdiv(atoms * channels, ROWS), batch](
        hidden, values, out, sources, atoms, count, width, *hidden.stride(), *values.stride(),
        CHANNELS=channels, ROWS=ROWS, SOURCES=_padded(sources), WIDTH=_padded(width),
    )  # fmt: skip
    return out


def edge_matrices(hidden: Tensor, given: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The places (B, N, N) and the matrices sum_c hidden[b, i, j, c] A_c of edges of which anything is given.

    Of contiguous (B, N, N, C), (B, N, N, F) and (width, C width), the A_c side by side. What is hidden must be a function of
    what is given, and nothing where that is nothing, as relu(weights given) is: such an edge has the place -1, and an edge of
    which the same is given as of the one from j to i its place, as in molecules all have. There is room for all edges.
    """
    channels, width = hidden.shape[3], len(matrices)
    back = (given == given.transpose(1, 2)).all(3).tril(-1)
    there = (given != 0).any(3)
    listed = there & ~back
    last, total = listed.flatten().cumsum(0), listed.numel()
    own = torch.where(listed, last.view(listed.shape) - 1, -1)
    places = torch.where(there & back, own.mT, own)
    edges, out = places.new_empty(total), matrices.new_empty(total, width, width)
    _list_edges[(triton.cdiv(total, NUMBERS),)](own, edges, total, NUMBERS=NUMBERS)
    _edge_matrices[triton.cdiv(width * width, COLUMNS), triton.cdiv(total, ROWS)](
        hidden, matrices, edges, last, out, total,
        CHANNELS=channels, WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, num_warps=8,
    )  # fmt: skip
    return places, out


def through_edges(places: Tensor, matrices: Tensor, values: Tensor) -> Tensor:
    """sum_i matrix_ij values[b, i, m, :] as (B N, M, width) in float32, of values (B, N, M, width)."""
    batch, atoms, count, width = values.shape
    out = values.new_empty(batch * atoms, count, width, dtype=torch.float32)
    _through_edges[atoms, batch](
        places, matrices, values, out, atoms, count, *values.stride(),
        WIDTH=width, SIDE=_padded(width), COUNT=_padded(count),
    )  # fmt: skip
    return out


def gru_backward_of_several(gradients: Tensor, gates: Tensor, out: Tensor) -> Tensor:
    """As in ``mpnn_parts``, all contiguous."""
    (_, count, width), total = gradients.shape, gradients.numel()
    of_state = gradients.new_empty(gradients.shape)
    _gru_backward[(triton.cdiv(total, NUMBERS),)](
        gradients, gates, out, of_state, total,
        COUNT=count, WIDTH=width, NUMBERS=NUMBERS,
    )  # fmt: skip
    return of_state


def _padded(side: int) -> int:
    return max(SHORTEST, 1 << (side - 1).bit_length())


@triton.jit  # type: ignore[untyped-decorator]
def _positive_products(  # type: ignore[no-untyped-def]
    rows, weights, out, total, features,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel, feature = tl.arange(0, PADDED), tl.arange(0, FEATURES)
    there, known = row < total, feature < features
    given = tl.load(rows + row[:, None] * features + feature[None, :], mask=there[:, None] & known[None, :], other=0.0)
    inside = known[:, None] & (channel < CHANNELS)[None, :]
    weight = tl.load(weights + channel[None, :] * features + feature[:, None], mask=inside, other=0.0)
    value = tl.dot(given, weight, input_precision="ieee")
    value = tl.where(value < 0, 0.0, value).to(out.dtype.element_ty)  # not a number stays
    tl.store(out + row[:, None] * CHANNELS + channel[None, :], value, mask=there[:, None] & (channel < CHANNELS)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _masked_sums(  # type: ignore[no-untyped-def]
    gradients, hidden, given, out, atoms, count, features,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, EDGES: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    number, batch, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    channel, feature = tl.arange(0, PADDED), tl.arange(0, FEATURES)
    gradients += (batch * atoms * count + number) * atoms * CHANNELS
    hidden += batch * atoms * atoms * CHANNELS
    given += batch * atoms * atoms * features
    total = tl.zeros((FEATURES, PADDED), dtype=tl.float32)
    for start in range(part * EDGES, atoms * atoms, tl.num_programs(2) * EDGES):
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
    to = out + (((part * tl.num_programs(1) + batch) * count + number) * features + feature[:, None]) * CHANNELS
    tl.store(to + channel[None, :], total, mask=(feature < features)[:, None] & (channel < CHANNELS)[None, :])


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
def _list_edges(places, edges, total, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    edge = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    place = tl.load(places + edge, mask=edge < total, other=-1)
    tl.store(edges + place, edge, mask=place >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def _edge_matrices(  # type: ignore[no-untyped-def]
    hidden, matrices, edges, last, out, total,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    count = tl.load(last + total - 1)
    first = tl.program_id(1) * ROWS
    if first >= count:
        return
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, wide = row < count, column < WIDTH * WIDTH
    edge = tl.load(edges + row, mask=there, other=0)
    place = matrices + (column // WIDTH * CHANNELS * WIDTH + column % WIDTH)[None, :]
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, CHANNELS, DEPTH):
        channel = start + tl.arange(0, DEPTH)
        known = channel < CHANNELS
        factor = hidden + edge[:, None] * CHANNELS + channel[None, :]
        product = tl.dot(
            tl.load(factor, mask=there[:, None] & known[None, :], other=0.0),
            tl.load(place + channel[:, None] * WIDTH, mask=known[:, None] & wide[None, :], other=0.0),
            product,
            input_precision="ieee",
        )
    to = out + row.to(tl.int64)[:, None] * WIDTH * WIDTH + column[None, :]
    tl.store(to, product.to(out.dtype.element_ty), mask=there[:, None] & wide[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _through_edges(  # type: ignore[no-untyped-def]
    places, matrices, values, out, atoms, count, values_b, values_i, values_m, values_w,
    WIDTH: tl.constexpr, SIDE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    atom, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, number = tl.arange(0, SIDE), tl.arange(0, COUNT)
    wide, known = row < WIDTH, number < count
    matrix = matrices + row[:, None] * WIDTH + row[None, :]
    value = values + batch * values_b + number[None, :] * values_m + row[:, None] * values_w
    total = tl.zeros((SIDE, COUNT), dtype=tl.float32)
    for other in range(atoms):
        place = tl.load(places + (batch * atoms + other) * atoms + atom)
        if place >= 0:
            total = tl.dot(
                tl.load(matrix + place * WIDTH * WIDTH, mask=wide[:, None] & wide[None, :], other=0.0),
                tl.load(value + other * values_i, mask=wide[:, None] & known[None, :], other=0.0),
                total,
                input_precision="ieee",
            )
    to = out + ((batch * atoms + atom) * count + number)[None, :] * WIDTH + row[:, None]
    tl.store(to, total, mask=wide[:, None] & known[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _gru_backward(  # type: ignore[no-untyped-def]
    gradients, gates, of_gates, of_state, total,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = number < total
    row, column = number // WIDTH, number % WIDTH
    gate = gates + (row // COUNT) * 5 * WIDTH + column
    r = tl.load(gate, mask=inside)
    z = tl.load(gate + WIDTH, mask=inside)
    n = tl.load(gate + 2 * WIDTH, mask=inside)
    state = tl.load(gate + 3 * WIDTH, mask=inside)
    slope = tl.load(gate + 4 * WIDTH, mask=inside) * r * (1 - r)
    gradient = tl.load(gradients + number, mask=inside)
    of_n = gradient * (1 - z) * (1 - n * n)
    to = of_gates + row * 4 * WIDTH + column
    tl.store(to, of_n * slope, mask=inside)
    tl.store(to + WIDTH, gradient * (state - n) * z * (1 - z), mask=inside)
    tl.store(to + 2 * WIDTH, of_n, mask=inside)
    tl.store(to + 3 * WIDTH, of_n * r, mask=inside)
    tl.store(of_state + number, gradient * z, mask=inside)
