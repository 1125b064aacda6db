"""The computation behind each statement of docs/theory.md on what the paper says and what is true instead.

Where the finite-step and the stochastic corollary go wrong is in test_bounds.py.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from moonopt.analysis.bounds import Problem, convex, deterministic, deterministic_settings
from moonopt.linalg.dual import Dual, solve_dual
from moonopt.linalg.polar import polar
from moonopt.linalg.schedules import CLASSICAL_TRIPLE, CUBIC_TRIPLE, MUON_TRIPLE, Triple, polar_express, schedule
from moonopt.optim.logits import next_logits


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def near(value: object, within: float = 5e-4) -> object:
    return pytest.approx(value, rel=0, abs=within)


def diag(*entries: float) -> Tensor:
    return torch.diag(torch.tensor(entries, dtype=torch.float64))


def spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def nuclear(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, "nuc"))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def descents(gradients: Tensor, direction: Tensor) -> Tensor:
    """<g_i, W> for every task."""
    return torch.tensordot(gradients, direction, 2)


# Delta m, from the tables as printed

HIGHER_IS_BETTER = {"NYU-v2": "110000111", "CityScapes": "1100", "QM9": "00000000000"}
METRICS = {
    ("NYU-v2", "STL"): "38.30 63.76 0.6754 0.2780 25.01 19.21 30.14 57.20 69.15",
    ("NYU-v2", "IMTL-G"): "39.35 65.60 0.5426 0.2256 26.02 21.19 26.20 53.13 66.24",
    ("NYU-v2", "FAMO"): "36.41 63.20 0.5406 0.2182 25.01 19.14 30.22 57.45 69.37",
    ("NYU-v2", "MOON"): "39.41 67.03 0.4891 0.2091 25.61 20.27 28.89 54.87 67.32",
    ("CityScapes", "STL"): "74.01 93.16 0.0125 27.77",
    ("CityScapes", "LS"): "70.95 91.73 0.0161 33.83",
    ("CityScapes", "MOON"): "78.61 94.36 0.0126 31.41",
    ("QM9", "STL"): "0.07 0.18 60.6 53.9 0.50 4.53 58.8 64.2 63.8 66.2 0.07",
    ("QM9", "MOON"): "0.07 0.24 52.9 71.0 3.35 5.67 46.4 46.7 46.9 46.3 0.08",
}


def delta_m(dataset: str, method: str, sign_where_higher_is_better: int = -1) -> float:
    sign = sign_where_higher_is_better
    signs = [sign if higher == "1" else -sign for higher in HIGHER_IS_BETTER[dataset]]
    rows = (map(float, METRICS[dataset, row].split()) for row in (method, "STL"))
    return float(np.mean([sign * 100 * (found / alone - 1) for sign, found, alone in zip(signs, *rows, strict=True)]))


def delta_m_before_rounding(dataset: str, method: str) -> tuple[float, float]:
    """The least and the largest Delta m of metrics that round to the printed ones."""

    def unrounded(printed: str) -> tuple[float, float]:
        half = 0.5 * 10.0 ** -len(printed.partition(".")[2])
        return float(printed) - half, float(printed) + half

    least, largest = [], []
    rows = (METRICS[dataset, row].split() for row in (method, "STL"))
    for higher, found, alone in zip(HIGHER_IS_BETTER[dataset], *rows, strict=True):
        sign = -1 if higher == "1" else 1
        changes = [sign * 100 * (x / y - 1) for x in unrounded(found) for y in unrounded(alone)]
        least.append(min(changes))
        largest.append(max(changes))
    return float(np.mean(least)), float(np.mean(largest))


@pytest.mark.parametrize(("method", "printed"), [("MOON", -4.63), ("FAMO", -4.11)])
def test_delta_m_is_printed_with_the_usual_sign_and_not_with_that_of_the_text(method, printed):
    assert delta_m("NYU-v2", method) == near(printed, within=0.015)
    assert delta_m("NYU-v2", method, sign_where_higher_is_better=1) == near(-printed, within=0.015)


@pytest.mark.parametrize(
    ("dataset", "method", "printed", "recomputed", "lowest", "highest"),
    [
        ("NYU-v2", "MOON", -4.63, -4.62, -4.65, -4.60),
        ("CityScapes", "MOON", 1.54, 1.60, 1.39, 1.82),
        ("CityScapes", "LS", 14.11, 14.07, 13.83, 14.32),
        ("QM9", "MOON", 49.9, 50.63, 46.74, 54.94),
    ],
)
def test_rounding_of_the_metrics_explains_the_printed_delta_m(dataset, method, printed, recomputed, lowest, highest):
    assert delta_m(dataset, method) == near(recomputed, within=0.005)
    unrounded = delta_m_before_rounding(dataset, method)
    assert unrounded == near((lowest, highest), within=0.006)
    assert unrounded[0] < printed < unrounded[1]


def test_delta_m_of_imtl_g_is_minus_060_and_no_rounding_makes_it_the_printed_minus_076():
    assert delta_m("NYU-v2", "IMTL-G") == near(-0.60, within=0.005)
    lowest, highest = delta_m_before_rounding("NYU-v2", "IMTL-G")
    assert (lowest, highest) == near((-0.63, -0.57), within=0.005)
    assert lowest > -0.76 + 0.005


# How the error of Newton-Schulz steps depends on their number q


def after(coefficients: Sequence[Triple], singular_values: Tensor) -> Tensor:
    for a, b, c in coefficients:
        singular_values = a * singular_values + b * singular_values**3 + c * singular_values**5
    return singular_values


def error_of(name: str, steps: int, matrix: Tensor) -> float:
    """The distance to the polar factor. A 1 x 1 matrix stands for all of rank one, whose other singular values stay 0."""
    return spectral(polar(matrix, name, steps) - polar(matrix, "svd"))


def test_muons_coefficients_cycle_with_errors_up_to_0318():
    a, b, c = MUON_TRIPLE
    fixed = math.sqrt((-b - math.sqrt(b * b - 4 * c * (a - 1))) / (2 * c))
    assert (fixed, a + 3 * b * fixed**2 + 5 * c * fixed**4) == near((0.868, -1.582))  # it repels
    ends = after([MUON_TRIPLE] * 2000, torch.linspace(1e-3, 1.2, 1200))
    assert sorted({round(each, 3) for each in ends.tolist()}) == [0.682, 0.753, 1.047, 1.134]
    cycle = [float(after([MUON_TRIPLE] * q, torch.tensor(fixed + 0.1))) for q in range(2000, 2004)]
    assert sorted(abs(1 - each) for each in cycle) == near([0.047, 0.134, 0.247, 0.318])


def test_muons_error_is_0318_at_every_q_where_singular_values_are_spread():
    errors = [error_of("muon", q, gaussian(64, 96)) for q in (3, 4, 5, 8, 12, 40, 41, 42, 43)]
    assert errors == near([0.318] * 9)


@pytest.mark.parametrize("matrix", [torch.ones(1, 1), torch.eye(64)], ids=["rank one", "flat"])
def test_muons_error_walks_round_its_cycle_where_singular_values_are_alike(matrix):
    errors = [error_of("muon", q, matrix.double()) for q in (40, 41, 42, 43)]
    assert errors == near([0.047, 0.318, 0.134, 0.247])


def test_polar_express_generated_for_each_q_gets_better_in_the_worst_case():
    grid = torch.logspace(-3, 0, 20001)
    worst = [float((1 - after(polar_express(q, safety=1.0, cushion=0.0), grid)).abs().max()) for q in range(1, 8)]
    assert worst == pytest.approx([0.9915, 0.9646, 0.8598, 0.5459, 0.1134, 9.17e-4, 4.81e-10], rel=2e-3)
    with_safety = [float((1 - after(polar_express(q), grid / 1.02)).abs().max()) for q in (5, 6, 7)]
    assert with_safety == pytest.approx([0.153, 3.94e-3, 4.62e-7], rel=3e-3)


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [(torch.ones(1, 1), [0.992, 0.196, 0.125, 0.426, 0.097]), (torch.eye(4), [0.453, 0.959, 0.719, 0.326, 0.135])],
    ids=["rank one", "identity"],
)
def test_polar_express_may_get_worse_with_a_step_for_one_matrix(matrix, expected):
    assert [error_of("polar_express", q, matrix.double()) for q in range(1, 6)] == near(expected, within=6e-4)


@pytest.mark.parametrize("triple", [CLASSICAL_TRIPLE, CUBIC_TRIPLE], ids=["classical", "cubic"])
def test_classical_steps_never_overshoot_and_improve_every_singular_value(triple):
    before = torch.linspace(1e-6, 1 - 1e-3, 10001)
    then = after([triple], before)
    assert (before < then).all()
    assert (then < 1).all()


def test_no_number_of_steps_keeps_the_error_of_all_matrices_from_one():
    errors = [error_of("polar_express", 5, diag(1, r)) for r in (1e-3, 1e-4, 1e-6, 1e-8)]
    assert errors == near([0.15335, 0.90313, 0.99903, 0.99999], within=6e-6)
    assert 1 / (1 - errors[2]) == pytest.approx(1031, rel=1e-3)  # the factor that the finite-step bound has
    assert [error_of("polar_express", 10, diag(1, r)) for r in (1e-6, 1e-8)] == near([0.9794, 0.9998], within=6e-5)
    for name, steps in (("muon", 5), ("classical", 10), ("cubic", 20)):
        assert error_of(name, steps, diag(1, 1e-8)) > 0.9999


def newton_schulz(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Polar Express without the care that ``polar`` takes, in one dtype from the first step to the last."""
    express = schedule("polar_express", steps)
    x = (matrix / (matrix.norm() * express.safety)).to(dtype)
    for a, b, c in express.coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.double()


