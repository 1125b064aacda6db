"""Set2Set of ``MPNN`` as one operation, for runs in which the number of kernels decides how long a step takes.

It is what ``Set2Set`` computes, in fewer operations: an LSTM gets its state as a part of its input, so that its two matrices
are one; in the backward pass, products of all steps are made at once, and of all gradients where torch asks for several. Like
``mpnn_rounds``, it knows its gradient and nothing more.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moonopt.bench.models.several import for_one_or_several
from moonopt.linalg.polar import without_autocast


class _Step(NamedTuple):
    """What a step leaves for the backward pass, of rows n = B M."""

    before: Tensor  # the cell before it, (n, width)
    after: Tensor  # and after it
    gates: Tensor  # (n, 4 width)
    attention: Tensor  # (B, M, N)
    both: Tensor  # question and answer, (n, 2 width)


def fused_readout(x: Tensor, unlikely: Tensor, lstm: nn.LSTMCell, steps: int) -> Tensor:
    """The last question and its answer, (B M, 2 width), of atoms (B, N, width); ``unlikely`` (B, M, N) is added to scores."""
    parameters = lstm.weight_ih, lstm.weight_hh, lstm.bias_ih, lstm.bias_hh
    with without_autocast(x.device.type):
        given = (each.to(lstm.weight_ih.dtype) for each in (x, unlikely))  # of autocast, they may be in half precision
        return _Readout.apply(*given, *parameters, steps)  # type: ignore[no-any-return, no-untyped-call]


class _Readout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, unlikely: Tensor, *given: Any) -> Tensor:
        weight_ih, weight_hh, bias_ih, bias_hh, steps = given
        (batch, several, _), width = unlikely.shape, x.shape[2]
        matrix = weight_ih.clone()
        matrix[:, :width] += weight_hh
        gates_in = nothing = x.new_zeros(batch * several, len(matrix))  # as the first input is
        cell = nothing.flatten()[: batch * several * width].view(-1, width)
        found: list[_Step] = []
        for _ in range(steps):
            if found:
                gates_in = found[-1].both @ matrix.T
            question, after, gates = _lstm(gates_in, nothing, cell, bias_ih, bias_hh)
            asked = question.view(batch, several, width)
            attention = torch.baddbmm(unlikely, asked, x.mT).softmax(2)
            both = torch.cat([asked, attention @ x], 2).flatten(0, 1)
            found.append(_Step(cell, after, gates, attention, both))
            cell = after
        ctx.save_for_backward(x, matrix, *(each for step in found for each in step))
        return found[-1].both

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(gradient.device.type):
            of_x, of_matrix, of_bias = for_one_or_several(_gradients, gradient, *ctx.saved_tensors)
        return of_x, None, of_matrix, of_matrix[:, : of_x.shape[2]], of_bias, of_bias, None


def _gradients(gradients: Tensor, x: Tensor, matrix: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    """Of atoms, of the one matrix and of the bias, for gradients (K, B M, 2 width). Rows are of a batch, K and M."""
    steps = [_Step(*saved[place : place + len(_Step._fields)]) for place in range(0, len(saved), len(_Step._fields))]
    (batch, atoms, width), count, several = x.shape, len(gradients), steps[0].attention.shape[1]

    def of_each(value: Tensor) -> Tensor:
        return value.view(batch, 1, several, -1).expand(-1, count, -1, -1)

    of_both, of_cell = gradients.view(count, batch, several, -1).transpose(0, 1).flatten(1, 2), None
    of_gates, of_scores, of_answers = [], [], []
    for step in reversed(steps):
        of_question, of_answer = torch.split(of_both, width, 2)
        of_attention = (of_answer @ x.mT).flatten(0, 1)
        of_score = _softmax_backward(of_attention, of_each(step.attention).reshape(-1, atoms)).view(batch, -1, atoms)
        of_question = torch.baddbmm(of_question, of_score, x).flatten(0, 1)
        given = (of_each(each).reshape(len(of_question), -1) for each in (step.before, step.after, step.gates))
        of_gate, of_cell = _lstm_backward(of_question, of_cell, *given)
        of_gates.append(of_gate.view(batch, count, several, -1).transpose(0, 1))
        of_scores.append(of_score.view(batch, count, several, atoms))
        of_answers.append(of_answer.view(batch, count, several, width))
        if len(of_gates) < len(steps):
            of_both = (of_gate @ matrix).view(batch, -1, 2 * width)
    attentions = [of_each(step.attention) for step in reversed(steps)]
    questions = [of_each(step.both)[..., :width] for step in reversed(steps)]
    sent, received = torch.cat([*attentions, *of_scores], 2), torch.cat([*of_answers, *questions], 2)
    of_x = (sent.flatten(0, 1).mT @ received.flatten(0, 1)).view(batch, count, atoms, width).transpose(0, 1)
    all_gates = torch.cat(of_gates, 1).view(count, len(steps) * batch * several, -1)
    inputs = torch.cat([*(step.both for step in reversed(steps[:-1])), torch.zeros_like(steps[0].both)])
    of_matrix = all_gates[0].T @ inputs if count == 1 else all_gates.mT @ inputs.expand(count, -1, -1)
    return of_x, of_matrix.view(count, *matrix.shape), all_gates.sum(1)


def _softmax_backward(gradient: Tensor, value: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(gradient, value, 1, value.dtype)  # type: ignore[no-any-return]


def _lstm(inputs: Tensor, states: Tensor, cell: Tensor, bias_ih: Tensor, bias_hh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state after an LSTM cell, the cell after it, and its four gates."""
    if inputs.is_cuda:
        return torch.ops.aten._thnn_fused_lstm_cell(inputs, states, cell, bias_ih, bias_hh)  # type: ignore[no-any-return]
    i, f, g, o = (inputs + states + bias_ih + bias_hh).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    gradient: Tensor, of_cell: Tensor | None, before: Tensor, after: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """Of what the gates are made of, and of the cell before, from those of the state and of the cell after."""
    if gradient.is_cuda:
        found = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(gradient, of_cell, before, after, gates, False)
        return found[0], found[1]
    i, f, g, o = gates.chunk(4, 1)
    shown = after.tanh()
    of_after = gradient * o * (1 - shown * shown)
    of_after = of_after if of_cell is None else of_after + of_cell
    of_i, of_f = of_after * g * i * (1 - i), of_after * before * f * (1 - f)
    of_g, of_o = of_after * i * (1 - g * g), gradient * shown * o * (1 - o)
    return torch.cat([of_i, of_f, of_g, of_o], 1), of_after * f
