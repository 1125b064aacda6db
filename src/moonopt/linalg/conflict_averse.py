"""CAGrad's direction, given the Gram matrix G of the task gradients.

An interior-point method like that of ``dual.py``, for a ball about the mean gradient. As in ``simplex.py``, everything is
computed on the CPU in float64, for few tasks, and nothing is differentiable.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moonopt.linalg.bargaining import ROUNDING, STATIONARY, inside
from moonopt.linalg.simplex import NEGLIGIBLE, scaled

_CAGRAD_STEPS = 100  # 10 to 20 are taken, up to 40 where gradients of very different lengths are dependent
_GAP = 1e-9  # at which to stop
_SHRINKING = 0.1  # of mu, after a step that was nearly full; smaller factors take more steps on dependent gradients
_NEARLY_FULL = 0.9
_CENTRED = 1e-10  # descent after which bounds are tight even next to g_w = 0, where the curvature is up to 1e13
_SLACK_BOUND = 1e3  # by what factor a slack may differ from mu / z
_LINE_SEARCH = 1e-2  # descent up to which none is needed
_SHORTEST = 1e-4  # step, and share of the promised descent that a step must bring


class CAGradAnswer(NamedTuple):
    """The answer of ``cagrad_weights``.

    Attributes:
        coefficients: x with the direction d = sum_i x_i g_i.
        weights: w in the simplex.
        gap: what d proves about w: <g_w, g0> + c |g0| |g_w| - min_i <g_i, d>, relative to |<g_w, g0>| + c |g0| |g_w|. Where
            the minimum counts as 0, another d proves that it is, relative to (1 + c) |g0| (sum_i w_i^2 |g_i|^2)^(1/2):
            about 1e-5.

    """

    coefficients: Tensor
    weights: Tensor
    gap: float


@torch.no_grad()
def cagrad_weights(gram: Tensor, c: float) -> CAGradAnswer:
    """The direction of CAGrad (Liu et al., 2021): within c |g0| of the mean g0, that in which the slowest task falls fastest.

        max_d min_i <g_i, d>  with  |d - g0| <= c |g0|      =      min_w <g_w, g0> + c |g0| |g_w|  with  g_w = sum_i w_i g_i

    over weights w of the simplex, and d = g0 + c |g0| g_w / |g_w|. The factors m, 1 / (1 + c) or 1 / (1 + c^2) of public codes
    are left to the caller. d is g0 where that is zero, where c is, and where the right side is least at g_w = 0, which is to
    say at |g_w|^2 <= 1e-10 sum_i w_i^2 |g_i|^2. Up to 1e-5 of it, rounding may leave a gap above 1e-8. If rounding has made
    eigenvalues of the matrix of cosines negative, twice the lowest is added to its diagonal first.

    From c = 1 on, the ball contains 0: the minimum is not negative, and d lets no loss rise unless the minimum is 0. That is
    where the tasks are Pareto stationary. No d lowers all of their losses, many let none rise, such as 0, and yet d is g0, as
    for every c. The larger c, the closer d is to a multiple of MGDA's direction.

    Args:
        gram: the inner products of the gradients, of shape (m, m), symmetric up to rounding.
        c: radius of the ball in units of |g0|, from 0 on.

    >>> cagrad_weights(torch.tensor([[18.0, -22.0], [-22.0, 38.0]]), 0.5).coefficients
    tensor([0.7041, 0.5000], dtype=torch.float64)

    """
    if not 0 <= c < math.inf:
        raise ValueError(f"c must be finite and not negative, found {c}.")
    cosines, norms = scaled(gram)
    weights, pull, gap = _cagrad(_without_negative_eigenvalues(cosines), norms / norms.max(), c)
    return CAGradAnswer((1 / len(norms) + pull * weights).to(gram.device), weights.to(gram.device), gap)


def _cagrad(cosines: Tensor, norms: Tensor, c: float) -> tuple[Tensor, float, float]:
    """The weights w, the c |g0| / |g_w| of d = g0 + (c |g0| / |g_w|) g_w or 0 where d is g0, and the gap."""
    products = cosines @ norms
    total = math.sqrt(max((norms @ products).item(), 0.0))  # |m g0|
    if total**2 <= NEGLIGIBLE * (norms**2 @ cosines.diagonal()).item():
        return torch.full_like(norms, 1 / len(norms)), 0.0, 0.0
    if c == 0:
        lowest = (norms * products <= (norms * products).min()).double()
        return lowest / lowest.sum(), 0.0, 0.0
    nonzero = cosines.diagonal() > 0
    shortest = norms[nonzero].min().item()
    problem = _ConflictAverse(cosines[nonzero][:, nonzero], norms[nonzero] / shortest, products[nonzero] / total, c)
    point, gap = problem.solve()
    if point.value >= 0 and not nonzero.all():
        return ~nonzero / (~nonzero).sum().double(), 0.0, 0.0
    weights = torch.zeros_like(norms).masked_scatter_(nonzero, point.z / problem.norms)
    pull = 0.0 if point.is_stationary else c * total / len(norms) / (point.norm * shortest)
    return weights / weights.sum(), pull, gap


def _without_negative_eigenvalues(cosines: Tensor) -> Tensor:
    """With twice the lowest added to the squares, if it is negative by more than the rounding of float64."""
    shifted = cosines.clone()
    shifted.diagonal().add_(ROUNDING * len(cosines))
    if int(torch.linalg.cholesky_ex(shifted).info) == 0:
        return cosines
    squares = cosines.diagonal()
    return cosines - torch.where(squares > 0, 2 * torch.linalg.eigvalsh(cosines)[0], 0.0).diag()


class _ConflictAverse:
    """Minimise slopes' z + c sqrt(z' C z) over z > 0 with sum_i z_i / n_i = 1: CAGrad's problem in z = w n, in units of |g0|.

    An interior-point method follows the minimisers z(mu) with - mu sum_i log z_i added, and the norm r replaced by
    h(r) = max_u (c u r + mu log(1 - u^2)), as in ``dual.py``. Its Newton steps are primal-dual: slacks s take the place of
    mu / z in the second derivative. That gives directions of descent all the same, and better ones.
    """

    def __init__(self, cosines: Tensor, norms: Tensor, slopes: Tensor, c: float) -> None:
        self.cosines, self.norms, self.slopes, self.c = cosines, norms, slopes, c
        self.squares = cosines.diagonal()

    def solve(self) -> tuple["_Point", float]:
        """The best point found, and its gap."""
        point = _Point(self, torch.ones_like(self.norms))
        mu, length, descent = (1 + self.c) * point.z.mean().item(), 0.0, math.inf
        slack = mu / point.z
        best, best_gap, best_excess = point, math.inf, math.inf
        for _ in range(_CAGRAD_STEPS):
            gap = point.gap(mu)
            excess = gap / (STATIONARY if point.is_stationary else _GAP)
            if excess < best_excess:
                best, best_gap, best_excess = point, gap, excess
            if excess <= 1:
                break
            if length > _NEARLY_FULL and (descent < _CENTRED or not point.is_stationary):
                mu *= _SHRINKING
            slack = slack.clamp(mu / _SLACK_BOUND / point.z, mu * _SLACK_BOUND / point.z)
            change, descent = point.newton_step(slack, mu)
            if not 0 <= descent < math.inf:
                break
            growth = mu / (point.z * slack) - 1 - change
            slack = slack * (1 + inside(growth) * growth)
            length, point = point.search(change, descent, mu)
        return best, best_gap


class _Point:
    """The multiple of z whose w are in the simplex, and the problem there."""

    def __init__(self, problem: _ConflictAverse, z: Tensor) -> None:
        self.problem = problem
        self.z = z / (z / problem.norms).sum()
        self.products = problem.cosines @ self.z
        self.square = max((self.z @ self.products).item(), 0.0)
        self.norm = math.sqrt(self.square)
        self.slope = (problem.slopes @ self.z).item()
        self.value = self.slope + problem.c * self.norm
        self.size = math.sqrt((self.z * self.z @ problem.squares).item())

    @property
    def is_stationary(self) -> bool:
        """Whether g_w counts as zero, or might as well be: with c = 1, others can have a value of zero, too."""
        return min(self.norm, self.value if self.problem.c >= 1 else math.inf) <= STATIONARY * self.size

    def gap(self, mu: float) -> float:
        c = self.problem.c
        if self.is_stationary:
            lower = 0.0 if c >= 1 else self.lower_bound(self.pull(mu))
            return (self.value - lower) / ((1 + c) * self.size)
        return (self.value - self.lower_bound(c / self.norm)) / (abs(self.slope) + c * self.norm)

    def lower_bound(self, pull: float) -> float:
        """By the direction g0 + pull g_w."""
        return (self.problem.norms * (self.problem.slopes + pull * self.products)).min().item()

    def pull(self, mu: float) -> float:
        """h'(r) / r, less than c / r."""
        return self.problem.c**2 / (mu + self._root(mu))

    def _root(self, mu: float) -> float:
        return math.hypot(mu, self.problem.c * self.norm)

    def barrier(self, mu: float) -> float:
        """What is minimised, in units of mu."""
        smoothed = (self.slope + self.pull(mu) * self.square) / mu + math.log(2 * mu / (mu + self._root(mu)))
        return smoothed - self.z.log().sum().item()

    def newton_step(self, slack: Tensor, mu: float) -> tuple[Tensor, float]:
        """The relative change of z, and how much the barrier falls along it at first; NaN where rounding prevails."""
        z, pull = self.z, self.pull(mu)
        shares = z / self.problem.norms
        slopes = z * (self.problem.slopes + pull * self.products)
        price = slopes.sum() - len(z) * mu  # at the minimum; any other is as good, but for rounding
        gradient = (slopes - price * shares) / mu - 1
        along = z * self.products
        curvature = self.problem.cosines * z * z.unsqueeze(1) - torch.outer(along, along * (pull / self._root(mu)))
        curvature.mul_(pull / mu).diagonal().add_(z * slack / mu)
        factor, failed = torch.linalg.cholesky_ex(curvature)
        if failed:
            return z, math.nan
        to_gradient, to_shares = torch.cholesky_solve(torch.stack([gradient, shares], 1), factor).unbind(1)
        change = to_shares * ((shares @ to_gradient) / (shares @ to_shares)) - to_gradient
        return change, -(gradient @ change).item()

    def search(self, change: Tensor, descent: float, mu: float) -> tuple[float, "_Point"]:
        """Along a direction of descent as far as it pays."""
        length, here = inside(change), self.barrier(mu) if descent > _LINE_SEARCH else math.inf
        while True:
            moved = _Point(self.problem, self.z * (1 + length * change))
            enough = here + ROUNDING * abs(here) - _SHORTEST * length * descent
            if length < _SHORTEST or enough == math.inf or moved.barrier(mu) <= enough:
                return length, moved
            length /= 2
