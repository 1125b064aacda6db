"""delta_i: the derivative of every task loss along the direction that the matrices move in (Algorithm 1, line 7).

A mode may look at the losses in ``combine`` (``observe``) and answers in ``step``, after the move (``deltas``).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moonopt.tasks.gradients import task_gradients
from moonopt.tasks.losses import TaskLosses
from moonopt.tasks.pending import Combined

Rate = float | Tensor


class Moved(NamedTuple):
    """How the matrices moved: each by -rate * direction."""

    rate: Rate
    directions: dict[Tensor, Tensor]  # by parameter


class Deltas(NamedTuple):
    """One number per task that the micro-batch has, and what of it may be rounding."""

    values: Tensor
    floor: Tensor


class LossDifference:
    """(l(before) - l(after)) / rate: one more forward pass. Off by O(rate); works with everything that trains."""

    evaluates_again = True
    uses_direction = False

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> None:
        return None

    def deltas(self, combined: Combined, evaluate: Callable[[Combined], Tensor], moved: Moved) -> Deltas:
        return Deltas((combined.before - evaluate(combined)) / moved.rate, combined.rounding / moved.rate)


class PerTask:
    """<direction, gradient of l_i>: one backward pass per task, exact. The reference for the others."""

    evaluates_again = False
    uses_direction = True

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> list[dict[Tensor, Tensor]]:
        rows = task_gradients(losses.values, matrices)
        return [{p: g for p, g in zip(matrices, row, strict=True) if g is not None} for row in rows]

    def deltas(self, combined: Combined, evaluate: Callable[[Combined], Tensor], moved: Moved) -> Deltas:
        values = torch.stack([_inner(row, moved.directions, combined.before) for row in combined.observed])
        return Deltas(values, torch.finfo(values.dtype).eps * values.abs())


#: The delta modes by name.
MODES: dict[str, Any] = {"loss_difference": LossDifference, "per_task": PerTask}

#: With what each mode works. What a mode does not work with is refused with a text that names one that does.
SUPPORT: dict[str, frozenset[str]] = {
    "loss_difference": frozenset(
        {"accumulation", "autocast", "compiled", "checkpointing", "reentrant checkpointing", "ddp", "fsdp2", "capture"}
    ),
    # "compiled" only where donated buffers are off; refused otherwise.
    "per_task": frozenset({"accumulation", "autocast", "compiled", "checkpointing"}),
}


def refuse_unsupported(mode: str, module: nn.Module | None) -> None:
    """Raise where a mode does not work with what the module is wrapped in."""
    wrappers = {
        "ddp": type(module).__name__ == "DistributedDataParallel",
        "fsdp2": module is not None and any(type(p).__name__ == "DTensor" for p in module.parameters()),
    }
    for name, found in wrappers.items():
        if found and name not in SUPPORT[mode]:
            able = " or ".join(f'delta="{other}"' for other, features in SUPPORT.items() if name in features)
            raise RuntimeError(f'delta="{mode}" does not work with {name.upper()}: use {able}.')


def _inner(gradients: dict[Tensor, Tensor], directions: dict[Tensor, Tensor], like: Tensor) -> Tensor:
    products = [(directions[p] * g).sum() for p, g in gradients.items() if p in directions]
    return torch.stack(products).sum() if products else torch.zeros((), dtype=like.dtype, device=like.device)
