"""Task gradients in one backward pass for all tasks, by ``torch.vmap``."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moonopt.errors import noted
from moonopt.linalg.polar import without_autocast
from moonopt.tasks.gradients import GRADIENT_SCALE, Rows, depends_on, unscaled, without_hooks

#: What an error may come from.
NOT_BATCHED = (
    'If the cause is a part of the model without a rule for batched gradients, which engine="stored:batched" takes: '
    'engine="stored" takes one after the other.'
)


#: How many numbers of two rows are multiplied by one part of a GPU, and how many numbers of all are in float64 at a time.
SHORT, CHUNK = 2**10, 2**23


class Joint(NamedTuple):
    """The gradients of all losses in some parameters, side by side in the rows of one matrix."""

    parameters: list[Tensor]
    matrix: Tensor

    def gram(self) -> Tensor:
        """The inner products of the rows, accumulated in float64."""
        together = max(1, CHUNK // len(self.matrix) // SHORT) * SHORT
        return torch.stack([_products(part) for part in torch.split(self.matrix, together, 1)]).sum(0)

    def weighted_sum(self, weights: Tensor) -> dict[Tensor, Tensor]:
        """The sum of the rows, each times its weight, by parameter."""
        total = torch.mv(self.matrix.T, weights.to(self.matrix))  # as a product of matrices it might be in TensorFloat-32
        return dict(zip(self.parameters, _pieces(total, self.parameters), strict=True))


def _products(matrix: Tensor) -> Tensor:
    """Those of many short pieces of the rows at once: a product of few rows that are long keeps a part of a GPU busy."""
    count, length = matrix.shape
    rest = matrix[:, length - length % SHORT :].double()
    pieces = matrix[:, : length - length % SHORT].view(count, -1, SHORT).transpose(0, 1).double()
    return (pieces @ pieces.mT).sum(0) + rest @ rest.mT


def gradients_at_once(losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[Rows, Joint | None]:
    """As ``task_gradients``, and those in the parameters of several losses as a matrix, where they are alike enough."""
    reached = depends_on(losses, parameters)
    users = [sum(column) for column in zip(*reached, strict=True)]
    shared = [number for number, count in enumerate(users) if count > 1]
    used = shared + [number for number, count in enumerate(users) if count == 1]
    if not used:
        return [[None] * len(parameters) for _ in losses], None
    stacks = _stacks([loss for loss in losses if loss.requires_grad], [parameters[number] for number in used])
    joint = _joined(losses, [parameters[number] for number in shared], stacks[: len(shared)])
    by_loss: list[Sequence[Tensor]] = list(zip(*(stack.unbind() for stack in stacks), strict=True))
    if joint is not None:
        pieces = [_pieces(row, joint.parameters) for row in joint.matrix]
        by_loss = [[*joined, *row[len(shared) :]] for joined, row in zip(pieces, by_loss, strict=True)]
    waiting, rows = iter(by_loss), []
    for loss, here in zip(losses, reached, strict=True):
        found = dict(zip(used, next(waiting), strict=True)) if loss.requires_grad else {}
        rows.append([found[number] if there else None for number, there in enumerate(here)])
    return rows, joint


def _stacks(losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """By parameter the gradients of all losses, in float32 or better."""

    def gradients(*along: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(losses, parameters, along, retain_graph=True)

    each_alone = GRADIENT_SCALE * torch.eye(len(losses), device=losses[0].device)
    along = [column.to(loss) for column, loss in zip(each_alone.unbind(1), losses, strict=True)]
    with torch.enable_grad(), without_autocast(losses[0].device.type), without_hooks(parameters), noted(NOT_BATCHED):
        found = torch.vmap(gradients, randomness="same")(*along)
    return [stack for stack in unscaled(found) if stack is not None]


def _joined(losses: Sequence[Tensor], parameters: list[Tensor], stacks: Sequence[Tensor]) -> Joint | None:
    alike = len({(stack.device, stack.dtype) for stack in stacks}) == 1
    if not alike or not all(loss.requires_grad for loss in losses):
        return None
    return Joint(parameters, torch.cat([stack.reshape(len(stack), -1) for stack in stacks], 1))


def _pieces(row: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """What of it is in which parameter."""
    parts = torch.split(row, [p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
