"""Small convex problems over the probability simplex {z >= 0, sum z = 1}, given by the Gram matrix of some vectors.

``min_norm_weights`` is the weighting of MGDA (Désidéri, 2012); other methods' weights are in ``bargaining.py``. The vectors
are few, one per task: everything is computed on the CPU in float64, and nothing is differentiable.
"""

import math

import torch
from torch import Tensor

#: What share of the trace counts as nothing. The rounding of float64 inner products is 1e-16 to 1e-14 of it.
NEGLIGIBLE = 1e-12
#: Rounding to bfloat16 makes no eigenvalue more negative than 2e-3 of the trace: below this, it is not a Gram matrix.
MOST_NEGATIVE = 1e-2
#: Vectors are independent where all eigenvalues of their matrix of cosines are above this.
INDEPENDENT = 1e-10

_ROUNDING = 1e-15  # of an inner product, relative to the norms of both vectors
_ROUNDS_PER_VECTOR = 10  # at most three have been seen; without rounding, the search ends by itself


@torch.no_grad()
def min_norm_weights(gram: Tensor) -> Tensor:
    """The weights of the point of least norm in the convex hull of m vectors: the z in the simplex with the least z' G z.

    It holds that min_i (G z)_i >= z' G z - 1e-10 trace(G). If rounding has made eigenvalues of G negative, twice the lowest
    is to be added. Where several weights give the point (equal, dependent or zero vectors), these are the ones of least
    norm; among dependent vectors, what is shorter than 1e-6 of the longest may count as zero. The scale of G does not matter.

    Args:
        gram: the inner products of the vectors, of shape (m, m), symmetric up to rounding.

    Returns:
        m weights in float64, on the device of ``gram``.

    >>> min_norm_weights(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    tensor([0.7500, 0.2500], dtype=torch.float64)

    """
    weights = _min_norm(_normalised(checked(gram)))
    return (weights / weights.sum()).to(gram.device)


def scaled(gram: Tensor) -> tuple[Tensor, Tensor]:
    """C and n with G = diag(n) C diag(n), without rounding: n are the norms, rounded up to powers of two.

    Where a norm is zero, so is the row of C, and n is that of the longest vector.
    """
    gram = checked(gram)
    _check_eigenvalues(_normalised(gram))
    norms = gram.diagonal().clamp_min(0).sqrt()
    zero = norms == 0
    if zero.any():
        norms = torch.where(zero, norms.max() if norms.max() > 0 else 1.0, norms)
        gram = gram.masked_fill(zero | zero.unsqueeze(1), 0.0)
    powers = norms / torch.frexp(norms).mantissa
    cosines = gram / powers / powers.unsqueeze(1)
    return (cosines + cosines.mT) / 2, powers


def checked(gram: Tensor) -> Tensor:
    """G on the CPU in float64."""
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.shape[0] == 0:
        raise ValueError(f"A Gram matrix has shape (m, m) with m >= 1, found shape {tuple(gram.shape)}.")
    if not gram.is_floating_point():
        raise ValueError(f"A Gram matrix must be real and floating point, found {gram.dtype}.")
    gram = gram.to("cpu", torch.float64)
    finite = gram.isfinite()
    if not finite.all():
        count = f"{int((~finite).sum())} of {gram.numel()}"
        raise ValueError(f"A Gram matrix must be finite, found {count} entries NaN or infinite.")
    return gram


def _normalised(gram: Tensor) -> Tensor:
    """G made symmetric, with trace 1 unless it is zero."""
    largest = gram.abs().max()
    if largest == 0:
        return gram
    gram = gram / largest
    trace = gram.trace().item()
    if trace <= 0:
        raise ValueError(f"A Gram matrix that is not zero has a positive trace, found {trace * largest.item():.3g}.")
    return (gram + gram.mT) / (2 * trace)


def _check_eigenvalues(gram: Tensor) -> None:
    shifted = gram.clone()
    shifted.diagonal().add_(MOST_NEGATIVE)
    if int(torch.linalg.cholesky_ex(shifted).info) != 0:
        _check_lowest_eigenvalue(torch.linalg.eigvalsh(gram)[0].item())


def _check_lowest_eigenvalue(lowest: float) -> None:
    if lowest < -MOST_NEGATIVE:
        raise ValueError(f"A Gram matrix has no negative eigenvalue but by rounding, found {lowest:.3g} of its trace.")


def _min_norm(gram: Tensor) -> Tensor:
    if len(gram) == 1:
        return torch.ones_like(gram[0])
    if len(gram) == 2:
        return _min_norm_of_two(gram)
    if _are_independent(gram):
        return _by_active_set(gram)
    lowest = torch.linalg.eigvalsh(gram)[0].item()
    _check_lowest_eigenvalue(lowest)
    ridge = max(NEGLIGIBLE, -2 * lowest)
    with_ridge = gram.clone()
    with_ridge.diagonal().add_(ridge)
    return _least_norm_weights(gram, _by_active_set(with_ridge), ridge)


