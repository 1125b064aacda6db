"""Two tasks on a 2 x 2 matrix, by hand: what the spectral geometry changes.

First the example of the paper's appendix, where both geometries choose the same weights and differ in the direction. Then two
gradients where they differ in the weights, and where the polar factor of the weighted gradient is not the best
direction, because that gradient is rank-deficient. Prints both tables and saves two_task.png.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from moonopt import MOON, Dual, certificate_gap, polar, solve_dual
from moonopt.linalg.simplex import min_norm_weights

SYMMETRIC, SKEW = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
APPENDIX = torch.stack([SYMMETRIC + SKEW, SYMMETRIC - SKEW]).double()
DEFICIENT = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, -1.0]]], dtype=torch.float64)


def loss(theta: Tensor) -> Tensor:
    """Both losses of the appendix, ||Theta||_F^2 / 2 + <A +- B, Theta>."""
    return theta.square().sum() / 2 + (APPENDIX * theta).sum((1, 2))


def euclidean_weights(gradients: Tensor) -> Tensor:
    flat = gradients.flatten(1)
    return min_norm_weights(flat @ flat.mT)


def mgda_direction(gradients: Tensor) -> Tensor:
    """The minimum-norm gradient, brought to spectral norm 1."""
    shortest = torch.tensordot(euclidean_weights(gradients), gradients, 1)
    return shortest / torch.linalg.matrix_norm(shortest, 2)


def moon_direction() -> Tensor:
    """What MOON subtracts per unit of its learning rate, from Theta = 0."""
    theta = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = MOON([{"params": [theta], "kind": "matrix"}], tasks=2, lr=1e-3, delta="per_task", schedule="svd")
    optimizer.minimize(lambda: loss(theta))
    return -theta.detach() / 1e-3


def crossing(first: Tensor, second: Tensor) -> float:
    """The step length at which two directions bring the loss equally low: -a1 t + b1 t^2 = -a2 t + b2 t^2."""
    slopes = [(APPENDIX[0] * direction).sum() for direction in (first, second)]
    squares = [direction.square().sum() / 2 for direction in (first, second)]
    return float((slopes[1] - slopes[0]) / (squares[1] - squares[0]))


def guarantee(gradients: Tensor, direction: Tensor) -> float:
    """How fast the slowest task falls."""
    return float(torch.tensordot(gradients, direction, 2).min())


def nuclear_norms(gradients: Tensor, weights: Tensor) -> Tensor:
    sums = weights[:, None, None] * gradients[0] + (1 - weights)[:, None, None] * gradients[1]
    return torch.linalg.svdvals(sums).sum(-1)


def frobenius_norms(gradients: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, None] * gradients[0].flatten() + (1 - weights)[:, None] * gradients[1].flatten()).norm(dim=1)


def plot_steps(axes: plt.Axes) -> None:
    mgda, moon = mgda_direction(APPENDIX), moon_direction()
    lengths = torch.linspace(0, 2.6, 200, dtype=torch.float64)
    for name, direction, colour in (("MGDA", mgda, "#7b3294"), ("MOON", moon, "#1f5fbf")):
        axes.plot(lengths, [loss(-t * direction)[0] for t in lengths], color=colour, linewidth=2, label=name)
    meeting = crossing(mgda, moon)
    there = (meeting, float(loss(-meeting * moon)[0]))
    axes.plot(*there, "o", color="0.2")
    axes.annotate(f"equal at {meeting:.3f}", there, (-92, -4), textcoords="offset points")
    axes.set(xlabel="step length in the spectral norm", ylabel="loss of either task")
    axes.set(title="The appendix: the same weights, another step")


def plot_weights(axes: plt.Axes, dual: Dual) -> None:
    weights = torch.linspace(0, 1, 401, dtype=torch.float64)
    best, shortest = dual.weights[:1], euclidean_weights(DEFICIENT)[:1]
    for norm, name, at, colour in (
        (nuclear_norms, "nuclear norm", best, "#1f5fbf"),
        (frobenius_norms, "Frobenius norm", shortest, "#7b3294"),
    ):
        label = f"{name}, least at {float(at):.3f}"
        axes.plot(weights, norm(DEFICIENT, weights), color=colour, linewidth=2, label=label)
        axes.plot(at, norm(DEFICIENT, at), "o", color=colour)
    lowest, theirs = float(nuclear_norms(DEFICIENT, best)), float(nuclear_norms(DEFICIENT, shortest))
    axes.vlines(float(shortest), lowest, theirs, color="0.4", linestyle=":")
    middle = (float(shortest), (lowest + theirs) / 2)
    axes.annotate("certificate gap", middle, (6, -3), textcoords="offset points", color="0.4")
    axes.set(xlabel="weight of the first task", ylabel="norm of the weighted gradient", ylim=(1, None))
    axes.set(title="diag(1, 2) and diag(2, -1): other weights")


def plot(dual: Dual, file: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    plot_steps(left)
    plot_weights(right, dual)
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("two_task.png"))
    options = parser.parse_args()

    print("The appendix: l = ||Theta||^2 / 2 + <A +- B, Theta>, A = diag(2, 1), B a quarter turn; one step from Theta = 0\n")
    print(f"{'direction':28}{'slope':>10}{'loss after a step of 1':>24}")
    for name, direction in {"MGDA, spectral norm 1": mgda_direction(APPENDIX), "MOON": moon_direction()}.items():
        print(f"{name:28}{-guarantee(APPENDIX, direction):10.4f}{float(loss(-direction)[0]):24.4f}")
    print(f"Both bring the loss equally low at a step of {crossing(mgda_direction(APPENDIX), moon_direction()):.4f}.\n")

    dual = solve_dual(DEFICIENT)
    weighted = torch.tensordot(dual.weights.round(decimals=6), DEFICIENT, 1)
    print("Gradients diag(1, 2) and diag(2, -1)\n")
    print(f"{'weights':28}{'first':>10}{'second':>10}{'nuclear norm':>15}")
    for name, weights in {"Euclidean, minimum norm": euclidean_weights(DEFICIENT), "exact dual": dual.weights}.items():
        print(f"{name:28}{weights[0]:10.4f}{weights[1]:10.4f}{float(nuclear_norms(DEFICIENT, weights[:1])):15.4f}")
    print(f"Certificate gap {certificate_gap(DEFICIENT):.4f}\n")
    print(f"{'direction, spectral norm 1':28}{'diagonal':>20}{'slowest task':>15}")
    for name, direction in {
        "MGDA": mgda_direction(DEFICIENT),
        "polar factor of the sum": polar(torch.where(weighted.abs() < 1e-5, 0.0, weighted), "svd"),
        "exact dual": dual.direction[0],
    }.items():
        diagonal = f"({direction[0, 0]:.4f}, {direction[1, 1]:.4f})"
        print(f"{name:28}{diagonal:>20}{guarantee(DEFICIENT, direction):15.4f}")
    print("MGDA finds the best direction here with weights that are not the best. Where the sum has full rank, weights decide.")
    plot(dual, options.plot)
    print(f"\nPlot: {options.plot}")


if __name__ == "__main__":
    main()
