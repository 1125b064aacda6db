"""The dual's answers are checked from the weights and the direction alone, with NumPy."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize
from torch import Tensor

from moonopt import polar, solve_dual
from moonopt.linalg.dual import Dual

MOST_STEPS = 120


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def certified_gap(gradients: list[Tensor], dual: Dual, scale: list[float] | None = None) -> float:
    """The relative gap, after checking that weights and direction are feasible and that the bounds are theirs."""
    scale = scale or [1.0] * len(gradients)
    z = dual.weights.numpy()
    assert (z >= 0).all()
    assert z.sum() == pytest.approx(1, abs=1e-14)
    upper, lower = 0.0, np.zeros(len(z))
    for s, block, w in zip(scale, gradients, dual.direction, strict=True):
        g, w = block.double().numpy(), w.numpy()
        assert w.shape == g.shape[1:]
        assert np.linalg.norm(w, 2) <= 1 + 1e-14
        upper += s * np.linalg.svd(np.tensordot(z, g, 1), compute_uv=False).sum()
        lower += s * np.tensordot(g, w, 2)
    assert dual.value == pytest.approx(upper, rel=1e-12, abs=1e-300)
    assert dual.lower_bound == pytest.approx(lower.min(), rel=1e-9, abs=1e-14 * max(np.abs(lower).max(), 1e-300))
    return (upper - lower.min()) / upper


def rank_one(m: int, p: int, q: int) -> Tensor:
    return random(m, p, 1, seed=1) @ random(m, 1, q, seed=2)


def with_duplicates(m: int) -> Tensor:
    gradients = random(m, 16, 16)
    gradients[m // 2 :] = gradients[: m - m // 2].clone()
    return gradients


def spread(m: int) -> Tensor:
    return torch.logspace(0, 4, m, dtype=torch.float64)[:, None, None]


def few_ranks(m: int) -> Tensor:
    """Gradients of rank 3 in 16 x 16, around a common one: the optimum is rank-deficient."""
    return random(m, 16, 3, seed=3) @ random(m, 3, 16, seed=4) + random(1, 16, 2, seed=5) @ random(1, 2, 16, seed=6)


CASES = {
    "square": lambda m: [random(m, 16, 16)],
    "wide": lambda m: [random(m, 8, 24)],
    "tall": lambda m: [random(m, 24, 8)],
    "row": lambda m: [random(m, 1, 48)],
    "blocks": lambda m: [random(m, 8, 8), random(m, 4, 12, seed=1), random(m, 16, 6, seed=2)],
    "agreeing": lambda m: [random(m, 16, 16) + 0.5 * random(1, 16, 16, seed=1)],
    "rank one": lambda m: [rank_one(m, 16, 16)],
    "rank-deficient": lambda m: [few_ranks(m)],
    "duplicates": lambda m: [with_duplicates(m)],
    "spread": lambda m: [spread(m) * random(m, 16, 16)],
    "spread, rank one": lambda m: [spread(m) * rank_one(m, 16, 16)],
    "spread blocks": lambda m: [spread(m) * random(m, 8, 8), random(m, 4, 12, seed=1) / spread(m)],
}


@pytest.mark.parametrize("tasks", [1, 2, 3, 11, 40])
@pytest.mark.parametrize("case", CASES)
def test_certified_gap(case: str, tasks: int) -> None:
    gradients = CASES[case](tasks)
    dual = solve_dual(gradients)
    assert dual.converged
    assert not dual.stationary
    assert certified_gap(gradients, dual) <= 1e-6
    assert dual.relative_gap <= 1e-6
    assert dual.iterations <= MOST_STEPS


def test_example_with_a_rank_deficient_optimum() -> None:
    """diag(1, 2) and diag(2, -1): the sum is rank one at the optimum, and its polar factor is not the direction."""
    gradients = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, -1.0]]])
    dual = solve_dual(gradients)
    assert dual.weights.tolist() == pytest.approx([1 / 3, 2 / 3], abs=1e-6)
    assert dual.value == pytest.approx(5 / 3, rel=1e-6)
    assert dual.lower_bound == pytest.approx(5 / 3, rel=1e-6)
    assert torch.allclose(dual.direction[0], torch.diag(torch.tensor([1.0, 1 / 3], dtype=torch.float64)), atol=1e-5)
    assert torch.equal(dual.primal[0], dual.value * dual.direction[0])
    polar = np.diag([1.0, 0.0])
    assert min(float((polar * g.numpy()).sum()) for g in gradients) == 1


def test_rank_deficient_optimum_of_random_problems() -> None:
    """The direction beats the compact polar factor of the weighted sum by far more than the gap: rank is missing."""
    gradients = random(11, 16, 16, seed=5)
    dual = solve_dual(gradients)
    u, s, vh = np.linalg.svd(np.tensordot(dual.weights.numpy(), gradients.numpy(), 1))
    assert s[-1] < 1e-5 * s[0]
    full = s > 1e-4 * s[0]
    polar = (u[:, full]) @ vh[full]
    assert np.tensordot(gradients.numpy(), polar, 2).min() < dual.lower_bound - 1e-3


@pytest.mark.parametrize("tasks", [3, 5])
def test_value_equals_that_of_a_general_solver(tasks: int) -> None:
    gradients = random(tasks, 5, 7, seed=tasks) + 0.3 * random(1, 5, 7, seed=9)

    def value(free: np.ndarray) -> float:
        z = np.exp(free) / np.exp(free).sum()
        return float(np.linalg.svd(np.tensordot(z, gradients.numpy(), 1), compute_uv=False).sum())

    options = {"maxiter": 20000, "xatol": 1e-10, "fatol": 1e-13}
    found = minimize(value, np.zeros(tasks), method="Nelder-Mead", options=options)
    assert solve_dual(gradients).value == pytest.approx(found.fun, rel=2e-6)


def test_two_tasks_on_a_grid() -> None:
    gradients = random(2, 6, 9)
    grid = torch.linspace(0, 1, 20001, dtype=torch.float64)
    sums = grid[:, None, None] * gradients[0] + (1 - grid)[:, None, None] * gradients[1]
    lowest = float(torch.linalg.svdvals(sums).sum(-1).min())
    dual = solve_dual(gradients, tol=1e-9)
    assert dual.value <= lowest * (1 + 1e-9)
    assert dual.lower_bound <= lowest


def test_primal_minimises_the_papers_objective_with_scales() -> None:
    """max_i -<V, G_i> + max_b (||V_b|| / s_b)^2 / 2 is -C^2 / 2 at the primal, and higher around it."""
    gradients, scale = [random(3, 4, 5) + random(1, 4, 5, seed=3), random(3, 6, 2, seed=1) + 1], [0.5, 3.0]
    dual = solve_dual(gradients, scale, tol=1e-9)

    def objective(step: list[Tensor]) -> float:
        products = sum(torch.tensordot(g, v, 2) for g, v in zip(gradients, step, strict=True))
        norm = max(float(torch.linalg.matrix_norm(v, 2)) / s for v, s in zip(step, scale, strict=True))
        return float(-products.min()) + norm**2 / 2

    lowest = objective(list(dual.primal))
    assert lowest == pytest.approx(-(dual.value**2) / 2, rel=1e-6)
    for seed in range(20):
        around = [v + 0.1 * random(*v.shape, seed=seed + i) for i, v in enumerate(dual.primal)]
        assert objective(around) >= lowest


def test_no_direction_of_the_same_size_guarantees_more() -> None:
    """Nor does MGDA's: the minimum-norm gradient, brought to spectral norm 1."""
    for seed in range(20):
        gradients = random(4, 6, 8, seed=seed) + 0.5 * random(1, 6, 8, seed=seed + 99)
        dual = solve_dual(gradients)
        flat = gradients.flatten(1).numpy()
        simplex = {"type": "eq", "fun": lambda z: z.sum() - 1}
        weights = minimize(lambda z, g=flat: z @ g @ g.T @ z, np.full(4, 0.25), bounds=[(0, 1)] * 4, constraints=simplex).x
        mgda = np.tensordot(weights, gradients.numpy(), 1)
        guarantee = np.tensordot(gradients.numpy(), mgda / np.linalg.norm(mgda, 2), 2).min()
        assert guarantee <= dual.lower_bound * (1 + 1e-6)


