"""Points of least norm against closed forms, enumeration of all faces, and scipy's NNLS and SLSQP."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize, nnls
from torch import Tensor

import moonopt.linalg.simplex as simplex_module
from moonopt.linalg.simplex import min_norm_weights

few = settings(max_examples=60, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
COUNTS = (1, 2, 3, 5, 11, 40, 100)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Their Gram matrix is exact, and so are its ranks."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def spread(count: int, orders: float) -> Tensor:
    """Lengths from 1 to 10^orders, one for each vector."""
    return torch.logspace(0, orders, count, dtype=torch.float64).unsqueeze(1)


def gram_of(vectors: Tensor) -> Tensor:
    return vectors @ vectors.mT


#: Rows of m vectors; in most of them several weights give the point of least norm.
FAMILIES: dict[str, Callable[[int, int], Tensor]] = {
    "independent": lambda m, seed: gaussian(m, 2 * m, seed=seed),
    "aligned": lambda m, seed: gaussian(m, 2 * m, seed=seed) + 1,
    "dependent": lambda m, seed: gaussian(m, max(1, m // 2), seed=seed),
    "dependent and aligned": lambda m, seed: gaussian(m, max(1, m // 3), seed=seed) + 1.5,
    "in the plane": lambda m, seed: gaussian(m, 2, seed=seed),
    "on a line": lambda m, seed: gaussian(m, 1, seed=seed),
    "small integers": lambda m, seed: integers(m, max(1, m // 2), seed=seed),
    "each twice": lambda m, seed: gaussian(m, 2 * m, seed=seed)[torch.arange(m) // 2],
    "opposite": lambda m, seed: gaussian(m, 2 * m, seed=seed)[torch.arange(m) // 2] * (-1) ** torch.arange(m).unsqueeze(1),
    "one zero": lambda m, seed: gaussian(m, 2 * m, seed=seed) * (torch.arange(m) != m // 2).unsqueeze(1),
    "all zero": lambda m, seed: torch.zeros(m, 3, dtype=torch.float64),
}
SPREAD_FAMILIES: dict[str, Callable[[int, int], Tensor]] = {
    "spread": lambda m, seed: gaussian(m, 2 * m, seed=seed) * spread(m, 4),
    "widely spread": lambda m, seed: gaussian(m, 2 * m, seed=seed) * spread(m, 6),
    "dependent and spread": lambda m, seed: gaussian(m, max(1, m // 2), seed=seed) * spread(m, 4),
    "dependent and widely spread": lambda m, seed: gaussian(m, max(1, m // 2), seed=seed) * spread(m, 6),
    "nearly equal": lambda m, seed: 1 + 1e-7 * gaussian(m, 2 * m, seed=seed),
    "nearly equal in length": lambda m, seed: (1 + 1e-7 * gaussian(m, 1, seed=seed)) * gaussian(1, 9, seed=seed + 1),
}
EVERY_FAMILY = FAMILIES | SPREAD_FAMILIES


def optimality_gap(gram: Tensor, weights: Tensor) -> float:
    """How far below z' G z the lowest of G z lies, relative to the trace."""
    gram = gram.double()
    slopes = gram @ weights
    return ((weights @ slopes - slopes.min()) / gram.trace().clamp_min(torch.finfo(gram.dtype).tiny)).item()


def assert_on_simplex(weights: Tensor) -> None:
    assert weights.dtype == torch.float64
    assert weights.min() >= 0
    assert abs(weights.sum().item() - 1) <= 1e-15


def by_nnls(vectors: Tensor) -> Tensor:
    """x >= 0 with the least ||V' x||^2 + (sum x - 1)^2 is a multiple of the weights."""
    unit = (vectors / torch.linalg.vector_norm(vectors).clamp_min(1e-300)).numpy()
    system = np.vstack([unit.T, np.ones(len(unit))])
    solution, _ = nnls(system, np.append(np.zeros(unit.shape[1]), 1.0), maxiter=100 * len(unit))
    return torch.from_numpy(solution / solution.sum())


