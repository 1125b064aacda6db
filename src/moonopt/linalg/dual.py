"""The exact nuclear-norm dual: task weights, and the direction in which the slowest task falls fastest.

Over blocks b with scales s_b, weights z of the simplex and matrices W_b of spectral norm at most 1,

    min_z sum_b s_b ||sum_i z_i G_ib||_S1  =  max_W min_i sum_b s_b <W_b, G_ib>.

So any z gives an upper and any W a lower bound of the same number, and a pair whose bounds meet proves itself.

An interior-point method follows the centre z(mu) of the left side with every singular value s replaced by
h(s) = max_w (w s + mu log(1 - w^2)), and - mu sum_i log z_i added. It is self-concordant, so that Newton's method
centres it in a few steps wherever it starts; the maximising w make up a W strictly inside its ball, and the bounds
at the centre are mu * (m + sum_b min(p_b, q_b)) apart at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: A value below this share of the smallest task gradient counts as none: the point is Pareto stationary.
STATIONARY = 1e-10

SHRINKING = 0.1  # of mu, once the weights are centred
CENTRED = 0.3  # squared Newton decrement from which on the weights count as centred
MAX_STEPS = 200
ROUNDING = 4 * torch.finfo(torch.float64).eps

Gradients = Tensor | Sequence[Tensor]
Scale = float | Sequence[float] | None


@dataclass(frozen=True, eq=False)
class Dual:
    """The answer of ``solve_dual``; everything in float64.

    Attributes:
        weights: z, one per task.
        value: sum_b s_b ||sum_i z_i G_ib||_S1 at these weights, an upper bound of the optimum.
        lower_bound: min_i sum_b s_b <W_b, G_ib> for W = ``direction``: what a step along it takes from every task.
        relative_gap: (value - lower_bound) / value; the absolute gap where ``stationary``.
        stationary: no direction helps all tasks, as far as float64 can tell; ``direction`` is 0 then.
        converged: whether the gap is within the tolerance, rounding included, or the point is stationary.
        iterations: Newton steps, each with one singular value decomposition per block, or a few.
        direction: the matrices W_b, of spectral norm at most 1. They equal the polar factors of sum_i z_i G_ib only
            where those have full rank.
        scale: the s_b.

    """

    weights: Tensor
    value: float
    lower_bound: float
    relative_gap: float
    stationary: bool
    converged: bool
    iterations: int
    direction: tuple[Tensor, ...]
    scale: tuple[float, ...]

    @property
    def primal(self) -> tuple[Tensor, ...]:
        """The V that minimises max_i -<V, G_i> + ||V||^2 / 2, where ||V|| = max_b ||V_b||_S-inf / s_b: value * s_b * W_b."""
        return tuple(self.value * s * w for s, w in zip(self.scale, self.direction, strict=True))


def solve_dual(gradients: Gradients, scale: Scale = None, tol: float = 1e-6) -> Dual:
    """Minimise sum_b scale_b ||sum_i z_i G_ib||_S1 over the weights z, with a certificate.

    Args:
        gradients: one task gradient below the other, (m, p, q), or a sequence of such, one per block.
        scale: one number per block, or one for all; 1 by default.
        tol: the relative gap at which to stop. 1e-12 and less is mostly out of reach in float64.

    A problem so close to stationary that rounding hides the gap ends with ``converged=False``, and with bounds that hold.

    >>> dual = solve_dual(torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, -1.0]]]))
    >>> [round(each, 3) for each in dual.weights.tolist()], round(dual.value, 3), dual.converged
    ([0.333, 0.667], 1.667, True)

    """
    if not 0 < tol < 1:
        raise ValueError(f"tol must be between 0 and 1, found {tol}.")
    blocks, scales = read_blocks(gradients, scale)
    wide = [s * (block.mT if block.shape[1] > block.shape[2] else block) for block, s in zip(blocks, scales, strict=True)]
    norms = nuclear_norms(wide)
    unit = float(norms.max())
    if not math.isfinite(unit):
        raise ValueError("The gradients times their scales are too large for float64.")
    unit = unit or 1.0
    bounds = _Bounds([block / unit for block in wide], norms / unit, tol)
    return bounds.answer(blocks, scales, 0 if bounds.settled_at_once() else _follow_the_centre(bounds))


def read_blocks(gradients: Gradients, scale: Scale = None) -> tuple[list[Tensor], list[float]]:
    """The gradients as float64 blocks (m, p, q) with the same m, and a scale for each."""
    given = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    if not given:
        raise ValueError("gradients must be a tensor (tasks, rows, columns) or several of them, found none.")
    for index, block in enumerate(given):
        if not isinstance(block, Tensor) or not block.is_floating_point() or block.dim() != 3 or 0 in block.shape:
            found = f"{block.dtype} of shape {tuple(block.shape)}" if isinstance(block, Tensor) else f"a {type(block).__name__}"
            raise ValueError(f"Block {index} of the gradients must be a tensor (tasks, rows, columns), found {found}.")
        if len(block) != len(given[0]):
            raise ValueError(f"Blocks must have the same tasks: block {index} has {len(block)}, block 0 has {len(given[0])}.")
        finite = block.detach().isfinite().flatten(1).all(1)
        if not finite.all():
            raise ValueError(f"The gradient of task {int(finite.int().argmin())} in block {index} has a NaN or infinite entry.")
    if scale is None or isinstance(scale, int | float):
        scales = [1.0 if scale is None else float(scale)] * len(given)
    else:
        scales = [float(each) for each in scale]
    if len(scales) != len(given):
        raise ValueError(f"scale must have one number per block: found {len(scales)} for {len(given)} blocks.")
    if not all(0 <= each < math.inf for each in scales):
        raise ValueError(f"scale must be finite and not negative, found {scales}.")
    return [block.detach().to(torch.float64) for block in given], scales


def nuclear_norms(blocks: Sequence[Tensor]) -> Tensor:
    """sum_b ||G_ib||_S1 for every task i."""
    return torch.stack([torch.linalg.svdvals(block).sum(-1) for block in blocks]).sum(0)


class _Bounds:
    """A problem in wide blocks of moderate size, and the best weights and direction seen so far."""

    def __init__(self, blocks: list[Tensor], norms: Tensor, tol: float) -> None:
        self.blocks, self.norms, self.tol = blocks, norms, tol
        self.tasks = len(norms)
        self.size = self.tasks + sum(block.shape[1] for block in blocks)  # bounds at the centre are mu * size apart
        self.weights = torch.full_like(norms, 1 / self.tasks)
        self.value = math.inf
        self.direction = [torch.zeros_like(block[0]) for block in blocks]
        self._surely = 0.0  # the lower bound that the direction proves, less the rounding in it

    def settled_at_once(self) -> bool:
        """Whether the answer was plain: a task without a gradient, or only one task."""
        zero = (self.norms == 0).to(self.norms)
        if zero.any():
            self.propose_weights(zero / zero.sum(), 0.0)
        elif self.tasks == 1:
            factored = [_Factored(block, self.weights) for block in self.blocks]
            self.propose_weights(self.weights, sum(each.nuclear_norm for each in factored))
            self.propose_direction([each.polar_factor() for each in factored])
        return self.value < math.inf

    def propose_weights(self, weights: Tensor, value: float) -> None:
        if value < self.value:
            self.weights, self.value = weights, value

    def propose_direction(self, direction: Sequence[Tensor]) -> None:
        """Take the direction where it proves more; one outside the ball is brought back."""
        inside = [w / max(1.0, float(torch.linalg.matrix_norm(w, 2))) for w in direction]
        products = inner_products(self.blocks, inside)
        surely = float((products - ROUNDING * self.norms).min())
        if surely > self._surely:
            self.direction, self._surely = inside, surely

    @property
    def stationary(self) -> bool:
        return _is_stationary(self.value, self.norms)

    @property
    def converged(self) -> bool:
        """Whether the gap is within the tolerance even if rounding has helped it."""
        rounding = ROUNDING * float(self.weights @ self.norms)
        return self.stationary or self.value + rounding - self._surely <= self.tol * self.value

    def answer(self, blocks: Sequence[Tensor], scales: Sequence[float], steps: int) -> Dual:
        """The bounds of the problem as it was given, computed from the weights and the direction alone."""
        scaled = [s * block for s, block in zip(scales, blocks, strict=True)]
        value = sum(float(torch.linalg.svdvals(torch.tensordot(self.weights, block, 1)).sum()) for block in scaled)
        stationary = _is_stationary(value, nuclear_norms(scaled))
        kept = 0.0 if stationary else 1.0
        direction = [
            kept * (w.mT if w.shape != block.shape[1:] else w) for w, block in zip(self.direction, blocks, strict=True)
        ]
        lower = float(inner_products(scaled, direction).min())
        gap = max(value - lower, 0.0)
        return Dual(
            weights=self.weights,
            value=value,
            lower_bound=lower,
            relative_gap=gap if stationary else gap / value,
            stationary=stationary,
            converged=stationary or (self.converged and gap <= self.tol * value),
            iterations=steps,
            direction=tuple(direction),
            scale=tuple(scales),
        )


def _is_stationary(value: float, norms: Tensor) -> bool:
    nonzero = norms[norms > 0]
    return value <= STATIONARY * float(nonzero.min()) if len(nonzero) else True


def inner_products(blocks: Sequence[Tensor], direction: Sequence[Tensor]) -> Tensor:
    """sum_b <W_b, G_ib> for every task i."""
    return torch.stack([torch.tensordot(block, w, 2) for block, w in zip(blocks, direction, strict=True)]).sum(0)


def _follow_the_centre(bounds: _Bounds) -> int:
    """Newton's method, with mu shrunk whenever the weights are centred; returns the steps taken."""
    weights = 1 / bounds.norms
    point = _Point(bounds.blocks, weights / weights.sum())
    mu = point.value / bounds.size
    for steps in range(1, MAX_STEPS + 1):
        bounds.propose_weights(point.weights, point.value)
        if bounds.stationary:
            return steps
        newton = _Newton(point, mu)
        if newton.decrement < 1:  # the corrected direction is inside its ball
            bounds.propose_direction(newton.direction())
        at_the_floor = mu * bounds.size < ROUNDING * float(point.weights @ bounds.norms)
        if bounds.converged or at_the_floor or not math.isfinite(newton.decrement):
            return steps
        if newton.decrement**2 < CENTRED:
            point, mu = point.moved(newton.change, 1.0), SHRINKING * mu
        else:
            point = _search(point, newton, mu)
    return MAX_STEPS


