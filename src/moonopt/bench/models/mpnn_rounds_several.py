"""The gradients of several losses at once in all rounds of messages, as a gradient-based method asks for them.

They share what the forward pass has kept, and all large tensors are passed over as few times as can be. Their rows are of atoms
(n = B N), and of gradients K within these; what is added up over atoms is one product for all.
"""

import torch
from torch import Tensor

from moonopt.bench.models.mpnn_parts import (
    ALIGNED,
    gru_backward_of_several,
    masked_sums,
    messages_backward,
    product,
    size_of,
    spread,
    where_positive,
)


def gradients_of_several(gradients: Tensor, *saved: Tensor, of_edges: bool) -> tuple[Tensor, ...]:
    """Of all that the rounds were given, for gradients (K, B, N, width), from what they have saved."""
    edges, weights, matrices, weight_ih, weight_hh, hidden, sent, inputs, messages, *gates = saved
    (count, batch, atoms, width), rounds = gradients.shape, len(gates)
    kept, dtype, total = matrices.dtype, gradients.dtype, batch * atoms
    hidden = hidden.view(batch, atoms, atoms, -1)
    scale = size_of(gradients)
    of_x = (gradients / scale).permute(1, 2, 0, 3).contiguous().view(total, count, width)
    of_gates = of_x.new_empty(rounds, total, count, 4 * width)
    of_got = matrices.new_empty(batch, atoms, count, rounds, width)
    of_bias = gradients.new_zeros(count, width)
    from_gates = _back_from_gates(weight_ih, weight_hh)
    from_messages = messages_backward(hidden, edges, matrices, count, dtype)
    for number in reversed(range(rounds)):
        of_state = gru_backward_of_several(of_x, gates[number], out=of_gates[number])
        of_message, of_x = (of_gates[number].flatten(0, 1) @ from_gates).view(total, count, -1).chunk(2, 2)
        of_message = where_positive(of_message, messages.chunk(rounds)[number].unsqueeze(1))
        of_bias = of_bias + of_message.sum(0)
        of_got[:, :, :, number] = of_message.view(batch, atoms, count, width)
        of_x = of_x + of_state + from_messages(of_got[:, :, :, number])
    del from_messages  # with what it has made of the edges
    of_hidden = of_got.view(batch, atoms * count, -1) @ sent.view(batch, -1, rounds * width).mT
    of_hidden = of_hidden.view(batch, atoms, count, *hidden.shape[2:])
    found = [
        of_x.view(batch, atoms, count, width).permute(2, 0, 1, 3),
        masked_sums(of_hidden, hidden, edges, dtype),
        _of_matrices(hidden, inputs.to(kept).view(rounds, batch, atoms, width), of_got, dtype),
        of_bias,
        *_of_cell(of_gates, messages, inputs),
        *([_of_edges(of_hidden, hidden, weights)] if of_edges else []),
    ]
    of_x, of_weights, of_matrices, *others = (_times(each, scale) for each in found)
    return of_x, of_weights, of_matrices.flatten(2), *others


def _times(value: Tensor, scale: Tensor) -> Tensor:
    """Of each of K gradients; written in the order of its sides, whatever order they lie in."""
    return torch.mul(value, scale.view(-1, *[1] * (value.ndim - 1)), out=value.new_empty(value.shape))


def _back_from_gates(weight_ih: Tensor, weight_hh: Tensor) -> Tensor:
    """What takes gradients of r, z, n and the state's part of n to those of a message and, beside it, of the state."""
    width = weight_ih.shape[1]
    of_inputs = torch.cat([weight_ih, torch.zeros_like(weight_ih[:width])])
    of_state = torch.cat([weight_hh[: 2 * width], torch.zeros_like(weight_hh[:width]), weight_hh[2 * width :]])
    return torch.cat([of_inputs, of_state], 1)


def _of_cell(of_gates: Tensor, messages: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
    """Of both weights and both biases of the cell: products with messages, with states and with ones."""
    rounds, total, count, _ = of_gates.shape
    width = inputs.shape[1]
    others = torch.cat([messages, inputs, inputs.new_ones(len(inputs), ALIGNED)], 1).view(rounds, total, -1)
    found = (of_gates.flatten(2).mT @ others).sum(0).view(count, 4 * width, -1)
    of_inputs, of_state = found[:, : 3 * width], torch.cat([found[:, : 2 * width], found[:, 3 * width :]], 1)
    return of_inputs[..., :width], of_state[..., width : 2 * width], of_inputs[..., -1], of_state[..., -1]


def _of_matrices(hidden: Tensor, inputs: Tensor, of_got: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradients (K, width, channels, width) of the matrices A_c, from those (B, N, K, rounds, width) of what atoms get.

    Atom i gets sum_c A_c' s_ic, and s_ic = sum_j h_ijc x_j is the same for all: the gradient of A_c is sum_i s_ic of_got_i'.
    """
    count, _, width = of_got.shape[2:]
    gathered = spread(hidden.transpose(1, 2), inputs.permute(1, 2, 0, 3)).flatten(3).flatten(0, 2)
    receivers = of_got.transpose(2, 3).reshape(len(gathered), -1)
    return product(gathered.T, receivers, dtype).view(-1, width, count, width).permute(2, 1, 0, 3)


def _of_edges(of_hidden: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
    return (where_positive(of_hidden, hidden.unsqueeze(2)).to(weights) @ weights).permute(2, 0, 1, 3, 4)
