"""The paper's toy case: two least-squares tasks that disagree, one 6 x 6 matrix, four methods.

    L1 = ||Theta x - y||^2 / 6        L2 = ||Theta x + y||^2 / 6

Every Theta with Theta x = t y, -1 <= t <= 1, is Pareto optimal, and t = 0 has the lowest average. MGDA stops at the first
Pareto point that it meets. Prints a table and saves quickstart.png.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from moonopt import MOON, Muon

STEPS = 1500
LEARNING_RATE = 0.1
COLOURS = {"MOON": "#1f5fbf", "Muon": "#e08214", "MGDA": "#7b3294", "MGDA+Muon": "#4d9221"}


class Toy(nn.Module):
    """The two tasks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(6, generator=generator), torch.randn(6, generator=generator)
        self.theta = nn.Linear(6, 6, bias=False)
        with torch.no_grad():
            self.theta.weight.copy_(torch.randn(6, 6, generator=generator))

    def losses(self) -> Tensor:
        output = self.theta(self.x)
        return torch.stack([(output - self.y).square().sum() / 6, (output + self.y).square().sum() / 6])


def moon(toy: Toy) -> tuple[torch.optim.Optimizer, Callable[[], Tensor]]:
    optimizer = MOON(toy, tasks=["first", "second"], lr=LEARNING_RATE)
    return optimizer, lambda: optimizer.minimize(toy.losses)


def muon(toy: Toy) -> tuple[torch.optim.Optimizer, Callable[[], Tensor]]:
    optimizer = Muon(toy, lr=LEARNING_RATE)
    return optimizer, lambda: optimizer.minimize(toy.losses)


def mgda(toy: Toy) -> tuple[torch.optim.Optimizer, Callable[[], Tensor]]:
    optimizer = torch.optim.SGD(toy.parameters(), lr=LEARNING_RATE)
    return optimizer, lambda: mgda_step(toy, optimizer)


def mgda_muon(toy: Toy) -> tuple[torch.optim.Optimizer, Callable[[], Tensor]]:
    optimizer = Muon(toy, lr=LEARNING_RATE)
    return optimizer, lambda: mgda_step(toy, optimizer)


def mgda_step(toy: Toy, optimizer: torch.optim.Optimizer) -> Tensor:
    """Weight two tasks by the shortest vector between their gradients, which has a closed form."""
    losses = toy.losses()
    first, second = (torch.autograd.grad(loss, toy.theta.weight, retain_graph=True)[0] for loss in losses)
    weight = (((second - first) * second).sum() / (first - second).square().sum()).clamp(0, 1)
    optimizer.zero_grad()
    (weight * losses[0] + (1 - weight) * losses[1]).backward()
    optimizer.step()
    return losses.detach()


METHODS = {"MOON": moon, "Muon": muon, "MGDA": mgda, "MGDA+Muon": mgda_muon}


def train(method: str, seed: int) -> Tensor:
    """Both losses before each of 1500 steps, with a cosine schedule, and after the last."""
    toy = Toy(seed)
    optimizer, step = METHODS[method](toy)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    path = []
    for _ in range(STEPS):
        path.append(step())
        scheduler.step()
    return torch.stack([*path, toy.losses().detach()])


def plot(paths: dict[str, Tensor], toy: Toy, file: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    lowest = toy.y.square().sum().item() / 6
    for name, path in paths.items():
        dashed = {"linestyle": (0, (4, 3))} if name == "Muon" else {}
        left.plot(path.mean(1), label=name, color=COLOURS[name], linewidth=2, **dashed)
        right.plot(*path.T, color=COLOURS[name], linewidth=1.5, alpha=0.8, **dashed)
        right.plot(
            *path[-1],
            "o",
            color=COLOURS[name],
            markersize=7 if "Muon" in name else 12,
            markeredgecolor="white",
            label=f"{name} ends",
        )
    left.axhline(lowest, color="0.4", linewidth=1, linestyle=":")
    left.annotate("lowest possible", (STEPS, lowest), (0, -14), textcoords="offset points", ha="right", color="0.4")
    left.set(xlabel="step", ylabel="average of the two losses", ylim=(0, None), title="Average loss")
    left.legend(frameon=False)
    t = torch.linspace(-1, 1, 100)
    right.plot(
        4 * lowest * ((t - 1) / 2) ** 2,
        4 * lowest * ((t + 1) / 2) ** 2,
        color="0.7",
        linewidth=7,
        zorder=0,
        label="Pareto front",
    )
    right.set(xlabel="loss of the first task", ylabel="loss of the second task", title="Where they end")
    right.set(xlim=(-0.2 * lowest, 6 * lowest), ylim=(-0.2 * lowest, 6 * lowest))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, default=Path("quickstart.png"))
    options = parser.parse_args()

    paths = {name: train(name, options.seed) for name in METHODS}
    toy = Toy(options.seed)
    lowest = toy.y.square().sum().item() / 6
    print(f"Two least-squares tasks on one 6 x 6 matrix, {STEPS} steps, seed {options.seed}\n")
    print(f"{'method':12}{'first task':>12}{'second task':>13}{'average':>11}{'above the lowest':>19}")
    for name, path in paths.items():
        first, second = path[-1].tolist()
        average = (first + second) / 2
        print(f"{name:12}{first:12.4f}{second:13.4f}{average:11.4f}{max(0.0, average / lowest - 1):19.2%}")
    print("\nMuon minimises the plotted average itself. MOON ends there, too; MGDA stops at the first Pareto point it meets.")
    plot(paths, toy, options.plot)
    print(f"Plot: {options.plot}")


if __name__ == "__main__":
    main()