@pytest.mark.parametrize(
    ("dtype", "steps", "to_compact", "to_nearest"),
    [
        (torch.float32, 8, 9e-5, 2.5e-6),
        (torch.float32, 10, 3e-4, 2.5e-6),
        (torch.float32, 15, 6e-3, 2.5e-6),
        (torch.bfloat16, 5, 0.42, 0.145),
        (torch.bfloat16, 6, 0.70, 0.055),
        (torch.bfloat16, 8, 1.00, 0.055),
        (torch.bfloat16, 15, 1.01, 0.059),
    ],
)
def test_rounding_takes_a_rank_deficient_matrix_from_the_compact_factor_and_not_from_all(dtype, steps, to_compact, to_nearest):
    rank = 32
    matrix = gaussian(256, rank, seed=0) @ gaussian(rank, 256, seed=1)
    u, _, vh = torch.linalg.svd(matrix)
    off = u.mT @ newton_schulz(matrix, steps, dtype) @ vh.mT
    off[:rank, :rank] -= torch.eye(rank)
    factor = 5 if dtype == torch.float32 else 1.2  # the order of its sums differs between machines
    assert to_compact / factor < spectral(off) < to_compact * factor
    # On the null space a polar factor may be any matrix of spectral norm at most 1: take the nearest.
    left, s, right = torch.linalg.svd(off[rank:, rank:])
    off[rank:, rank:] -= (left * s.clamp(max=1)) @ right
    assert to_nearest / factor < spectral(off) < to_nearest * factor


