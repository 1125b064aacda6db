"""MOON's measured stationarity is under its theorems' bounds and falls as fast; the runs are those of examples/rates.py."""

import math

import pytest
import torch
from torch import nn

from moonopt import MOON


@pytest.fixture(scope="module")
def rates(example):
    return example("rates")


def test_the_problems_constants(rates):
    """L, H and B as the issue of the theorems states them, against random points and pairs of points."""
    problem = rates.PROBLEM
    assert problem.smoothness == 2 / 8
    assert problem.gradient_bound == pytest.approx(math.sqrt(6) * (3 * math.sqrt(3) / 8) / math.sqrt(48))
    assert problem.rho == pytest.approx(math.sqrt(6))
    generator = torch.Generator().manual_seed(0)
    theta = nn.Parameter(torch.randn(6, 8, dtype=torch.float64, generator=generator))
    found = torch.stack([torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in rates.losses(theta)])
    assert torch.allclose(found, rates.gradients(theta.detach()), atol=1e-15)
    for _ in range(200):
        size = 10 ** float(torch.empty(()).uniform_(-2, 1, generator=generator))
        one, other = size * torch.randn(2, 6, 8, dtype=torch.float64, generator=generator)
        assert torch.linalg.matrix_norm(rates.gradients(one), "nuc").max() <= problem.gradient_bound
        assert rates.losses(one).max() <= problem.loss_bound
        change = torch.linalg.matrix_norm(rates.gradients(one) - rates.gradients(other), "nuc").max()
        assert change <= problem.smoothness * torch.linalg.matrix_norm(one - other, 2)


def test_deterministic_rate(rates):
    found = [rates.deterministic(steps) for steps in (100, 1000, 10000)]
    assert all(rate.measured <= rate.bound for rate in found)
    assert rates.slope(found) <= -0.45


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_stochastic_rate_over_eight_seeds(rates, noise):
    found = [rates.mean_over_seeds(steps, noise, seeds=8) for steps in (100, 1000, 10000)]
    assert all(rate.measured <= rate.bound for rate in found)
    assert rates.slope(found) <= -0.22
    assert all(rates.bounds.stochastic_settings(rates.PROBLEM, rate.steps, noise).mu < 1 for rate in found)


def test_stochastic_bound_on_short_runs(rates):
    found = [rates.mean_over_seeds(steps, 0.1, seeds=2) for steps in (100, 1000)]
    assert all(rate.measured <= rate.bound for rate in found)
    assert rates.slope(found) <= -0.2


@pytest.mark.parametrize("steps", [100, 1000, pytest.param(10000, marks=pytest.mark.slow)])
def test_finite_step_bound_with_the_measured_error(rates, steps):
    rate = rates.finite_step(steps)
    error = float(rate.note.removeprefix("eps "))
    assert error < 0.5
    assert rate.measured <= rate.bound


def test_convex_bound_with_its_diameter(rates):
    for steps in (100, 1000):
        rate = rates.convex(steps)
        assert 0 < rate.measured <= rate.bound


@pytest.mark.parametrize("steps", [100, 1000, 10000])
def test_averaged_weights_approach_the_dual(rates, steps):
    """The theorems' beta freezes the weights, so that they need a test of their own: mirror descent on frozen gradients."""
    rate = rates.weights_alone(steps)
    assert 0 <= rate.measured <= rate.bound


def test_weights_that_do_not_move_miss_the_dual(rates, monkeypatch):
    """The test above can fail: with the weighting deleted, the gap stays."""

    class Frozen(MOON):
        def _follow(self, *args):
            pass

    monkeypatch.setattr(rates, "MOON", Frozen)
    short, longer = rates.weights_alone(10), rates.weights_alone(100)
    assert short.measured == pytest.approx(longer.measured)
    assert short.measured > longer.bound * math.sqrt(100 / 10000)
