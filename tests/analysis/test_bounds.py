"""The theorems' right-hand sides against the formulas as printed, their corollaries, and runs of Algorithm 1 in numpy."""

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings as run, strategies as st

from moonopt.analysis.bounds import (
    Bound,
    Problem,
    Settings,
    block_rho,
    convex,
    deterministic,
    deterministic_settings,
    finite_step,
    stochastic,
    stochastic_settings,
)

few = run(max_examples=60, deadline=None, derandomize=True)

PROBLEM = Problem(tasks=3, smoothness=2.0, gradient_bound=5.0, loss_bound=7.0, rho=math.sqrt(6))
SETTINGS = Settings(lr=0.03, beta=0.002, mu=0.1)
STEPS = 400

positive = st.floats(1e-3, 1e3)
problems = st.builds(Problem, st.integers(1, 50), positive, positive, positive, positive)
counts = st.integers(1, 10**6)
shares = st.floats(1e-3, 1.0)
from_zero = st.just(0.0) | positive
choices = st.builds(Settings, positive, from_zero, shares)
errors = st.floats(0, 0.99)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=0)


def letters(problem: Problem, steps: int) -> tuple[int, float, float, float, float, int]:
    """The paper's m, L, H, B, rho and T."""
    return (*dataclasses.astuple(problem), steps)


# The theorems as printed


@few
@given(problems, counts, choices)
def test_deterministic_bound_is_the_printed_one(problem, steps, choice):
    m, L, H, B, _, T = letters(problem, steps)
    alpha, beta, mu = choice
    printed = (
        2 * B / (alpha * T) + 2 * H / (mu * T) + 2 * L * alpha / mu + 2 * m * H**2 / mu * beta
        + m * H * B * beta / alpha + L / 2 * alpha
    )  # fmt: skip
    assert deterministic(problem, steps, choice).value == close(printed)


@few
@given(problems, counts, choices, from_zero)
def test_stochastic_bound_is_the_printed_one(problem, steps, choice, noise):
    m, L, H, B, rho, T = letters(problem, steps)
    (alpha, beta, mu), sigma = choice, noise
    printed = [
        2 * B / (alpha * T),
        2 * H / (mu * T),
        (H + math.sqrt(m) * rho * sigma) * m * B * beta / alpha,
        L / 2 * alpha,
        2 * L * alpha / mu,
        2 * math.sqrt(mu) * rho * sigma,
        2 * m * H * (H + math.sqrt(m) * rho * sigma) / mu * beta,
    ]
    bound = stochastic(problem, steps, choice, noise)
    assert sorted(bound.terms.values()) == [close(term) for term in sorted(printed)]
    assert bound.value == close(sum(printed))


@few
@given(problems, counts, choices, errors)
def test_finite_step_bound_is_the_printed_one(problem, steps, choice, error):
    m, L, H, B, _, T = letters(problem, steps)
    (alpha, beta, mu), eps = choice, error
    printed = (
        2 * B / (alpha * T) + 2 * H / (mu * T) + 2 * L * alpha * (1 + eps) / mu + 2 * m * H**2 * beta * (1 + eps) / mu
        + m * H * B * beta * (1 + eps) / alpha + L * alpha * (1 + eps) ** 2 / 2
    ) / (1 - eps)  # fmt: skip
    assert finite_step(problem, steps, choice, error).value == close(printed)


def test_terms_say_where_they_come_from():
    bound = stochastic(PROBLEM, STEPS, SETTINGS, noise=0.5)
    assert bound.terms == {
        "range": close(2 * 7 / (0.03 * 400)),
        "start": close(2 * 5 / (0.1 * 400)),
        "lag": close(2 * 2 * 0.03 / 0.1),
        "lag_weights": close(2 * 3 * 5 * (5 + math.sqrt(18) * 0.5) * 0.002 / 0.1),
        "weights": close(3 * 7 * (5 + math.sqrt(18) * 0.5) * 0.002 / 0.03),
        "curvature": close(2 * 0.03 / 2),
        "noise": close(2 * math.sqrt(0.1 * 6) * 0.5),
    }
    assert list(deterministic(PROBLEM, STEPS, SETTINGS).terms) == list(bound.terms)[:-1]