# Propositions 1 to 3


def test_proposition_1_needs_the_step_trace_over_L():
    gradient, L = diag(2, 1), 10.0
    factor = polar(gradient, "svd")

    def bound(step: float) -> float:
        change = -step * factor
        return float((gradient * change).sum()) + L / 2 * spectral(change) ** 2

    trace = nuclear(gradient)
    assert (trace, bound(trace / L), bound(trace)) == near((3, -0.45, 36), within=1e-12)
    assert min(bound(step) for step in np.linspace(0, 3, 301)) == near(-0.45, within=1e-12)


PAPERS_TWO_TASKS = ((2.0, 1.0), (-1.0, 1.0)), ((2.0, -1.0), (1.0, 1.0))


@pytest.mark.parametrize(
    ("lr", "best_multiple", "bound_at_C"), [(0.5, 3.0, -2.25), (0.25, 6.0, -1.6875), (0.05, 30.0, -0.4275)]
)
def test_proposition_2_is_an_equivalence_only_at_lr_one_over_L(lr, best_multiple, bound_at_C):
    gradients, L = torch.tensor(PAPERS_TWO_TASKS), 2.0
    dual = solve_dual(gradients, tol=1e-10)
    C, W = dual.value, dual.direction[0]
    slowest, length = float(descents(gradients, W).min()), spectral(W)

    def common_bound(multiple: float | np.ndarray) -> float | np.ndarray:
        return -lr * multiple * slowest + L * lr**2 / 2 * (multiple * length) ** 2

    grid = np.linspace(0, 60, 6001)
    assert grid[np.argmin(common_bound(grid))] == near(best_multiple, within=1e-9)
    assert C / (lr * L) == near(best_multiple, within=1e-6)
    assert common_bound(C / (lr * L)) == near(-(C**2) / (2 * L), within=1e-6)
    assert (C, common_bound(C)) == near((3.0, bound_at_C), within=1e-6)