def _search(point: "_Point", newton: "_Newton", mu: float) -> "_Point":
    """Along the Newton direction as far as it pays; 1 / (1 + decrement) always does."""
    safe = 1 / (1 + newton.decrement)
    here = point.objective(mu)
    length = min(1.0, 0.9 / max(float(-newton.change.min()), 0.9))
    while length > safe:
        there = point.moved(newton.change, length)
        if there.objective(mu) <= here - 0.2 * length * newton.decrement**2:
            return there
        length /= 2
    return point.moved(newton.change, safe)


class _Point:
    """Weights, and the decompositions of the weighted sums there."""

    def __init__(self, blocks: list[Tensor], weights: Tensor) -> None:
        self.blocks, self.weights = blocks, weights
        self.factored = [_Factored(block, weights) for block in blocks]
        self.value = sum(each.nuclear_norm for each in self.factored)

    def moved(self, change: Tensor, length: float) -> "_Point":
        """By a relative change of the weights."""
        weights = self.weights * (1 + length * change)
        return _Point(self.blocks, weights / weights.sum())

    def objective(self, mu: float) -> float:
        """The smoothed value with its barrier, in units of mu."""
        smoothed = sum(each.smoothed_norm(mu) for each in self.factored)
        return smoothed / mu - float(self.weights.log().sum())


