"""Whatever the losses do, the weights stay on the simplex."""

import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from moonopt import MOON


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tasks=st.integers(1, 7),
    beta=st.one_of(st.floats(0, 1e3), st.sampled_from(["auto", "auto:1.0"])),
    gamma=st.floats(0, 1e-2),
    loss=st.sampled_from(["plain", "log"]),
    scale=st.floats(1e-8, 1e8),
    delta=st.sampled_from(["loss_difference", "per_task"]),
    data=st.data(),
)
def test_weights_stay_on_the_simplex(tasks, beta, gamma, loss, scale, delta, data):
    theta = nn.Parameter(torch.eye(3))
    targets = torch.randn(tasks, 3, 3, generator=torch.Generator().manual_seed(0))
    groups = [{"params": [theta], "kind": "matrix"}]
    optimizer = MOON(groups, tasks=tasks, lr=0.1, beta=beta, gamma=gamma, loss=loss, delta=delta, module=nn.Module())
    for _ in range(4):
        present = data.draw(st.sets(st.integers(0, tasks - 1), min_size=1))
        optimizer.minimize(lambda names: {str(i): scale * (theta - targets[i]).square().sum() for i in names}, sorted(present))
        weights = optimizer.task_weights
        assert weights.min() >= 0
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
        assert theta.isfinite().all()
