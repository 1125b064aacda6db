"""Gradients of several tasks from one backward pass: those of one pass each, for stock modules, and what cannot be had so."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moonopt import build
from moonopt.tasks.gradients import shared_by, task_gradients


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.net = kind(6, 8, batch_first=True)

    def forward(self, x):
        return self.net(x)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.net(x, x, x, need_weights=False)[0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8), nn.GELU(), nn.MaxPool1d(2))

    def forward(self, x):
        return self.net(x.mT)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Embedding(5, 8)

    def forward(self, x):
        return self.net((x.abs() * 10).long() % 5)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


TRUNKS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Softmax(-1)),
    "convolution": Convolution,
    "attention": Attention,
    "transformer": lambda: nn.TransformerEncoderLayer(6, 2, 16, dropout=0.1, batch_first=True),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "embedding": Embedded,
    "checkpointed": Checkpointed,
}


def tasks_on(trunk, tasks=5, dtype=torch.float64):
    """Losses of some tasks, each with a head of its own, and all parameters."""
    torch.manual_seed(0)
    net = trunk().to(dtype)
    features = net(torch.randn(4, 7, 6, dtype=dtype)).flatten(1)
    heads = nn.ModuleList(nn.Linear(features.shape[1], 2) for _ in range(tasks)).to(dtype)
    losses = [(i + 1) * functional.softplus(head(features)).square().mean() for i, head in enumerate(heads)]
    return losses, [*net.parameters(), *heads.parameters()]


def filled(row, parameters):
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, row, strict=True)])


@pytest.mark.parametrize("name", TRUNKS)
def test_they_are_those_of_one_backward_pass_for_each(name):
    losses, parameters = tasks_on(TRUNKS[name])
    expected = task_gradients(losses, parameters)
    for at_once in (2, 5, 9):
        found = task_gradients(losses, parameters, at_once=at_once)
        for row, other in zip(found, expected, strict=True):
            assert [each is None for each in row] == [each is None for each in other]
            torch.testing.assert_close(filled(row, parameters), filled(other, parameters), rtol=1e-10, atol=1e-12)


def test_what_a_task_does_not_touch_has_no_gradient():
    losses, parameters = tasks_on(TRUNKS["linear"], tasks=3)
    rows = task_gradients(losses, parameters, at_once=3)
    users = [sum(each is not None for each in column) for column in zip(*rows, strict=True)]
    assert users == [3] * (len(parameters) - 6) + [1] * 6
    assert len(shared_by(losses, parameters)) == len(parameters) - 6


def test_a_loss_without_a_graph_has_no_gradients():
    losses, parameters = tasks_on(TRUNKS["linear"], tasks=3)
    given = [losses[0], torch.ones((), dtype=torch.float64), losses[2]]
    rows = task_gradients(given, parameters, at_once=3)
    assert not any(each is not None for each in rows[1])
    torch.testing.assert_close(filled(rows[2], parameters), filled(task_gradients(losses, parameters)[2], parameters))
    assert task_gradients([torch.ones(()), torch.ones(())], parameters, at_once=2) == [[None] * len(parameters)] * 2


def test_a_parameter_may_be_a_loss_itself():
    x = nn.Parameter(torch.tensor(3.0))
    losses = [x, x.square()]
    assert task_gradients(losses, [x], at_once=2) == task_gradients(losses, [x]) == [[torch.tensor(1.0)], [torch.tensor(6.0)]]
    assert shared_by(losses, [x]) == [x]


def test_under_autocast_they_are_as_close_as_bfloat16_is():
    with torch.autocast("cpu", torch.bfloat16):
        losses, parameters = tasks_on(TRUNKS["linear"], dtype=torch.float32)
        found, expected = (task_gradients(losses, parameters, at_once=at_once) for at_once in (5, 1))
    for row, other in zip(found, expected, strict=True):
        assert all(each is None or each.dtype == torch.float32 for each in row)
        torch.testing.assert_close(filled(row, parameters), filled(other, parameters), rtol=0.02, atol=1e-3)


def test_random_numbers_that_would_be_drawn_again_are_refused():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    features = checkpoint(net, torch.randn(4, 6), use_reentrant=False)
    losses = [features.square().mean(), features.sin().mean()]
    with pytest.raises(RuntimeError, match=r'for several tasks at once: use engine="stored"'):
        task_gradients(losses, list(net.parameters()), at_once=2)


def test_a_failure_of_another_kind_is_told_as_it_is():
    x = nn.Parameter(torch.ones(3))
    y = x.exp()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        task_gradients([y.sum(), y.square().sum()], [x], at_once=2)


def test_compiled_models_are_refused():
    model = nn.Linear(3, 2)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = build("mgda", model, 2, engine="batched")
    refused = pytest.raises(RuntimeError, match="do not work with compiled models")
    with torch._functorch.config.patch(donated_buffer=False), refused:
        optimizer.minimize(lambda: list(compiled(torch.ones(4, 3)).square().mean(0)))
    torch.compiler.reset()


def test_an_operation_that_cannot_be_batched_is_told():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient if gradient.sum() > -1 else gradient  # asks for a number of each task

    x = nn.Parameter(torch.ones(3))
    y = Doubled.apply(x)
    with pytest.raises(RuntimeError, match=r'for several tasks at once: use engine="stored"'):
        task_gradients([y.sum(), y.square().sum()], [x], at_once=2)
