"""How tasks share a step, given the Gram matrix G of their gradients: Nash-MTL, IMTL-G and PCGrad.

Every function takes the inner products G_ij = <g_i, g_j> and gives what the gradients are multiplied with. As in
``simplex.py``, everything is computed on the CPU in float64, for few tasks, and nothing is differentiable.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moonopt.linalg.simplex import INDEPENDENT, checked, scaled

#: What max_i |a_i (G a)_i - 1| may be in a solution of Nash-MTL's equation.
RESIDUAL = 1e-8
#: Tasks are stationary where |sum_i w_i g_i| is below this times (sum_i w_i^2 |g_i|^2)^(1/2), for some weights w.
STATIONARY = math.sqrt(INDEPENDENT)

ROUNDING = 1e-15  # of a sum, relative to its terms
_SAFE_PIVOT = 1e-3  # of the cosines' Cholesky decomposition: above it they are far from dependent
_NASH_STEPS = 100  # 4 to 15 are taken
_QUADRATIC = 0.25  # Newton decrement from which on full steps at least halve it, but for rounding
_CANCELLING = 1e4  # mean of (a_i |g_i|)^2 from which on G a is summed up exactly


class NashAnswer(NamedTuple):
    """The answer of ``nash_weights``.

    Attributes:
        weights: a > 0; where not solved, the ``start``, or ones.
        residual: max_i |a_i (G a)_i - 1| of these weights.
        solved: whether they are the solution, with a residual of at most 1e-8.

    """

    weights: Tensor
    residual: float
    solved: bool


@torch.no_grad()
def nash_weights(gram: Tensor, start: Tensor | None = None) -> NashAnswer:
    """The bargaining solution of Nash-MTL (Navon et al., 2022): the a > 0 with a_i (G a)_i = 1 for all i.

    It minimises the strictly convex 1/2 a' G a - sum_i log a_i. There is no solution where a gradient is zero, or where
    sum_i w_i g_i = 0 for some weights w of the simplex: the tasks are Pareto stationary. What counts as zero in the latter is
    a sum whose square is below 1e-10 of sum_i w_i^2 |g_i|^2. From there to 1e-7 of it, the rounding of the large weights
    alone may leave a residual above 1e-8: then there is no solution either. Weights have the unit of 1 / |g_i|.

    Args:
        gram: the inner products of the gradients, of shape (m, m), symmetric up to rounding.
        start: m positive numbers, such as the weights of the last step: where to begin, if it is better than weights
            1 / |g_i|, and the answer where there is no solution.

    >>> nash_weights(torch.tensor([[4.0, 0.0], [0.0, 0.25]])).weights
    tensor([0.5000, 2.0000], dtype=torch.float64)

    """
    cosines, norms = scaled(gram)
    guesses = [torch.ones_like(norms)]
    weights = torch.ones_like(norms)
    if start is not None:
        weights = _checked_start(start, norms)
        guesses.append(weights / weights.max() * (norms / norms.max()))
    if cosines.diagonal().min() > 0:
        solution = _nash_solution(cosines, min(guesses, key=lambda guess: _nash_objective(cosines, guess)))
        if solution is not None and (residual := _largest(_nash_residuals(cosines, solution))) <= RESIDUAL:
            return NashAnswer((solution / norms).to(gram.device), residual, True)
    return NashAnswer(weights.to(gram.device), _largest(_nash_residuals(cosines, weights * norms)), False)


@torch.no_grad()
def imtl_g_weights(gram: Tensor) -> Tensor:
    """The weights of IMTL-G (Liu et al., 2021): those of sum 1 for which d = sum_i a_i g_i has equal <d, g_i> / |g_i|.

    They are a_i = x_i / |g_i| with x = pinv(C) 1, divided by their sum, where C are the cosines of the gradients. Some may be
    negative. Eigenvalues of C up to 1e-10 count as zero: gradients are dependent, and the projections are as equal as can
    be. Zero gradients have weight zero. All weights are zero, for a step that does nothing, where their sum is but rounding,
    since dividing by it would make a step of any length and sign.

    Args:
        gram: the inner products of the gradients, of shape (m, m), symmetric up to rounding.

    >>> imtl_g_weights(torch.tensor([[1.0, 0.0], [0.0, 9.0]]))
    tensor([0.7500, 0.2500], dtype=torch.float64)

    """
    weights = _imtl_g_of_independent(checked(gram))
    return (_imtl_g_of_dependent(gram) if weights is None else weights).to(gram.device)


def _imtl_g_of_independent(gram: Tensor) -> Tensor | None:
    """By a Cholesky decomposition, which is all it takes as a rule; None where a pivot is too small to tell."""
    gram = gram + gram.mT  # their symmetric part, twice: only ratios matter
    sizes = gram.diagonal().rsqrt()
    factor, info = torch.linalg.cholesky_ex(gram * sizes * sizes[:, None])
    if info.item() != 0 or not factor.diagonal().min().item() > _SAFE_PIVOT:  # nor is a NaN
        return None
    weights = torch.cholesky_solve(sizes.new_ones(len(sizes), 1), factor)[:, 0] * sizes
    total = weights.sum().item()
    return weights / total if abs(total) > _SAFE_PIVOT * weights.abs().sum().item() else None


def _imtl_g_of_dependent(gram: Tensor) -> Tensor:
    cosines, norms = scaled(gram)
    squares = cosines.diagonal()
    lengths = torch.where(squares > 0, squares, 1.0).sqrt()
    eigenvalues, vectors = torch.linalg.eigh(cosines / lengths / lengths.unsqueeze(1))
    eigenvalues = torch.where(eigenvalues > INDEPENDENT, eigenvalues, math.inf)
    weights = vectors @ (vectors.sum(0) / eigenvalues) / (lengths * (norms / norms.min()))
    total = weights.sum()
    rounding = ROUNDING * len(norms) / eigenvalues.min() * weights.abs().sum()
    return weights / total if total.abs() > rounding else torch.zeros_like(weights)


@torch.no_grad()
def pcgrad_weights(gram: Tensor, orders: Tensor) -> Tensor:
    """The weights of PCGrad (Yu et al., 2020): the sum over i of g_i less its conflicts, as multiples of the gradients.

    For every i, a copy v of g_i loses v -= <v, g_j> / |g_j|^2 g_j for the j in orders[i], one after the other, wherever
    <v, g_j> is negative at the time. A zero gradient takes part in no conflict, and has weight 1.

    Args:
        gram: the inner products of the gradients, of shape (m, m), symmetric up to rounding.
        orders: integers of shape (m, m - 1); row i has all tasks but i, in the order in which they are met.

    >>> pcgrad_weights(torch.tensor([[1.0, -1.0], [-1.0, 2.0]]), torch.tensor([[1], [0]]))
    tensor([2.0000, 1.5000], dtype=torch.float64)

    """
    cosines, norms = scaled(gram)
    orders = _checked_orders(orders, len(norms))
    squares = torch.where(cosines.diagonal() > 0, cosines.diagonal(), 1.0)
    projections = cosines / squares.unsqueeze(1)
    inner, conflicts = cosines.clone(), torch.zeros_like(cosines)  # of the copies, by row, with the gradients
    for partners in orders.mT:
        conflict = inner.gather(1, partners.unsqueeze(1)).clamp_max_(0)
        inner.addcmul_(conflict, projections[partners], value=-1)
        conflicts.scatter_(1, partners.unsqueeze(1), conflict)
    return (1 - norms @ conflicts / squares / norms).to(gram.device)


def _checked_start(start: Tensor, norms: Tensor) -> Tensor:
    if start.shape != norms.shape:
        raise ValueError(f"start must have shape {tuple(norms.shape)}, found {tuple(start.shape)}.")
    start = start.to("cpu", torch.float64)
    if not (start.isfinite() & (start > 0)).all():
        raise ValueError(f"start must be positive and finite, found {start.tolist()}.")
    return start


def _checked_orders(orders: Tensor, count: int) -> Tensor:
    if orders.shape != (count, count - 1) or orders.is_floating_point():
        found = f"{orders.dtype} of shape {tuple(orders.shape)}"
        raise ValueError(f"orders must be integers of shape {(count, count - 1)}, found {found}.")
    tasks = torch.arange(count, device="cpu")
    orders = orders.to("cpu", torch.int64)
    if not (torch.cat([orders, tasks.unsqueeze(1)], 1).sort(1).values == tasks).all():
        raise ValueError(f"Row i of orders must have all tasks but i, found {orders.tolist()}.")
    return orders


def _nash_solution(cosines: Tensor, b: Tensor) -> Tensor | None:
    """Newton's method in relative changes of b = a n, in which the second derivative is I + diag(b) C diag(b).

    Every step begins at the best multiple of b. None where some b proves that the tasks are stationary.
    """
    last = math.inf
    for _ in range(_NASH_STEPS):
        square = (b @ (cosines @ b)).item()
        if square <= INDEPENDENT * (b @ b).item():
            return None
        b = b * math.sqrt(len(b) / square)
        curvature = cosines * b * b.unsqueeze(1)
        curvature.diagonal().add_(1)
        factor, failed = torch.linalg.cholesky_ex(curvature)
        if failed:
            return None
        residuals = _nash_residuals(cosines, b)
        change = -torch.cholesky_solve(residuals.unsqueeze(1), factor).squeeze(1)
        decrement = math.sqrt(max(-(residuals @ change).item(), 0.0))
        if decrement > _QUADRATIC:
            b = _nash_search(cosines, b, change, decrement)
        else:
            b = b * (1 + inside(change) * change)
            if decrement < RESIDUAL or decrement > last / 2:
                break
            last = decrement
    return b


def _nash_search(cosines: Tensor, b: Tensor, change: Tensor, decrement: float) -> Tensor:
    """Along the Newton direction as far as it pays; 1 / (1 + decrement) always does."""
    here, length = _nash_objective(cosines, b), inside(change)
    safe = min(length, 1 / (1 + decrement))
    while length > safe:
        there = b * (1 + length * change)
        if _nash_objective(cosines, there) <= here - 0.2 * length * decrement**2:
            return there
        length /= 2
    return b * (1 + safe * change)


def inside(change: Tensor) -> float:
    """How much of a relative change positive numbers can take and stay positive, 1 at most."""
    return min(1.0, 0.99 / max(-change.min().item(), 0.99))


def _nash_objective(cosines: Tensor, b: Tensor) -> float:
    """At the best multiple of b."""
    square = (b @ (cosines @ b)).clamp_min(torch.finfo(b.dtype).tiny)
    return (len(b) / 2 * square.log() - b.log().sum()).item()


def _nash_residuals(cosines: Tensor, b: Tensor) -> Tensor:
    exact = _CANCELLING * len(b) < (b @ b).item() < len(b) / INDEPENDENT
    return b * (_exact_product(cosines, b) if exact else cosines @ b) - 1


def _exact_product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Rounded once: 24 leading bits of a number times the 29 others of another fit into the 53 of float64."""
    halves = [(leading := x.float().double(), x - leading) for x in (matrix, vector)]
    products = torch.cat([of_matrix * of_vector for of_matrix in halves[0] for of_vector in halves[1]], 1)
    return vector.new_tensor([math.fsum(row) for row in products.tolist()])


def _largest(residuals: Tensor) -> float:
    return residuals.abs().nan_to_num(math.inf).max().item()
