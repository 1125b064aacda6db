"""All rounds of messages of ``MPNN`` as one operation, which keeps what edges hide and what atoms send in half precision.

These tensors are by far the largest of a training step, and reading and writing them is most of its time where several runs
share a GPU. Float16 has the ten bits that TensorFloat-32 multiplies with, so that products are as exact; they are added up in
float32. Gradients, which float16 would flush to zero, are divided by the largest that comes in. The operation knows its
gradient and nothing more: torch refuses to differentiate it forwards or twice.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from moonopt.linalg.polar import without_autocast


class Factors(NamedTuple):
    """Of what atom i gets from j: relu(weights edge_ij) says how much of each of the matrices, applied to x_j."""

    edges: Tensor  # (B, N, N, features)
    weights: Tensor  # (channels, features)
    matrices: Tensor  # (width, channels * width)


def half_rounds(x: Tensor, factors: Factors, bias: Tensor, cell: nn.GRUCell, rounds: int) -> Tensor:
    """Atoms (B, N, width) after so many rounds, each of which is x <- cell(relu(messages + bias), x)."""
    with without_autocast(x.device.type):
        return all_rounds(x.float(), *factors, bias, *cell.parameters(), rounds, torch.float16)


def all_rounds(*given: Any) -> Tensor:
    """The same of tensors, a number of rounds and a dtype: in float64 its gradients can be compared with differences."""
    return _Rounds.apply(*given)  # type: ignore[no-any-return, no-untyped-call]


class _Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        edges, weights, matrices, bias, weight_ih, weight_hh, bias_ih, bias_hh, rounds, kept = given
        shape, edges, matrices = x.shape, edges.to(kept), matrices.to(kept)
        hidden = functional.linear(edges, weights.to(kept)).relu_().flatten(2)
        x = x.flatten(0, 1)
        sent = hidden.new_empty(len(x), len(weights), rounds, shape[2])  # so that the backward pass takes all rounds at once
        before, got, gates = [], [], []  # by round
        for i in range(rounds):
            before.append(x)
            several = matrices.view(shape[2], *sent.shape[1::2]).transpose(0, 1)
            torch.bmm(x.to(kept).expand(len(several), -1, -1), several, out=sent[:, :, i].transpose(0, 1))
            got.append((_product(hidden, _by_molecule(sent, shape)[:, :, i], x.dtype) + bias).relu_().flatten(0, 1))
            x, known = _gru(got[-1] @ weight_ih.T, x @ weight_hh.T, x, bias_ih, bias_hh)
            gates.append(known)
        both = torch.cat(before), torch.cat(got)
        ctx.save_for_backward(edges, weights, matrices, weight_ih, weight_hh, hidden, sent, *both, *gates)
        return x.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        edges, weights, matrices, weight_ih, weight_hh, hidden, sent, before, got, *gates = ctx.saved_tensors
        rounds, kept, dtype = len(gates), matrices.dtype, gradient.dtype
        scale = torch.linalg.vector_norm(gradient, torch.inf).clamp(min=torch.finfo(dtype).tiny)
        of_x = (gradient / scale).flatten(0, 1)
        of_sent = matrices.new_empty(rounds, len(of_x), matrices.shape[1])
        of_messages, rows = hidden.new_empty(*gradient.shape[:2], *sent.shape[2:]), []
        for i in reversed(range(rounds)):
            of_input, of_state, of_x = _gru_backward(of_x, gates[i])
            of_got = _where_positive(of_input @ weight_ih, got.chunk(rounds)[i])
            rows.append(torch.cat([of_input, of_state, of_got], 1))
            of_messages[:, :, i] = of_got.view(gradient.shape)
            torch.bmm(hidden.mT, of_messages[:, :, i], out=of_sent[i].view(len(hidden), -1, gradient.shape[2]))
            of_x = torch.addmm(of_x, of_state, weight_hh) + _product(of_sent[i], matrices.mT, dtype)
        of_hidden = of_messages.flatten(2) @ _by_molecule(sent, gradient.shape).flatten(2).mT
        of_hidden = _where_positive(of_hidden, hidden).view(-1, len(weights))
        of_edges = (of_hidden.to(dtype) @ weights * scale).view_as(edges) if ctx.needs_input_grad[1] else None
        of_rows = torch.cat(rows[::-1])
        of_inputs, of_states, _ = torch.split(of_rows, widths := [len(weight_ih), len(weight_hh), weight_ih.shape[1]], 1)
        of_bias_ih, of_bias_hh, of_bias = torch.split(of_rows.sum(0), widths)
        found = [
            of_x.view_as(gradient),
            _product(of_hidden.mT, edges.flatten(0, 2), dtype),
            _product(before.to(kept).mT, of_sent.flatten(0, 1), dtype),
            *(of_bias, of_inputs.mT @ got, of_states.mT @ before, of_bias_ih, of_bias_hh),
        ]
        of_x, *of_parameters = torch._foreach_mul(found, scale)
        return of_x, of_edges, *of_parameters, None, None


def _by_molecule(sent: Tensor, shape: Sequence[int]) -> Tensor:
    """What its atoms send in all channels below each other, (B, N * channels, rounds, width)."""
    return sent.view(shape[0], -1, *sent.shape[2:])


def _product(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Added up and returned in a wider dtype."""
    if first.dtype == dtype:
        return first @ second
    if first.is_cuda:
        return (torch.mm if first.ndim == 2 else torch.bmm)(first, second, out_dtype=dtype)
    return first.to(dtype) @ second.to(dtype)


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
