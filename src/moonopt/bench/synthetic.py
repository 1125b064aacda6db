"""The paper's synthetic regression: 30 targets of 20 inputs, one task each, fitted by an MLP in 1000 full-batch steps.

The paper says no more about the data, nor of the scales of its targets. Ours come from a random network and noise, so that they
can be learned in part:

    x ~ N(0, I)        y = s * (standardized(B tanh(A x)) + noise * N(0, I))        s_i = exp(spread * N(0, 1))

Every seed draws its own problem. With ``data.spread = 0`` all tasks have one scale; with 1 a few tasks are
much larger than the rest. There plain MOON with a large beta (0.03) starves the largest, because its weights follow absolute
decreases, and ``loss="log"`` does not. All metrics are of the training data, as in the paper.
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moonopt.bench.base import Benchmark, Splits, Tensors
from moonopt.bench.metrics import Metric
from moonopt.methods import by_optimizer

INPUTS, TASKS = 20, 30
TEACHER_WIDTH = 64


class Synthetic30(Benchmark):
    """Thirty regressions over one MLP, 1000 steps."""

    name = "synthetic30"
    title = "the paper's 30-task regression on synthetic data, by an MLP"
    metrics = (
        Metric("average loss", higher=False),
        Metric("worst loss", higher=False),
        Metric("relative loss", higher=False),  # each task's loss over the variance of its target, averaged
        Metric("worst relative loss", higher=False),
    )
    headline = "average loss"
    defaults: ClassVar = {
        "data.samples": 512,
        "data.noise": 0.1,  # standard deviation, where the signal has 1
        "data.spread": 0.0,
        "model.width": 64,
        "model.depth": 2,  # hidden layers
        "train.epochs": 20,
        "train.steps_per_epoch": 50,
        "train.batch_size": 512,
    }
    tuned: ClassVar = {
        **by_optimizer({"optimizer.lr": 0.03}, {"optimizer.lr": 0.05, "optimizer.vector_lr": 0.03}),
        "nash-mtl": {"optimizer.lr": 0.02},
    }
    tuning = (
        "Lowest mean average loss over the problems of seeds 100 to 102, nine trials each, for moon, muon, famo+muon, famo, "
        "ls, uw, si and nash-mtl (docs/synthetic30.md); every trial is in results/synthetic30. The others have the rate of "
        "ls, and with Muon those of muon: mgda and mgda+muon chose rates at the ends of their grids."
    )
    tasks = tuple(f"y{number}" for number in range(TASKS))

    def load(self, folder: Path, seed: int) -> Splits:
        samples, noise = self.settings["data.samples"], self.settings["data.noise"]
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, INPUTS, generator=generator)
        first = torch.randn(INPUTS, TEACHER_WIDTH, generator=generator) / INPUTS**0.5
        second = torch.randn(TEACHER_WIDTH, TASKS, generator=generator)
        signal = (x @ first).tanh() @ second
        signal = (signal - signal.mean(0)) / signal.std(0)
        noisy = signal + noise * torch.randn(samples, TASKS, generator=generator)
        scales = (self.settings["data.spread"] * torch.randn(TASKS, generator=generator)).exp()
        return Splits(train=Tensors(x, scales * noisy))

    def model(self) -> nn.Module:
        return MLP(self.settings["model.width"], self.settings["model.depth"])

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        losses: Tensor = (model(x) - y).square().mean(0)
        return losses

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        errors, targets = zip(*((model(x) - y, y) for x, y in batches), strict=True)
        loss = torch.cat(errors).square().mean(0)
        relative = loss / torch.cat(targets).var(0, correction=0)
        return {
            "average loss": loss.mean().item(),
            "worst loss": loss.max().item(),
            "relative loss": relative.mean().item(),
            "worst relative loss": relative.max().item(),
        }


class MLP(nn.Module):
    """Hidden linear layers, whose weights are the matrices, and a linear head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [INPUTS] + [width] * depth
        layers = [(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(sizes)]
        self.hidden = nn.Sequential(*(module for layer in layers for module in layer))
        self.head = nn.Linear(sizes[-1], TASKS)

    def forward(self, x: Tensor) -> Tensor:
        """The predictions of all tasks, (batch, tasks)."""
        return self.head(self.hidden(x))  # type: ignore[no-any-return]