@few
@given(problems, counts, choices)
def test_bounds_without_noise_and_error_are_the_deterministic_one(problem, steps, choice):
    expected = deterministic(problem, steps, choice)
    assert finite_step(problem, steps, choice, error=0.0) == expected
    assert stochastic(problem, steps, choice, noise=0.0) == Bound(expected.terms | {"noise": 0.0})


def test_convex_bound_is_the_diameter_times_the_mean_norm():
    assert convex(3.0, [1.0, 2.0, 6.0]) == close(9.0)
    assert convex(3.0, np.array([1.0, 2.0, 6.0])) == close(9.0)
    assert convex(0.0, iter([1.0])) == 0


# The chosen settings


@few
@given(problems, counts, shares)
def test_deterministic_settings_are_the_printed_ones(problem, steps, mu):
    m, L, H, B, _, T = letters(problem, steps)
    expected = (math.sqrt(B / (L * T)), 1 / (m * H * T), mu)
    assert deterministic_settings(problem, steps, mu) == tuple(close(each) for each in expected)


@few
@given(problems, counts, st.floats(1e-4, 1e3))
def test_stochastic_settings_are_the_printed_ones(problem, steps, noise):
    m, L, H, B, rho, T = letters(problem, steps)
    mu = min(math.sqrt(L * B) / (noise * rho * math.sqrt(T)), 1)
    expected = (math.sqrt(mu * B / (T * L)), 1 / ((H + math.sqrt(m) * rho * noise) * m * T), mu)
    assert stochastic_settings(problem, steps, noise) == tuple(close(each) for each in expected)


@few
@given(problems, counts)
def test_settings_without_noise_are_the_deterministic_ones_without_momentum(problem, steps):
    assert stochastic_settings(problem, steps, noise=0.0) == deterministic_settings(problem, steps, mu=1.0)


def test_momentum_is_what_is_kept():
    assert Settings(lr=0.1, beta=0.0, mu=0.05).momentum == pytest.approx(0.95)


# The corollaries


@few
@given(problems, counts, shares)
def test_deterministic_corollary_is_the_bound_at_its_settings(problem, steps, mu):
    _, L, H, B, _, T = letters(problem, steps)
    closed = (7 / 2 + 2 / mu) * math.sqrt(L * B / T) + 4 * H / mu / T
    assert deterministic(problem, steps, deterministic_settings(problem, steps, mu)).value == close(closed)


def finite_step_corollary(problem: Problem, steps: int, mu: float, eps: float, leading: float) -> float:
    _, L, H, B, _, T = letters(problem, steps)
    factor = leading + 2 * (1 + eps) / mu + (1 + eps) + (1 + eps) ** 2 / 2
    return (factor * math.sqrt(L * B / T) + (4 + 2 * eps) * H / (mu * T)) / (1 - eps)


@few
@given(problems, counts, shares, errors)
def test_finite_step_corollary_has_the_leading_constant_two_and_not_three(problem, steps, mu, error):
    bound = finite_step(problem, steps, deterministic_settings(problem, steps, mu), error).value
    assert bound == close(finite_step_corollary(problem, steps, mu, error, leading=2))
    assert bound < finite_step_corollary(problem, steps, mu, error, leading=3)


@few
@given(problems, counts, shares)
def test_only_the_constant_two_meets_the_deterministic_corollary_at_no_error(problem, steps, mu):
    exact = deterministic(problem, steps, deterministic_settings(problem, steps, mu)).value
    assert finite_step_corollary(problem, steps, mu, 0.0, leading=2) == close(exact)
    excess = finite_step_corollary(problem, steps, mu, 0.0, leading=3) - exact
    assert excess == pytest.approx(math.sqrt(problem.smoothness * problem.loss_bound / steps), rel=1e-9)


