"""The verbs: ``minimize`` and ``combine`` beside torch's ``step`` and ``zero_grad``, the same for every method."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moonopt.tasks.losses import Losses, TaskLosses, detached, read_losses
from moonopt.tasks.pending import MicroBatch, Pending
from moonopt.tasks.replay import Replay

Closure = Callable[..., Losses]
Parts = Generator[Callable[[], None], None, Any]
NO_GRADIENT = "No parameter has a gradient. Call backward() on the combined loss before step(), with no zero_grad() between."


class TaskOptimizer(Optimizer):
    """An optimizer of several losses. A method says how they are weighted; by default their mean is taken."""

    _pending: Pending

    def minimize(self, closure: Closure, *args: Any) -> Any:
        """One step on ``closure(*args)``: ``zero_grad()``, ``combine(closure, *args).backward()``, ``step()``.

        Returns the losses before the step, detached, in the structure in which the closure gave them.
        """
        if not callable(closure):
            raise TypeError(f"minimize needs a closure that computes the losses, found a {type(closure).__name__}.")
        parts = self.in_parts(closure, args)
        while True:
            try:
                decide = next(parts)
            except StopIteration as end:
                return end.value
            decide()
            del decide  # and what it knows

    def in_parts(self, closure: Closure, args: tuple[Any, ...]) -> Parts:
        """The step of ``minimize`` in parts that ask nothing of the host: what is yielded is to be called between two."""
        self.zero_grad()
        answer = self._differentiate(closure, args)
        self.step()
        return answer
        yield

    def combine(self, closure: Closure | Losses, *args: Any, again: Callable[[], Losses] | None = None) -> Tensor:
        """The task losses as one scalar for any backward pass.

        Args:
            closure: called now as ``closure(*args)``, for a 1-D tensor, sequence or dict of scalar losses. Methods that
                evaluate twice call it again in ``step``, with the same random numbers, buffers, flags and autocast. Or
                losses that were computed already.
            args: the closure's, kept until ``step``.
            again: computes such losses once more. It must be bound to its batch (in a loop, by a default argument) and
                free of randomness.

        Several calls before one ``step`` are micro-batches of it. Without a graph, as in validation, nothing waits.

        """
        return self._combine(closure, args, again)[0]

    def obstacle_to_capture(self) -> str | None:
        """Why ``moonopt.capture`` cannot make a CUDA graph of a step, and what to do about it; None where it can."""
        return f"{type(self).__name__} does not say that it can be"

    def prepare_for_capture(self) -> None:
        """Bring to the device what a step would otherwise have to wait for."""

    def is_setting(self, name: str) -> bool:
        """Whether a step takes this entry of a group as given: no rate, and nothing that it counts or remembers there."""
        return name not in ("params", "param_names", "lr", "initial_lr", "step")

    def known_module(self) -> nn.Module | None:
        """The model, where it was passed."""
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Torch's, and forget combined losses whose backward has run: their step was skipped."""
        super().zero_grad(set_to_none)
        self._pending.forget_finished()

    def _differentiate(self, closure: Closure, args: tuple[Any, ...]) -> Any:
        """Leave the gradients of the combined losses in the parameters; the losses come back without their graph."""
        loss, answer = self._combine(closure, args, None)
        run_backward(loss)
        return detached(answer)

    def _combine(
        self, closure: Closure | Losses, args: tuple[Any, ...], again: Callable[[], Losses] | None
    ) -> tuple[Tensor, Losses]:
        self._pending.watch.tell()
        trained = self._trained()
        if torch.is_grad_enabled():
            self._pending.forget_left_out(trained)
        if callable(closure):
            if again is not None:
                raise ValueError("again= is for losses that were computed already: a closure is called again by itself.")
            replay = self._replay(closure, args)
            self._look_ahead(replay)
            answer = closure(*args) if replay is None else replay.first()
        else:
            if args:
                raise ValueError(f"Arguments are for a closure, and the first one is a {type(closure).__name__}.")
            replay = None if again is None else self._replay(again, ())
            self._look_ahead(replay)
            answer = closure
        losses = self._read(answer, replay)
        self._warn_of_constants(losses)
        batch = self._micro_batch(losses, replay) if losses.values.requires_grad else None
        loss = self._combined(losses, batch)
        if batch is not None:
            self._pending.add(batch, loss, trained)
        return loss, answer

    def _trained(self) -> list[Tensor]:
        """All parameters of all groups, those that are frozen as well."""
        return [p for group in self.param_groups for p in group["params"]]

    def _replay(self, closure: Closure, args: tuple[Any, ...]) -> Replay | None:
        """How to evaluate ``closure`` again, for methods that do."""
        return None

    def _look_ahead(self, replay: Replay | None) -> None:
        """What a method evaluates before the evaluation that counts."""

    def _read(self, answer: Losses, replay: Replay | None) -> TaskLosses:
        """The losses by task."""
        return read_losses(answer)

    def _combined(self, losses: TaskLosses, batch: MicroBatch | None) -> Tensor:
        """The losses as one; without a batch nobody differentiates it."""
        return (self._gradient_weights(losses).to(losses.values) * losses.values).sum()

    def _gradient_weights(self, losses: TaskLosses) -> Tensor:
        """Of the losses that are there, in the combined gradient."""
        return torch.zeros_like(losses.values).softmax(0)

    def _micro_batch(self, losses: TaskLosses, replay: Replay | None) -> MicroBatch:
        """What waits for ``step``."""
        return MicroBatch(losses, replay)

    def _repeatable(
        self, closure: Closure, args: tuple[Any, ...], module: nn.Module | None, plain: bool, advice: str
    ) -> Replay:
        """A closure that can be evaluated again; what to do about a module that is not known is advised once."""
        if module is None:
            self._warn_once(
                "The second evaluation of the losses protects no buffers (BatchNorm statistics, for one), because the module "
                f"is not known: {advice}."
            )
        devices = [self.param_groups[0]["params"][0].device]
        return Replay(closure, args, module, devices, plain, self._warn_once, self._pending.differentiating)

    def _warn_of_constants(self, losses: TaskLosses) -> None:
        """Of losses without a graph beside others: a placeholder would count as a task that never falls."""
        constant = [repr(name) for name, each in zip(losses.names, losses.separate, strict=True) if not each.requires_grad]
        if constant and losses.values.requires_grad:
            whose = f"{'tasks' if len(constant) > 1 else 'task'} {', '.join(constant)}"
            self._warn_once(
                f"The loss of {whose} does not depend on anything that is trained, and counts as one that never falls. Return "
                "a dict without it to leave a task out of a step."
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._pending.warned:
            self._pending.warned.add(text)
            warnings.warn(text, stacklevel=_users_level())


def _users_level() -> int:
    """How many frames up from the caller of this is code that is neither ours nor torch's."""
    ours = tuple(map(str, (Path(__file__).parents[1], Path(torch.__file__).parent, contextlib.__file__)))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    return level


def run_backward(loss: Tensor) -> None:
    """Its backward pass; a clear error where it has no graph."""
    if not loss.requires_grad:
        raise RuntimeError(
            "The losses do not depend on anything that is trained: were they detached, or computed under torch.no_grad()?"
        )
    loss.backward()  # type: ignore[no-untyped-call]
