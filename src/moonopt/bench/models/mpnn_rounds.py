"""All rounds of messages of ``MPNN`` as one operation, which keeps what edges hide and what atoms send in half precision.

These tensors are by far the largest of a training step, and reading and writing them is most of its time where several runs
share a GPU. Float16 has the ten bits that TensorFloat-32 multiplies with, so that products are as exact, as long as nothing is
above 65,504: what is becomes infinite, which losses show. What atoms get, and gradients of parameters, are added up in float32.
Gradients of what is kept, which float16 would flush to zero, are divided by the largest that comes in.

The operation knows its gradient and nothing more. It cannot be differentiated forwards; twice neither, which ``backward``
refuses, while ``torch.autograd.grad`` leaves out what it cannot see where ``allow_unused`` is given.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moonopt.bench.models.mpnn_parts import (
    gru,
    gru_backward,
    masked_sums,
    positive_products,
    product,
    size_of,
    where_positive,
)
from moonopt.bench.models.mpnn_rounds_several import gradients_of_several
from moonopt.bench.models.several import for_one_or_several
from moonopt.errors import UserError
from moonopt.linalg.polar import without_autocast


class Factors(NamedTuple):
    """Of what atom i gets from j: relu(weights edge_ij) says how much of each of the matrices, applied to x_j."""

    edges: Tensor  # (B, N, N, features)
    weights: Tensor  # (channels, features)
    matrices: Tensor  # (width, channels * width)


class Cell(NamedTuple):
    """The parameters of a GRU cell, each with three gates below each other: r, z, n."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor
    bias_hh: Tensor