def stochastic_corollary(problem: Problem, steps: int, sigma: float) -> float:
    _, L, H, B, rho, T = letters(problem, steps)
    return (4 * sigma * rho * H / (L * B) + 1 / 2) * math.sqrt(L * B / T) + 7 * (rho**2 * sigma**2 * L * B / T) ** (1 / 4)


def noise_that_is(ratio: float, problem: Problem, steps: int) -> float:
    """The sigma whose rho * sigma is this multiple of sqrt(L B / T), from where on mu is below 1."""
    return ratio * math.sqrt(problem.smoothness * problem.loss_bound / steps) / problem.rho


@few
@given(problems, counts, st.floats(1.0, 1e4))
def test_stochastic_corollary_is_the_bound_but_for_the_curvature_where_noise_is_large(problem, steps, ratio):
    noise = noise_that_is(ratio, problem, steps)
    choice = stochastic_settings(problem, steps, noise)
    bound = stochastic(problem, steps, choice, noise)
    simplified = bound.terms["curvature"] / math.sqrt(choice.mu)
    assert stochastic_corollary(problem, steps, noise) == close(bound.value - bound.terms["curvature"] + simplified)


@few
@given(problems, counts, st.floats(1e-8, 0.99))
def test_stochastic_corollary_is_below_the_theorem_where_noise_is_small(problem, steps, ratio):
    noise = noise_that_is(ratio, problem, steps)
    assert (
        stochastic_corollary(problem, steps, noise)
        < stochastic(problem, steps, stochastic_settings(problem, steps, noise), noise).value
    )


@few
@given(problems, counts)
def test_as_noise_vanishes_the_theorem_meets_the_deterministic_bound_and_the_corollary_falls_below(problem, steps):
    noise = noise_that_is(1e-14, problem, steps)
    exact = deterministic(problem, steps, deterministic_settings(problem, steps, mu=1.0)).value
    theorem = stochastic(problem, steps, stochastic_settings(problem, steps, noise), noise).value
    assert exact < theorem * (1 + 1e-12)
    assert theorem == pytest.approx(exact, rel=1e-11)
    assert stochastic_corollary(problem, steps, noise) < exact / 10


def test_a_linear_loss_refutes_the_stochastic_corollary_for_small_noise():
    """From B to -B in T steps, each of the same gradient: it is L-smooth for every L, and its noise is below every sigma."""
    problem = Problem(tasks=1, smoothness=2.0, gradient_bound=1.0, loss_bound=3.0)
    steps, noise = 1000, 1e-6
    choice = stochastic_settings(problem, steps, noise)
    gradient = 2 * problem.loss_bound / (choice.lr * steps)
    assert gradient < problem.gradient_bound
    assert stochastic_corollary(problem, steps, noise) < gradient / 3
    assert gradient < stochastic(problem, steps, choice, noise).value


# How they change


@pytest.mark.parametrize("name", ["tasks", "smoothness", "gradient_bound", "loss_bound", "rho"])
def test_no_term_falls_and_the_bound_grows_with_every_constant(name):
    larger = dataclasses.replace(PROBLEM, **{name: 2 * getattr(PROBLEM, name)})
    before, after = (stochastic(each, STEPS, SETTINGS, noise=0.3) for each in (PROBLEM, larger))
    assert all(after.terms[term] >= before.terms[term] for term in before.terms)
    assert after.value > before.value
    for bound in (lambda each: deterministic(each, STEPS, SETTINGS), lambda each: finite_step(each, STEPS, SETTINGS, 0.4)):
        assert bound(larger).value > bound(PROBLEM).value or name == "rho"