def test_scale_weighs_the_blocks() -> None:
    gradients = [random(4, 6, 6), random(4, 5, 9, seed=1)]
    scale = [0.3, 2.5]
    dual = solve_dual(gradients, scale)
    assert certified_gap(gradients, dual, scale) <= 1e-6
    folded = solve_dual([s * g for s, g in zip(scale, gradients, strict=True)])
    assert torch.allclose(dual.weights, folded.weights, atol=1e-9)
    assert dual.value == pytest.approx(folded.value, rel=1e-9)
    assert solve_dual(gradients, 2.0).value == pytest.approx(2 * solve_dual(gradients).value, rel=1e-9)
    assert solve_dual(gradients, torch.tensor(scale)).value == pytest.approx(dual.value, rel=1e-6)
    left_out = solve_dual(gradients, [1.0, 0.0])
    assert left_out.value == pytest.approx(solve_dual(gradients[0]).value, rel=2e-6)


@pytest.mark.parametrize("tasks", [2, 3, 11, 40])
def test_opposite_gradients_are_stationary(tasks: int) -> None:
    gradients = random(tasks, 16, 16)
    gradients[-1] = -gradients[0]
    dual = solve_dual(gradients)
    assert dual.stationary
    assert dual.converged
    assert dual.value <= 1e-10 * min(np.linalg.svd(g, compute_uv=False).sum() for g in gradients.numpy())
    assert dual.relative_gap == pytest.approx(dual.value, abs=1e-20)
    assert all((w == 0).all() for w in dual.direction)
    assert dual.iterations <= MOST_STEPS


