"""Reading a closure's answer: which tasks it has, one scalar each, in a dtype that can be compared."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moonopt.errors import unknown_name

HALF_DTYPES = (torch.bfloat16, torch.float16)

#: What a closure may return: a 1-D tensor, a sequence or a mapping of scalar losses.
Losses = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


class TaskLosses(NamedTuple):
    """The losses of the tasks that are there, in the order of the tasks."""

    names: tuple[str, ...]
    present: tuple[bool, ...]  # of all tasks, in their order
    values: Tensor  # one per present task, float32 or better, still in the graph
    separate: tuple[Tensor, ...]  # the same before they were stacked: a backward pass from one does not visit the others
    spacing: float  # of numbers around 1, in the dtype that the closure gave its losses
    are_logarithms: bool = False

    @property
    def rounding(self) -> Tensor:
        """How far rounding alone may have put each value."""
        sizes = self.values.detach().abs()
        return self.spacing * (1 + sizes if self.are_logarithms else sizes)

    def log(self) -> "TaskLosses":
        """The logarithms of the losses. A loss that is not positive becomes NaN or infinite."""
        separate = tuple(each.log() for each in self.separate)
        return self._replace(values=torch.stack(separate), separate=separate, are_logarithms=True)


def task_names(tasks: int | Sequence[str]) -> tuple[str, ...]:
    """Task names from a number ("0", "1", ...) or from the names themselves."""
    if isinstance(tasks, int):
        names = tuple(str(i) for i in range(tasks))
    else:
        names = tuple(tasks) if isinstance(tasks, Sequence) and not isinstance(tasks, str) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"tasks must be a positive number or a sequence of names, found {tasks!r}.")
    if len(set(names)) < len(names):
        raise ValueError(f"Task names must differ, found {', '.join(names)}.")
    return names


def read_losses(answer: Losses, tasks: Sequence[str] | None = None) -> TaskLosses:
    """The losses in ``answer`` by task. Without ``tasks``, the answer itself says which there are.

    Only a mapping may omit tasks: a sequence or tensor has one loss for each, in their order.
    """
    if isinstance(answer, Mapping):
        by_name = {str(name) if isinstance(name, int) else name: loss for name, loss in answer.items()}
        if len(by_name) < len(answer):
            raise ValueError(f"The closure returned two losses of one task, found {', '.join(map(repr, answer))}.")
        tasks = tuple(by_name) if tasks is None else tasks
        _check_names(by_name, tasks)
    else:
        scalars = _scalars(answer)
        tasks = task_names(max(1, len(scalars))) if tasks is None else tasks
        if len(scalars) != len(tasks):
            raise ValueError(
                f"The closure returned {len(scalars)} losses, expected {len(tasks)} ({', '.join(tasks)}). "
                "Return a dict to leave tasks out."
            )
        by_name = dict(zip(tasks, scalars, strict=True))
    names = tuple(name for name in tasks if name in by_name)
    losses = [_checked(by_name[name], name) for name in names]
    device = losses[0].device
    separate = tuple(loss.to(device, torch.promote_types(loss.dtype, torch.float32)) for loss in losses)
    values = torch.stack(separate)
    spacing = max(torch.finfo(loss.dtype).eps for loss in losses)
    present = tuple(name in by_name for name in tasks)
    return TaskLosses(names, present, values, separate, spacing)


def check_same_tasks(before: Sequence[str], again: Sequence[str]) -> None:
    """Raise where another evaluation has the losses of other tasks."""
    if before != again:
        raise ValueError(
            f"Evaluated again, the closure returned the losses of {', '.join(again)}, expected those of {', '.join(before)} as "
            "before."
        )


def in_half_precision(answer: Losses) -> bool:
    """Whether some loss has fewer digits than float32."""
    losses = [answer] if isinstance(answer, Tensor) else answer.values() if isinstance(answer, Mapping) else answer
    return any(loss.dtype in HALF_DTYPES for loss in losses)


def detached(answer: Losses) -> Any:
    """The same structure without the graph."""
    if isinstance(answer, Tensor):
        return answer.detach()
    if isinstance(answer, Mapping):
        losses_by_name = {name: loss.detach() for name, loss in answer.items()}
        return copy.copy(answer) | losses_by_name if isinstance(answer, dict) else losses_by_name
    losses = [loss.detach() for loss in answer]
    if isinstance(answer, tuple):
        return type(answer)._make(losses) if hasattr(answer, "_make") else tuple(losses)
    return losses


def _check_names(by_name: Mapping[str, Tensor], tasks: Sequence[str]) -> None:
    for name in by_name:
        if name not in tasks:
            raise ValueError(unknown_name(name, tasks, "task in the closure's losses"))
    if not by_name:
        raise ValueError(f"The closure returned no loss at all, expected some of {', '.join(tasks) or 'the tasks'}.")


def _scalars(answer: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    if isinstance(answer, Tensor):
        if answer.ndim != 1:
            raise ValueError(
                f"The closure returned a tensor of shape {tuple(answer.shape)}, expected one loss per task: a 1-D tensor, "
                "a sequence or a dict of scalars."
            )
        return answer.unbind()
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        return answer
    raise TypeError(
        f"The closure returned {type(answer).__name__}, expected a 1-D tensor, a sequence or a dict of scalar losses."
    )


def _checked(loss: Tensor, name: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"The loss of task {name!r} is a {type(loss).__name__}, expected a tensor with one number.")
    if loss.ndim != 0:
        raise ValueError(
            f"The loss of task {name!r} has shape {tuple(loss.shape)}, expected a scalar: take its mean or its sum."
        )
    if not loss.is_floating_point():
        raise TypeError(f"The loss of task {name!r} has dtype {loss.dtype}, expected a floating point one.")
    return loss