def test_the_bounds_grow_with_noise_and_error():
    by_noise = [stochastic(PROBLEM, STEPS, SETTINGS, noise).value for noise in (0.0, 0.1, 1.0, 10.0)]
    by_error = [finite_step(PROBLEM, STEPS, SETTINGS, error).value for error in (0.0, 0.1, 0.5, 0.99)]
    for values in (by_noise, by_error):
        assert values == sorted(set(values))


def test_the_bounds_fall_with_the_steps_and_grow_with_beta():
    by_steps = [deterministic(PROBLEM, steps, SETTINGS).value for steps in (1, 10, 100, 1000)]
    assert by_steps == sorted(set(by_steps), reverse=True)
    by_beta = [deterministic(PROBLEM, STEPS, SETTINGS._replace(beta=beta)).value for beta in (0.0, 1e-3, 1e-2)]
    assert by_beta == sorted(set(by_beta))


def test_at_the_chosen_settings_the_bounds_have_the_rates_of_the_theorems():
    exact = [deterministic(PROBLEM, steps, deterministic_settings(PROBLEM, steps, 0.1)).value for steps in (10**8, 4 * 10**8)]
    noisy = [stochastic(PROBLEM, steps, stochastic_settings(PROBLEM, steps, 1.0), 1.0).value for steps in (10**12, 16 * 10**12)]
    assert exact[0] / exact[1] == pytest.approx(2, rel=1e-3)
    assert noisy[0] / noisy[1] == pytest.approx(2, rel=1e-3)


# Runs of Algorithm 1


def algorithm(targets: np.ndarray, steps: int, choice: Settings, gamma: float, keep: float) -> tuple[Problem, float]:
    """Losses |theta - target|_F^2 / 2: the constants along the run, and the mean nuclear norm of the weighted gradients.

    The direction is ``keep`` times the polar factor, whose error is then 1 - keep.
    """
    alpha, beta, mu = choice
    theta, momentum, logits = np.zeros_like(targets[0]), np.zeros_like(targets[0]), np.zeros(len(targets))
    norms, gradient_norms, losses = [], [], []
    for step in range(steps + 1):
        gradients = theta - targets
        gradient_norms += [np.linalg.norm(each, "nuc") for each in gradients]
        losses += [(each**2).sum() / 2 for each in gradients]
        if step == steps:
            break
        weights = np.exp(logits - logits.max())
        weighted = np.einsum("i,ipq->pq", weights / weights.sum(), gradients)
        norms.append(np.linalg.norm(weighted, "nuc"))
        momentum = (1 - mu) * momentum + mu * weighted
        u, _, vh = np.linalg.svd(momentum, full_matrices=False)
        direction = keep * u @ vh
        theta = theta - alpha * direction
        logits = logits - beta * ((direction * gradients).sum((1, 2)) + gamma * logits)
    smoothness = float(min(theta.shape))  # ||A||_S1 <= min(p, q) ||A||_S-inf
    problem = Problem(len(targets), smoothness, float(max(gradient_norms)), float(max(losses)))
    return problem, float(np.mean(norms))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.0, 1e-2, 1.0])
@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("error", [0.0, 0.3])
def test_runs_stay_below_their_bound(seed, beta, mu, error):
    targets = np.random.default_rng(seed).normal(size=(3, 4, 6))
    choice = Settings(lr=0.02, beta=beta, mu=mu)
    problem, mean_norm = algorithm(targets, 80, choice, gamma=0.1, keep=1 - error)
    bound = finite_step(problem, 80, choice, error)
    assert mean_norm < bound.value
    assert mean_norm > bound.terms["range"] / 100  # the bound is no empty promise


# Several blocks


def test_rho_of_one_block_is_that_of_the_paper():
    assert block_rho([(6, 11)]) == close(math.sqrt(6))
    assert block_rho([(11, 6)], scale=[1.0]) == close(math.sqrt(6))


