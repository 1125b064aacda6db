"""Many heads of one number each, and their losses, computed together; a task still touches no head but its own.

One product of all heads would make every loss depend on every head, and balancers that look at gradients would take heads for
shared parameters. So here what a loss does not depend on has no gradient at all, and ``reaches`` tells it to those who look at
the graph (``moonopt.tasks.gradients.nodes_of``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

Gradients = tuple[Tensor | None, ...]


class Pointwise(NamedTuple):
    """A loss of one prediction, and its derivative, of predictions and what is wanted."""

    value: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


#: (z - y)^2.
SQUARED = Pointwise(lambda z, y: (z - y).square(), lambda z, y: 2 * (z - y))
#: log(1 + exp(-s z)) for a sign s: the cross-entropy of a logit.
LOGISTIC = Pointwise(lambda z, s: functional.softplus(-s * z), lambda z, s: -s * torch.sigmoid(-s * z))


def predictions(features: Tensor, heads: nn.ModuleDict) -> dict[str, Tensor]:
    """What heads make of features (n, width): (n, outputs) each, together where all are linear with one output."""
    together = all(isinstance(head, nn.Linear) and head.out_features == 1 for head in heads.values())
    if not together or torch.compiler.is_compiling():  # which fuses them itself
        return {task: head(features) for task, head in heads.items()}
    parameters = [head.weight for head in heads.values()] + [head.bias for head in heads.values()]
    return dict(zip(heads, _Heads.apply(features, *parameters), strict=True))  # type: ignore[no-untyped-call]


def of_first(predicted: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """What is predicted of so many. A part costs a backward pass two operations for each task, and the whole none."""
    return {task: each if len(each) == count else each[:count] for task, each in predicted.items()}


def mean_losses(predicted: Mapping[str, Tensor], wanted: Tensor, loss: Pointwise) -> dict[str, Tensor]:
    """The mean loss of each task, of predictions (n) or (n, 1) and what is wanted, (n, tasks), in the same order."""
    columns = [each.flatten() for each in predicted.values()]
    if wanted.shape != (len(columns[0]), len(columns)):
        raise ValueError(f"For {len(columns)} tasks of {len(columns[0])} predictions, {tuple(wanted.shape)} are wanted.")
    if torch.compiler.is_compiling():
        losses = [loss.value(column, each).mean() for column, each in zip(columns, wanted.unbind(1), strict=True)]
    else:
        losses = _Losses.apply(loss, wanted, *columns)  # type: ignore[no-untyped-call]
    return dict(zip(predicted, losses, strict=True))


class _Heads(torch.autograd.Function):
    """Of features, all weights (1, width) and all biases (1)."""

    @staticmethod
    def forward(features: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = _halves(parameters)
        return functional.linear(features, torch.cat(weights), torch.cat(biases)).tensor_split(len(weights), 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        features, *parameters = inputs
        weights, _ = _halves(parameters)
        count = len(output)  # an output itself, held by what it holds, would never be freed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(features, *weights)
        ctx.save_for_forward(features, *weights)
        ctx.reaches = lambda number: (0, 1 + number, 1 + count + number)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        features, *weights = ctx.saved_tensors
        there = _present(gradients)
        if not there:
            return (None,) * (1 + 2 * len(weights))
        joint = torch.cat(list(there.values()), 1)
        of_weights = (joint.mT @ features.to(joint.dtype)).to(weights[0].dtype)
        of_biases = joint.sum(0).to(weights[0].dtype)
        of_features = joint @ torch.cat([weights[i] for i in there]).to(joint.dtype)
        parts = [_spread(each.tensor_split(len(there)), there, len(weights)) for each in (of_weights, of_biases)]
        return of_features.to(features.dtype), *parts[0], *parts[1]

    @staticmethod
    def jvp(ctx: Any, along: Tensor | None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        features, *weights = ctx.saved_tensors
        of_weights, of_biases = _halves(tangents)
        turned = torch.cat(_or_zeros(of_weights, weights))
        moved = torch.cat(_or_zeros(of_biases, [each[0, :1] for each in weights]))
        found = functional.linear(features, turned.to(features.dtype), moved.to(features.dtype))
        if along is not None:
            found = found + functional.linear(along, torch.cat(weights).to(along.dtype))
        return found.tensor_split(len(weights), 1)


class _Losses(torch.autograd.Function):
    """Of a loss, what is wanted (n, tasks), and predictions (n) of every task."""

    @staticmethod
    def forward(loss: Pointwise, wanted: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
        return loss.value(torch.stack(columns, 1), wanted).mean(0).unbind()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.loss, wanted, *columns = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(wanted, *columns)
        ctx.save_for_forward(wanted, *columns)
        ctx.reaches = lambda number: (1 + number,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        wanted, *columns = ctx.saved_tensors
        there = _present(gradients)
        if not there:
            return (None,) * (2 + len(columns))
        joint = torch.stack([columns[i] for i in there], 1)
        chosen = wanted if len(there) == len(columns) else torch.stack([wanted[:, i] for i in there], 1)
        found = ctx.loss.slope(joint, chosen) * (torch.stack(list(there.values())) / len(joint))
        return None, None, *_spread(found.to(joint.dtype).unbind(1), there, len(columns))

    @staticmethod
    def jvp(ctx: Any, _: None, __: Tensor | None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        wanted, *columns = ctx.saved_tensors
        slopes: Tensor = ctx.loss.slope(torch.stack(columns, 1), wanted)
        return (slopes * torch.stack(_or_zeros(tangents, columns), 1)).mean(0).unbind()


def _present(gradients: Sequence[Tensor | None]) -> dict[int, Tensor]:
    return {number: each for number, each in enumerate(gradients) if each is not None}


def _spread(found: Iterable[Tensor], there: Mapping[int, Tensor], count: int) -> Gradients:
    """What was found in the places of those that are there, none in the others."""
    each = iter(found)
    return tuple(next(each) if number in there else None for number in range(count))


def _or_zeros(tangents: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(value) if each is None else each for each, value in zip(tangents, like, strict=True)]


def _halves(parameters: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    count = len(parameters) // 2
    return list(parameters[:count]), list(parameters[count:])
