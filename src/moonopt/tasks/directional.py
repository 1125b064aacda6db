"""delta_i: the derivative of every task loss along the direction that the matrices move in (Algorithm 1, line 7).

A mode may look at the losses in ``combine`` (``observe``) and answers in ``step`` (``deltas``): an exact one just before
the matrices move, the others just after.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from moonopt.errors import noted
from moonopt.linalg.polar import without_autocast
from moonopt.tasks.gradients import STATIC_GRAPH, by_parameter, graph_features, task_gradients
from moonopt.tasks.losses import TaskLosses
from moonopt.tasks.pending import MicroBatch
from moonopt.tasks.tangents import carried, tangent_of
from moonopt.tasks.twice import WeightedGradients, backward, differentiate

Rate = float | Tensor
Evaluate = Callable[[MicroBatch], contextlib.AbstractContextManager[Tensor]]


class Move(NamedTuple):
    """How the matrices move: each by -rate * direction."""

    rate: Rate
    directions: dict[Tensor, Tensor]  # by parameter
    parameters: Sequence[Tensor]  # all that are trained


class Deltas(NamedTuple):
    """One number per task that the micro-batch has, and what of it may be rounding."""

    values: Tensor
    floor: Tensor


class DeltaMode(Protocol):
    """A way to the deltas."""

    name: ClassVar[str]
    evaluates_again: ClassVar[bool]
    exact: ClassVar[bool]

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> Any:
        """In ``combine``: what to keep until ``step``."""

    def deltas(self, batch: MicroBatch, evaluate: Evaluate, move: Move) -> Deltas:
        """In ``step``: ``evaluate`` gives the losses of a micro-batch where the matrices are now."""


class LossDifference:
    """(l(before) - l(after)) / rate: one more forward pass. Off by O(rate); works with everything that trains."""

    name: ClassVar[str] = "loss_difference"
    evaluates_again: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> None:
        return None

    def deltas(self, batch: MicroBatch, evaluate: Evaluate, move: Move) -> Deltas:
        with evaluate(batch) as after:
            return Deltas((batch.before - after) / move.rate, batch.losses.rounding / move.rate)


class PerTask:
    """<direction, gradient of l_i>: one backward pass per task. The reference for the others."""

    name: ClassVar[str] = "per_task"
    evaluates_again: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> list[dict[Tensor, Tensor]]:
        refuse_unsupported(self.name, graph_features(losses.values))
        return [by_parameter(matrices, row) for row in task_gradients(losses.separate, matrices)]

    def deltas(self, batch: MicroBatch, evaluate: Evaluate, move: Move) -> Deltas:
        return _exact(torch.stack([_inner(row, move.directions, batch.before) for row in batch.observed]))


class ForwardMode:
    """One Jacobian-vector product: the closure is evaluated on matrices that carry their direction along."""

    name: ClassVar[str] = "forward_mode"
    evaluates_again: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> None:
        refuse_unsupported(self.name, graph_features(losses.values))

    def deltas(self, batch: MicroBatch, evaluate: Evaluate, move: Move) -> Deltas:
        with _names_other_modes(self.name), carried(move.directions, move.parameters), evaluate(batch) as losses:
            return _exact(tangent_of(losses).detach())


class DoubleBackward:
    """The gradient of <sum_i w_i grad l_i, direction> in w: a backward pass through a backward pass.

    Through the one that ``minimize`` makes anyway, whose graph it keeps until then; or else through one of losses that are
    evaluated again.
    """

    name: ClassVar[str] = "double_backward"
    evaluates_again: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> None:
        refuse_unsupported(self.name, graph_features(losses.values))

    def backward(self, losses: Tensor, weights: Tensor, slopes: Tensor, matrices: Sequence[Tensor]) -> WeightedGradients:
        """The backward pass of the weighted losses, and what to keep of it until ``step``."""
        with _names_other_modes(self.name):
            return backward(losses, weights, slopes, matrices)

    def deltas(self, batch: MicroBatch, evaluate: Evaluate, move: Move) -> Deltas:
        kept, batch.observed = batch.observed, None  # with the graph, which nobody needs any more
        with _names_other_modes(self.name):
            if kept is not None:
                return _exact(kept.along(move.directions))
            parameters = [p for p in move.directions if p.requires_grad]
            with torch.enable_grad(), evaluate(batch) as losses, without_autocast(losses.device.type):
                return _exact(differentiate(losses, parameters).along(move.directions))


class Auto:
    """The cheaper of ``forward_mode`` and ``double_backward`` that works, by a short measurement for every new shape.

    Both evaluate again: at the first evaluation nobody knows yet which one it will be. Sizes count up to the next power of
    two. Which one it is no checkpoint remembers: they differ by rounding.
    """

    name: ClassVar[str] = "auto"
    evaluates_again: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def __init__(self) -> None:
        self.chosen: dict[Any, DeltaMode] = {}

    def observe(self, losses: TaskLosses, matrices: Sequence[Tensor]) -> None:
        refuse_unsupported(self.name, graph_features(losses.values))

    def deltas(self, batch: MicroBatch, evaluate: Evaluate, move: Move) -> Deltas:
        shape = batch.names, batch.replay.signature() if batch.replay is not None else ()
        if shape in self.chosen:
            try:
                return self.chosen[shape].deltas(batch, evaluate, move)
            except RuntimeError:  # something has changed that the shape does not tell
                del self.chosen[shape]
        self.chosen[shape] = self._measured(batch, evaluate, move)
        return self.chosen[shape].deltas(batch, evaluate, move)

    def _measured(self, batch: MicroBatch, evaluate: Evaluate, move: Move) -> DeltaMode:
        seconds: dict[DeltaMode, float] = {}
        failures: list[tuple[str, RuntimeError]] = []
        for mode in (ForwardMode(), DoubleBackward()):
            try:
                mode.deltas(batch, evaluate, move)  # to warm up
                seconds[mode] = _seconds(mode, batch, evaluate, move)
            except RuntimeError as error:  # NotImplementedError is one
                failures.append((mode.name, error))
        if not seconds:
            texts = "; ".join(f"{name} fails with {str(error).splitlines()[0]!r}" for name, error in failures)
            raise RuntimeError(
                f'delta="auto" found no mode that works: {texts}. Use {_modes_for(GRADIENT_ONLY)}.'
            ) from failures[-1][1]
        return min(seconds, key=lambda mode: seconds[mode])


#: The delta modes by name.
MODES: dict[str, type[DeltaMode]] = {mode.name: mode for mode in (LossDifference, PerTask, ForwardMode, DoubleBackward, Auto)}

_EVERYWHERE = frozenset({"accumulation", "autocast", "checkpointing"})
_ONE_PASS = _EVERYWHERE | {STATIC_GRAPH}
GRADIENT_ONLY = "operations that know their gradient and nothing more"

#: What each mode works with. The rest is refused with a text that names the modes that do.
SUPPORT: dict[str, frozenset[str]] = {
    "loss_difference": _ONE_PASS | {"compiled models", GRADIENT_ONLY, "donated buffers", "reentrant checkpointing"},
    "per_task": _EVERYWHERE | {"compiled models", GRADIENT_ONLY},
    "forward_mode": _ONE_PASS,
    "double_backward": _ONE_PASS,
    "auto": _ONE_PASS,
}


def refuse_unsupported(mode: str, features: Mapping[str, str]) -> None:
    """Raise where a mode does not work with one of ``features``, which come with what else could be done."""
    for feature, remedy in features.items():
        if feature not in SUPPORT[mode]:
            raise RuntimeError(f'delta="{mode}" does not work with {feature}: use {_modes_for(feature)}, or {remedy}.')


def _modes_for(feature: str) -> str:
    return " or ".join(f'delta="{mode}"' for mode, supported in SUPPORT.items() if feature in supported)


def _names_other_modes(mode: str) -> contextlib.AbstractContextManager[None]:
    return noted(
        f'If the cause is {GRADIENT_ONLY}, which delta="{mode}" cannot use: {_modes_for(GRADIENT_ONLY)} can, and delta="auto" '
        "tries forward_mode and double_backward."
    )


def _exact(values: Tensor) -> Deltas:
    return Deltas(values, torch.finfo(values.dtype).eps * values.abs())


def _inner(gradients: dict[Tensor, Tensor], directions: dict[Tensor, Tensor], like: Tensor) -> Tensor:
    products = [(directions[p] * g).sum() for p, g in gradients.items() if p in directions]
    return torch.stack(products).sum() if products else torch.zeros((), dtype=like.dtype, device=like.device)


def _seconds(mode: DeltaMode, batch: MicroBatch, evaluate: Evaluate, move: Move) -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    start = time.perf_counter()
    mode.deltas(batch, evaluate, move)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start
