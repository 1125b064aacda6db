"""Random loss weighting."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moonopt.balance import chance
from moonopt.balance.base import Balancer, Memory, Tasks


class RLW(Balancer):
    """Random loss weighting (Lin et al., 2022): the softmax of standard normals, drawn anew in every step. Weights sum to 1."""

    name: ClassVar[str] = "rlw"

    def __init__(self, tasks: int | Sequence[str], seed: int = 0) -> None:
        super().__init__(tasks)
        self.seed = seed

    def initial(self, like: Tensor) -> dict[str, Any]:
        return chance.initial(self.seed)

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        return torch.randn(tasks.count, generator=chance.generator(memory), device="cpu").softmax(0)