class _Factored:
    """G = sum_i z_i G_i = U diag(s) V' of one block, and the smoothed nuclear norm there.

    With w in (0, 1) for every singular value s: s = 2 mu w / (1 - w^2), h'(s) = w, and every quotient of differences that
    the second derivative is made of is free of cancellation in w and c = 1 - w^2 = 2 mu / (mu + sqrt(mu^2 + s^2)).
    """

    def __init__(self, block: Tensor, weights: Tensor) -> None:
        self.block = block
        self.u, self.s, self.vh = torch.linalg.svd(torch.tensordot(weights, block, 1), full_matrices=False)
        self.nuclear_norm = float(self.s.sum())

    def polar_factor(self) -> Tensor:
        """The compact one: singular values within rounding of zero count as zero."""
        cutoff = max(self.block.shape[1:]) * torch.finfo(self.s.dtype).eps * self.s[0]
        factor: Tensor = (self.u * (self.s > cutoff)) @ self.vh
        return factor

    def smoothed_norm(self, mu: float) -> float:
        w, c = self._slopes(mu)
        return float((w * self.s + mu * c.log()).sum())

    def smooth(self, mu: float) -> None:
        """Get ready for the derivatives at this mu: the tasks in the basis of G, and the curvatures there."""
        self.mu = mu
        self.w, self.c = self._slopes(mu)
        self.left = self.u.mT @ self.block
        self.inner = self.left @ self.vh.mT
        away = self.c / (1 + self.w)  # 1 - w
        pairs = torch.outer(self.c, self.c) / (2 * mu)
        self.along = pairs / (1 + torch.outer(self.w, self.w))  # (w_j - w_k) / (s_j - s_k)
        self.across = pairs / (away[:, None] + away - torch.outer(away, away))  # (w_j + w_k) / (s_j + s_k)
        self.outside = (self.c / (2 * mu))[:, None]  # w_j / s_j, for what lies outside the row space
        self.is_square = self.block.shape[1] == self.block.shape[2]

    def _slopes(self, mu: float) -> tuple[Tensor, Tensor]:
        root = mu + (self.s * self.s + mu * mu).sqrt()
        return self.s / root, 2 * mu / root

    def slopes_by_task(self) -> Tensor:
        """<W, G_i>: the derivatives in the weights."""
        return torch.einsum("ijj,j->i", self.inner, self.w)

    def curvature(self) -> Tensor:
        """A matrix A with a row per task: A A' is the second derivative in the weights."""
        parts = [self.along.sqrt() * _symmetric(self.inner), self.across.sqrt() * _skew(self.inner)]
        if not self.is_square:
            parts.append(self.outside.sqrt() * (self.left - self.inner @ self.vh))
        return torch.cat([part.flatten(1) for part in parts], 1)

    def direction(self, change: Tensor) -> Tensor:
        """W to first order where the weights have changed."""
        direction: Tensor = (self.u * self.w) @ self.vh + self.turned(change)
        return direction

    def turned(self, change: Tensor) -> Tensor:
        """By how much W changes then."""
        inner, left = torch.tensordot(change, self.inner, 1), torch.tensordot(change, self.left, 1)
        turned = (self.along * _symmetric(inner) + self.across * _skew(inner)) @ self.vh
        if not self.is_square:
            turned = turned + self.outside * (left - inner @ self.vh)
        change_of_direction: Tensor = self.u @ turned
        return change_of_direction


