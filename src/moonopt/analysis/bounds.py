"""What the convergence theorems promise: the right-hand side of each, term by term, and the settings they choose.

All but the convex one bound the mean over the steps of the Pareto stationarity min_z ||sum_i z_i grad l_i||_S1, for every
gamma with 0 <= beta * gamma <= 1. They are about Algorithm 1, where delta is an inner product. With differences of losses
|delta| may exceed H, by less than L alpha: take H that much larger.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Problem:
    """The constants that the theorems assume, along all iterates.

    With several blocks, H and L are those of the norm max_b ||W_b||_S-inf / scale_b and of its dual
    sum_b scale_b ||G_b||_S1, and rho is ``block_rho``.

    Args:
        tasks: their number m.
        smoothness: L, by how much a task's gradient changes in the nuclear norm per unit of the spectral norm.
        gradient_bound: H, the largest nuclear norm of a task's gradient.
        loss_bound: B, the largest absolute value of a task's loss.
        rho: the largest ratio of nuclear and Frobenius norm, sqrt(min(p, q)); only the stochastic theorem needs it.

    """

    tasks: int
    smoothness: float
    gradient_bound: float
    loss_bound: float
    rho: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what the theorems do not cover."""
        _check_count("tasks", self.tasks)
        for name in ("smoothness", "gradient_bound", "loss_bound", "rho"):
            value = getattr(self, name)
            _check(name, value, 0 < value < math.inf, "a positive number")


class Settings(NamedTuple):
    """How MOON is run: ``lr`` is alpha, ``beta`` the rate of the logits, ``mu`` the share of the new gradient."""

    lr: float
    beta: float
    mu: float

    @property
    def momentum(self) -> float:
        """What MOON's argument of this name is: 1 - mu."""
        return 1 - self.mu


@dataclass(frozen=True)
class Bound:
    """A right-hand side: its terms by name.

    ``range`` is how far the losses can fall at all. ``start``, ``lag`` and ``lag_weights`` are the error of the momentum: it
    begins at zero, and follows gradients and weights that change. ``weights`` is what changing weights do to the weighted
    loss, ``curvature`` the second order of a step, ``noise`` that of the gradients.
    """

    terms: Mapping[str, float]

    @property
    def value(self) -> float:
        """The sum of the terms."""
        return math.fsum(self.terms.values())


def deterministic(problem: Problem, steps: int, settings: Settings) -> Bound:
    """Exact gradients and exact polar factors.

    2B / (alpha T) + 2H / (mu T) + 2L alpha / mu + 2m H^2 beta / mu + m H B beta / alpha + L alpha / 2

    >>> problem = Problem(tasks=2, smoothness=1.0, gradient_bound=1.0, loss_bound=1.0)
    >>> round(deterministic(problem, 100, deterministic_settings(problem, 100, mu=1.0)).value, 4)
    0.59
    """
    return Bound(_terms(problem, steps, settings, delta=problem.gradient_bound))


def stochastic(problem: Problem, steps: int, settings: Settings, noise: float) -> Bound:
    """Unbiased noisy gradients, in expectation; ``noise`` is sigma, where E ||error of a task's gradient||_F^2 <= sigma^2.

    The deterministic terms, with H + sqrt(m) rho sigma in place of the H that bounds |delta|, and 2 sqrt(mu) rho sigma.
    At sigma = 0 it is the deterministic bound.
    """
    _check_noise(noise)
    terms = _terms(problem, steps, settings, delta=_noisy_delta(problem, noise))
    return Bound(terms | {"noise": 2 * math.sqrt(settings.mu) * problem.rho * noise})


def finite_step(problem: Problem, steps: int, settings: Settings, error: float) -> Bound:
    """Exact gradients, and a direction within ``error`` (eps_q) of a polar factor in the spectral norm, at every step.

    The direction may be longer by a factor 1 + eps_q, and its descent smaller by a factor 1 - eps_q, by which all terms are
    divided. No number of Newton-Schulz steps keeps the errors of all matrices away from 1: it is an assumption on the run.
    """
    _check("error", error, 0 <= error < 1, "at least 0 and below 1")
    longest = 1 + error
    terms = _terms(problem, steps, settings, delta=problem.gradient_bound * longest, longest=longest)
    return Bound({name: term / (1 - error) for name, term in terms.items()})


