"""Gradient sign dropout."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moonopt.balance import chance
from moonopt.balance.base import Aggregator, Memory, Tasks


class GradDrop(Aggregator):
    """GradDrop (Chen et al., 2020): in every coordinate, only gradients of one sign, chosen at random by how pure it is.

    With P = (1 + sum_i g_i / sum_i |g_i|) / 2 and U uniform, the positive parts stay where P > U and the negative ones
    elsewhere; the sum of what stays is the direction. It acts on the gradients of parameters, one task at a time: two sums
    are kept, whatever the number of tasks.

    Args:
        tasks: their names, or how many.
        seed: of the uniform numbers.

    """

    name: ClassVar[str] = "graddrop"

    def __init__(self, tasks: int | Sequence[str], seed: int = 0) -> None:
        super().__init__(tasks)
        self.seed = seed

    def initial(self, like: Tensor) -> dict[str, Any]:
        return chance.initial(self.seed)

    def direction(self, tasks: Tasks, memory: Memory) -> dict[Tensor, Tensor]:
        positive: dict[Tensor, Tensor] = {}
        negative: dict[Tensor, Tensor] = {}
        for row in tasks.gradients_one_by_one():
            for p, gradient in zip(tasks.parameters, row, strict=True):
                if gradient is not None:
                    for sums, part in ((positive, gradient.clamp_min(0)), (negative, gradient.clamp_max(0))):
                        sums[p] = part if p not in sums else sums[p].add_(part)
        if not positive:
            return {}
        generator = chance.generator(memory, next(iter(positive)).device)
        chosen = set(positive) if tasks.chosen is None else set(tasks.chosen)
        return {p: self._dropped(positive[p], negative[p], generator) for p in positive if p in chosen}

    def _dropped(self, positive: Tensor, negative: Tensor, generator: torch.Generator) -> Tensor:
        purity = (1 + (positive + negative) / (positive - negative).clamp_min(1e-30)) / 2
        uniform = torch.rand(positive.shape, generator=generator, device=positive.device, dtype=positive.dtype)
        return torch.where(purity > uniform, positive, negative)