def half_rounds(x: Tensor, factors: Factors, bias: Tensor, cell: nn.GRUCell, rounds: int) -> Tensor:
    """Atoms (B, N, width) after so many rounds, each of which is x <- cell(relu(messages + bias), x)."""
    if bias.dtype != torch.float32:
        raise UserError(f"half_messages is for parameters in float32, found {bias.dtype}.")
    parameters = Cell(cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
    with without_autocast(x.device.type):
        return all_rounds(x.float(), factors, bias, parameters, rounds, torch.float16)


def all_rounds(x: Tensor, factors: Factors, bias: Tensor, cell: Cell, rounds: int, kept: torch.dtype) -> Tensor:
    """The same with messages kept in any dtype: in float64 its gradients can be compared with differences."""
    learning = torch.is_grad_enabled()
    return _Rounds.apply(x, *factors, bias, *cell, rounds, kept, learning)  # type: ignore[no-any-return, no-untyped-call]


class _Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        edges, weights, matrices, bias, weight_ih, weight_hh, bias_ih, bias_hh, rounds, kept, learning = given
        (batch, atoms, width), channels = x.shape, len(weights)
        edges, weights_kept, matrices = (each.to(kept).contiguous() for each in (edges, weights, matrices))
        hidden = positive_products(edges.flatten(0, 2), weights_kept).view(batch, atoms, atoms * channels)
        several = matrices.view(width, channels, width).transpose(0, 1)
        # All rounds side by side, so that the backward pass multiplies them at once; without one the next takes the place.
        sent = matrices.new_empty(batch * atoms, channels, rounds if learning else 1, width)
        x = x.flatten(0, 1)
        inputs, messages, gates = [], [], []
        for number in range(rounds):
            place = number % sent.shape[2]
            if learning:
                torch.bmm(x.to(kept).expand(channels, -1, -1), several, out=sent[:, :, place].transpose(0, 1))
            else:  # in one piece
                torch.mm(x.to(kept), matrices, out=sent.view(len(x), -1))
            got = product(hidden, sent.view(batch, -1, *sent.shape[2:])[:, :, place], x.dtype)
            got = (got + bias).relu_().flatten(0, 1)
            after, known = gru(got @ weight_ih.T, x @ weight_hh.T, x, bias_ih, bias_hh)
            if learning:
                inputs.append(x)
                messages.append(got)
                gates.append(known)
            x = after
        if learning:
            both = torch.cat(inputs), torch.cat(messages)
            ctx.save_for_backward(edges, weights, matrices, weight_ih, weight_hh, hidden, sent, *both, *gates)
        return x.view(batch, atoms, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_edges = ctx.needs_input_grad[1]
        with without_autocast(gradient.device.type):
            of_x, *others = for_one_or_several(partial(_gradients, of_edges=of_edges), gradient, *ctx.saved_tensors)
        return of_x, others.pop() if of_edges else None, *others, None, None, None


def _gradients(gradients: Tensor, *saved: Tensor, of_edges: bool) -> tuple[Tensor, ...]:
    """Of all that ``forward`` was given, for gradients (K, B, N, width)."""
    if len(gradients) > 1:
        return gradients_of_several(gradients, *saved, of_edges=of_edges)
    return tuple(each.unsqueeze(0) for each in _gradients_of_one(gradients.squeeze(0), *saved, of_edges=of_edges))


def _gradients_of_one(gradient: Tensor, *saved: Tensor, of_edges: bool) -> Sequence[Tensor]:
    """For a gradient (B, N, width); what is made on the way is divided by ``scale``."""
    edges, weights, matrices, weight_ih, weight_hh, hidden, sent, inputs, messages, *gates = saved
    (batch, atoms, width), rounds, kept, dtype = gradient.shape, len(gates), matrices.dtype, gradient.dtype
    scale = size_of(gradient)
    of_x = (gradient / scale).flatten(0, 1)
    of_got = matrices.new_empty(batch, atoms, rounds, width)
    of_sent = matrices.new_empty(rounds, batch * atoms, matrices.shape[1])
    rows = []
    for number in reversed(range(rounds)):
        of_gates_in, of_gates_x, of_x = _gru_backward_of_one(of_x, gates[number])
        of_message = where_positive(of_gates_in @ weight_ih, messages.chunk(rounds)[number])
        of_got[:, :, number] = of_message.view(gradient.shape)
        rows.append(torch.cat([of_gates_in, of_gates_x, of_message], 1))
        torch.bmm(hidden.mT, of_got[:, :, number], out=of_sent[number].view(batch, -1, width))
        of_x = torch.addmm(of_x, of_gates_x, weight_hh) + product(of_sent[number], matrices.mT, dtype)
    of_hidden = of_got.view(batch, atoms, -1) @ sent.view(batch, -1, rounds * width).mT
    of_hidden, hidden = (each.view(*edges.shape[:3], -1) for each in (of_hidden, hidden))
    of_rows, widths = torch.cat(rows[::-1]), [len(weight_ih), len(weight_hh), width]
    of_gates_in, of_gates_x, _ = torch.split(of_rows, widths, 1)
    of_bias_ih, of_bias_hh, of_bias = torch.split(of_rows.sum(0), widths)
    found = [
        of_x.view(gradient.shape),
        masked_sums(of_hidden.unsqueeze(2), hidden, edges, dtype).squeeze(0),
        product(inputs.to(kept).mT, of_sent.flatten(0, 1), dtype),
        *(of_bias, of_gates_in.mT @ messages, of_gates_x.mT @ inputs, of_bias_ih, of_bias_hh),
        *([where_positive(of_hidden, hidden).to(dtype) @ weights] if of_edges else []),
    ]
    return torch._foreach_mul(found, scale.view(()))


def _gru_backward_of_one(gradient: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of what inputs and the state give to the gates, and of the state itself."""
    if gradient.is_cuda:
        return torch.ops.aten._thnn_fused_gru_cell_backward(gradient, gates, False)[:3]  # type: ignore[no-any-return]
    of_gates, of_state = gru_backward(gradient, gates)
    r, z, n, part = of_gates.chunk(4, 1)
    return torch.cat([r, z, n], 1), torch.cat([r, z, part], 1), of_state
