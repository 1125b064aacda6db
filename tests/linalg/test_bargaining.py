"""Nash-MTL, CAGrad, IMTL-G and PCGrad against their defining equations, closed forms, scipy, and a loop over gradients.

Residuals and gaps are computed anew, by numpy in extended precision.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize, nnls
from torch import Tensor

from moonopt.linalg import bargaining
from moonopt.linalg.bargaining import imtl_g_weights, nash_weights, pcgrad_weights
from moonopt.linalg.conflict_averse import CAGradAnswer, cagrad_weights
from moonopt.linalg.simplex import min_norm_weights

few = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
COUNTS = (1, 2, 3, 11, 40)
RADII = (0.01, 0.4, 0.9, 1.0, 3.0)
GOLDEN = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]])

exactly = partial(torch.testing.assert_close, rtol=1e-12, atol=0)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lengths(count: int, orders: float, seed: int = 0) -> Tensor:
    """From 1 to 10^orders, in random order."""
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return torch.logspace(0, orders, count, dtype=torch.float64)[shuffled].unsqueeze(1)


def gram_of(gradients: Tensor) -> Tensor:
    return gradients @ gradients.mT


def with_opposites(gradients: Tensor) -> Tensor:
    """The second is a negative multiple of the first, which makes them stationary."""
    gradients = gradients.clone()
    gradients[1] = -2.5 * gradients[0]
    return gradients


def random_orders(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    permutations = [torch.randperm(count, generator=generator).tolist() for _ in range(count)]
    rows = [[j for j in permutation if j != i] for i, permutation in enumerate(permutations)]
    return torch.tensor(rows, dtype=torch.int64).view(count, max(count - 1, 0))


#: Gradients of m tasks that no weights of the simplex bring to zero.
SOLVABLE: dict[str, Callable[[int, int], Tensor]] = {
    "independent": lambda m, seed: gaussian(m, 2 * m, seed=seed),
    "many parameters": lambda m, seed: gaussian(m, 1000, seed=seed),
    "aligned": lambda m, seed: gaussian(m, 2 * m, seed=seed) + 1,
    "dependent": lambda m, seed: gaussian(m, max(1, m // 3), seed=seed).abs() + 0.1,
    "each twice": lambda m, seed: gaussian(m, 2 * m, seed=seed)[torch.arange(m) // 2],
    "spread 1e4": lambda m, seed: gaussian(m, 2 * m, seed=seed) * lengths(m, 4, seed),
    "spread 1e6": lambda m, seed: gaussian(m, 2 * m, seed=seed) * lengths(m, 6, seed),
    "dependent, spread 1e4": lambda m, seed: (gaussian(m, max(1, m // 3), seed=seed).abs() + 0.1) * lengths(m, 4, seed),
    "dependent, spread 1e6": lambda m, seed: (gaussian(m, max(1, m // 3), seed=seed).abs() + 0.1) * lengths(m, 6, seed),
}
#: And such that they do: m >= 2.
STATIONARY: dict[str, Callable[[int, int], Tensor]] = {
    "two opposite": lambda m, seed: with_opposites(gaussian(m, 2 * m, seed=seed)),
    "two opposite, spread 1e6": lambda m, seed: with_opposites(gaussian(m, 2 * m, seed=seed)) * lengths(m, 6, seed),
    "sum of zero": lambda m, seed: (v := gaussian(m, 2 * m, seed=seed)) - v.mean(0),
    "sum of zero, spread 1e4": lambda m, seed: ((v := gaussian(m, 2 * m, seed=seed)) - v.mean(0)) * lengths(m, 4, seed),
    "on a line, both ways": lambda m, seed: gaussian(m, 1, seed=seed).abs() * (-1) ** torch.arange(m).unsqueeze(1),
}


def extended(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy().astype(np.longdouble)


# Nash-MTL


def nash_residual(gram: Tensor, weights: Tensor) -> float:
    g, a = extended(gram), extended(weights)
    return float(np.abs(a * (g @ a) - 1).max())


def assert_solves(gram: Tensor) -> None:
    answer = nash_weights(gram)
    assert answer.solved
    assert answer.weights.min() > 0
    assert nash_residual(gram, answer.weights) <= 1e-8
    assert answer.residual == pytest.approx(nash_residual(gram, answer.weights), abs=1e-10)


@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("family", SOLVABLE)
def test_nash_weights_solve_the_equation(family, m):
    for seed in range(4):
        assert_solves(gram_of(SOLVABLE[family](m, seed)))


def generic_cosines(m: int, lowest: float, seed: int) -> Tensor:
    basis = torch.linalg.qr(gaussian(m, m, seed=seed)).Q
    return cosines_of(basis * torch.logspace(math.log10(lowest), 0, m, dtype=torch.float64) @ basis.mT)


def nearly_stationary_cosines(m: int, lowest: float, seed: int) -> Tensor:
    null = gaussian(m, 1, seed=seed).abs() + 0.1
    null /= null.norm()
    gradients = gaussian(m, 2 * m, seed=seed + 1)
    gram = gram_of(gradients - null @ (null.mT @ gradients))
    return cosines_of(gram / gram.diagonal().mean() + lowest * null @ null.mT)


def nearly_opposite_cosines(m: int, lowest: float, seed: int) -> Tensor:
    one = gaussian(1, 2 * m, seed=seed)
    signs = (-1.0) ** torch.arange(m).unsqueeze(1)
    return cosines_of(gram_of(signs * one / one.norm() + math.sqrt(lowest / m) * gaussian(m, 2 * m, seed=seed + 1)))


def cosines_of(gram: Tensor) -> Tensor:
    scale = gram.diagonal().rsqrt()
    cosines = gram * scale * scale.unsqueeze(1)
    return (cosines + cosines.mT) / 2


@pytest.mark.parametrize("m", [2, 3, 11, 40])
@pytest.mark.parametrize("cosines_with", [generic_cosines, nearly_stationary_cosines, nearly_opposite_cosines])
def test_nash_weights_solve_the_equation_up_to_a_lowest_eigenvalue_of_1e_7_and_a_spread_of_1e6(cosines_with, m):
    for seed in range(4):
        lowest = 1e-7
        for _ in range(4):
            cosines = cosines_with(m, lowest, seed)
            found = torch.linalg.eigvalsh(cosines)[0].item()
            lowest *= 1.1e-7 / found
        assert 1e-7 < found < 1.2e-7
        norms = lengths(m, 6, seed)
        assert_solves(cosines * (norms * norms.mT))


@pytest.mark.parametrize("length", [1e-150, 1e-15, 1.0, 3.0, 1e15, 1e150])
def test_nash_weight_of_one_task_is_its_inverse_norm(length):
    gram = torch.tensor([[length**2]], dtype=torch.float64)
    exactly(nash_weights(gram).weights, torch.tensor([1 / length], dtype=torch.float64))


@pytest.mark.parametrize("cosine", [-1 + 1e-6, -0.5, 0.0, 0.9, 1.0])
@pytest.mark.parametrize("second", [1e-6, 1.0, 1e6])
def test_nash_weights_of_two_tasks_are_those_of_the_formula(cosine, second):
    gram = torch.tensor([[1.0, cosine * second], [cosine * second, second**2]], dtype=torch.float64)
    expected = torch.tensor([1.0, 1 / second], dtype=torch.float64) / math.sqrt(1 + cosine)
    torch.testing.assert_close(nash_weights(gram).weights, expected, rtol=1e-9, atol=0)


def test_nash_weights_of_orthogonal_gradients_are_their_inverse_norms():
    norms = lengths(40, 6).squeeze(1)
    exactly(nash_weights(norms.square().diag()).weights, 1 / norms)


def test_nash_weights_of_copies_share_the_bargain():
    gram = gram_of(gaussian(4, 9))
    copies = nash_weights(gram.repeat(3, 3)).weights.view(3, 4)
    exactly(copies, copies[:1].expand(3, 4))
    total = copies.sum(0)
    exactly(total * (gram @ total), torch.full((4,), 3.0, dtype=torch.float64))


def test_nash_direction_is_the_golden_one():
    direction = nash_weights(gram_of(GOLDEN)).weights.float() @ GOLDEN
    torch.testing.assert_close(direction / direction.norm(), torch.tensor([0.0542, 0.7061, 0.7061]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("m", [2, 3, 11, 40])
@pytest.mark.parametrize("family", STATIONARY)
def test_nash_sees_that_there_is_no_solution(family, m):
    for seed in range(4):
        gram = gram_of(STATIONARY[family](m, seed))
        assert torch.equal(nash_weights(gram).weights, torch.ones(m, dtype=torch.float64))
        before = gaussian(m, seed=seed).exp()
        answer = nash_weights(gram, before)
        assert not answer.solved
        assert torch.equal(answer.weights, before)
        assert answer.residual == pytest.approx(nash_residual(gram, before), rel=1e-9)


@pytest.mark.parametrize("family", STATIONARY)
def test_nash_is_quick_to_see_it(family, monkeypatch):
    gram = gram_of(STATIONARY[family](40, 0))
    evaluations = []
    residuals = bargaining._nash_residuals
    monkeypatch.setattr(bargaining, "_nash_residuals", lambda *args: evaluations.append(None) or residuals(*args))
    nash_weights(gram)
    assert len(evaluations) <= 22


@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("zeros", ["one", "all"])
def test_nash_sees_zero_gradients(m, zeros):
    gradients = gaussian(m, 2 * m)
    gradients[: 1 if zeros == "one" else m] = 0
    answer = nash_weights(gram_of(gradients))
    assert not answer.solved
    assert torch.equal(answer.weights, torch.ones(m, dtype=torch.float64))
    assert 1 <= answer.residual < math.inf


@few
@given(m=st.integers(2, 9), dimensions=st.integers(1, 4), shift=st.integers(0, 1), seed=seeds)
def test_nash_solves_whatever_nnls_finds_not_stationary(m, dimensions, shift, seed):
    gradients = torch.randint(-2, 3, (m, dimensions), generator=torch.Generator().manual_seed(seed)).double() + shift
    _, distance = nnls(np.vstack([gradients.mT.numpy(), np.ones(m)]), np.append(np.zeros(dimensions), 1.0))
    answer = nash_weights(gram_of(gradients))
    assert answer.solved == (distance > 1e-6)
    assert not answer.solved or nash_residual(gram_of(gradients), answer.weights) <= 1e-8


@few
@given(m=st.integers(2, 9), closeness=st.floats(-16, -6), orders=st.floats(0, 6), seed=seeds)
def test_nash_never_takes_a_near_solution_for_one(m, closeness, orders, seed):
    gradients = with_opposites(gaussian(m, 2 * m, seed=seed)) + 10**closeness * gaussian(m, 2 * m, seed=seed + 1)
    gram = gram_of(gradients * lengths(m, orders, seed))
    answer = nash_weights(gram)
    assert answer.weights.isfinite().all()
    assert math.isfinite(answer.residual)
    assert answer.solved == (answer.residual <= 1e-8)
    assert not answer.solved or nash_residual(gram, answer.weights) <= 1.001e-8


@pytest.mark.parametrize("exponent", [-30, -7, 7, 30])
def test_nash_weights_scale_as_inverse_norms(exponent):
    gram = gram_of(gaussian(11, 30))
    exactly(nash_weights(gram * 10.0**exponent).weights, nash_weights(gram).weights * 10.0 ** (-exponent / 2))


@pytest.mark.parametrize("exponent", [-1000, -300, 300, 1000])
def test_nash_weights_scale_without_rounding_by_powers_of_two(exponent):
    gram = gram_of(gaussian(11, 30))
    assert torch.equal(nash_weights(gram * 2.0**exponent).weights, nash_weights(gram).weights * 2.0 ** (-exponent // 2))


@few
@given(m=st.integers(1, 12), orders=st.floats(0, 6), seed=seeds)
def test_nash_update_does_not_depend_on_the_units_of_losses(m, orders, seed):
    gradients = gaussian(m, 2 * m, seed=seed)
    units = 10 ** (orders * gaussian(m, seed=seed).clamp(-1, 1))
    weights = nash_weights(gram_of(gradients * units.unsqueeze(1))).weights
    torch.testing.assert_close(weights * units, nash_weights(gram_of(gradients)).weights, rtol=1e-9, atol=0)


@pytest.mark.parametrize("start", ["solution", "random", "tiny", "huge", "far apart"])
def test_nash_solution_does_not_depend_on_the_start(start):
    gram = gram_of(gaussian(11, 30) * lengths(11, 4))
    solution = nash_weights(gram).weights
    starts = {
        "solution": solution,
        "random": gaussian(11).exp(),
        "tiny": torch.full((11,), 1e-300, dtype=torch.float64),
        "huge": torch.full((11,), 1e300, dtype=torch.float64),
        "far apart": torch.logspace(-300, 300, 11, dtype=torch.float64),
    }
    answer = nash_weights(gram, starts[start])
    assert answer.solved
    torch.testing.assert_close(answer.weights, solution, rtol=1e-11, atol=0)


@pytest.mark.parametrize("start", [torch.ones(2), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, math.nan, 1.0])])
def test_nash_start_must_be_positive_and_of_as_many_tasks(start):
    with pytest.raises(ValueError, match="start must"):
        nash_weights(gram_of(gaussian(3, 5)), start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [2, 5, 40])
def test_nash_weights_are_positive_whatever_rounding_makes_of_the_eigenvalues(dtype, m):
    for seed in range(10):
        gram = gram_of(gaussian(m, max(1, m // 4), seed=seed)).to(dtype)
        answer = nash_weights(gram)
        assert answer.weights.min() > 0
        assert not answer.solved or nash_residual(gram, answer.weights) <= 1e-8


# CAGrad


def cagrad_bounds(gram: Tensor, c: float, answer: CAGradAnswer) -> tuple[float, float, float]:
    """The objective at w, min_i <g_i, d>, and |<g_w, g0>| + c |g0| |g_w|."""
    g, x, w = extended(gram), extended(answer.coefficients), extended(answer.weights)
    mean = np.full(len(g), np.longdouble(1) / len(g))
    along, across = w @ g @ mean, c * np.sqrt(max(mean @ g @ mean, 0) * max(w @ g @ w, 0))
    return float(along + across), float((g @ x).min()), float(abs(along) + across)


def assert_certified(gram: Tensor, c: float) -> None:
    """The bounds meet, for a d of the ball and a w of the simplex."""
    answer = cagrad_weights(gram, c)
    assert answer.weights.min() >= 0
    assert answer.weights.sum().item() == pytest.approx(1, abs=1e-14)
    upper, lower, size = cagrad_bounds(gram, c, answer)
    assert lower - 1e-12 * size <= upper <= lower + 1e-8 * size
    assert answer.gap == pytest.approx((upper - lower) / size, abs=1e-9)
    g, mean = extended(gram), np.full(len(gram), np.longdouble(1) / len(gram))
    pull = extended(answer.coefficients) - mean
    assert float(pull @ g @ pull) == pytest.approx(float(c**2 * (mean @ g @ mean)), rel=1e-9)


def assert_mean(answer: CAGradAnswer) -> None:
    m = len(answer.weights)
    assert torch.equal(answer.coefficients, torch.full((m,), 1 / m, dtype=torch.float64))


@pytest.mark.parametrize("c", RADII)
@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("family", SOLVABLE)
def test_cagrad_is_certified_by_weak_duality(family, m, c):
    assert_certified(gram_of(SOLVABLE[family](m, m)), c)


@pytest.mark.parametrize("m", [11, 40])
@pytest.mark.parametrize("c", [0.1, 0.4])
def test_cagrad_is_certified_where_dependent_tasks_conflict(m, c):
    for seed in range(5):
        assert_certified(gram_of(gaussian(m, m // 3, seed=seed)), c)
        assert_certified(gram_of(gaussian(m, m // 3, seed=seed) * lengths(m, 4, seed)), c)


def slsqp(gradients: np.ndarray, c: float) -> np.ndarray:
    mean = gradients.mean(0)
    radius = c * np.linalg.norm(mean)
    found = minimize(
        lambda w: w @ gradients @ mean + radius * np.linalg.norm(w @ gradients),
        np.full(len(gradients), 1 / len(gradients)),
        jac=lambda w: gradients @ (mean + radius * (w @ gradients) / np.linalg.norm(w @ gradients)),
        bounds=[(0, 1)] * len(gradients),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return mean + radius * (found.x @ gradients) / np.linalg.norm(found.x @ gradients)


@pytest.mark.parametrize("c", [0.2, 0.5, 1.5])
@pytest.mark.parametrize("m", [2, 3, 6, 11])
@pytest.mark.parametrize("family", ["independent", "aligned", "dependent", "each twice"])
def test_cagrad_direction_is_that_of_slsqp(family, m, c):
    gradients = SOLVABLE[family](m, 3)
    direction = cagrad_weights(gram_of(gradients), c).coefficients @ gradients
    expected = torch.from_numpy(slsqp(gradients.numpy(), c))
    torch.testing.assert_close(direction, expected, rtol=0, atol=1e-5 * expected.norm().item())


def test_cagrad_weights_and_direction_are_the_golden_ones():
    coefficients = cagrad_weights(gram_of(GOLDEN), 0.5).coefficients.float()
    torch.testing.assert_close(coefficients, torch.tensor([0.7041, 0.5]), rtol=0, atol=1e-4)
    torch.testing.assert_close(coefficients @ GOLDEN, torch.tensor([0.1835, 1.2041, 1.2041]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("c", [0.0, 0.4, 2.0])
def test_cagrad_of_one_task_goes_as_far_along_as_it_may(c):
    exactly(cagrad_weights(torch.tensor([[7.0]]), c).coefficients, torch.tensor([1 + c], dtype=torch.float64))


def test_cagrad_of_orthogonal_gradients_of_equal_length_is_a_longer_mean():
    exactly(cagrad_weights(torch.eye(5), 0.4).coefficients, torch.full((5,), 1.4 / 5, dtype=torch.float64))


@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("family", SOLVABLE)
def test_cagrad_without_a_radius_is_the_mean(family, m):
    gram = gram_of(SOLVABLE[family](m, 0))
    answer = cagrad_weights(gram, 0.0)
    assert_mean(answer)
    upper, lower, size = cagrad_bounds(gram, 0.0, answer)
    assert upper == pytest.approx(lower, abs=1e-12 * size)


@pytest.mark.parametrize("c", [0.0, 0.4, 1.0, 3.0])
@pytest.mark.parametrize("m", COUNTS)
def test_cagrad_is_the_mean_where_that_is_zero(m, c):
    gradients = gaussian(m, 2 * m)
    for gram in (gram_of(gradients - gradients.mean(0)), torch.zeros(m, m)):
        answer = cagrad_weights(gram, c)
        assert_mean(answer)
        assert answer.weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("c", [1.0, 1.5, 1e3, 1e6])
@pytest.mark.parametrize("m", [2, 3, 11, 40])
@pytest.mark.parametrize("family", ["two opposite", "two opposite, spread 1e6", "on a line, both ways"])
def test_cagrad_is_the_mean_where_the_ball_contains_zero_and_tasks_are_stationary(family, m, c):
    for seed in range(3):
        answer = cagrad_weights(gram_of(STATIONARY[family](m, seed)), c)
        assert_mean(answer)
        assert answer.gap <= 1e-5


def test_cagrad_is_the_mean_where_the_minimum_is_at_zero_in_a_small_ball():
    gradients = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    answer = cagrad_weights(gram_of(gradients), 0.9)  # d = (0, 2/3) reaches the optimum, which is 0
    assert_mean(answer)
    torch.testing.assert_close(answer.weights, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), rtol=0, atol=1e-5)
    assert answer.gap <= 1e-5


def test_cagrad_finds_the_conflict_that_a_small_ball_cannot_avoid():
    gradients = torch.tensor([[10.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    answer = cagrad_weights(gram_of(gradients), 0.4)  # g0 is (4.5, 0), and d the closest to zero: (2.7, 0)
    torch.testing.assert_close(answer.weights, torch.tensor([0.0, 1.0], dtype=torch.float64), rtol=0, atol=1e-8)
    torch.testing.assert_close(
        answer.coefficients @ gradients, torch.tensor([2.7, 0.0], dtype=torch.float64), rtol=0, atol=1e-6
    )
    assert_certified(gram_of(gradients), 0.4)


@pytest.mark.parametrize("m", [2, 3, 11, 40])
def test_cagrad_with_a_zero_gradient_is_the_mean_unless_others_must_rise(m):
    gradients = gaussian(m, 2 * m).abs()
    gradients[m // 2] = 0
    answer = cagrad_weights(gram_of(gradients), 0.4)
    assert_mean(answer)
    assert answer.weights.tolist() == [float(i == m // 2) for i in range(m)]
    conflicting = torch.tensor([[10.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert_certified(gram_of(conflicting), 0.4)
    assert cagrad_weights(gram_of(conflicting), 0.4).weights[2] == 0


@pytest.mark.parametrize("c", [1.0, 1.5, 10.0])
@pytest.mark.parametrize("family", ["independent", "dependent", "spread 1e4"])
def test_cagrad_lets_no_loss_rise_where_the_ball_contains_zero(family, c):
    for m in COUNTS:
        gram = gram_of(SOLVABLE[family](m, 1))
        assert (gram @ cagrad_weights(gram, c).coefficients).min() > 0


@pytest.mark.parametrize("m", [2, 3, 11, 40])
def test_cagrad_in_a_large_ball_is_along_the_point_of_least_norm(m):
    gradients = gaussian(m, 2 * m, seed=m)
    far = cagrad_weights(gram_of(gradients), 1e8).coefficients @ gradients
    least = min_norm_weights(gram_of(gradients)) @ gradients
    torch.testing.assert_close(far / far.norm(), least / least.norm(), rtol=0, atol=1e-4)


@few
@given(m=st.integers(2, 12), exponent=st.floats(-30, 30), orders=st.floats(0, 4), c=st.sampled_from(RADII), seed=seeds)
def test_cagrad_does_not_depend_on_scale_or_order(m, exponent, orders, c, seed):
    gradients = gaussian(m, 2 * m, seed=seed) * lengths(m, orders, seed)
    gram = gram_of(gradients)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    direction = cagrad_weights(gram, c).coefficients @ gradients
    permuted = cagrad_weights((10**exponent * gram)[order][:, order], c).coefficients @ gradients[order]
    torch.testing.assert_close(permuted, direction, rtol=0, atol=1e-3 * gradients.mean(0).norm().item())
    assert_certified((10**exponent * gram)[order][:, order], c)


@few
@given(m=st.integers(2, 12), dimensions=st.integers(1, 12), c=st.sampled_from(RADII), seed=seeds)
def test_cagrad_is_certified_or_the_mean_for_small_integers(m, dimensions, c, seed):
    gradients = torch.randint(-2, 3, (m, dimensions), generator=torch.Generator().manual_seed(seed)).double()
    gram, answer = gram_of(gradients), cagrad_weights(gram_of(gradients), c)
    if torch.equal(answer.coefficients, torch.full_like(answer.coefficients, 1 / m)):
        upper, _, _ = cagrad_bounds(gram, c, answer)
        assert abs(upper) <= 1e-4 * (1 + c) * gram.trace().item()
        assert answer.gap <= 1e-4
    else:
        assert_certified(gram, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [2, 5, 40])
@pytest.mark.parametrize("c", [0.4, 3.0])
def test_cagrad_has_a_solution_whatever_rounding_makes_of_the_eigenvalues(c, m, dtype):
    for seed in range(5):
        answer = cagrad_weights(gram_of(gaussian(m, max(1, m // 4), seed=seed)).to(dtype), c)
        assert answer.coefficients.isfinite().all()
        assert answer.gap <= 1e-3  # next to stationary, where rounding decides


@pytest.mark.parametrize("c", [-0.1, math.nan, math.inf])
def test_cagrad_radius_must_be_finite_and_not_negative(c):
    with pytest.raises(ValueError, match="c must be finite"):
        cagrad_weights(torch.eye(2), c)


# IMTL-G


@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("family", [family for family in SOLVABLE if not family.startswith("dependent")])
def test_imtl_g_has_equal_projections_on_all_gradients(family, m):
    for seed in range(4):
        gram = gram_of(SOLVABLE[family](m, seed))
        weights = imtl_g_weights(gram)
        projections = extended(gram) @ extended(weights) / np.sqrt(np.diag(extended(gram)))
        assert weights.sum().item() == pytest.approx(1, abs=1e-9 * weights.abs().sum().item())
        np.testing.assert_allclose(projections.astype(float), float(projections.mean()), rtol=1e-8)


@pytest.mark.parametrize("m", [2, 3, 11, 40])
def test_imtl_g_is_the_formula_with_the_pseudo_inverse(m):
    gram = gram_of(gaussian(m, 2 * m)).numpy()
    expected = np.linalg.pinv(gram) @ np.sqrt(np.diag(gram))
    torch.testing.assert_close(imtl_g_weights(torch.from_numpy(gram)), torch.from_numpy(expected / expected.sum()))


def test_imtl_g_is_the_golden_one():
    weights = imtl_g_weights(gram_of(GOLDEN)).float()
    torch.testing.assert_close(weights, torch.tensor([0.5923, 0.4077]), rtol=0, atol=1e-4)
    torch.testing.assert_close(weights @ GOLDEN, torch.tensor([0.0767, 1.0, 1.0]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("ratio", [1e-6, 0.3, 1.0, 1e6])
def test_imtl_g_of_two_gradients_are_their_inverse_norms(ratio):
    gram = torch.tensor([[1.0, 0.4 * ratio], [0.4 * ratio, ratio**2]], dtype=torch.float64)
    exactly(imtl_g_weights(gram), torch.tensor([ratio, 1.0], dtype=torch.float64) / (1 + ratio))


def test_imtl_g_weights_may_be_negative():
    gradients = torch.tensor([[1.0, 0.0, 0.1], [0.0, 1.0, 0.1], [1.0, 1.0, 0.0]], dtype=torch.float64)
    assert imtl_g_weights(gram_of(gradients)).min() < 0


def gram_between_two(norm):
    """Of two gradients of length one and a third between them of this one: C^-1 1 is (15, 15, -20)."""
    cosines = torch.tensor([[1.0, 0.0, 0.7], [0.0, 1.0, 0.7], [0.7, 0.7, 1.0]], dtype=torch.float64)
    norms = torch.tensor([1.0, 1.0, norm], dtype=torch.float64)
    return cosines * norms * norms.unsqueeze(1)


def test_imtl_g_turns_against_all_gradients_where_the_sum_is_negative():
    gram = gram_between_two(0.5)
    weights = imtl_g_weights(gram)
    torch.testing.assert_close(weights, torch.tensor([-1.5, -1.5, 4.0], dtype=torch.float64))
    torch.testing.assert_close(gram @ weights / gram.diagonal().sqrt(), torch.full((3,), -0.1, dtype=torch.float64))


def test_imtl_g_does_nothing_where_the_weights_have_no_sum():
    gram = gram_between_two(2 / 3)
    assert imtl_g_weights(gram).tolist() == [0.0, 0.0, 0.0]
    assert imtl_g_weights(gram + 1e-6 * torch.eye(3)).sum().item() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("m", COUNTS)
def test_imtl_g_leaves_zero_gradients_out(m):
    gradients = gaussian(m, 2 * m)
    gradients[0] = 0
    weights = imtl_g_weights(gram_of(gradients))
    assert weights[0] == 0
    torch.testing.assert_close(weights[1:], imtl_g_weights(gram_of(gradients[1:])) if m > 1 else weights[1:])


@few
@given(m=st.integers(1, 12), exponent=st.floats(-30, 30), dimensions=st.integers(1, 20), seed=seeds)
def test_imtl_g_does_not_depend_on_scale_or_order(m, exponent, dimensions, seed):
    gram = gram_of(gaussian(m, dimensions, seed=seed))
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    weights = imtl_g_weights(gram)
    permuted = imtl_g_weights((10**exponent * gram)[order][:, order])
    torch.testing.assert_close(permuted, weights[order], rtol=0, atol=1e-6 * (1 + weights.abs().max().item()))


@few
@given(m=st.integers(1, 12), seed=seeds)
def test_imtl_g_direction_does_not_depend_on_the_units_of_losses(m, seed):
    gradients = gaussian(m, 2 * m, seed=seed)
    units = 10 ** gaussian(m, 1, seed=seed + 1)
    one = imtl_g_weights(gram_of(gradients)) @ gradients
    other = imtl_g_weights(gram_of(units * gradients)) @ (units * gradients)
    torch.testing.assert_close(other / other.norm(), one / one.norm() * (other @ one).sign(), rtol=0, atol=1e-8)


# PCGrad


def pcgrad_by_loops(gradients: Tensor, orders: Tensor) -> Tensor:
    total = torch.zeros_like(gradients[0])
    for i, order in enumerate(orders.tolist()):
        copy = gradients[i].clone()
        for j in order:
            inner = copy @ gradients[j]
            if inner < 0:
                copy -= inner / gradients[j].square().sum() * gradients[j]
        total += copy
    return total


@pytest.mark.parametrize("m", [2, 3, 11, 40])
@pytest.mark.parametrize("family", [*SOLVABLE, *STATIONARY, "a zero row"])
def test_pcgrad_is_the_loop_over_gradients(family, m):
    for seed in range(1 if m == 40 else 3):
        gradients = (SOLVABLE | STATIONARY).get(family, SOLVABLE["independent"])(m, seed)
        if family == "a zero row":
            gradients[m // 2] = 0
        orders = random_orders(m, seed)
        found = pcgrad_weights(gram_of(gradients), orders) @ gradients
        expected = pcgrad_by_loops(gradients, orders)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * (1 + gradients.norm(dim=1).max().item()))


def test_pcgrad_is_the_golden_one():
    direction = pcgrad_weights(gram_of(GOLDEN), torch.tensor([[1], [0]])).float() @ GOLDEN
    torch.testing.assert_close(direction, torch.tensor([0.5848, 3.8012, 3.8012]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("inner", "expected"), [(1.0, [1.0, 1.0]), (0.0, [1.0, 1.0]), (-1.0, [2.0, 1.25])])
def test_pcgrad_of_two_gradients_takes_away_conflicts_only(inner, expected):
    gram = torch.tensor([[1.0, inner], [inner, 4.0]])
    assert pcgrad_weights(gram, torch.tensor([[1], [0]])).tolist() == expected


def test_pcgrad_gives_weight_one_to_zero_gradients_and_to_tasks_alone():
    assert pcgrad_weights(torch.zeros(3, 3), random_orders(3)).tolist() == [1.0, 1.0, 1.0]
    assert pcgrad_weights(torch.tensor([[4.0]]), torch.empty(1, 0, dtype=torch.int64)).tolist() == [1.0]


def test_pcgrad_depends_on_the_order():
    gram = gram_of(gaussian(4, 2))
    assert not torch.allclose(pcgrad_weights(gram, random_orders(4, 0)), pcgrad_weights(gram, random_orders(4, 1)))


@few
@given(m=st.integers(2, 12), exponent=st.floats(-30, 30), orders=st.floats(0, 4), seed=seeds)
def test_pcgrad_does_not_depend_on_scale_or_names(m, exponent, orders, seed):
    gram = gram_of(gaussian(m, 2 * m, seed=seed) * lengths(m, orders, seed))
    partners = random_orders(m, seed)
    renamed = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    names = renamed.argsort()
    weights = pcgrad_weights(gram, partners)
    permuted = pcgrad_weights((10**exponent * gram)[renamed][:, renamed], names[partners[renamed]])
    torch.testing.assert_close(permuted, weights[renamed], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "orders",
    [
        torch.tensor([[1, 2], [0, 2], [0, 2]]),
        torch.tensor([[1, 1], [0, 2], [0, 1]]),
        torch.tensor([[1, 3], [0, 2], [0, 1]]),
        torch.tensor([[1, -1], [0, 2], [0, 1]]),
        torch.tensor([[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]),
        torch.tensor([[0, 1, 2]] * 3),
    ],
)
def test_pcgrad_orders_must_have_all_other_tasks(orders):
    with pytest.raises(ValueError, match="orders"):
        pcgrad_weights(torch.eye(3), orders)


# All of them

METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "nash": lambda gram: nash_weights(gram).weights,
    "cagrad": lambda gram: cagrad_weights(gram, 0.4).coefficients,
    "imtl-g": imtl_g_weights,
    "pcgrad": lambda gram: pcgrad_weights(gram, random_orders(len(gram))),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))


@every_method
@pytest.mark.parametrize(
    ("gram", "message"),
    [
        (torch.ones(2, 3), "has shape"),
        (torch.ones(3), "has shape"),
        (torch.empty(0, 0), "has shape"),
        (torch.eye(2, dtype=torch.int64), "floating point"),
        (torch.eye(2, dtype=torch.complex64), "real"),
        (torch.tensor([[1.0, math.nan], [math.nan, 1.0]]), "must be finite, found 2 of 4"),
        (-torch.eye(2), "positive trace"),
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "negative eigenvalue"),
    ],
)
def test_what_is_no_gram_matrix_is_refused(method, gram, message):
    with pytest.raises(ValueError, match=message):
        method(gram)


@every_method
def test_weights_are_in_float64_and_the_input_is_left_as_it_is(method):
    gram = gram_of(gaussian(5, 9)).float().requires_grad_()
    before = gram.detach().clone()
    weights = method(gram)
    assert weights.dtype == torch.float64
    assert not weights.requires_grad
    assert torch.equal(gram, before)
    torch.testing.assert_close(weights, method(gram_of(gaussian(5, 9))), rtol=1e-4, atol=1e-4)


@every_method
def test_weights_are_those_of_the_symmetric_part(method):
    gram = gram_of(gaussian(6, 9)) * (1 + 1e-6 * gaussian(6, 6, seed=1))
    torch.testing.assert_close(method(gram), method((gram + gram.mT) / 2), rtol=1e-7, atol=1e-9)


@every_method
def test_autocast_does_not_matter(method):
    gram = gram_of(gaussian(6, 9))
    expected = method(gram)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(method(gram), expected)


@every_method
@pytest.mark.parametrize("orders", [20, 100, 250])
@pytest.mark.parametrize("family", ["independent", "dependent", "two opposite"])
def test_lengths_of_any_spread_give_finite_weights(method, family, orders):
    gradients = (SOLVABLE | STATIONARY)[family](6, 0) * lengths(6, orders) / 10.0 ** (orders / 2)
    assert method(gram_of(gradients)).isfinite().all()
