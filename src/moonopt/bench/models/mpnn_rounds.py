"""All rounds of messages of ``MPNN`` as one operation, which keeps what edges hide and what atoms send in half precision.

These tensors are by far the largest of a training step, and reading and writing them is most of its time where several runs
share a GPU. Float16 has the ten bits that TensorFloat-32 multiplies with, so that products are as exact, as long as nothing is
above 65,504: what is becomes infinite, which losses show. What atoms get, and gradients of parameters, are added up in float32.
Gradients of what is kept, which float16 would flush to zero, are divided by the largest that comes in.

The operation knows its gradient and nothing more. It cannot be differentiated forwards; twice neither, which ``backward``
refuses, while ``torch.autograd.grad`` leaves out what it cannot see where ``allow_unused`` is given.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
        edges, matrices = edges.to(kept), matrices.to(kept)
        hidden = _positive_products(edges.flatten(0, 2), weights.to(kept)).view(batch, atoms, atoms * channels)
        several = matrices.view(width, channels, width).transpose(0, 1)
        # All rounds side by side, so that the backward pass multiplies them at once; without one the next takes the place.
        sent = matrices.new_empty(batch * atoms, channels, rounds if learning else 1, width)
        x = x.flatten(0, 1)
        inputs, messages, gates = [], [], []
        for number in range(rounds):
            place = number % sent.shape[2]
            torch.bmm(x.to(kept).expand(channels, -1, -1), several, out=sent[:, :, place].transpose(0, 1))
            got = _product(hidden, sent.view(batch, -1, *sent.shape[2:])[:, :, place], x.dtype)
            got = (got + bias).relu_().flatten(0, 1)
            after, known = _gru(got @ weight_ih.T, x @ weight_hh.T, x, bias_ih, bias_hh)
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
    """Of all that ``forward`` was given, for gradients (K, B, N, width); what is made on the way is divided by ``scale``."""
    edges, weights, matrices, weight_ih, weight_hh, hidden, sent, inputs, messages, *gates = saved
    count, batch, atoms, width = gradients.shape
    rounds, kept, dtype = len(gates), matrices.dtype, gradients.dtype
    scale = torch.linalg.vector_norm(gradients, torch.inf, (1, 2, 3), True).clamp(min=torch.finfo(dtype).tiny)
    of_x = (gradients / scale).flatten(0, 2)
    of_got = matrices.new_empty(batch, count, atoms, rounds, width)
    # Of one gradient, that of the matrices is made of these of all rounds; of several it is not, and the next takes the place.
    of_sent = matrices.new_empty(count, rounds if count == 1 else 1, batch * atoms, matrices.shape[1])
    rows = []
    for number in reversed(range(rounds)):
        of_round = of_sent[:, number % of_sent.shape[1]]
        of_gates_in, of_gates_x, of_x = _gru_backward(of_x, gates[number].expand(count, -1, -1).flatten(0, 1))
        of_message = (of_gates_in @ weight_ih).view(count, -1, width)
        of_message = _where_positive(of_message, messages.chunk(rounds)[number])
        of_got[:, :, :, number] = of_message.view(gradients.shape).transpose(0, 1)
        rows.append(torch.cat([of_gates_in, of_gates_x, of_message.flatten(0, 1)], 1).view(count, batch * atoms, -1))
        for one, place in zip(of_got[:, :, :, number].unbind(1), of_round, strict=True):
            torch.bmm(hidden.mT, one, out=place.view(batch, -1, width))
        of_x = torch.addmm(of_x, of_gates_x, weight_hh) + _product(of_round, matrices.mT, dtype).flatten(0, 1)
    of_hidden = of_got.view(batch, -1, rounds * width) @ sent.view(batch, -1, rounds * width).mT
    of_hidden = _where_positive(of_hidden.view(batch, count, *hidden.shape[1:]), hidden.unsqueeze(1))
    of_hidden = of_hidden.view(batch * count, -1, len(weights))
    given = edges.view(batch, 1, -1, edges.shape[3]).expand(-1, count, -1, -1).flatten(0, 1)
    of_rows, widths = torch.cat(rows[::-1], 1), [len(weight_ih), len(weight_hh), width]
    of_gates_in, of_gates_x, _ = torch.split(of_rows, widths, 2)
    of_bias_ih, of_bias_hh, of_bias = torch.split(of_rows.sum(1), widths, 1)
    if count == 1:
        of_matrices = _product(inputs.to(kept).mT.unsqueeze(0), of_sent.flatten(1, 2), dtype)
    else:
        of_matrices = _of_matrices(hidden, inputs.to(kept), of_got, dtype)
    found = [
        of_x.view(gradients.shape),
        _product(of_hidden.mT, given, dtype).view(batch, count, *weights.shape).sum(0),
        of_matrices,
        *(of_bias, _product(of_gates_in.mT, messages, dtype), _product(of_gates_x.mT, inputs, dtype), of_bias_ih, of_bias_hh),
        *([(of_hidden.to(dtype) @ weights).view(batch, count, *edges.shape[1:]).transpose(0, 1)] if of_edges else []),
    ]
    if count == 1:
        return tuple(torch._foreach_mul(found, scale.view(())))
    return tuple(each * scale.view(count, *[1] * (each.ndim - 1)) for each in found)


def _of_matrices(hidden: Tensor, inputs: Tensor, of_got: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradients (K, width, channels * width) of the matrices A_k, from those (B, K, N, rounds, width) of what atoms get.

    Atom i gets sum_k A_k' s_ik, and s_ik = sum_j h_ijk x_j is the same for all: the gradient of A_k is sum_i s_ik of_got_i'.
    """
    batch, count, atoms, rounds, width = of_got.shape
    senders = inputs.view(rounds, batch, 1, atoms, width).permute(1, 2, 3, 0, 4).flatten(3)
    gathered = senders.expand(-1, atoms, -1, -1).flatten(0, 1).mT @ hidden.view(batch * atoms, atoms, -1)
    receivers = of_got.permute(0, 2, 3, 1, 4).reshape(-1, count * width)
    found = _product_of_two(gathered.view(len(receivers), -1).T, receivers, dtype)
    return found.view(width, -1, count, width).permute(2, 0, 1, 3).reshape(count, width, -1)


