"""The stationarity measure and what Euclidean weights miss of it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from moonopt import certificate_gap, pareto_stationarity

EXAMPLE = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, -1.0]]])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_example() -> None:
    """Euclidean weights (1/2, 1/2) give 2, the optimum (1/3, 2/3) gives 5/3."""
    assert pareto_stationarity(EXAMPLE) == pytest.approx(5 / 3, rel=1e-6)
    assert certificate_gap(EXAMPLE) == pytest.approx(1 / 3, rel=1e-5)


def test_one_task_is_its_nuclear_norm() -> None:
    gradient = random(1, 5, 7, seed=0)
    assert pareto_stationarity(gradient) == pytest.approx(np.linalg.norm(gradient[0].numpy(), "nuc"))
    assert certificate_gap(gradient) == 0


def test_the_papers_two_task_example_has_no_gap() -> None:
    a, b = torch.diag(torch.tensor([2.0, 1.0])), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    gradients = torch.stack([a + b, a - b])
    assert pareto_stationarity(gradients) == pytest.approx(3)
    assert certificate_gap(gradients) == pytest.approx(0, abs=1e-6)


def test_opposite_tasks_are_stationary() -> None:
    gradient = random(1, 4, 4, seed=1)
    assert pareto_stationarity(torch.cat([gradient, -3 * gradient])) < 1e-9


def test_scale() -> None:
    blocks = [random(3, 4, 5, seed=2), random(3, 6, 2, seed=3)]
    assert pareto_stationarity(blocks, [2.0, 2.0]) == pytest.approx(2 * pareto_stationarity(blocks), rel=2e-6)
    assert certificate_gap(blocks, 2.0) == pytest.approx(2 * certificate_gap(blocks), rel=1e-4, abs=1e-5)


@settings(max_examples=40)
@given(tasks=st.integers(1, 6), rows=st.integers(1, 6), cols=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_the_gap_is_never_negative_and_below_that_of_a_grid(tasks: int, rows: int, cols: int, seed: int) -> None:
    gradients = random(tasks, rows, cols, seed=seed)
    gap = certificate_gap(gradients)
    assert gap >= 0
    weights = torch.distributions.Dirichlet(torch.ones(tasks, dtype=torch.float64)).sample((200,))
    lowest = float(torch.linalg.svdvals(torch.tensordot(weights, gradients, 1)).sum(-1).min())
    assert pareto_stationarity(gradients) <= lowest * (1 + 1e-9)