def test_in_the_papers_two_task_example_both_geometries_choose_equal_weights():
    first, second = torch.tensor(PAPERS_TWO_TASKS)
    sums = [z * first + (1 - z) * second for z in np.linspace(0, 1, 101)]
    assert np.argmin([nuclear(each) for each in sums]) == np.argmin([float(each.norm()) for each in sums]) == 50


def solved(first: Tensor, second: Tensor) -> tuple[Tensor, Dual]:
    gradients = torch.stack([first, second])
    return gradients, solve_dual(gradients, tol=1e-9)


def primal(gradients: Tensor, v: Tensor) -> float:
    return float(-descents(gradients, v).min()) + spectral(v) ** 2 / 2


def test_proposition_3_fails_where_the_weighted_gradient_has_no_full_rank():
    gradients, dual = solved(diag(1, 2), diag(2, -1))
    assert dual.weights.tolist() == near([1 / 3, 2 / 3], within=1e-6)
    assert (dual.value, dual.lower_bound) == near((5 / 3, 5 / 3), within=1e-6)
    assert torch.allclose(torch.tensordot(dual.weights, gradients, 1), diag(5 / 3, 0), atol=1e-6)
    assert torch.allclose(dual.direction[0], diag(1, 1 / 3), atol=1e-6)
    assert descents(gradients, dual.direction[0]).tolist() == near([5 / 3, 5 / 3], within=1e-6)

    compact = polar(diag(5 / 3, 0), "svd")
    assert descents(gradients, compact).tolist() == [1, 2]
    assert (primal(gradients, dual.primal[0]), -(dual.value**2) / 2) == near((-1.389, -1.389))
    assert primal(gradients, dual.value * compact) == near(-0.278)
    assert min(primal(gradients, each * compact) for each in np.linspace(0, 4, 401)) == near(-0.5, within=1e-12)


def test_the_polar_factor_can_be_an_ascent_direction_for_a_task():
    gradients, dual = solved(diag(-1, 4), diag(3, -2))
    assert dual.weights.tolist() == near([1 / 3, 2 / 3], within=1e-6)
    assert torch.allclose(dual.direction[0], diag(1, 2 / 3), atol=1e-6)
    assert descents(gradients, dual.direction[0]).tolist() == near([5 / 3, 5 / 3], within=1e-6)
    compact = polar(diag(5 / 3, 0), "svd")
    assert descents(gradients, compact).tolist() == [-1, 3]


@pytest.mark.parametrize(
    ("tasks", "size", "deficient", "ascending", "least_share"),
    [(2, 16, 0, 0, 1.0), (11, 16, 9, 0, 0.818), (11, 4, 12, 6, -0.751)],
)
def test_optima_without_full_rank_are_common_and_ascent_is_a_matter_of_small_matrices(
    tasks, size, deficient, ascending, least_share
):
    shares = []
    for seed in range(12):
        gradients = gaussian(tasks, size, size, seed=seed)
        dual = solve_dual(gradients, tol=1e-9)
        u, s, vh = torch.linalg.svd(torch.tensordot(dual.weights, gradients, 1))
        kept = s > 1e-5 * s[0]
        if not kept.all():
            shares.append(float(descents(gradients, u[:, kept] @ vh[kept]).min()) / dual.value)
    assert len(shares) == deficient
    assert sum(share < 0 for share in shares) == ascending
    assert min(shares, default=1.0) == near(least_share)