def by_enumeration(vectors: Tensor) -> Tensor:
    """Of the least-norm affine minimisers over all faces that lie in the face: the least value, then the least norm."""
    unit = (vectors / torch.linalg.vector_norm(vectors).clamp_min(1e-300)).numpy()
    candidates = []
    for size in range(1, len(unit) + 1):
        for face in itertools.combinations(range(len(unit)), size):
            inner = unit[list(face)] @ unit[list(face)].T
            stationary = np.vstack([inner - inner[0], np.ones(size)])
            part, *_ = np.linalg.lstsq(stationary, np.append(np.zeros(size), 1.0), rcond=1e-10)
            if part.min() >= -1e-12:
                weights = np.zeros(len(unit))
                weights[list(face)] = part
                candidates.append(weights)
    least = min(np.linalg.norm(unit.T @ weights) ** 2 for weights in candidates)
    best = [weights for weights in candidates if np.linalg.norm(unit.T @ weights) ** 2 <= least + 1e-13]
    return torch.from_numpy(min(best, key=np.linalg.norm))


def distance_from_least_norm_certificate(vectors: Tensor, weights: Tensor) -> float:
    """Zero where z is the shortest of the weights z >= 0 that give V' z: if z = max(0, B' y) for B = (V', 1') and some y.

    Vectors that no weighting of that point can contain, as they lie strictly above its supporting plane, are left out.
    """
    unit = vectors / torch.linalg.vector_norm(vectors).clamp_min(1e-300)
    slopes = unit @ (unit.mT @ weights)
    on_face = slopes <= weights @ slopes + 1e-10
    weights = weights[on_face].numpy()
    constraints = np.hstack([unit[on_face].numpy(), np.ones((len(weights), 1))])
    slack = np.eye(len(weights))[:, weights <= 1e-12]
    _, residual = nnls(np.hstack([constraints, -constraints, slack]), weights, maxiter=1000 * len(weights))
    return residual


# One and two vectors


def test_one_vector_has_all_the_weight():
    for length in (0.0, 3.0):
        assert min_norm_weights(torch.tensor([[length]])).tolist() == [1.0]