@pytest.mark.parametrize("scale", [None, [0.5, 1.0, 3.0]])
def test_rho_of_several_blocks_is_the_largest_ratio_of_the_norms(scale):
    shapes = [(2, 5), (4, 3), (1, 6)]
    rng = np.random.default_rng(0)

    def ratio(blocks: list[np.ndarray]) -> float:
        nuclear = sum(each * np.linalg.norm(b, "nuc") for each, b in zip(scale or [1.0] * 3, blocks, strict=True))
        return nuclear / math.sqrt(sum((b**2).sum() for b in blocks))

    rho = block_rho(shapes, scale)
    assert all(ratio([rng.normal(size=shape) for shape in shapes]) < rho for _ in range(20))
    # Attained where every block is its scale times an orthonormal matrix.
    assert ratio([each * np.eye(*shape) for each, shape in zip(scale or [1.0] * 3, shapes, strict=True)]) == close(rho)


# What bad input gets


@pytest.mark.parametrize("name", ["smoothness", "gradient_bound", "loss_bound", "rho"])
@pytest.mark.parametrize("found", [0, -1.0, math.nan, math.inf])
def test_constants_that_are_not_positive_are_refused(name, found):
    with pytest.raises(ValueError, match=rf"^{name} must be a positive number, found {found!r}\.$"):
        dataclasses.replace(PROBLEM, **{name: found})


@pytest.mark.parametrize("found", [0, -2, 1.5])
def test_counts_that_are_no_positive_integers_are_refused(found):
    with pytest.raises(ValueError, match=rf"^tasks must be a positive integer, found {found!r}\.$"):
        Problem(found, 1.0, 1.0, 1.0)
    for call in (
        lambda: deterministic(PROBLEM, found, SETTINGS),
        lambda: deterministic_settings(PROBLEM, found, mu=0.1),
        lambda: stochastic_settings(PROBLEM, found, noise=0.1),
    ):
        with pytest.raises(ValueError, match=rf"^steps must be a positive integer, found {found!r}\.$"):
            call()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lr": 0.0}, "lr must be a positive number, found 0.0."),
        ({"beta": -1e-3}, "beta must be a number of at least 0, found -0.001."),
        ({"mu": 0.0}, "mu must be above 0 and at most 1, found 0.0."),
        ({"mu": 1.01}, "mu must be above 0 and at most 1, found 1.01."),
    ],
)
def test_settings_out_of_range_are_refused(changes, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        deterministic(PROBLEM, STEPS, SETTINGS._replace(**changes))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: deterministic_settings(PROBLEM, STEPS, mu=2.0), "mu must be above 0 and at most 1, found 2.0."),
        (lambda: stochastic(PROBLEM, STEPS, SETTINGS, noise=-1.0), "noise must be a number of at least 0, found -1.0."),
        (lambda: stochastic_settings(PROBLEM, STEPS, noise=math.inf), "noise must be a number of at least 0, found inf."),
        (lambda: finite_step(PROBLEM, STEPS, SETTINGS, error=1.0), "error must be at least 0 and below 1, found 1.0."),
        (lambda: finite_step(PROBLEM, STEPS, SETTINGS, error=-0.1), "error must be at least 0 and below 1, found -0.1."),
        (lambda: convex(-1.0, [1.0]), "diameter must be a number of at least 0, found -1.0."),
        (lambda: convex(1.0, []), "nuclear_norms must be numbers of at least 0, found []."),
        (lambda: convex(1.0, [2.0, -3.0]), "nuclear_norms must be numbers of at least 0, found [2.0, -3.0]."),
        (lambda: block_rho([]), "shapes must be pairs of positive numbers, at least one, found []."),
        (lambda: block_rho([(3, 0)]), "shapes must be pairs of positive numbers, at least one, found [(3, 0)]."),
        (
            lambda: block_rho([(3, 2)], scale=[1.0, 2.0]),
            "scale must be one number of at least 0 for each of the 1 blocks, found [1.0, 2.0].",
        ),
        (
            lambda: block_rho([(3, 2)], scale=[-1.0]),
            "scale must be one number of at least 0 for each of the 1 blocks, found [-1.0].",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(call, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call()