def test_stationary_is_said_of_the_value_that_is_reported() -> None:
    """Also where norms are so far apart that rounding decides."""
    for seed in range(30):
        gradients = torch.logspace(0, 12, 20, dtype=torch.float64)[:, None, None] * random(20, 2, 2, seed=seed)
        dual = solve_dual(gradients)
        smallest = min(np.linalg.svd(g, compute_uv=False).sum() for g in gradients.numpy())
        assert dual.stationary == (dual.value <= 1e-10 * smallest)


@pytest.mark.parametrize("tasks", [1, 2, 3, 11])
def test_zero_gradient_is_stationary(tasks: int) -> None:
    gradients = [random(tasks, 4, 6), random(tasks, 5, 3)]
    for block in gradients:
        block[tasks // 2] = 0
    dual = solve_dual(gradients)
    assert dual.stationary
    assert dual.converged
    assert dual.value == 0
    assert dual.lower_bound == 0
    assert dual.weights[tasks // 2] == 1
    assert all((w == 0).all() for w in dual.direction)


def test_one_task_has_its_compact_polar_factor() -> None:
    """Nothing in the null space, and nothing in a block without gradient."""
    gradients = [random(1, 4, 2) @ random(1, 2, 6, seed=1), torch.zeros(1, 3, 3)]
    dual = solve_dual(gradients)
    assert certified_gap(gradients, dual) <= 1e-12
    assert torch.allclose(dual.direction[0], polar(gradients[0][0], "svd"), atol=1e-12)
    assert (dual.direction[1] == 0).all()


@pytest.mark.parametrize("distance", [1e-5, 1e-6])
def test_almost_collinear_gradients_converge(distance: float) -> None:
    """Where z is rounded, W is off by that over mu, and has to be refined."""
    found = []
    for seed in range(20):
        factors = random(10, 1, 1, seed=seed)
        dual = solve_dual(factors * random(1, 8, 8, seed=seed + 50) + distance * random(10, 8, 8, seed=seed + 99))
        found.append(dual.converged)
    assert sum(found) >= 16


def test_nothing_but_zeros() -> None:
    dual = solve_dual(torch.zeros(3, 4, 5))
    assert dual.stationary
    assert dual.value == 0
    assert torch.allclose(dual.weights, torch.full((3,), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("distance", [1e-4, 1e-6, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12, 1e-14])
def test_near_stationary_problems_never_claim_too_much(distance: float) -> None:
    """Bounds are recomputed with twice the digits: what the answer claims holds there, too."""
    common = random(1, 6, 8)
    gradients = torch.cat([common, -common]) + distance * random(2, 6, 8, seed=1)
    dual = solve_dual(gradients)
    assert dual.iterations <= MOST_STEPS
    exact = solve_dual_of_two(gradients, common, distance)
    if dual.converged and not dual.stationary:
        assert dual.value == pytest.approx(exact, rel=2e-6)
    elif dual.stationary:
        assert exact <= 2e-10 * float(torch.linalg.svdvals(gradients).sum(-1).min())
    else:
        assert distance < 1e-7
    assert dual.lower_bound <= exact * (1 + 1e-6) + 1e-14


def solve_dual_of_two(gradients: Tensor, common: Tensor, distance: float) -> float:
    """The optimum of g1 = c + e n1, g2 = -c + e n2 with the cancellation done by hand: z = 1/2 + e t."""
    n1, n2 = random(2, 6, 8, seed=1).numpy()
    t = np.linspace(-6, 6, 24001)[:, None, None]
    sums = 2 * t * common.numpy() + (n1 + n2) / 2 + distance * t * (n1 - n2)
    return float(distance * np.linalg.svd(sums, compute_uv=False).sum(-1).min())


@settings(max_examples=60)
@given(
    tasks=st.integers(2, 8),
    shapes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=3),
    rank=st.integers(1, 8),
    exponent=st.integers(-25, 25),
    seed=st.integers(0, 2**31),
)
def test_any_problem_has_a_certificate(tasks: int, shapes: list[tuple[int, int]], rank: int, exponent: int, seed: int) -> None:
    gradients = [
        10.0**exponent * random(tasks, p, rank, seed=seed + i) @ random(tasks, rank, q, seed=seed + 99 + i)
        for i, (p, q) in enumerate(shapes)
    ]
    dual = solve_dual(gradients)
    assert dual.iterations <= MOST_STEPS
    if not dual.stationary and dual.converged:
        assert certified_gap(gradients, dual) <= 1e-6
    smallest = sum(torch.linalg.svdvals(block).sum(-1) for block in gradients).min()
    assert dual.converged or dual.value < 1e-6 * float(smallest)


@settings(max_examples=20)
@given(tasks=st.integers(2, 6), power=st.integers(-30, 30), seed=st.integers(0, 2**31))
def test_units_do_not_matter(tasks: int, power: int, seed: int) -> None:
    gradients = random(tasks, 5, 6, seed=seed)
    one, other = solve_dual(gradients), solve_dual(gradients * 2.0**power)
    assert torch.allclose(one.weights, other.weights, atol=1e-9)
    assert other.value == pytest.approx(one.value * 2.0**power, rel=1e-9)
    assert torch.allclose(one.direction[0], other.direction[0], atol=1e-6)


def test_float32_and_half_precision_are_read_exactly() -> None:
    gradients = random(3, 6, 6).to(torch.bfloat16)
    dual = solve_dual(gradients)
    assert dual.weights.dtype == torch.float64
    assert certified_gap([gradients], dual) <= 1e-6


def test_gradients_that_require_grad() -> None:
    assert not solve_dual(random(2, 3, 3).requires_grad_()).weights.requires_grad


@pytest.mark.parametrize(
    ("gradients", "scale", "text"),
    [
        (
            torch.ones(3, 4),
            None,
            r"Block 0 of the gradients must be a tensor \(tasks, rows, columns\), found torch.float32 of shape \(3, 4\)",
        ),
        ([], None, "found none"),
        ([torch.ones(2, 3, 3), [1]], None, "Block 1 .* found a list"),
        ([torch.ones(2, 3, 3), torch.ones(3, 3, 3)], None, "block 1 has 3, block 0 has 2"),
        (torch.tensor([[[1.0]], [[float("nan")]]]), None, "gradient of task 1 in block 0 has a NaN or infinite entry"),
        (torch.ones(2, 3, 3), [1.0, 2.0], "one number per block: found 2 for 1 blocks"),
        (torch.ones(2, 3, 3), [-1.0], "not negative"),
        (torch.ones(2, 3, 3, dtype=torch.complex64), None, "found torch.complex64"),
        (torch.full((2, 3, 3), 1e300, dtype=torch.float64), [1e10], "too large for float64"),
    ],
)
def test_bad_input(gradients: object, scale: list[float] | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        solve_dual(gradients, scale)  # type: ignore[arg-type]


def test_bad_tolerance() -> None:
    with pytest.raises(ValueError, match="tol must be between 0 and 1, found 0"):
        solve_dual(torch.ones(2, 3, 3), tol=0)


@pytest.mark.slow
def test_forty_tasks_take_less_than_three_seconds_on_one_core() -> None:
    gradients = [random(40, 64, 64, seed=seed) for seed in range(4)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.perf_counter()
        dual = solve_dual(gradients)
        seconds = time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)
    assert certified_gap(gradients, dual) <= 1e-6
    assert dual.iterations <= MOST_STEPS
    assert seconds < 3
