"""What waits between ``combine`` and ``step``, and what has been counted on the way.

Everything is in one mutable object, because trainers wrap optimizers in subclasses that copy the ``__dict__``: attributes
must not be rebound. Pickling and copying drop it: a graph that waits for its backward cannot be saved.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moonopt.tasks.losses import TaskLosses, check_same_tasks
from moonopt.tasks.replay import Replay
from moonopt.tasks.watch import Watch


class MicroBatch:
    """One micro-batch: its losses before the move, how to evaluate them again, and whether its backward has run.

    It is passed over where gradients were cleared before that; its backward may follow, or never come. Where one has left
    gradients in no parameter, they are collected elsewhere.
    """

    def __init__(self, losses: TaskLosses, replay: Replay | None, observed: Any = None, observed_before: Any = None) -> None:
        self.names, self.present = losses.names, losses.present
        self.losses = losses._replace(values=losses.values.detach(), separate=())  # as they are compared, without a graph
        self.replay = replay
        self.observed = observed  # what the method wants to keep, and what it had from earlier ones
        self.observed_before = observed_before
        self.backward_has_run = False
        self.left_gradients = False
        self.passed_over = False
        self.left_out = False

    @property
    def before(self) -> Tensor:
        """The losses as numbers, one for each task that is there."""
        return self.losses.values

    def notice_backward(self, parameters: Sequence[Tensor]) -> None:
        """A backward pass reaches the combined loss, by whatever name and scale it is called."""
        self.backward_has_run = True
        if self.replay is not None:
            self.replay.notice_backward()
        if torch.compiler.is_compiling():  # compiled autograd may not have a look at the end of the pass
            self.left_gradients = True
            return
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(self._look_for_gradients, parameters))

    def _look_for_gradients(self, parameters: Sequence[Tensor]) -> None:
        self.left_gradients = any(p.grad is not None for p in parameters)

    def evaluated_again(self, losses: TaskLosses) -> TaskLosses:
        """The losses of a later evaluation, which must be those of the same tasks."""
        check_same_tasks(self.names, losses.names)
        return losses


class Pending:
    """The combined losses of the coming step, and counters."""

    def __init__(self) -> None:
        self.batches: list[MicroBatch] = []
        self.watch = Watch()
        self.counters: dict[str, int | Tensor] = {}
        self.latest: dict[str, float | Tensor] = {}  # of the last step, for diagnostics
        self.by_task: dict[str, Tensor] = {}  # of the last step, one number per task
        self.foreseen: dict[str, Any] = {}  # what was evaluated before the first evaluation
        self.warned: set[str] = set()
        self.differentiating: set[object] = set()  # the code of closures that do so inside
        self._taken = 0  # how often, so far

    def __reduce__(self) -> tuple[Callable[[], "Pending"], tuple[()]]:
        return Pending, ()

    def add(self, batch: MicroBatch, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        """Let ``batch`` wait for the backward pass of ``loss``, with gradients of ``parameters``, and the step after it."""
        coming = self._taken

        def notice(_: Tensor) -> None:
            if batch.left_out and coming == self._taken:
                batch.left_out = False
                self.batches.append(batch)
                self.count("losses_without_backward", -1)
            batch.notice_backward(parameters)

        loss.register_hook(notice)  # type: ignore[no-untyped-call]
        self.batches.append(batch)

    def take(self) -> list[MicroBatch]:
        """What the coming step is made of.

        A loss without a backward has no part in it, nor in a later one: by then the parameters that it was evaluated at
        are gone.
        """
        taken = [each for each in self.batches if each.backward_has_run]
        self.count("losses_without_backward", len(self.batches) - len(taken))
        self.batches.clear()
        self._taken += 1
        return taken

    def forget_finished(self) -> None:
        """Gradients are cleared: drop losses whose backward has run but whose step never came, since a scaler skipped it."""
        self._drop([each for each in self.batches if each.backward_has_run])
        for each in self.batches:
            each.passed_over = True

    def forget_left_out(self, parameters: Sequence[Tensor]) -> None:
        """Before others are combined, drop losses that will never have a step.

        Those that were passed over have no backward any more; should it come all the same, they are back. Where no parameter
        has a gradient although a backward has left some, the model's own ``zero_grad`` has cleared them.
        """
        if self.batches and all(p.grad is None for p in parameters):
            self._drop([each for each in self.batches if each.left_gradients])
        for each in self.batches:
            each.left_out = each.passed_over and not each.backward_has_run
        kept = [each for each in self.batches if not each.left_out]
        if len(kept) < len(self.batches):
            self.count("losses_without_backward", len(self.batches) - len(kept))
            self.batches[:] = kept

    def _drop(self, skipped: Sequence[MicroBatch]) -> None:
        if skipped:
            self.count("skipped_steps", 1)
            self.batches[:] = [each for each in self.batches if each not in skipped]

    def clear(self) -> None:
        """Forget everything but warnings that were given and what is known of closures; counters on a device stay, at 0."""
        self.batches.clear()
        self.watch.clear()
        self.counters = {name: count.zero_() for name, count in self.counters.items() if isinstance(count, Tensor)}
        self.latest.clear()
        self.by_task.clear()

    def count(self, name: str, number: int | Tensor) -> None:
        """Count on; on the device in place, so that a captured step counts as well."""
        before = self.counters.get(name, 0)
        if isinstance(number, Tensor) and not isinstance(before, Tensor):
            before = torch.full_like(number, before)
        before += number
        self.counters[name] = before
