"""Gradient sign dropout."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moonopt.balance import chance
from moonopt.balance.base import Aggregator, Memory, Tasks
from moonopt.tasks.gradients import by_parameter


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
        positive: Tensor | None = None
        negative: Tensor | None = None
        used: set[Tensor] = set()
        for row in tasks.gradients_one_by_one():
            used.update(by_parameter(tasks.parameters, row))
            pairs = zip(tasks.parameters, row, strict=True)
            together = torch.cat([(torch.zeros_like(p) if each is None else each).flatten() for p, each in pairs])
            above, below = together.clamp_min(0), together.clamp_max(0)
            positive = above if positive is None else positive.add_(above)
            negative = below if negative is None else negative.add_(below)
        if positive is None or negative is None or not used:
            return {}
        purity = (1 + (positive + negative) / (positive - negative).clamp_min(1e-30)) / 2
        generator = chance.generator(memory, positive.device)
        uniform = torch.rand(positive.shape, generator=generator, device=positive.device, dtype=positive.dtype)
        pieces = torch.split(torch.where(purity > uniform, positive, negative), [p.numel() for p in tasks.parameters])
        chosen = used if tasks.chosen is None else used & set(tasks.chosen)
        return {p: piece.view_as(p) for p, piece in zip(tasks.parameters, pieces, strict=True) if p in chosen}
