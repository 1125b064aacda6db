"""Fixed weights: linear scalarization (LS), its scale-invariant form (SI), and a single task (STL)."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from moonopt.balance.base import Balancer, Memory, Tasks
from moonopt.errors import unknown_name
from moonopt.tasks.presence import pick, selection

Reduction = Literal["mean", "sum"]


def check_reduction(reduction: str) -> None:
    """Raise where it is none."""
    if reduction not in ("mean", "sum"):
        raise ValueError(unknown_name(reduction, ("mean", "sum"), "reduction"))


class LS(Balancer):
    """Linear scalarization: the mean or the sum of the losses.

    Args:
        tasks: their names, or how many.
        reduction: "mean", over the tasks that are there, or "sum".
        factors: how much the loss of each task counts; by default all alike.

    >>> LS(2, reduction="sum")
    LS(['0', '1'], reduction='sum')

    """

    name: ClassVar[str] = "ls"
    capturable: bool = True
    factors: list[float] | None = None
    _factors: Tensor | None = None

    def __init__(
        self, tasks: int | Sequence[str], reduction: Reduction = "mean", factors: Sequence[float] | None = None
    ) -> None:
        super().__init__(tasks)
        check_reduction(reduction)
        self.reduction = reduction
        if factors is not None:
            listed = list(factors) if isinstance(factors, Sequence) and not isinstance(factors, str) else []
            good = all(isinstance(each, int | float) and 0 < each < math.inf for each in listed)
            if not good or len(listed) != len(self.tasks):
                raise ValueError(f"factors must be one number above 0 for each of {len(self.tasks)} tasks, found {factors!r}.")
            self.factors = [float(each) for each in listed]

    def initial(self, like: Tensor) -> dict[str, Any]:
        self._factors = None if self.factors is None else like.new_tensor(self.factors)  # which a captured step cannot fetch
        return {}

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        if self._factors is None:
            return torch.full_like(tasks.values, 1 / tasks.count if self.reduction == "mean" else 1.0)
        factors = pick(self._factors, tasks.losses.present).to(tasks.values)
        return factors / factors.sum() if self.reduction == "mean" else factors


class SI(LS):
    """Scale-invariant: the mean or the sum of log l_i, whose gradient has the weights 1 / l_i. Needs positive losses."""

    name: ClassVar[str] = "si"
    takes_logarithms: ClassVar[bool] = True

    def __init__(self, tasks: int | Sequence[str], reduction: Reduction = "mean") -> None:
        super().__init__(tasks, reduction)

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        return super().weights(tasks, memory) / torch.where(tasks.values > 0, tasks.values, torch.nan)

    def value(self, losses: Tensor, weights: Tensor, memory: Memory) -> Tensor:
        logs = losses.log()
        return logs.mean() if self.reduction == "mean" else logs.sum()


class STL(Balancer):
    """Single-task learning: the loss of one task, and nothing of the others."""

    name: ClassVar[str] = "stl"
    capturable: bool = True

    def __init__(self, tasks: int | Sequence[str], task: str | None = None) -> None:
        super().__init__(tasks)
        self.task = self.tasks[0] if task is None else task
        if self.task not in self.tasks:
            raise ValueError(unknown_name(str(task), self.tasks, "task"))

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        return selection([name == self.task for name in tasks.losses.names], tasks.values)