def convex(diameter: float, nuclear_norms: Iterable[float]) -> float:
    """D / T * sum_t ||G_t||_S1 for convex tasks: by how much all of them could still go down at once, at a mean step.

    Args:
        diameter: D, of a convex set in the spectral norm. Nothing keeps the iterates in it: that they are is assumed.
        nuclear_norms: of the weighted gradients G_t, one per step.

    >>> convex(2.0, [3.0, 1.0])
    4.0

    """
    norms = [float(norm) for norm in nuclear_norms]
    _check("diameter", diameter, 0 <= diameter < math.inf, "a number of at least 0")
    _check("nuclear_norms", norms, bool(norms) and all(0 <= norm < math.inf for norm in norms), "numbers of at least 0")
    return diameter * math.fsum(norms) / len(norms)


def deterministic_settings(problem: Problem, steps: int, mu: float) -> Settings:
    """The choice alpha = sqrt(B / (L T)), beta = 1 / (m H T), for exact gradients and any mu.

    The bound is then (7/2 + 2 / mu) sqrt(L B / T) + 4 H / (mu T). At this beta no logit ever leaves [-1/m, 1/m].
    """
    _check_count("steps", steps)
    _check("mu", mu, 0 < mu <= 1, "above 0 and at most 1")
    lr = math.sqrt(problem.loss_bound / (problem.smoothness * steps))
    return Settings(lr, 1 / (problem.tasks * problem.gradient_bound * steps), mu)


def stochastic_settings(problem: Problem, steps: int, noise: float) -> Settings:
    """The choice for noisy gradients; without noise it is the deterministic one at mu = 1.

    mu = min(sqrt(L B / T) / (rho sigma), 1), alpha = sqrt(mu B / (L T)), beta = 1 / (m (H + sqrt(m) rho sigma) T)
    """
    _check_count("steps", steps)
    _check_noise(noise)
    signal = math.sqrt(problem.smoothness * problem.loss_bound / steps)
    mu = signal / max(signal, noise * problem.rho)
    lr = math.sqrt(mu * problem.loss_bound / (problem.smoothness * steps))
    return Settings(lr, 1 / (problem.tasks * _noisy_delta(problem, noise) * steps), mu)


def block_rho(shapes: Sequence[Sequence[int]], scale: Sequence[float] | None = None) -> float:
    """The rho of several blocks, sqrt(sum_b scale_b^2 min(p_b, q_b)): sum_b scale_b ||A_b||_S1 <= rho ||A||_F.

    Args:
        shapes: one (p, q) per block.
        scale: one number per block; 1 where not given.

    >>> block_rho([(4, 7), (12, 5)])
    3.0

    """
    sides = [min(p, q) for p, q in shapes]
    scale = [1.0] * len(sides) if scale is None else scale
    _check("shapes", shapes, bool(sides) and min(sides) > 0, "pairs of positive numbers, at least one")
    fits = len(scale) == len(sides) and all(0 <= each < math.inf for each in scale)
    _check("scale", scale, fits, f"one number of at least 0 for each of the {len(sides)} blocks")
    return math.sqrt(math.fsum(each**2 * side for each, side in zip(scale, sides, strict=True)))


def _terms(problem: Problem, steps: int, settings: Settings, delta: float, longest: float = 1.0) -> dict[str, float]:
    """What the theorems share. ``delta`` bounds |delta|, and ``longest`` the spectral norm of a direction."""
    lr, beta, mu = settings
    _check_count("steps", steps)
    _check("lr", lr, 0 < lr < math.inf, "a positive number")
    _check("beta", beta, 0 <= beta < math.inf, "a number of at least 0")
    _check("mu", mu, 0 < mu <= 1, "above 0 and at most 1")
    weight_change = problem.tasks * beta * delta
    return {
        "range": 2 * problem.loss_bound / (lr * steps),
        "start": 2 * problem.gradient_bound / (mu * steps),
        "lag": 2 * problem.smoothness * lr * longest / mu,
        "lag_weights": 2 * problem.gradient_bound * weight_change / mu,
        "weights": problem.loss_bound * weight_change / lr,
        "curvature": problem.smoothness * lr * longest**2 / 2,
    }


def _noisy_delta(problem: Problem, noise: float) -> float:
    """H + sqrt(m) rho sigma: what bounds the expected |delta| of noisy gradients."""
    return problem.gradient_bound + math.sqrt(problem.tasks) * problem.rho * noise


def _check_count(name: str, found: int) -> None:
    _check(name, found, isinstance(found, int) and found > 0, "a positive integer")


def _check_noise(noise: float) -> None:
    _check("noise", noise, 0 <= noise < math.inf, "a number of at least 0")


def _check(name: str, found: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {expected}, found {found!r}.")
