"""Task gradients against autograd one by one, and the graphs they refuse."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moonopt import MOON
from moonopt.balance import MGDA, Balanced
from moonopt.tasks.at_once import gradients_at_once
from moonopt.tasks.gradients import gram_matrix, shared_by, task_gradients


def gradients_of(losses, parameters, batched):
    return gradients_at_once(losses, parameters)[0] if batched else task_gradients(losses, parameters)


@pytest.mark.parametrize("batched", [False, True])
def test_task_gradients_are_those_of_each_loss(batched, two_heads, batch):
    model = two_heads(tasks=3, dtype=torch.float64)
    x, y = batch(tasks=3, dtype=torch.float64)
    parameters = [*model.parameters(), nn.Parameter(torch.zeros(3))]  # the last one is touched by no loss
    losses = model.losses(x, y)
    rows = gradients_of(losses, parameters, batched)
    for i, row in enumerate(rows):
        expected = torch.autograd.grad(losses[i], parameters, retain_graph=True, allow_unused=True)
        for ours, theirs in zip(row, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                exact = 1e-12 if batched else 0  # multiplying by a power of two is
                torch.testing.assert_close(ours, theirs, rtol=exact, atol=exact)
    losses.sum().backward()  # the graph is still there


@pytest.mark.parametrize("batched", [False, True])
def test_losses_without_a_graph_have_no_gradients(batched):
    x, constant = nn.Parameter(torch.ones(2)), torch.ones(())
    (none,), (row,), (half,) = gradients_of([constant, x.sum(), x.half().sum()], [x], batched)
    assert none is None
    assert row.tolist() == half.tolist() == [1, 1]
    assert gradients_of([constant, constant], [x], batched) == [[None], [None]]


@pytest.mark.parametrize("batched", [False, True])
def test_small_half_precision_gradients_are_not_flushed(batched):
    p = nn.Parameter(torch.ones(4, 4))
    loss = (p.half() * 1e-4).sum().float() * 1e-4  # 1e-8: below what float16 can hold
    plain = torch.autograd.grad(loss, p, retain_graph=True)[0]
    assert not plain.any()
    found = gradients_of(loss.reshape(1), [p], batched)[0][0]
    torch.testing.assert_close(found, torch.full((4, 4), 1e-8), rtol=0.01, atol=0)


@pytest.mark.parametrize("batched", [False, True])
def test_hooks_on_hidden_tensors_see_the_gradients_of_the_losses(batched):
    p = nn.Parameter(torch.linspace(-1, 1, 8))

    def losses(hook):
        hidden = p.tanh()
        hidden.register_hook(hook)
        return (hidden * torch.linspace(0, 1, 8)).sum(), (hidden - 2).square().sum()

    def clipped(gradient):
        return gradient.clamp(-0.5, 0.5)

    expected = [torch.autograd.grad(loss, p, retain_graph=True) for loss in losses(clipped)]
    torch.testing.assert_close(gradients_of(losses(clipped), [p], batched), [list(row) for row in expected])


@pytest.mark.parametrize("kind", ["function", "compiled"])
def test_what_may_hide_float16_is_taken_for_it(kind):
    p = nn.Parameter(torch.ones(4, 4))

    class InHalf(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.half().float()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.half().float()

    @torch.compile(backend="aot_eager")
    def in_half(x):
        return x.half().float()

    forward = InHalf.apply if kind == "function" else in_half
    loss = (forward(p) * 1e-8).sum()
    assert not torch.autograd.grad(loss, p, retain_graph=True)[0].any()
    with torch._functorch.config.patch(donated_buffer=False):
        ((found,),) = task_gradients([loss], [p])
    torch.testing.assert_close(found, torch.full((4, 4), 1e-8), rtol=0.3, atol=0)


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


def test_what_several_losses_share_is_one_matrix_with_the_same_products_and_sums(two_heads, batch, monkeypatch):
    monkeypatch.setattr("moonopt.tasks.at_once.SHORT", 4)
    monkeypatch.setattr("moonopt.tasks.at_once.TOGETHER", 36)
    model, (x, y) = two_heads(tasks=3, dtype=torch.float64), batch(tasks=3, dtype=torch.float64)
    rows, joint = gradients_at_once(model.losses(x, y), list(model.parameters()))
    places = [next(number for number, each in enumerate(model.parameters()) if each is p) for p in joint.parameters]
    assert len(places) == len(rows[0])  # one tensor of all losses makes everything shared
    torch.testing.assert_close(joint.gram(), gram_matrix(rows))
    weights = torch.tensor([0.5, -1.0, 2.0])
    for place, found in zip(places, joint.weighted_sum(weights).values(), strict=True):
        torch.testing.assert_close(found, sum(w * row[place] for w, row in zip(weights.double(), rows, strict=True)))


def test_parameters_of_several_dtypes_are_no_matrix():
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    losses = [(one.double() * other).sum(), (one + other).sum()]
    rows, joint = gradients_at_once(losses, [one, other])
    assert joint is None
    torch.testing.assert_close(rows, task_gradients(losses, [one, other]))


def test_one_pass_for_all_goes_through_checkpointing():
    model, x = Checkpointed(reentrant=False), torch.randn(8, 6)
    losses = model(x)
    one_by_one, at_once = (gradients_of(losses.unbind(), list(model.parameters()), each) for each in (False, True))
    torch.testing.assert_close(at_once, one_by_one)


def test_what_one_task_has_alone_is_kept_once():
    trunk, heads = nn.Linear(4, 8), [nn.Linear(8, 3) for _ in range(5)]
    losses = [head(trunk(torch.ones(2, 4))).square().mean() for head in heads]
    parameters = [*trunk.parameters(), *(p for head in heads for p in head.parameters())]
    rows, _ = gradients_at_once(losses, parameters)
    kept = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for row in rows for each in row if each is not None
    }
    padding = 4 * 16 * len(parameters)
    assert sum(kept.values()) <= 4 * (5 * (8 * 4 + 8) + 5 * (3 * 8 + 3)) + padding
    torch.testing.assert_close(rows, task_gradients(losses, parameters))


class ForgetsOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_what_a_graph_reaches_may_have_no_gradient_in_one_pass():
    x, y = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    losses = [ForgetsOne.apply(x, y).sum(), (x * y).sum()]
    (_, forgotten), (_, known) = gradients_at_once(losses, [x, y])[0]
    assert not forgotten.any()
    assert known.tolist() == [1, 1, 1]


def test_autocast_is_not_for_one_pass_either():
    model, x = nn.Linear(40, 2), torch.randn(8, 40)
    losses = model(x).square().mean(0).unbind()
    expected = task_gradients(losses, list(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients_at_once(losses, list(model.parameters()))[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class WithoutRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient.new_empty(x.shape).copy_(2 * x * gradient.tolist()[0])


def test_what_has_no_rule_for_one_pass_names_the_engine_that_needs_none():
    model = nn.Linear(3, 2)
    optimizer = Balanced(MGDA(2), torch.optim.SGD(model.parameters(), lr=0.1), engine="stored:batched")
    with pytest.raises(RuntimeError) as caught:
        optimizer.minimize(lambda: WithoutRule.apply(model(torch.ones(4, 3))).mean(0))
    assert any('engine="stored" takes one after the other' in note for note in caught.value.__notes__)


def test_one_pass_for_all_is_refused_for_compiled_models(two_heads, batch):
    model, (x, y) = two_heads(), batch()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = Balanced(MGDA(2), torch.optim.SGD(model.parameters(), lr=0.1), engine="stored:batched")
    with (
        torch._functorch.config.patch(donated_buffer=False),
        pytest.raises(RuntimeError, match="do not work with compiled models"),
    ):
        optimizer.combine(lambda: (compiled(x) - y).square().mean(0))
    torch.compiler.reset()


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


@pytest.mark.parametrize("batched", [False, True])
def test_a_parameter_may_be_a_loss_itself(batched):
    x = nn.Parameter(torch.tensor(3.0))
    losses = [x, x.square()]
    assert gradients_of(losses, [x], batched) == [[torch.tensor(1.0)], [torch.tensor(6.0)]]
    assert shared_by(losses, [x]) == [x]
