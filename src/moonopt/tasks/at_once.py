"""Task gradients in one backward pass for all tasks, by ``torch.vmap``."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moonopt.errors import noted
from moonopt.linalg.polar import without_autocast
from moonopt.tasks.gradients import Rows, depends_on, each_divided, gradient_scale, unscaled, without_hooks

#: What an error may come from.
NOT_BATCHED = (
    'If the cause is a part of the model without a rule for batched gradients, which engine="stored:batched" takes: '
    'engine="stored" takes one after the other.'
)
#: How many numbers of two rows are multiplied by one part of a GPU, and how many numbers of all are in float64 at a time.
SHORT, TOGETHER = 2**10, 2**23
#: Gradients begin at multiples of so many numbers, where kernels read 16 bytes at a time.
ALIGNED = 4


class Joint(NamedTuple):
    """The gradients of all losses in some parameters, side by side in the rows of one matrix."""

    parameters: list[Tensor]
    matrix: Tensor

    def gram(self) -> Tensor:
        """The inner products of the rows, accumulated in float64."""
        width = max(1, TOGETHER // len(self.matrix) // SHORT) * SHORT
        return torch.stack([_gram_in_pieces(part) for part in torch.split(self.matrix, width, 1)]).sum(0)

    def rows(self) -> Iterator[Iterator[Tensor]]:
        """For each loss its gradients."""
        return (_pieces(row, self.parameters) for row in self.matrix)

    def weighted_sum(self, weights: Tensor) -> dict[Tensor, Tensor]:
        """The sum of the rows, each times its weight, by parameter."""
        total = torch.mv(self.matrix.T, weights.to(self.matrix))  # as a product of matrices it might be in TensorFloat-32
        return dict(zip(self.parameters, _pieces(total, self.parameters), strict=True))


def gradients_at_once(losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[Rows, Joint | None]:
    """As ``task_gradients``, and those in the parameters of several losses as a matrix, where they are alike enough.

    A gradient that is undefined, though the graph reaches its parameter, is zero. One that is not finite makes those of the
    other losses ill, too, as zero times infinity.
    """
    reached = depends_on(losses, parameters)
    users = [[number for number, row in enumerate(reached) if row[place]] for place in range(len(parameters))]
    used = [place for place, who in enumerate(users) if who]
    rows: Rows = [[None] * len(parameters) for _ in losses]
    if not used:
        return rows, None
    numbers = [number for number, loss in enumerate(losses) if loss.requires_grad]
    found, scale = _stacks([losses[number] for number in numbers], [parameters[place] for place in used])
    stacks = dict(zip(used, found, strict=True))

    shared = [place for place in used if len(users[place]) > 1]
    of_shared, joint = [stacks[place] for place in shared], None
    if len(numbers) == len(losses) and _are_alike(of_shared):
        joint = Joint([parameters[place] for place in shared], _divided(_side_by_side(of_shared), scale))
    columns: Iterable[Iterable[Tensor]] = zip(*joint.rows(), strict=True) if joint else each_divided(of_shared, scale)
    for place, column in zip(shared, columns, strict=True):
        for number, gradient in zip(numbers, column, strict=True):
            rows[number][place] = gradient if number in users[place] else None

    own = [(place, who[0]) for place, who in enumerate(users) if len(who) == 1]
    alone = [stacks[place][numbers.index(number)] for place, number in own]
    for (place, number), gradient in zip(own, _divided_copies(alone, scale), strict=True):
        rows[number][place] = gradient
    return rows, joint


def _gram_in_pieces(matrix: Tensor) -> Tensor:
    """Of many short pieces of the rows at once: a product of few rows that are long keeps a part of a GPU busy."""
    count, length = matrix.shape
    rest = matrix[:, length - length % SHORT :].double()
    pieces = matrix[:, : length - length % SHORT].view(count, -1, SHORT).transpose(0, 1).double()
    return (pieces @ pieces.mT).sum(0) + rest @ rest.mT


def _stacks(losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """By parameter the gradients of all losses, in float32 or better, and what they are still to be divided by."""

    def gradients(*along: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(losses, parameters, along, retain_graph=True, materialize_grads=True)

    scale = gradient_scale(losses)
    each_alone = scale * torch.eye(len(losses), device=losses[0].device)
    along = [column.to(loss) for column, loss in zip(each_alone.unbind(1), losses, strict=True)]
    with torch.enable_grad(), without_autocast(losses[0].device.type), without_hooks(parameters), noted(NOT_BATCHED):
        found = torch.vmap(gradients, randomness="same")(*along)
    return [stack for stack in unscaled(found, 1) if stack is not None], scale


def _divided(matrix: Tensor, scale: float) -> Tensor:
    """In place, and so in one operation: gradients that lie in several orders of memory would take one each."""
    return matrix if scale == 1 else matrix.div_(scale)


def _divided_copies(gradients: Sequence[Tensor], scale: float) -> Iterator[Tensor]:
    """So that the gradients of the other losses, which are zero, are not kept beside them."""
    if not _are_alike(gradients):
        return (gradient / scale for gradient in gradients)
    (row,) = _side_by_side([gradient.unsqueeze(0) for gradient in gradients])
    return _pieces(_divided(row, scale), gradients)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    return len({(each.device, each.dtype) for each in tensors}) == 1


def _side_by_side(stacks: Sequence[Tensor]) -> Tensor:
    """A row for each place in the stacks, with zeros up to where the next gradient begins."""
    zero, parts = stacks[0].new_zeros(()), []
    for stack in stacks:
        parts.append(stack.reshape(len(stack), -1))
        if padding := -stack[0].numel() % ALIGNED:
            parts.append(zero.expand(len(stack), padding))
    return torch.cat(parts, 1)


def _pieces(row: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """What of a row belongs to which of the tensors. To autograd they have nothing to do with each other."""
    start = 0
    for each in like:
        yield row[start : start + each.numel()].view(each.shape).detach()
        start += each.numel() + -each.numel() % ALIGNED
