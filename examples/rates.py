"""MOON against its theorems: measured Pareto stationarity beside the bound, and how fast both fall with the steps T.

Three bounded, smooth and non-convex losses of one 6 x 8 matrix, l_i = mean phi(Theta - A_i) with
phi(x) = x^2 / (1 + x^2), for which every constant of the theorems is known. Prints the tables and saves rates.png.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from moonopt import MOON, pareto_stationarity, polar, solve_dual
from moonopt.analysis import bounds
from moonopt.linalg.simplex import min_norm_weights

ROWS, COLS, TASKS = 6, 8, 3
MEASURED = 100  # points of a run at which the stationarity is computed
MOMENTUM = 0.9
STEPS = (100, 1000, 10000)

#: phi'' <= 2 and |phi'| <= 3 sqrt(3) / 8, in the spectral and nuclear norms; phi < 1.
PROBLEM = bounds.Problem(
    tasks=TASKS,
    smoothness=2 / COLS,
    gradient_bound=math.sqrt(ROWS) * (3 * math.sqrt(3) / 8) / math.sqrt(ROWS * COLS),
    loss_bound=1.0,
    rho=bounds.block_rho([(ROWS, COLS)]),
)


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


CENTRES = 0.3 * gaussian(TASKS, ROWS, COLS, seed=0)
START = torch.full((ROWS, COLS), 0.2, dtype=torch.float64)


def losses(theta: Tensor) -> Tensor:
    squares = (theta - CENTRES).square()
    return (squares / (1 + squares)).mean((1, 2))


def gradients(theta: Tensor) -> Tensor:
    differences = theta - CENTRES
    return 2 * differences / (1 + differences.square()).square() / (ROWS * COLS)


def optimizer_of(theta: nn.Parameter, settings: bounds.Settings, **options: object) -> MOON:
    """Algorithm 1 with exact deltas, and exact polar factors unless said otherwise."""
    group = [{"params": [theta], "kind": "matrix"}]
    chosen = {"momentum": settings.momentum, "delta": "per_task", "schedule": "svd"} | options
    return MOON(group, tasks=TASKS, lr=settings.lr, beta=settings.beta, **chosen)


def averaged(steps: int, theta: Tensor, step: Callable[[], object]) -> float:
    """The mean stationarity of a run, at equally spaced steps."""
    measured = []
    for t in range(steps):
        if t % (steps // min(steps, MEASURED)) == 0:
            measured.append(pareto_stationarity(gradients(theta.detach())))
        step()
    return sum(measured) / len(measured)


class Rate(NamedTuple):
    """A run's measure beside its bound."""

    steps: int
    measured: float
    bound: float
    note: str = ""


def deterministic(steps: int) -> Rate:
    settings = bounds.deterministic_settings(PROBLEM, steps, mu=1 - MOMENTUM)
    theta = nn.Parameter(START.clone())
    optimizer = optimizer_of(theta, settings)
    measured = averaged(steps, theta, lambda: optimizer.minimize(lambda: losses(theta)))
    return Rate(steps, measured, bounds.deterministic(PROBLEM, steps, settings).value)


def stochastic(steps: int, noise: float, seed: int) -> Rate:
    """Each task's gradient has an error of Frobenius norm ``noise``, in the root mean square."""
    settings = bounds.stochastic_settings(PROBLEM, steps, noise)
    theta = nn.Parameter(START.clone())
    optimizer = optimizer_of(theta, settings)
    generator = torch.Generator().manual_seed(seed)

    def noisy() -> Tensor:
        error = torch.randn(TASKS, ROWS, COLS, dtype=torch.float64, generator=generator) * noise / math.sqrt(ROWS * COLS)
        return losses(theta) + (error * (theta - theta.detach())).sum((1, 2))

    measured = averaged(steps, theta, lambda: optimizer.minimize(noisy))
    return Rate(steps, measured, bounds.stochastic(PROBLEM, steps, settings, noise).value, f"mu {settings.mu:.3f}")


def finite_step(steps: int, iterations: int = 6) -> Rate:
    """Newton-Schulz in place of the exact polar factor; its largest error along the run enters the bound.

    Five iterations, the default, have errors of up to 0.84 in 10,000 steps: the momentum comes close to singular.
    """
    settings = bounds.deterministic_settings(PROBLEM, steps, mu=1 - MOMENTUM)
    theta = nn.Parameter(START.clone())
    optimizer = optimizer_of(theta, settings, schedule="polar_express", steps=iterations)
    largest = 0.0

    def step() -> None:
        nonlocal largest
        before = theta.detach().clone()
        optimizer.minimize(lambda: losses(theta))
        taken = (before - theta.detach()) / settings.lr
        exact = polar(optimizer.state[theta]["momentum"], "svd")
        largest = max(largest, float(torch.linalg.matrix_norm(taken - exact, 2)))

    measured = averaged(steps, theta, step)
    bound = bounds.finite_step(PROBLEM, steps, settings, largest).value
    return Rate(steps, measured, bound, f"eps {largest:.3f}")


