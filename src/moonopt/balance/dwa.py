"""Dynamic weight average."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moonopt.balance.base import Balancer, Learned, Memory, Tasks
from moonopt.balance.linear import Reduction, check_reduction
from moonopt.tasks.presence import pick


class DWA(Balancer):
    """Dynamic weight average (Liu et al., 2019): w = K softmax(r / T), r_i = the loss of task i lately over that before.

    Args:
        tasks: their names, or how many.
        temperature: T.
        window: how many steps "lately" is, and "before" as many. The method's own paper compares epochs: pass the steps of
            one. Weights are equal until there are two full windows.
        sliding: compare the last two windows in every step; or only once per window, as epochs are.
        reduction: the sum of w_i l_i, or their mean.

    """

    name: ClassVar[str] = "dwa"

    def __init__(
        self,
        tasks: int | Sequence[str],
        temperature: float = 2.0,
        window: int = 25,
        sliding: bool = True,
        reduction: Reduction = "sum",
    ) -> None:
        super().__init__(tasks)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, found {temperature}.")
        if window < 1:
            raise ValueError(f"window must be a positive number of steps, found {window}.")
        check_reduction(reduction)
        self.temperature, self.window, self.sliding, self.reduction = temperature, window, sliding, reduction
        self.capturable = sliding

    def initial(self, like: Tensor) -> dict[str, Any]:
        return {
            "history": like.new_full((2 * self.window, len(like)), torch.nan),
            "seen": 0,
            "ratios": like.new_ones(len(like)),
        }

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        ratios = pick(memory["ratios"], tasks.losses.present)
        weights = tasks.count * (ratios / self.temperature).softmax(0)
        return weights if self.reduction == "sum" else weights / tasks.count

    def learn(self, learned: Learned, memory: Memory) -> None:
        newest = torch.where(learned.before.isfinite(), learned.before, memory["history"][-1])  # a task that was not there
        history = torch.cat([memory["history"][1:], newest[None]])
        memory["history"], memory["seen"] = history, memory["seen"] + 1
        if self.sliding or memory["seen"] % self.window == 0:
            ratios = history[self.window :].mean(0) / history[: self.window].mean(0)
            # Not finite before two windows are full, of a task that was not there, or of one that is solved.
            memory["ratios"] = torch.where(ratios.isfinite(), ratios, 1.0)