# Several blocks


def test_several_blocks_have_one_C_and_weights_of_their_own_guarantee_less():
    generator = torch.Generator().manual_seed(3)
    blocks = [torch.randn(2, 3, 4, generator=generator), torch.randn(2, 5, 2, generator=generator)]
    dual = solve_dual(blocks, tol=1e-10)
    norms = [nuclear(torch.tensordot(dual.weights, block, 1)) for block in blocks]
    assert (*norms, dual.value) == near((3.148, 3.031, 6.179))
    assert sum(norms) == near(dual.value, within=1e-9)

    def objective(lengths: Sequence[float]) -> float:
        directions = [length * w for length, w in zip(lengths, dual.direction, strict=True)]
        together = sum(descents(block, v) for block, v in zip(blocks, directions, strict=True))
        return float(-together.min()) + max(map(spectral, directions)) ** 2 / 2

    assert objective([dual.value] * 2) == near(-(dual.value**2) / 2, within=1e-6)
    assert (objective([dual.value] * 2), objective(norms)) == near((-19.09, -14.05), within=5e-3)

    alone = [solve_dual(block, tol=1e-10) for block in blocks]
    guaranteed = sum(descents(block, each.direction[0]) for block, each in zip(blocks, alone, strict=True)).min()
    assert (sum(each.value for each in alone), float(guaranteed)) == near((5.991, 5.991))


def test_blocks_that_are_stationary_alone_need_not_be_so_together():
    blocks = [torch.tensor([1.0, -1.0]).view(2, 1, 1), torch.tensor([-1.0, 2.0]).view(2, 1, 1)]
    assert [solve_dual(block).value for block in blocks] == near([0, 0], within=1e-9)
    dual = solve_dual(blocks, tol=1e-9)
    assert (dual.value, dual.lower_bound) == near((1 / 3, 1 / 3), within=1e-6)


# What the theorems assume