def _product(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Added up and returned in a wider dtype. The first has several matrices, the second as many, or one for all."""
    if len(first) == 1:  # for which there are faster kernels
        return _product_of_two(first[0], second.view(second.shape[-2:]), dtype).unsqueeze(0)
    return _product_of_two(first, second.expand(len(first), -1, -1), dtype)


def _product_of_two(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    if first.dtype == dtype:
        return first @ second
    if first.is_cuda:
        return (torch.mm if first.ndim == 2 else torch.bmm)(first, second, out_dtype=dtype)
    return first.to(dtype) @ second.to(dtype)


def _positive_products(rows: Tensor, weights: Tensor) -> Tensor:
    """relu(rows weights'): the largest tensor of all is written once."""
    return torch._addmm_activation(weights.new_zeros(len(weights)), rows, weights.T)


def _where_positive(gradient: Tensor, value: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(gradient, value, 0)  # type: ignore[no-any-return]


def _gru(inputs: Tensor, states: Tensor, x: Tensor, bias_ih: Tensor, bias_hh: Tensor) -> tuple[Tensor, Tensor]:
    """The state after a GRU cell, and side by side what its gradient needs: gates r, z, n, the state before, its part of n."""
    if inputs.is_cuda:
        return torch.ops.aten._thnn_fused_gru_cell(inputs, states, x, bias_ih, bias_hh)  # type: ignore[no-any-return]
    (r_in, z_in, n_in), (r_x, z_x, n_x) = (inputs + bias_ih).chunk(3, 1), (states + bias_hh).chunk(3, 1)
    r, z = (r_in + r_x).sigmoid(), (z_in + z_x).sigmoid()
    n = (n_in + r * n_x).tanh()
    return n + z * (x - n), torch.cat([r, z, n, x, n_x], 1)


def _gru_backward(gradient: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of what inputs and the state give to the gates, and of the state itself."""
    if gradient.is_cuda:
        return torch.ops.aten._thnn_fused_gru_cell_backward(gradient, gates, False)[:3]  # type: ignore[no-any-return]
    r, z, n, x, n_x = gates.chunk(5, 1)
    of_z, of_n = gradient * (x - n) * z * (1 - z), gradient * (1 - z) * (1 - n * n)
    of_r = of_n * n_x * r * (1 - r)
    return torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1), gradient * z
