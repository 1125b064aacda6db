"""Conflict-averse gradient descent."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from moonopt.balance.base import Balancer, Heads, Memory, Tasks
from moonopt.linalg.conflict_averse import cagrad_weights


class CAGrad(Balancer):
    """CAGrad (Liu et al., 2021): near the mean gradient g0, the direction that helps the slowest task most.

    d maximises min_i <g_i, d> over ||d - g0|| <= c ||g0||.

    Args:
        tasks: their names, or how many.
        c: how far from the mean gradient d may be.
        rescale: divide d by 1 + c^2, as the method's code does.
        times_tasks: multiply d by K, to match the size of a summed loss.

    """

    name: ClassVar[str] = "cagrad"
    needs_gradients: ClassVar[bool] = True
    uses_gram: bool = True
    heads: Heads = "plain"

    def __init__(self, tasks: int | Sequence[str], c: float = 0.4, rescale: bool = True, times_tasks: bool = False) -> None:
        super().__init__(tasks)
        if not c >= 0:
            raise ValueError(f"c must be a number of at least 0, found {c}.")
        self.c, self.rescale, self.times_tasks = c, rescale, times_tasks

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        weights = cagrad_weights(tasks.gram(), self.c).coefficients
        if self.rescale:
            weights = weights / (1 + self.c**2)
        return weights * tasks.count if self.times_tasks else weights