def _min_norm_of_two(gram: Tensor) -> Tensor:
    """In the ratio of G22 - G12 to G11 - G12, of which at most one is negative."""
    (first, inner), (_, second) = gram.tolist()
    _check_lowest_eigenvalue(first * second - inner**2)  # times the other, which is about 1, the trace
    ratio = gram.new_tensor([second - inner, first - inner])
    return ratio.clamp_min(0) if ratio.max() > NEGLIGIBLE else torch.ones_like(ratio)


def _are_independent(gram: Tensor) -> bool:
    """Whatever their lengths: with very different ones, G has tiny eigenvalues that matter."""
    norms = gram.diagonal().sqrt()
    if not norms.min() > 0:
        return False
    cosines = gram / norms / norms.unsqueeze(1)
    cosines.diagonal().sub_(INDEPENDENT)
    return int(torch.linalg.cholesky_ex(cosines).info) == 0


def _by_active_set(gram: Tensor) -> Tensor:
    """Wolfe's algorithm (1976) for a positive definite G, from a first guess that is often the solution."""
    weights = _shrunk_to_positive(gram)
    norms = gram.diagonal().sqrt()
    for _ in range(_ROUNDS_PER_VECTOR * len(gram)):
        slopes = gram @ weights
        lowest, entering = (slopes + _ROUNDING * (norms @ weights) * norms).min(0)
        if lowest >= weights @ slopes:
            break
        moved = _with_vector(gram, weights, int(entering))
        if torch.equal(moved > 0, weights > 0):
            break
        weights = moved
    return weights


def _shrunk_to_positive(gram: Tensor) -> Tensor:
    """Minimise over the affine hull of all vectors, without those of negative weights, and so on."""
    support = torch.ones_like(gram[0], dtype=torch.bool)
    while True:
        weights = _affine_minimiser(gram, support)
        positive = weights > 0
        if torch.equal(positive, support):
            return weights
        support = positive


def _with_vector(gram: Tensor, weights: Tensor, entering: int) -> Tensor:
    """Walk to the affine minimiser with one more vector; leave out those whose weight reaches zero, and walk on."""
    support = weights > 0
    support[entering] = True
    while True:
        target = _affine_minimiser(gram, support)
        blocking = support & (target <= 0)
        if not blocking.any():
            return target
        distances = (weights - target).clamp_min(torch.finfo(gram.dtype).tiny)
        steps = torch.where(blocking, weights / distances, math.inf)
        step = steps.min()
        weights = torch.where(steps <= step, 0.0, torch.lerp(weights, target, step).clamp_min(0))
        support = weights > 0


def _affine_minimiser(gram: Tensor, support: Tensor) -> Tensor:
    """The least z' G z with sum z = 1, of any signs, that is zero outside of the support."""
    chosen = support.nonzero().squeeze(1)
    factor = torch.linalg.cholesky_ex(gram[chosen.unsqueeze(1), chosen]).L
    solution = torch.cholesky_solve(gram.new_ones(len(chosen), 1), factor).squeeze(1)
    return torch.zeros_like(gram[0]).index_copy_(0, chosen, solution / solution.sum())


def _least_norm_weights(gram: Tensor, weights: Tensor, ridge: float) -> Tensor:
    """From the minimiser with G + ridge I to its limit for a ridge of zero: of all minimisers with G, that of least norm.

    On the same support, the limit is the affine minimiser of least norm. Only rounding makes weights of it negative.
    """
    limit = _least_norm_affine_minimiser(gram, weights > 0, ridge).clamp_min(0)
    limit = limit / limit.sum()
    return limit if _optimality_gap(gram, limit) <= max(_optimality_gap(gram, weights), ridge) else weights


def _least_norm_affine_minimiser(gram: Tensor, support: Tensor, cutoff: float) -> Tensor:
    """Equal weights on the support, and the shortest step from there to an affine minimiser."""
    chosen = support.nonzero().squeeze(1)
    part = gram[chosen.unsqueeze(1), chosen]
    means = part.mean(0)
    centred = part - means - means.unsqueeze(1) + means.mean()
    inverse = torch.linalg.pinv(centred, atol=cutoff, rtol=0.0, hermitian=True)
    weights = torch.full_like(means, 1 / len(chosen))
    for _ in range(2):  # again for what rounding left
        slopes = part @ weights
        weights = weights - inverse @ (slopes - slopes.mean())
    return torch.zeros_like(gram[0]).index_copy_(0, chosen, weights)


def _optimality_gap(gram: Tensor, weights: Tensor) -> float:
    slopes = gram @ weights
    return (weights @ slopes - slopes.min()).item()
