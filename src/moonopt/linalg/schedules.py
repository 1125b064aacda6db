"""Newton-Schulz coefficients: generated (Polar Express) and named ones.

A step with coefficients (a, b, c) maps X to a X + b (X X') X + c (X X')^2 X, that is, every singular value x to the
odd quintic a x + b x^3 + c x^5. A schedule is a sequence of such steps whose composition is close to 1 on (0, 1].
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from moonopt.errors import unknown_name

Triple = tuple[float, float, float]
Norm = Literal["schatten-4", "frobenius"]

#: Singular values below this share of the norm are not promised to reach 1 (Amsel et al., Polar Express).
POLAR_EXPRESS_LOWER = 1e-3
#: The published five steps are generated with these two. The safety factor leaves room for rounding in bfloat16,
#: the cushion keeps the first polynomials from oscillating on a very wide interval.
POLAR_EXPRESS_SAFETY = 1.02
POLAR_EXPRESS_CUSHION = 0.02

_REMEZ_ROUNDS = 30  # it converges quadratically: seven are enough for every interval of interest

MUON_TRIPLE: Triple = (3.4445, -4.7750, 2.0315)  # Jordan et al.: steep at 0, never converges (0.68 to 1.13)
CLASSICAL_TRIPLE: Triple = (15 / 8, -10 / 8, 3 / 8)  # third order, monotone
CUBIC_TRIPLE: Triple = (3 / 2, -1 / 2, 0.0)  # the original Newton-Schulz step, second order
YOU_TRIPLES: tuple[Triple, ...] = (  # found by You, used in Dion: within 0.978 to 1.032 above 1e-2
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class Schedule(NamedTuple):
    """What a Newton-Schulz iteration needs: its steps, and the norm by which its input is divided first."""

    name: str
    coefficients: tuple[Triple, ...]
    norm: Norm = "schatten-4"
    safety: float = 1.0


def schedule(name: str, steps: int) -> Schedule:
    """The schedule called ``name`` with ``steps`` steps.

    ``polar_express`` is generated for the number of steps, ``muon``, ``classical`` and ``cubic`` repeat one triple,
    ``you`` has five, and ``none`` has no step at all: it is M / ||M||_F, the Euclidean update.

    >>> [round(a, 4) for a, b, c in schedule("polar_express", 5).coefficients]
    [8.1566, 4.0429, 3.8917, 3.2858, 2.3465]
    """
    if name not in _BUILDERS:
        raise ValueError(unknown_name(name, SCHEDULES, "schedule"))
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive integer, found {steps!r}.")
    return _BUILDERS[name](steps)


@functools.cache
def polar_express(
    steps: int,
    lower: float = POLAR_EXPRESS_LOWER,
    safety: float = POLAR_EXPRESS_SAFETY,
    cushion: float = POLAR_EXPRESS_CUSHION,
) -> tuple[Triple, ...]:
    """Polar Express coefficients: greedily, the best odd quintic for the interval that the last one left.

    ``lower`` is the smallest singular value, relative to the norm, that is to reach 1. ``safety`` (>= 1) makes every
    step but the last expect inputs larger by that factor; the first input must then be divided by it, too.
    ``cushion`` bounds the ratio of the interval's ends that a polynomial is fitted to.

    >>> [tuple(round(x, 3) for x in triple) for triple in polar_express(8, safety=1.0)][-1]
    (1.875, -1.25, 0.375)
    """
    low, high = lower, 1.0
    triples = []
    for step in range(steps):
        fitted_low = max(low, cushion * high)
        triple = _best_quintic(fitted_low, high)
        if fitted_low > low:  # the fit ignored (low, fitted_low): centre the image of the whole interval on 1 again
            centre = (_evaluate(triple, low) + _evaluate(triple, high)) / 2
            triple = _scaled(triple, output=1 / centre)
        if step < steps - 1:
            triple = _scaled(triple, argument=1 / safety)
        triples.append(triple)
        low = _evaluate(triple, low)
        high = 2 - low
    return tuple(triples)


def _best_quintic(low: float, high: float) -> Triple:
    """The odd quintic p with the smallest maximum of |1 - p| on [low, high], by Remez' exchange."""
    ratio = low / high
    if ratio >= 1 - 1e-5:  # too narrow to be solved for in float64: the limit has contact of third order at 1
        return _scaled(CLASSICAL_TRIPLE, argument=1 / high)
    inner = [(3 * ratio + 1) / 4, (ratio + 3) / 4]
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64, device="cpu")
    previous_error = math.inf
    for _ in range(_REMEZ_ROUNDS):
        points = signs.new_tensor([ratio, *inner, 1.0])
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, error = torch.linalg.solve(system, torch.ones_like(points)).tolist()
        if abs(error - previous_error) <= 1e-15:
            break
        previous_error = error
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
    return _scaled((a, b, c), argument=1 / high)


def _evaluate(triple: Triple, x: float) -> float:
    a, b, c = triple
    return a * x + b * x**3 + c * x**5


def _scaled(triple: Triple, *, argument: float = 1.0, output: float = 1.0) -> Triple:
    """Coefficients of x -> output * p(argument * x)."""
    a, b, c = triple
    return output * argument * a, output * argument**3 * b, output * argument**5 * c


def _you(steps: int) -> Schedule:
    if steps > len(YOU_TRIPLES):
        raise ValueError(f"Schedule 'you' has {len(YOU_TRIPLES)} steps, found steps={steps}: use 'polar_express'.")
    return Schedule("you", YOU_TRIPLES[:steps])


_BUILDERS: dict[str, Callable[[int], Schedule]] = {
    "polar_express": lambda steps: Schedule(
        "polar_express", polar_express(steps), safety=POLAR_EXPRESS_SAFETY if steps > 1 else 1.0
    ),
    "you": _you,
    # Its band depends on where the iteration starts, so it keeps the norm that it was published with.
    "muon": lambda steps: Schedule("muon", (MUON_TRIPLE,) * steps, norm="frobenius"),
    "classical": lambda steps: Schedule("classical", (CLASSICAL_TRIPLE,) * steps),
    "cubic": lambda steps: Schedule("cubic", (CUBIC_TRIPLE,) * steps),
    "none": lambda steps: Schedule("none", (), norm="frobenius"),
}

SCHEDULES: tuple[str, ...] = tuple(_BUILDERS)
