"""A model of two tasks, in a module of its own so that it can be pickled: several conftest.py share one name."""

import torch
from torch import Tensor, nn


class TwoHeads(nn.Module):
    """A smooth trunk of two matrices and one head per task."""

    def __init__(self, tasks: int = 2, width: int = 12) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(tasks))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        return torch.cat([head(hidden) for head in self.heads], dim=1)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return (self(x) - y).square().mean(0)
