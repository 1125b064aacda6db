"""double_backward in ``minimize``: the backward pass that sets the gradients is the one that is differentiated."""

import functools
import gc
import math
import weakref

import pytest
import torch
from cubed import CubedOnceOnly
from torch import nn
from torch.nn import functional

from moonopt import MOON, Muon
from moonopt.tasks.twice import WeightedGradients, backward

TASKS = ("a", "b", "c")


class Mixed(nn.Module):
    """Dropout, batch norm, tied weights, a matrix that one task alone uses, and a frozen one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inputs, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.tied = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.private = nn.Linear(8, 8)
        self.double()

    def forward(self, x, names=TASKS):
        hidden = self.drop(self.norm(self.inputs(x)).relu())
        hidden = hidden + self.attention(*[hidden[None]] * 3, need_weights=False)[0][0]
        hidden = functional.gelu(self.tied(self.frozen(self.tied(hidden).tanh())))
        losses = {
            "a": hidden.square().mean(),
            "b": (hidden - 1).square().mean(),
            "c": functional.softplus(self.private(hidden)).mean(),
        }
        return {name: losses[name] for name in names}


def _data(seed=1):
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _optimizer(model, delta="double_backward", **settings):
    optimizer = MOON(model, tasks=TASKS, delta=delta, beta=0.3, **settings)
    torch.manual_seed(1)  # for the same dropout
    return optimizer


def _by_minimize(delta, names, **settings):
    model = Mixed()
    optimizer = _optimizer(model, delta, **settings)
    for seed in range(3):
        optimizer.minimize(model, _data(seed), names)
    return model, optimizer


def _by_combine(delta, names, **settings):
    model = Mixed()
    optimizer = _optimizer(model, delta, **settings)
    for seed in range(3):
        optimizer.zero_grad()
        optimizer.combine(model, _data(seed), names).backward()
        optimizer.step()
    return model, optimizer


def _assert_alike(one, other):
    for found, expected in zip(one[0].state_dict().values(), other[0].state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    for found, expected in zip(one[0].parameters(), other[0].parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-10)
    found, expected = (pair[1].diagnostics() for pair in (one, other))
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-10, nan_ok=True)  # deltas and logits among them
    assert max(abs(value) for name, value in found.items() if name.startswith("delta/") and not math.isnan(value)) > 1e-3


@pytest.mark.parametrize("names", [TASKS, ("a", "c"), ("b",)], ids=["all tasks", "two of them", "one of them"])
@pytest.mark.parametrize("loss", ["plain", "log"])
class TestSteps:
    def test_are_those_of_per_task(self, names, loss):
        _assert_alike(_by_minimize("double_backward", names, loss=loss), _by_minimize("per_task", names, loss=loss))

    def test_are_those_of_losses_that_are_evaluated_again(self, names, loss):
        _assert_alike(_by_minimize("double_backward", names, loss=loss), _by_combine("double_backward", names, loss=loss))


def test_a_weight_that_has_underflowed_has_its_delta():
    deltas = []
    for delta in ("double_backward", "per_task"):
        model = Mixed()
        optimizer = _optimizer(model, delta)
        optimizer.param_groups[0]["logits"].copy_(torch.tensor([0.0, -2000.0, 1.0]))
        optimizer.minimize(model, _data())
        deltas.append(optimizer.diagnostics()["delta/b"])
    assert deltas[0] == pytest.approx(deltas[1], rel=1e-10)
    assert abs(deltas[0]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_under_autocast_have_its_digits(dtype):
    found = []
    for delta in ("double_backward", "per_task"):
        model = Mixed().float()
        optimizer = _optimizer(model, delta)
        with torch.autocast("cpu", dtype=dtype):
            optimizer.minimize(model, _data().float())
        found.append([optimizer.diagnostics()[f"delta/{task}"] for task in TASKS])
    assert found[0] == pytest.approx(found[1], rel=3e-2, abs=3e-2 * max(map(abs, found[1])))


def test_combined_losses_that_wait_meanwhile_have_no_part_in_the_step():
    model = Mixed()
    optimizer = _optimizer(model)
    waiting = optimizer.combine(model, _data())
    optimizer.minimize(model, _data())
    assert optimizer.diagnostics()["losses_without_backward"] == 1
    assert waiting.requires_grad


# The gradients


def _plainly(losses, weights):
    (weights * losses).sum().backward()


@pytest.mark.parametrize("differentiate", [_plainly, lambda losses, weights: backward(losses, weights, weights, [])])
def test_a_backward_pass_leaves_what_backward_leaves(differentiate):
    """In leaves that no optimizer has, on top of what is there, and through every kind of hook."""
    torch.manual_seed(0)
    shared, other, unused = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    other.grad = torch.ones(4, 4)
    seen = []
    shared.register_hook(lambda gradient: seen.append(gradient.requires_grad) or gradient.clamp(-0.1, 0.1))
    shared.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    losses = torch.stack([(shared @ other).square().mean(), shared.sin().mean()])
    differentiate(losses, torch.tensor([0.3, 0.7]))
    x, y = shared.detach().requires_grad_(), other.detach().requires_grad_()
    expected = torch.autograd.grad(0.3 * (x @ y).square().mean() + 0.7 * x.sin().mean(), (x, y))
    assert seen[0] is False
    assert torch.equal(seen[1], shared.grad)
    torch.testing.assert_close(shared.grad, expected[0].clamp(-0.1, 0.1))
    torch.testing.assert_close(other.grad, expected[1] + 1)
    assert unused.grad is None
    assert not shared.grad.requires_grad
    assert not other.grad.requires_grad


def test_gradients_of_a_step_are_those_of_muon_bit_by_bit():
    """At equal weights, in a model whose backward pass torch computes in the same way whether it is kept or not."""
    models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, (_optimizer(models[0]), Muon(models[1])), strict=True):
        optimizer.minimize(lambda x, model=model: model(x).square().mean(0), _data().float())
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.grad, other.grad)
        assert torch.equal(one, other)


@pytest.mark.parametrize("verb", ["minimize", "combine"])
def test_hooks_on_parameters_run_once_and_not_for_the_deltas(verb):
    deltas, calls = [], []
    for delta in ("double_backward", "per_task"):
        model = Mixed()
        model.tied.weight.register_hook(lambda gradient, delta=delta: calls.append(delta) or gradient / 2)
        optimizer = _optimizer(model, delta)
        if verb == "minimize":
            optimizer.minimize(model, _data())
        else:
            optimizer.combine(model, _data()).backward()
            optimizer.step()
        deltas.append([optimizer.diagnostics()[f"delta/{task}"] for task in TASKS])
    assert deltas[0] == pytest.approx(deltas[1], rel=1e-10)
    assert calls == ["double_backward", "per_task"]


# What is left behind


def test_a_step_leaves_no_graph():
    """And needs no garbage collector for that, which sees no cycles through torch's graphs."""
    model, seen = Mixed(), []
    optimizer = _optimizer(model)

    def losses(x):
        hidden = model.inputs(x)
        seen.append(weakref.ref(hidden))  # which the first graph saves
        hidden.register_hook(lambda gradient: seen.append(weakref.ref(gradient)))  # and this the second
        return [(model.tied(hidden) - i).square().mean() for i in range(3)]

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            answer = optimizer.minimize(losses, _data())
        assert [each() for each in seen] == [None] * 6
    finally:
        gc.enable()
    assert not any(loss.requires_grad for loss in answer)
    assert not any(p.grad.requires_grad for p in model.parameters() if p.grad is not None)
    assert not optimizer._pending.batches


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_loss_that_is_not_finite_changes_nothing(nonfinite):
    model = Mixed()
    optimizer = _optimizer(model, nonfinite=nonfinite)
    before = [p.detach().clone() for p in model.parameters()]
    bad = lambda x: {name: loss * (torch.nan if name == "b" else 1) for name, loss in model(x).items()}  # noqa: E731
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match="At step 1, the loss of task 'b' is NaN or infinite"):
            optimizer.minimize(bad, _data())
    else:
        optimizer.minimize(bad, _data())
        assert optimizer.diagnostics()["skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.logits.tolist() == [0, 0, 0]
    optimizer.minimize(model, _data())
    assert optimizer.logits.abs().max() > 0


def test_log_needs_positive_losses():
    model = Mixed()
    optimizer = _optimizer(model, loss="log")
    with pytest.raises(FloatingPointError, match="task 'a' is NaN, infinite or not positive"):
        optimizer.minimize(lambda x: {name: loss - (100 if name == "a" else 0) for name, loss in model(x).items()}, _data())


def test_losses_without_a_graph_are_refused():
    model = Mixed()
    optimizer = _optimizer(model)
    with pytest.raises(RuntimeError, match="No loss depends on anything that requires a gradient"), torch.no_grad():
        optimizer.minimize(model, _data())
    assert optimizer.param_groups[0]["step"] == 0


@pytest.mark.parametrize("verb", ["minimize", "combine"])
def test_a_way_around_a_function_that_is_once_differentiable_is_not_taken(verb):
    """Torch would leave out the part of the derivative that goes through it."""
    model = Mixed()
    optimizer = _optimizer(model)

    def losses(x):
        hidden = model.tied(model.inputs(x))
        return [(hidden + CubedOnceOnly.apply(hidden) - i).square().mean() for i in range(3)]

    if verb == "combine":
        optimizer.combine(losses, _data()).backward()
    step = optimizer.step if verb == "combine" else functools.partial(optimizer.minimize, losses, _data())
    with pytest.raises(RuntimeError, match="marked with @once_differentiable") as error:
        step()
    assert 'delta="loss_difference" or delta="per_task" can' in error.value.__notes__[0]


def test_a_function_that_is_once_differentiable_may_stand_below_all_matrices():
    deltas = []
    for delta in ("double_backward", "per_task"):
        model = Mixed()
        model.token = nn.Parameter(torch.ones(6, dtype=torch.float64))  # a vector
        optimizer = _optimizer(model, delta)
        optimizer.minimize(lambda x, model=model: model(x * CubedOnceOnly.apply(model.token)), _data())
        deltas.append([optimizer.diagnostics()[f"delta/{task}"] for task in TASKS])
        assert model.token.grad.abs().max() > 0
    assert deltas[0] == pytest.approx(deltas[1], rel=1e-10)


def test_a_second_derivative_that_fails_leaves_a_whole_step(monkeypatch):
    models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    moon, muon = _optimizer(models[0], weight_decay=0.1), Muon(models[1], weight_decay=0.1)

    def fail(*args):
        raise RuntimeError("no second derivative")

    monkeypatch.setattr(WeightedGradients, "along", fail)
    with pytest.raises(RuntimeError, match="no second derivative") as error:
        moon.minimize(lambda x: models[0](x).square().mean(0), _data().float())
    assert 'delta="auto"' in error.value.__notes__[0]
    muon.minimize(lambda x: models[1](x).square().mean(0), _data().float())
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    assert moon.logits.tolist() == [0, 0, 0]
    assert not moon._pending.batches