def convex(steps: int) -> Rate:
    """Quadratics (1/2)||Theta - A_i||_F^2: how far below all losses could go at once is half the squared distance to the hull.

    Omega is the smallest spectral ball about 0 that holds the iterates and the A_i, found afterwards.
    """
    centres = gaussian(TASKS, ROWS, COLS, seed=1)
    theta = nn.Parameter(2 * gaussian(ROWS, COLS, seed=2))
    optimizer = optimizer_of(theta, bounds.Settings(lr=5 / steps**0.75, beta=1e-3, mu=1 - MOMENTUM))
    radius = float(torch.linalg.matrix_norm(centres, 2).max())
    could_fall, norms = [], []
    for _ in range(steps):
        differences = (theta.detach() - centres).flatten(1)
        weights = min_norm_weights(differences @ differences.mT)
        could_fall.append(float((weights @ differences).square().sum()) / 2)
        weighted = (optimizer.task_weights @ differences).reshape(ROWS, COLS)
        norms.append(float(torch.linalg.matrix_norm(weighted, "nuc")))
        radius = max(radius, float(torch.linalg.matrix_norm(theta.detach(), 2)))
        optimizer.minimize(lambda: (theta - centres).square().sum((1, 2)) / 2)
    return Rate(steps, sum(could_fall) / steps, bounds.convex(2 * radius, norms), f"D {2 * radius:.1f}")


def weights_alone(steps: int) -> Rate:
    """Losses that are linear in Theta freeze the gradients, and only the weights learn.

    Without momentum and gamma, and with beta = sqrt(2 log m / T) / H, the mean weights are within H sqrt(2 log m / T).
    """
    constant = gaussian(TASKS, ROWS, COLS, seed=3) + 0.5 * gaussian(1, ROWS, COLS, seed=4)
    bound = float(torch.linalg.matrix_norm(constant, "nuc").max())
    settings = bounds.Settings(lr=1e-3, beta=math.sqrt(2 * math.log(TASKS) / steps) / bound, mu=1.0)
    theta = nn.Parameter(torch.zeros(ROWS, COLS, dtype=torch.float64))
    optimizer = optimizer_of(theta, settings, gamma=0.0)
    mean = torch.zeros(TASKS, dtype=torch.float64)
    for _ in range(steps):
        mean += optimizer.task_weights / steps
        optimizer.minimize(lambda: (constant * theta).sum((1, 2)))
    value = float(torch.linalg.matrix_norm(torch.tensordot(mean, constant, 1), "nuc"))
    return Rate(steps, value - solve_dual(constant).lower_bound, bound * math.sqrt(2 * math.log(TASKS) / steps))


def slope(rates: list[Rate], of: str = "measured") -> float:
    """Of a straight line through log(measured) over log(T), by least squares."""
    x = torch.tensor([math.log(rate.steps) for rate in rates])
    y = torch.tensor([math.log(getattr(rate, of)) for rate in rates])
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def mean_over_seeds(steps: int, noise: float, seeds: int) -> Rate:
    runs = [stochastic(steps, noise, seed) for seed in range(seeds)]
    return runs[0]._replace(measured=sum(run.measured for run in runs) / seeds)


def plot(tables: dict[str, list[Rate]], file: Path) -> None:
    figure, axes = plt.subplots(1, len(tables), figsize=(3.4 * len(tables), 3.6), layout="constrained")
    for axis, (name, rates) in zip(axes, tables.items(), strict=True):
        for what, style in (("bound", {"color": "0.5", "linestyle": "--"}), ("measured", {"color": "#1f5fbf", "marker": "o"})):
            label = f"{what}, slope {slope(rates, what):.2f}"
            axis.loglog([rate.steps for rate in rates], [getattr(rate, what) for rate in rates], label=label, **style)
        axis.set(title=name, xlabel="steps T")
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS), metavar="T")
    parser.add_argument("--noise", type=float, default=0.1, help="sigma of the stochastic theorem")
    parser.add_argument("--seeds", type=int, default=2, help="runs to average over with noise")
    parser.add_argument("--plot", type=Path, default=Path("rates.png"))
    options = parser.parse_args()

    theorems: dict[str, Callable[[int], Rate]] = {
        "deterministic": deterministic,
        f"stochastic, sigma {options.noise}": lambda steps: mean_over_seeds(steps, options.noise, options.seeds),
        "finite-step": finite_step,
        "convex": convex,
        "weights alone": weights_alone,
    }
    print(f"{TASKS} losses of a {ROWS} x {COLS} matrix; the measure is averaged over the steps\n")
    print(f"{'theorem':24}{'T':>8}{'measured':>12}{'bound':>12}{'share':>8}")
    tables: dict[str, list[Rate]] = {}
    for name, run in theorems.items():
        tables[name] = []
        for steps in options.steps:
            rate = run(steps)
            tables[name].append(rate)
            print(
                f"{name:24}{steps:8}{rate.measured:12.3e}{rate.bound:12.3e}{rate.measured / rate.bound:8.1%}  {rate.note}",
                flush=True,
            )
        if len(options.steps) > 1:
            print(f"{'':24}{'slope':>8}{slope(tables[name]):12.3f}{slope(tables[name], 'bound'):12.3f}\n")
    plot(tables, options.plot)
    print(f"Plot: {options.plot}")


if __name__ == "__main__":
    main()