@pytest.mark.parametrize(
    ("gram", "expected"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], 0.5),
        ([[1.0, 0.0], [0.0, 3.0]], 0.75),
        ([[1.0, -1.0], [-1.0, 4.0]], 5 / 7),
        ([[1.0, -2.0], [-2.0, 4.0]], 2 / 3),
        ([[1.0, 2.0], [2.0, 9.0]], 1.0),
        ([[9.0, 2.0], [2.0, 1.0]], 0.0),
        ([[1.0, 1.0], [1.0, 1.0]], 0.5),
        ([[0.0, 0.0], [0.0, 5.0]], 1.0),
        ([[0.0, 0.0], [0.0, 0.0]], 0.5),
        ([[1.0, 1.0 + 1e-15], [1.0 + 1e-15, 1.0]], 0.5),
        ([[1.0, 1.0 - 1e-14], [1.0 - 1e-14, 1.0 + 2e-14]], 0.5),
        ([[1.0, 1.0 + 1e-9], [1.0 + 1e-9, 1.0 + 2e-9]], 1.0),
    ],
)
def test_two_vectors_have_the_weights_of_the_formula(gram, expected):
    weights = min_norm_weights(torch.tensor(gram, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([expected, 1 - expected], dtype=torch.float64), rtol=0, atol=1e-15)


@pytest.mark.parametrize("seed", range(10))
def test_formula_for_two_agrees_with_the_active_set(seed):
    gram = gram_of(gaussian(2, 3, seed=seed) + 0.5)
    gram = gram / gram.trace()
    torch.testing.assert_close(min_norm_weights(gram), simplex_module._by_active_set(gram), rtol=0, atol=1e-13)


# Closed forms


@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("orders", [0, 2, 4, 6])
def test_orthogonal_vectors_are_weighted_by_their_inverse_squares(m, orders):
    inverse_squares = spread(m, orders).squeeze(1) ** -2
    weights = min_norm_weights(inverse_squares.reciprocal().diag())
    torch.testing.assert_close(weights, inverse_squares / inverse_squares.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("orders", [0, 2, 4, 6])
def test_vectors_at_equal_obtuse_angles_are_weighted_by_the_inverse_of_their_gram_matrix(orders):
    cosine, lengths = -0.1, spread(8, orders).squeeze(1)
    gram = (cosine + (1 - cosine) * torch.eye(8, dtype=torch.float64)) * torch.outer(lengths, lengths)
    by_sherman_morrison = (1 / lengths - cosine / (1 + 7 * cosine) * (1 / lengths).sum()) / lengths
    expected = by_sherman_morrison / by_sherman_morrison.sum()
    torch.testing.assert_close(min_norm_weights(gram), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("m", COUNTS)
def test_zero_gives_equal_weights(m):
    torch.testing.assert_close(min_norm_weights(torch.zeros(m, m)), torch.full((m,), 1 / m, dtype=torch.float64))


@pytest.mark.parametrize("m", COUNTS[2:])
def test_zero_vectors_share_all_the_weight(m):
    vectors = gaussian(m, 2 * m)
    vectors[[0, m // 2]] = 0
    weights = min_norm_weights(gram_of(vectors))
    torch.testing.assert_close(weights[[0, m // 2]], torch.full((2,), 0.5, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("copies", [2, 3, 10])
@pytest.mark.parametrize("orders", [0, 2, 4])
def test_equal_vectors_share_the_weight_of_one(copies, orders):
    vectors = gaussian(4, 9)
    vectors[0] *= 10**orders
    weights = min_norm_weights(gram_of(vectors.repeat(copies, 1)))
    expected = (min_norm_weights(gram_of(vectors)) / copies).expand(copies, 4)
    torch.testing.assert_close(weights.view(copies, 4), expected, rtol=0, atol=1e-8)


def test_long_opposite_vectors_share_all_the_weight_beside_short_ones():
    vectors = torch.tensor([[6, -3, 1], [384, 384, 256], [1, -2, 3], [-64, 64, -192], [-384, -384, -256]]).double()
    expected = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(min_norm_weights(gram_of(vectors)), expected, rtol=0, atol=1e-12)


def test_regular_polygon_around_the_origin_has_equal_weights():
    angles = torch.arange(7, dtype=torch.float64) * 2 * torch.pi / 7
    weights = min_norm_weights(gram_of(torch.stack([angles.cos(), angles.sin()], dim=1)))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 7), rtol=0, atol=1e-12)


def test_shortest_vector_has_all_the_weight_where_it_points_along_the_others():
    vectors = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, -1.0]], dtype=torch.float64)
    assert min_norm_weights(gram_of(vectors)).tolist() == [1.0, 0.0, 0.0]


# Optimality, and other people's solvers


@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_weights_are_optimal(family, m):
    for seed in range(3):
        gram = gram_of(EVERY_FAMILY[family](m, seed))
        weights = min_norm_weights(gram)
        assert_on_simplex(weights)
        assert optimality_gap(gram, weights) <= 1e-11


@pytest.mark.parametrize("m", [3, 5, 11, 40, 100])
@pytest.mark.parametrize("family", ["independent", "aligned", "spread"])
def test_weights_of_independent_vectors_are_those_of_nnls(family, m):
    vectors = EVERY_FAMILY[family](m, 0)
    torch.testing.assert_close(min_norm_weights(gram_of(vectors)), by_nnls(vectors), rtol=0, atol=1e-9)


@pytest.mark.parametrize("m", [3, 5, 11, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_point_is_that_of_nnls(family, m):
    vectors = FAMILIES[family](m, 0)
    found = vectors.mT @ min_norm_weights(gram_of(vectors))
    torch.testing.assert_close(found, vectors.mT @ by_nnls(vectors), rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["independent", "aligned", "dependent and aligned"])
def test_slsqp_finds_nothing_shorter(family):
    vectors = FAMILIES[family](6, 0)
    gram = gram_of(vectors)
    shortest = minimize(
        lambda z: z @ gram.numpy() @ z,
        np.full(6, 1 / 6),
        jac=lambda z: 2 * gram.numpy() @ z,
        bounds=[(0, 1)] * 6,
        constraints={"type": "eq", "fun": lambda z: z.sum() - 1},
        tol=1e-12,
    )
    weights = min_norm_weights(gram)
    assert (weights @ gram @ weights).item() <= shortest.fun + 1e-12
    torch.testing.assert_close((weights @ gram @ weights).item(), shortest.fun, rtol=1e-6, atol=1e-10)


# Of all weights that give the point, the shortest


@pytest.mark.parametrize("m", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_enumeration(family, m):
    for seed in range(2):
        vectors = FAMILIES[family](m, seed)
        torch.testing.assert_close(min_norm_weights(gram_of(vectors)), by_enumeration(vectors), rtol=0, atol=1e-9)


@pytest.mark.parametrize("m", [5, 11, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_weights_of_the_same_point_are_shorter(family, m):
    vectors = FAMILIES[family](m, 1)
    assert distance_from_least_norm_certificate(vectors, min_norm_weights(gram_of(vectors))) <= 1e-9


def test_certificate_sees_weights_that_could_be_shorter():
    vectors = FAMILIES["each twice"](6, 0)
    weights = min_norm_weights(gram_of(vectors))
    weights[0], weights[1] = weights[0] + weights[1], 0.0
    assert optimality_gap(gram_of(vectors), weights) <= 1e-11
    assert distance_from_least_norm_certificate(vectors, weights) > 1e-3


@few
@given(m=st.integers(2, 5), dimensions=st.integers(1, 3), shift=st.integers(0, 3), seed=seeds)
def test_weights_of_small_integers_are_those_of_enumeration(m, dimensions, shift, seed):
    vectors = integers(m, dimensions, seed=seed) + shift
    torch.testing.assert_close(min_norm_weights(gram_of(vectors)), by_enumeration(vectors), rtol=0, atol=1e-9)


# What does not matter


@few
@given(m=st.integers(1, 12), family=st.sampled_from(list(FAMILIES)), exponent=st.floats(-30, 30), seed=seeds)
def test_scale_does_not_matter(m, family, exponent, seed):
    gram = gram_of(FAMILIES[family](m, seed))
    torch.testing.assert_close(min_norm_weights(gram * 10**exponent), min_norm_weights(gram), rtol=0, atol=1e-8)


@pytest.mark.parametrize("exponent", [-1000, -300, 300, 1019])
def test_powers_of_two_do_not_matter_at_all(exponent):
    gram = gram_of(integers(7, 4))  # its trace of 59 is infinite at the largest scale
    assert torch.equal(min_norm_weights(gram * 2.0**exponent), min_norm_weights(gram))


@few
@given(m=st.integers(1, 12), family=st.sampled_from(list(FAMILIES)), seed=seeds)
def test_order_does_not_matter(m, family, seed):
    gram = gram_of(FAMILIES[family](m, seed))
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(min_norm_weights(gram[order][:, order]), min_norm_weights(gram)[order], rtol=0, atol=1e-8)


@few
@given(m=st.integers(2, 12), orders=st.floats(0, 8), dimensions=st.integers(1, 15), seed=seeds)
def test_weights_are_optimal_whatever_the_lengths(m, orders, dimensions, seed):
    vectors = gaussian(m, dimensions, seed=seed)
    gram = gram_of(vectors * 10 ** (orders * torch.rand(m, 1, generator=torch.Generator().manual_seed(seed)).double()))
    weights = min_norm_weights(gram)
    assert_on_simplex(weights)
    assert optimality_gap(gram, weights) <= 1e-11


@few
@given(m=st.integers(2, 12), distance=st.floats(-14, -2), dimensions=st.integers(1, 15), seed=seeds)
def test_weights_are_optimal_however_close_the_vectors(m, distance, dimensions, seed):
    gram = gram_of(gaussian(1, dimensions, seed=seed) + 10**distance * gaussian(m, dimensions, seed=seed + 1))
    weights = min_norm_weights(gram)
    assert_on_simplex(weights)
    assert optimality_gap(gram, weights) <= 1e-11


# Rounded input


@few
@given(m=st.integers(2, 30), noise=st.floats(-17, -4), dimensions=st.integers(1, 10), seed=seeds)
def test_weights_are_optimal_up_to_the_negative_eigenvalues(m, noise, dimensions, seed):
    errors = gaussian(m, m, seed=seed + 1)
    gram = gram_of(gaussian(m, dimensions, seed=seed))
    gram = gram + 10**noise * gram.trace() * (errors + errors.mT) / m
    lowest = torch.linalg.eigvalsh(gram / gram.trace())[0].item()
    weights = min_norm_weights(gram)
    assert_on_simplex(weights)
    assert optimality_gap(gram, weights) <= 1e-11 + 2 * max(0.0, -lowest)


def test_weights_are_optimal_up_to_the_negative_eigenvalues_of_large_errors():
    for seed in range(50):
        errors = gaussian(20, 20, seed=seed + 50)
        gram = gram_of(gaussian(20, 3, seed=seed))
        gram = gram + 1e-5 * gram.trace() * (errors + errors.mT) / 20
        lowest = torch.linalg.eigvalsh(gram / gram.trace())[0].item()
        assert lowest < -1e-6
        assert optimality_gap(gram, min_norm_weights(gram)) <= -2 * lowest


def test_weights_are_those_of_the_symmetric_part():
    gram = gram_of(gaussian(9, 5)) * (1 + 1e-6 * gaussian(9, 9, seed=1))
    torch.testing.assert_close(min_norm_weights(gram), min_norm_weights((gram + gram.mT) / 2), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)]
)
def test_every_dtype_gives_float64(dtype, tolerance):
    gram = gram_of(gaussian(6, 40)) / 40
    weights = min_norm_weights(gram.to(dtype))
    assert_on_simplex(weights)
    torch.testing.assert_close(weights, min_norm_weights(gram), rtol=0, atol=tolerance)
    assert torch.equal(weights, min_norm_weights(gram.to(dtype).double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [2, 5, 40])
def test_dependent_vectors_in_low_precision_give_a_point_that_is_no_longer_than_rounding(dtype, m):
    vectors = gaussian(m, max(1, m // 5))
    vectors = torch.cat([vectors, -vectors])
    gram = gram_of(vectors)
    weights = min_norm_weights(gram.to(dtype))
    assert_on_simplex(weights)
    assert (weights @ gram @ weights).item() <= 4 * torch.finfo(dtype).eps * gram.trace().item()


def test_input_is_left_as_it_is_and_nothing_is_differentiated():
    gram = gram_of(gaussian(5, 3)).requires_grad_()
    before = gram.detach().clone()
    assert not min_norm_weights(gram).requires_grad
    assert torch.equal(gram, before)


@pytest.mark.parametrize("family", ["dependent", "aligned"])
def test_autocast_does_not_matter(family):
    gram = gram_of(FAMILIES[family](8, 0))
    expected = min_norm_weights(gram)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(min_norm_weights(gram), expected)


@pytest.mark.parametrize("gram", [gram_of(gaussian(20, 40) + 1), torch.ones(3, 3) + torch.tensor([0.0, 6.0, 7.0]).diag()])
def test_search_ends_where_the_vector_that_enters_is_left_out_at_once(gram, monkeypatch):
    entered = []
    with_vector = simplex_module._with_vector
    expected = min_norm_weights(gram)
    monkeypatch.setattr(simplex_module, "_ROUNDING", -10.0)
    monkeypatch.setattr(simplex_module, "_with_vector", lambda *given: entered.append(given[2]) or with_vector(*given))
    torch.testing.assert_close(min_norm_weights(gram), expected, rtol=0, atol=1e-12)
    assert 1 <= len(entered) <= 20


def test_search_ends_where_supports_alternate(monkeypatch):
    corners = itertools.cycle(torch.eye(5, dtype=torch.float64))
    monkeypatch.setattr(simplex_module, "_shrunk_to_positive", lambda gram: next(corners))
    monkeypatch.setattr(simplex_module, "_with_vector", lambda *given: next(corners))
    assert_on_simplex(min_norm_weights(torch.eye(5)))


# Errors


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 0), (2, 2, 2)])
def test_only_square_matrices_are_taken(shape):
    with pytest.raises(ValueError, match=r"shape \(m, m\) with m >= 1, found shape"):
        min_norm_weights(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_real_floating_point_matrices_are_taken(dtype):
    with pytest.raises(ValueError, match=f"real and floating point, found {dtype}"):
        min_norm_weights(torch.ones(2, 2, dtype=dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_only_finite_matrices_are_taken(value, m):
    gram = torch.eye(m)
    gram[0, -1] = value
    with pytest.raises(ValueError, match=f"must be finite, found 1 of {m * m} entries NaN or infinite"):
        min_norm_weights(gram)


@pytest.mark.parametrize("m", [2, 3, 5])
def test_negative_eigenvalues_that_no_rounding_makes_are_refused(m):
    with pytest.raises(ValueError, match="no negative eigenvalue but by rounding, found -"):
        min_norm_weights(torch.eye(m) - 0.9 * torch.ones(m, m) * (1 - torch.eye(m)) * 2)


@pytest.mark.parametrize("gram", [[[-2.0]], [[0.0, 1.0], [1.0, 0.0]], [[-1.0, 0.0], [0.0, 0.5]]])
def test_trace_must_be_positive(gram):
    with pytest.raises(ValueError, match=r"positive trace, found -?[0-9.]+"):
        min_norm_weights(torch.tensor(gram))
