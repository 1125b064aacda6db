"""delta_i: the derivative of every task loss along the direction that the matrices move in (Algorithm 1, line 7).

A mode may look at the losses in ``combine`` (``observe``) and answers in ``step``, after the move (``deltas``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from moonopt.tasks.gradients import graph_features, task_gradients
from moonopt.tasks.losses import TaskLosses
from moonopt.tasks.pending import MicroBatch

Rate = float | Tensor


class Moved(NamedTuple):
    """How the matrices moved: each by -rate * direction."""

    rate: Rate
    directions: dict[Tensor, Tensor]  # by parameter


class Deltas(NamedTuple):
    """One number per task that the micro-batch has, and what of it may be rounding."""

    values: Tensor
    floor: Tensor


class DeltaMode(Protocol):
    """A way to the deltas."""

    evaluates_again: ClassVar[bool]
    uses_direction: ClassVar[bool]

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> Any:
        """In ``combine``: what to keep until ``step``."""

    def deltas(self, batch: MicroBatch, evaluate: Callable[[MicroBatch], Tensor], moved: Moved) -> Deltas:
        """In ``step``, when the matrices have moved: ``evaluate`` gives the losses of a micro-batch there."""


class LossDifference:
    """(l(before) - l(after)) / rate: one more forward pass. Off by O(rate); works with everything that trains."""

    evaluates_again: ClassVar[bool] = True
    uses_direction: ClassVar[bool] = False

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> None:
        return None

    def deltas(self, batch: MicroBatch, evaluate: Callable[[MicroBatch], Tensor], moved: Moved) -> Deltas:
        return Deltas((batch.before - evaluate(batch)) / moved.rate, batch.rounding / moved.rate)


class PerTask:
    """<direction, gradient of l_i>: one backward pass per task, exact. The reference for the others."""

    evaluates_again: ClassVar[bool] = False
    uses_direction: ClassVar[bool] = True

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> list[dict[Tensor, Tensor]]:
        refuse_unsupported("per_task", graph_features(losses.values))
        rows = task_gradients(losses.values, matrices)
        return [{p: g for p, g in zip(matrices, row, strict=True) if g is not None} for row in rows]

    def deltas(self, batch: MicroBatch, evaluate: Callable[[MicroBatch], Tensor], moved: Moved) -> Deltas:
        values = torch.stack([_inner(row, moved.directions, batch.before) for row in batch.observed])
        return Deltas(values, torch.finfo(values.dtype).eps * values.abs())


#: The delta modes by name.
MODES: dict[str, type[DeltaMode]] = {"loss_difference": LossDifference, "per_task": PerTask}

#: What each mode works with. The rest is refused with a text that names the modes that do.
SUPPORT: dict[str, frozenset[str]] = {
    "loss_difference": frozenset(
        {"accumulation", "autocast", "checkpointing", "compiled models", "donated buffers", "reentrant checkpointing"}
    ),
    "per_task": frozenset({"accumulation", "autocast", "checkpointing", "compiled models"}),
}


def refuse_unsupported(mode: str, features: Mapping[str, str]) -> None:
    """Raise where a mode does not work with one of ``features``, which come with what else could be done."""
    for feature, remedy in features.items():
        if feature not in SUPPORT[mode]:
            able = " or ".join(f'delta="{other}"' for other, supported in SUPPORT.items() if feature in supported)
            raise RuntimeError(f'delta="{mode}" does not work with {feature}: use {able}, or {remedy}.')


def _inner(gradients: dict[Tensor, Tensor], directions: dict[Tensor, Tensor], like: Tensor) -> Tensor:
    products = [(directions[p] * g).sum() for p, g in gradients.items() if p in directions]
    return torch.stack(products).sum() if products else torch.zeros((), dtype=like.dtype, device=like.device)
