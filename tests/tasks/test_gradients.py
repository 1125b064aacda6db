"""Task gradients against autograd one by one, and the graphs they refuse."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moonopt import MOON
from moonopt.tasks.gradients import shared_by, task_gradients


def test_task_gradients_are_those_of_each_loss(two_heads, batch):
    model = two_heads(tasks=3, dtype=torch.float64)
    x, y = batch(tasks=3, dtype=torch.float64)
    parameters = [*model.parameters(), nn.Parameter(torch.zeros(3))]  # the last one is touched by no loss
    losses = model.losses(x, y)
    rows = task_gradients(losses, parameters)
    for i, row in enumerate(rows):
        expected = torch.autograd.grad(losses[i], parameters, retain_graph=True, allow_unused=True)
        for ours, theirs in zip(row, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert torch.equal(ours, theirs), "multiplying by a power of two must be exact"
    losses.sum().backward()  # the graph is still there


def test_small_half_precision_gradients_are_not_flushed():
    p = nn.Parameter(torch.ones(4, 4))
    loss = (p.half() * 1e-4).sum().float() * 1e-4  # 1e-8: below what float16 can hold
    plain = torch.autograd.grad(loss, p, retain_graph=True)[0]
    assert not plain.any()
    torch.testing.assert_close(task_gradients(loss.reshape(1), [p])[0][0], torch.full((4, 4), 1e-8), rtol=0.01, atol=0)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.trunk = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.5))
        self.out = nn.Linear(12, 2)

    def forward(self, x):
        return self.out(checkpoint(self.trunk, x, use_reentrant=self.reentrant)).square().mean(0)


@pytest.mark.parametrize("delta", ["loss_difference", "per_task"])
def test_activation_checkpointing_works(delta):
    model = Checkpointed(reentrant=False)
    plain = Checkpointed(reentrant=False)
    plain.forward = lambda x: plain.out(plain.trunk(x)).square().mean(0)
    for each in (model, plain):
        torch.manual_seed(1)
        optimizer = MOON(each, tasks=2, delta=delta, beta=0.1)
        for _ in range(3):
            optimizer.minimize(each, torch.randn(8, 6))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_reentrant_checkpointing_is_refused_with_the_mode_that_works():
    x = torch.randn(8, 6, requires_grad=True)
    model = Checkpointed(reentrant=True)
    with pytest.raises(
        RuntimeError, match=r'does not work with reentrant checkpointing: use delta="loss_difference", or .*use_reentrant=False'
    ):
        MOON(model, tasks=2, delta="per_task").combine(model, x)
    before = model.trunk[0].weight.detach().clone()
    MOON(model, tasks=2, delta="loss_difference").minimize(model, x)
    assert not torch.equal(model.trunk[0].weight, before)


def test_compiled_models_with_donated_buffers_are_refused_with_the_mode_that_works(two_heads, batch):
    model = two_heads()
    x, y = batch()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = MOON(compiled, tasks=2, delta="per_task")
    with (
        torch._functorch.config.patch(donated_buffer=True),
        pytest.raises(
            RuntimeError, match=r'does not work with donated buffers: use delta="loss_difference", or .*donated_buffer = False'
        ),
    ):
        optimizer.combine(lambda: (compiled(x) - y).square().mean(0))
    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        optimizer.minimize(lambda: (compiled(x) - y).square().mean(0))
    assert optimizer.param_groups[0]["step"] == 1


def test_a_parameter_may_be_a_loss_itself():
    x = nn.Parameter(torch.tensor(3.0))
    losses = [x, x.square()]
    assert task_gradients(losses, [x]) == [[torch.tensor(1.0)], [torch.tensor(6.0)]]
    assert shared_by(losses, [x]) == [x]
