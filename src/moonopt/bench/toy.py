"""The paper's toy case: two least-squares tasks that disagree, over one 6 x 6 matrix.

    L1 = ||Theta x - y||^2 / 6        L2 = ||Theta x + y||^2 / 6

Every Theta with Theta x = t y, -1 <= t <= 1, is Pareto optimal, and t = 0 has the lowest average, ||y||^2 / 6. MGDA stops at
the first Pareto point that it meets.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moonopt.bench.base import Benchmark, Splits, Tensors
from moonopt.bench.metrics import Metric


class Toy(Benchmark):
    """Two least-squares tasks over one matrix, 1500 steps."""

    name = "toy"
    title = "the paper's toy case: two least-squares tasks over one 6 x 6 matrix"
    metrics = (
        Metric("first", higher=False, task="first"),
        Metric("second", higher=False, task="second"),
        Metric("average loss", higher=False),
        Metric("above the lowest", higher=False, unit="%", digits=3),
    )
    headline = "average loss"
    defaults: ClassVar = {
        "data.size": 6,
        "train.epochs": 30,
        "train.steps_per_epoch": 50,
        "train.batch_size": 1,
        "train.log_every": 5,
    }
    tuned: ClassVar = {"*": {"optimizer.lr": 0.1}}
    tuning = "0.1 for all; it was not tuned"
    tasks = ("first", "second")

    def load(self, folder: Path, seed: int) -> Splits:
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(1, self.settings["data.size"], generator=generator) for _ in range(2))
        return Splits(train=Tensors(x, y))

    def model(self) -> nn.Module:
        size = self.settings["data.size"]
        theta = nn.Linear(size, size, bias=False)
        nn.init.normal_(theta.weight)
        return theta

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        output = model(x)
        return {"first": (output - y).square().mean(), "second": (output + y).square().mean()}

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        (batch,) = batches
        first, second = (loss.item() for loss in self.losses(model, batch).values())
        average, lowest = (first + second) / 2, batch[1].square().mean().item()
        return {
            "first": first,
            "second": second,
            "average loss": average,
            "above the lowest": 100 * (average / lowest - 1),
        }