def test_sigma_bounds_the_standard_deviation_and_not_the_variance():
    """Noise of 1000 runs in the momentum after 100 steps, against the lemma's sqrt(mu) rho sigma."""
    mu, rho = 0.1, math.sqrt(6)
    momentum = torch.zeros(1000, 6, 9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        momentum = (1 - mu) * momentum + mu * torch.randn(1000, 6, 9, generator=generator) / math.sqrt(6 * 9)
    unit = float(torch.linalg.matrix_norm(momentum, "nuc").mean())  # where E ||error||_F^2 = 1
    assert unit / (math.sqrt(mu) * rho) == near(0.65, within=0.01)
    sigma = 0.1
    assert (math.sqrt(sigma) * unit, math.sqrt(mu) * rho * sigma) == near((0.159, 0.0775), within=2e-3)


@pytest.mark.parametrize("steps", [10, 100, 1000, 10_000])
def test_along_a_linear_loss_B_has_to_grow_with_the_steps_and_the_bound_does_not_fall(steps):
    def last_loss(B: float) -> float:
        return -deterministic_settings(Problem(1, 1.0, 1.0, B), steps, mu=1.0).lr * steps  # l(theta) = theta, from 0

    assert abs(last_loss(steps)) == near(steps, within=1e-6)
    assert abs(last_loss(0.99 * steps)) > 0.99 * steps
    problem = Problem(1, 1.0, 1.0, float(steps))
    settings = deterministic_settings(problem, steps, mu=1.0)
    assert settings.lr == near(1.0, within=1e-12)
    assert deterministic(problem, steps, settings).value == near(5.5 + 4 / steps, within=1e-9)


def slopes_of_two_losses(H: float, L: float, lr: float, less: float = 1e-3) -> tuple[np.ndarray, np.ndarray]:
    """On a grid of a step's path [-lr, 0]: the first falls and the second rises, steepest in the middle."""
    x = np.linspace(-lr, 0, 20001)
    second = np.minimum(H - less + L * (x + lr), H - L * x)
    return x, np.stack([-second[::-1], second])


def test_a_loss_difference_exceeds_H_by_a_quarter_of_L_lr_between_iterates_and_by_half_of_it_elsewhere():
    H = L = lr = 1.0
    x, slopes = slopes_of_two_losses(H, L, lr)
    assert np.abs(slopes[:, [0, -1]]).max() == H  # at the two iterates
    assert np.abs(np.diff(slopes) / np.diff(x)).max() < L * (1 + 1e-9)
    assert np.abs(np.trapezoid(slopes, x) / lr) == near(np.full(2, H + L * lr / 4), within=6e-4)
    steeper_all_the_way = H - L * x  # from 0, an iterate, to -lr, which is none
    assert np.trapezoid(steeper_all_the_way, x) / lr == near(H + L * lr / 2, within=1e-9)


def test_with_loss_differences_weights_can_change_by_more_than_beta_H():
    H = L = lr = 1.0
    x, slopes = slopes_of_two_losses(H, L, lr)
    beta, gamma = 1e-4, 0.9999e4
    logits, position, weights = np.zeros(2), -1, []
    for _ in range(6):
        weights.append(np.exp(logits) / np.exp(logits).sum())
        direction = np.sign(weights[-1] @ slopes[:, position])
        assert direction == (1 if position == -1 else -1)  # to and fro between the ends of the path
        position = 0 if position == -1 else -1
        logits = logits - beta * (direction * np.trapezoid(slopes, x) / lr + gamma * logits)
    changes = np.abs(np.diff(weights, axis=0)).max(1)
    assert changes[1:] / (beta * H) == near(np.full(4, 1.249))


def test_the_convex_bound_fails_where_an_iterate_leaves_the_set():
    """theta^2 / 2 on [-0.05, 0.05], from its end with lr 1."""
    iterates = [0.05, 0.05 - 1.0 * np.sign(0.05)]
    above_the_best = [theta**2 / 2 for theta in iterates]
    assert (iterates[1], above_the_best[1], convex(0.1, [abs(iterates[1])])) == near((-0.95, 0.451, 0.095))
    assert np.mean(above_the_best) > 4 * convex(0.1, [abs(theta) for theta in iterates])


def test_nothing_keeps_the_iterates_in_a_set():
    targets, theta, logits, outside = gaussian(2, 4, 4), torch.zeros(4, 4), torch.zeros(2), 0
    for _ in range(200):
        gradients = theta - targets
        direction = polar(torch.tensordot(logits.softmax(0), gradients, 1), "svd")
        theta = theta - 0.05 * direction
        logits = logits - 1e-4 * descents(gradients, direction)
        outside += spectral(theta) > 0.5
    assert outside == near(190, within=1)


# The weights


@pytest.mark.parametrize(("tasks", "farthest"), [(2, 0.231), (3, 0.160), (11, 0.0162), (40, 0.00125)])
def test_the_theorems_beta_keeps_weights_close_to_uniform(tasks, farthest):
    steps, H = 1000, 5.0
    beta = deterministic_settings(Problem(tasks, 1.0, H, 1.0), steps, mu=1.0).beta
    largest_logit = beta * H * steps
    assert largest_logit == near(1 / tasks, within=1e-12)
    logits = torch.full((tasks,), -largest_logit)
    logits[0] = largest_logit
    up, down = (float((each.softmax(0)[0] - 1 / tasks).abs()) for each in (logits, -logits))
    assert max(up, down) == pytest.approx(farthest, rel=4e-3)


def test_two_tasks_can_move_their_weights_by_0122():
    """A linear first loss, a constant second one."""
    steps, H = 1000, 5.0
    logits = -steps * deterministic_settings(Problem(2, 1.0, H, 1.0), steps, mu=1.0).beta * torch.tensor([H, 0.0])
    assert logits.softmax(0).tolist() == near([0.378, 0.622])


def quadratics(tasks: int, spread: float, steps: int, weighted: bool) -> tuple[float, float, float]:
    """Of a run at the theorem's settings: how far weights got from uniform, the mean norm, and the bound on it."""
    generator, mu, gamma = torch.Generator().manual_seed(0), 0.1, 1e-3
    targets = torch.randn(tasks, 6, 8, generator=generator)
    targets = targets * torch.exp(spread * torch.randn(tasks, 1, 1, generator=generator))
    problem = Problem(tasks, 6.0, max(map(nuclear, targets)), float(targets.square().sum((1, 2)).max()) / 2)
    settings = deterministic_settings(problem, steps, mu)
    settings = settings if weighted else settings._replace(beta=0.0)
    theta, momentum, logits = torch.zeros(6, 8), torch.zeros(6, 8), torch.zeros(tasks)
    farthest, norms = 0.0, []
    for _ in range(steps):
        gradients, weights = theta - targets, logits.softmax(0)
        assert max(map(nuclear, gradients)) <= problem.gradient_bound * (1 + 1e-9)
        assert float(gradients.square().sum((1, 2)).max()) / 2 <= problem.loss_bound * (1 + 1e-9)
        farthest = max(farthest, float((weights - 1 / tasks).abs().max()))
        total = torch.tensordot(weights, gradients, 1)
        norms.append(nuclear(total))
        momentum = (1 - mu) * momentum + mu * total
        direction = polar(momentum, "svd")
        theta = theta - settings.lr * direction
        logits = logits - settings.beta * (descents(gradients, direction) + gamma * logits)
    return farthest, float(np.mean(norms)), deterministic(problem, steps, settings).value


@pytest.mark.parametrize(("tasks", "spread", "farthest"), [(2, 0.0, 0.0014), (2, 1.0, 0.0039), (11, 1.0, 0.0001)])
def test_a_test_of_the_rate_passes_with_the_weighting_deleted(tasks, spread, farthest):
    with_weights = quadratics(tasks, spread, steps=300, weighted=True)
    without = quadratics(tasks, spread, steps=300, weighted=False)
    assert with_weights[0] == pytest.approx(farthest, rel=0.05)
    for _, mean_norm, bound in (with_weights, without):
        assert 17 < bound / mean_norm < 31


def test_gammas_up_to_001_hardly_matter_in_a_run_of_their_ablation():
    beta, steps = 1e-4, 100 * math.ceil(60_000 / 256)  # 100 epochs of MNIST
    gammas = np.array([1e-4, 1e-3, 5e-3, 1e-2, 5e-2])
    assert 1 / (beta * gammas) == pytest.approx([1e8, 1e7, 2e6, 1e6, 2e5])
    kept = (1 - beta * gammas) ** steps
    assert 100 * (1 - kept) == near([0.02, 0.23, 1.17, 2.32, 11.09], within=0.006)
    difference = (1 - kept) / (beta * gammas * steps)  # of two logits, where it would be 1 without gamma
    weights = 1 / (1 + np.exp(-difference))
    assert (1 / (1 + math.exp(-1)), weights[0], weights[1], weights[-1]) == near((0.7311, 0.7310, 0.7308, 0.7198), within=6e-5)
    assert weights[0] - weights[1] < 2.1e-4


def updated(weights: Tensor, delta: Tensor, beta: float) -> Tensor:
    """Algorithm 1, as MOON does it."""
    return next_logits(weights.log(), torch.zeros(()), delta, None, beta=beta, gamma=0.0)[0].softmax(0)


def updated_with_jacobian(weights: Tensor, delta: Tensor, beta: float) -> Tensor:
    """As in FAMO."""
    jacobian = torch.diag(weights) - torch.outer(weights, weights)
    return (weights.log() - beta * jacobian @ delta).softmax(0)


def test_the_three_updates_of_the_weights_differ():
    weights, delta, beta = torch.tensor([0.8, 0.15, 0.05]), torch.tensor([1.0, 2.0, -1.0]), 0.1
    algorithm, famo, appendix = (
        updated(weights, delta, beta),
        updated_with_jacobian(weights, delta, beta),
        weights - beta * delta,
    )
    exponentiated = weights * torch.exp(-beta * delta)
    assert torch.allclose(algorithm, exponentiated / exponentiated.sum(), rtol=1e-12)
    assert algorithm.tolist() == near([0.8026, 0.1362, 0.0613], within=5e-5)
    assert famo.tolist() == near([0.8019, 0.1476, 0.0504], within=5e-5)
    assert float(torch.cosine_similarity(algorithm - weights, famo - weights, dim=0)) == near(0.766)
    assert (*appendix.tolist(), float(appendix.sum())) == near((0.70, -0.05, 0.15, 0.8), within=1e-12)


def test_the_softmax_jacobian_is_a_factor_m_at_uniform_weights_and_579_in_a_corner():
    delta = torch.tensor([1.0, 2.0, -1.0])

    def ratio(weights: Tensor, beta: float) -> float:
        changes = [update(weights, delta, beta) - weights for update in (updated, updated_with_jacobian)]
        return float(changes[0].norm() / changes[1].norm())

    assert ratio(torch.full((3,), 1 / 3), beta=1e-6) == near(3.0, within=1e-4)
    assert ratio(torch.tensor([0.998, 0.001, 0.001]), beta=1e-4) == near(579, within=0.5)


def test_the_common_part_of_logits_costs_digits_in_float32_unless_they_are_centred():
    single = np.float32
    beta, gamma, first, second, half = single(1e-4), single(1e-3), single(10), single(10.1), single(0.5)
    drifting, centred = {}, {}
    a = b = c = d = single(0)  # two logits that drift, a and b, and the same two centred, c and d
    for step in range(1, 1_000_001):
        a, b = a - beta * (first + gamma * a), b - beta * (second + gamma * b)
        mean = (c + d) * half
        c, d = c - mean, d - mean
        c, d = c - beta * (first + gamma * c), d - beta * (second + gamma * d)
        if step in (10**5, 10**6):
            drifting[step], centred[step] = float(a - b), float(c - d)

    def error(found: float, step: int) -> float:
        exact = 0.1 / 1e-3 * (1 - (1 - 1e-4 * 1e-3) ** step)
        return abs(found / exact - 1)

    assert (drifting[10**5], drifting[10**6]) == near((0.927, 11.79), within=5e-3)
    assert [error(found, step) for step, found in drifting.items()] == near([0.07, 0.24], within=5e-3)
    assert [error(found, step) for step, found in centred.items()] == near([0.001, 0.011])


# The toy case


def momenta_of_the_toy_case(factor: str, steps: int = 1500) -> Iterator[tuple[Tensor, Tensor]]:
    """|theta x - y|^2 / 6 and |theta x + y|^2 / 6: the momentum of every step, and the direction from it."""
    generator = torch.Generator().manual_seed(0)
    x, y, theta = (torch.randn(shape, generator=generator) for shape in ((6,), (6,), (6, 6)))
    momentum, logits = torch.zeros(6, 6), torch.zeros(2)
    for _ in range(steps):
        gradients = torch.stack([torch.outer(theta @ x - y, x), torch.outer(theta @ x + y, x)]) / 3
        momentum = 0.95 * momentum + 0.05 * torch.tensordot(logits.softmax(0), gradients, 1)
        direction = polar(momentum, factor)
        yield momentum, direction
        theta = theta - 0.02 * direction
        logits = logits - 1e-4 * descents(gradients, direction)


def second_over_first(matrix: Tensor) -> float:
    first, second, *_ = torch.linalg.svdvals(matrix).tolist()
    return second / first


def test_the_toy_cases_momentum_has_rank_one_so_that_its_factor_is_the_euclidean_direction():
    for momentum, direction in momenta_of_the_toy_case("polar_express"):
        assert second_over_first(momentum) < 1e-12
        assert torch.allclose(direction / direction.norm(), momentum / momentum.norm(), rtol=0, atol=1e-8)


def test_the_exact_svd_makes_full_singular_values_of_the_toy_cases_rounding():
    run = list(momenta_of_the_toy_case("svd"))
    above_the_cutoff = [second_over_first(momentum) > 6 * torch.finfo(torch.float64).eps for momentum, _ in run]
    of_full_size = [second_over_first(direction) > 0.5 for _, direction in run]
    assert max(second_over_first(momentum) for momentum, _ in run) < 1e-12
    assert np.mean(np.equal(of_full_size, above_the_cutoff)) > 0.99
    assert sum(of_full_size) == near(289, within=150)  # of 1500; the very number depends on how LAPACK rounds
