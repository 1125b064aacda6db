"""Uncertainty weighting."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moonopt.balance import adam
from moonopt.balance.base import Balancer, Learned, Memory, Tasks
from moonopt.tasks.presence import pick, selection


class UW(Balancer):
    """Uncertainty weighting (Kendall et al., 2018): sum_i (exp(-s_i) l_i + s_i) / 2, where the s_i are learned by Adam.

    Args:
        tasks: their names, or how many.
        lr: the rate at which s is learned.
        start: of s; public codes start at 0 or at -0.5.

    """

    name: ClassVar[str] = "uw"
    capturable: bool = True

    def __init__(self, tasks: int | Sequence[str], lr: float = 0.025, start: float = 0.0) -> None:
        super().__init__(tasks)
        self.lr, self.start = lr, start

    def initial(self, like: Tensor) -> dict[str, Any]:
        return adam.initial("s", torch.full_like(like, self.start))

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        return pick(memory["s"], tasks.losses.present).neg().exp() / 2

    def value(self, losses: Tensor, weights: Tensor, memory: Memory) -> Tensor:
        return (weights * losses).sum() - (2 * weights).log().sum() / 2

    def learn(self, learned: Learned, memory: Memory) -> None:
        here = selection(learned.present, memory["s"])
        losses = torch.where(here > 0, learned.before, 0.0)
        adam.step(memory, "s", (1 - memory["s"].neg().exp() * losses) / 2, here, self.lr)