class _Newton:
    """The Newton step at a point, in relative changes d of the weights, with sum_i z_i d_i = 0.

    In these the barrier's second derivative is the identity, and the whole one is I + A A' / mu with entries of up to
    1 / mu^2. It is never formed: a QR decomposition with A keeps the digits of the directions that have little curvature.
    """

    def __init__(self, point: _Point, mu: float) -> None:
        self._point, self._mu = point, mu
        for each in point.factored:
            each.smooth(mu)
        z = point.weights
        slopes = torch.stack([each.slopes_by_task() for each in point.factored]).sum(0)
        self._free = _complement(z)
        parts = [each.curvature().mT * (z / math.sqrt(mu)) @ self._free for each in point.factored]
        triangles = [torch.linalg.qr(part, mode="r").R for part in parts]
        self._triangle = torch.linalg.qr(torch.cat([self._free, *triangles]), mode="r").R
        gradient = self._free.mT @ (z * slopes / mu - 1)
        half = torch.linalg.solve_triangular(self._triangle.mT, gradient[:, None], upper=False)
        self.decrement = float(half.norm())
        self.change = -(self._free @ torch.linalg.solve_triangular(self._triangle, half, upper=True))[:, 0]

    def direction(self) -> list[Tensor]:
        """W to first order at the end of the step: its products with the tasks are balanced up to mu / z, as at the centre.

        z is rounded, and W follows it at a rate of 1 / mu: what that has put off balance is corrected once.
        """
        z, factored = self._point.weights, self._point.factored
        direction = [each.direction(z * self.change) for each in factored]
        products = inner_products(self._point.blocks, direction)
        rest = self._free.mT @ (z * products / self._mu - 1 + self.change)
        half = torch.linalg.solve_triangular(self._triangle.mT, rest[:, None], upper=False)
        change = -z * (self._free @ torch.linalg.solve_triangular(self._triangle, half, upper=True))[:, 0]
        return [w + each.turned(change) for w, each in zip(direction, factored, strict=True)]


def _complement(vector: Tensor) -> Tensor:
    """An orthonormal basis of what is orthogonal to a vector of positive numbers, as columns (Householder's reflection)."""
    normal = vector / vector.norm()
    normal[0] += 1
    reflection: Tensor = (
        torch.eye(len(vector), dtype=vector.dtype, device=vector.device) - torch.outer(normal, normal) / normal[0]
    )
    return reflection[:, 1:]


def _symmetric(matrices: Tensor) -> Tensor:
    return (matrices + matrices.mT) / 2


def _skew(matrices: Tensor) -> Tensor:
    return (matrices - matrices.mT) / 2
