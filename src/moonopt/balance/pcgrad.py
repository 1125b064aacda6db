"""Projecting conflicting gradients."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moonopt.balance import chance
from moonopt.balance.base import Balancer, Heads, Memory, Tasks
from moonopt.balance.linear import Reduction, check_reduction
from moonopt.linalg.bargaining import pcgrad_weights


class PCGrad(Balancer):
    """PCGrad (Yu et al., 2020): from each task gradient, its projections on those in conflict with it are taken away.

    They are visited in random order, each with its original gradient, and the results are added up.

    Args:
        tasks: their names, or how many.
        seed: of the orders.
        reduction: the sum of the projected gradients, or their mean.

    """

    name: ClassVar[str] = "pcgrad"
    needs_gradients: ClassVar[bool] = True
    uses_gram: bool = True
    heads: Heads = "plain"

    def __init__(self, tasks: int | Sequence[str], seed: int = 0, reduction: Reduction = "sum") -> None:
        super().__init__(tasks)
        check_reduction(reduction)
        self.seed, self.reduction = seed, reduction

    def initial(self, like: Tensor) -> dict[str, Any]:
        return chance.initial(self.seed)

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        weights = pcgrad_weights(tasks.gram(), random_orders(tasks.count, chance.generator(memory)))
        return weights if self.reduction == "sum" else weights / tasks.count


def random_orders(count: int, generator: torch.Generator) -> Tensor:
    """For each task the others in random order, (count, count - 1)."""
    order = torch.rand(count, count - 1, generator=generator, device="cpu").argsort(1)
    return order + (order >= torch.arange(count, device="cpu")[:, None])
