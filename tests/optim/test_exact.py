"""MOON with dual="exact": the minimax step from solve_dual."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moonopt import MOON, Split, solve_dual


def _targets(tasks=3, rows=4, cols=6, seed=0):
    return torch.randn(tasks, rows, cols, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _on(theta, **settings):
    return MOON([{"params": [theta], "kind": "matrix"}], **({"tasks": 3, "lr": 0.01, "dual": "exact"} | settings))


def _quadratics(theta, targets):
    return lambda: (theta - targets).square().sum((1, 2)) / 2


def test_the_step_is_the_minimax_direction_of_the_gradients():
    targets = _targets()
    theta = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer = _on(theta)
    dual = solve_dual(-targets)
    optimizer.minimize(_quadratics(theta, targets))
    assert torch.equal(theta.detach(), -0.01 * dual.direction[0])
    assert torch.allclose(optimizer.task_weights, dual.weights, atol=1e-12)
    numbers = optimizer.diagnostics()
    assert numbers["dual/value"] == dual.value
    assert numbers["dual/converged"] == 1
    assert numbers["dual/relative_gap"] <= 1e-6
    assert min(numbers[f"delta/{i}"] for i in range(3)) == pytest.approx(dual.lower_bound)


@pytest.mark.parametrize("seed", range(4))
def test_every_loss_falls_until_no_direction_helps_all(seed):
    """L = 4 for these losses in the spectral norm (||W||_F^2 <= 4), so that a step of value / L lowers each by value^2 / 2L."""
    targets = _targets(seed=seed)
    theta = nn.Parameter(3 * _targets(1, seed=seed + 50)[0])
    optimizer = _on(theta)
    closure = _quadratics(theta, targets)
    value = solve_dual(theta.detach() - targets).value
    for _ in range(5000):
        optimizer.param_groups[0]["lr"] = value / 4
        before = optimizer.minimize(closure)
        after = closure().detach()
        least = value**2 / 8
        assert (after <= before - least * (1 - 1e-5) + 1e-13).all()
        dual = solve_dual(theta.detach() - targets)
        value = dual.value
        if dual.stationary:
            break
    assert dual.stationary
    optimizer.param_groups[0]["lr"] = 0.1
    at = theta.detach().clone()
    optimizer.minimize(closure)
    assert torch.equal(theta.detach(), at)
    assert optimizer.diagnostics()["dual/stationary"] == 1


def test_it_never_guarantees_less_than_mgda_with_the_same_spectral_budget():
    """Along a whole path, against the minimum-norm gradient of two tasks in closed form, brought to spectral norm 1."""
    targets = _targets(2)
    theta = nn.Parameter(3 * _targets(1, seed=9)[0])
    optimizer = _on(theta, tasks=2, lr=0.05)
    for _ in range(60):
        g1, g2 = (theta.detach() - targets).numpy()
        z = np.clip(((g2 - g1) * g2).sum() / ((g2 - g1) ** 2).sum(), 0, 1)
        mgda = z * g1 + (1 - z) * g2
        direction = mgda / np.linalg.norm(mgda, 2)
        optimizer.minimize(_quadratics(theta, targets))
        numbers = optimizer.diagnostics()
        guaranteed = min(numbers["delta/0"], numbers["delta/1"])
        assert guaranteed >= min((direction * g1).sum(), (direction * g2).sum()) * (1 - 1e-6)


def test_all_blocks_share_one_dual_with_their_scales_and_rates():
    first = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    second = nn.Parameter(torch.zeros(10, 3, dtype=torch.float64))
    a, b = _targets(3, 4, 6), _targets(3, 10, 3, seed=1)
    groups = [
        {"params": [first], "kind": "matrix", "lr": 0.01},
        {"params": [second], "kind": "matrix", "lr": 0.002, "scale": "spectral", "rows": [[6, 4]]},
    ]
    optimizer = MOON(groups, tasks=3, dual="exact")
    optimizer.minimize(lambda: ((first - a).square().sum((1, 2)) + (second - b).square().sum((1, 2))) / 2)
    spectral = [(6 / 3) ** 0.5, (4 / 3) ** 0.5]
    dual = solve_dual([-a, -b[:, :6], -b[:, 6:]], [1.0, 0.2 * spectral[0], 0.2 * spectral[1]])
    assert torch.allclose(first.detach(), -0.01 * dual.direction[0])
    moved = torch.cat([s * w for s, w in zip(spectral, dual.direction[1:], strict=True)])
    assert torch.allclose(second.detach(), -0.002 * moved)
    assert torch.allclose(optimizer.task_weights, dual.weights)


def test_a_module_with_convolution_fused_projection_and_vectors(batch):
    """Vectors take AdamW's step along the weighted gradient, and matrices the minimax direction."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"conv": nn.Conv1d(2, 4, 3), "qkv": nn.Linear(4, 12), "head": nn.Linear(12, 3)}).double()
    optimizer = MOON(model, tasks=3, lr=0.01, dual="exact", rules={"qkv.weight": Split(3)})
    x, y = batch(16, 3, torch.float64)

    def losses():
        hidden = model["conv"](x.reshape(16, 2, 3)).mean(-1).tanh()
        return (model["head"](model["qkv"](hidden).tanh()) - y).square().mean(0)

    matrices = [model["conv"].weight, model["qkv"].weight]
    rows = [torch.autograd.grad(loss, matrices, retain_graph=True) for loss in losses()]
    conv = torch.stack([row[0].flatten(1) for row in rows])
    qkv = torch.stack([row[1] for row in rows]).split(4, dim=1)
    dual = solve_dual([conv, *qkv])
    bias = model["head"].bias.detach().clone()
    gradient = torch.autograd.grad(dual.weights @ losses(), model["head"].bias)[0]
    before = [p.detach().clone() for p in matrices]
    optimizer.minimize(losses)
    assert torch.allclose(before[0].flatten(1) - matrices[0].detach().flatten(1), 0.01 * dual.direction[0])
    assert torch.allclose(before[1] - matrices[1].detach(), 0.01 * torch.cat(dual.direction[1:]))
    assert torch.allclose(model["head"].bias.grad, gradient)
    assert torch.allclose(bias - model["head"].bias.detach(), 1e-3 * gradient.sign(), rtol=1e-4)


def test_micro_batches_move_the_matrices_like_one_batch(two_heads, batch):
    x, y = batch(32, 2, torch.float64)
    whole, parts = two_heads(2, torch.float64), two_heads(2, torch.float64)
    one, four = (MOON(model, tasks=2, dual="exact", vector_lr=0.0) for model in (whole, parts))
    for _ in range(5):
        one.minimize(whole.losses, x, y)
        four.zero_grad()
        for part in zip(x.chunk(4), y.chunk(4), strict=True):
            (four.combine(parts.losses, *part) / 4).backward()
        four.step()
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_an_omitted_task_has_no_say_and_keeps_its_weight():
    targets = _targets()
    theta = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer = _on(theta, tasks=["a", "b", "c"])
    optimizer.minimize(lambda: {name: (theta - targets[i]).square().sum() / 2 for i, name in ((0, "a"), (2, "c"))})
    dual = solve_dual(-targets[[0, 2]])
    assert torch.allclose(theta.detach(), -0.01 * dual.direction[0])
    first, third = (2 / 3 * dual.weights).tolist()
    assert optimizer.task_weights.tolist() == pytest.approx([first, 1 / 3, third], abs=1e-12)


def test_one_task_per_micro_batch_trains_every_head(two_heads, batch):
    x, y = batch()
    model = two_heads()
    optimizer = MOON(model, tasks=["a", "b"], dual="exact")
    before = [head.weight.detach().clone() for head in model.heads]
    for _ in range(5):
        optimizer.zero_grad()
        for index, name in enumerate("ab"):
            optimizer.combine(lambda n=name, i=index: {n: model.losses(x, y)[i]}).backward()
        optimizer.step()
    moved = [float((head.weight.detach() - start).abs().max()) for head, start in zip(model.heads, before, strict=True)]
    assert min(moved) > 0.5 * max(moved) > 0


def test_one_task_alone_moves_along_its_compact_polar_factor():
    """And a matrix that it does not touch, or touches with a zero gradient, stays."""
    theta, idle = (nn.Parameter(torch.zeros(3, 3, dtype=torch.float64)) for _ in range(2))
    optimizer = MOON([{"params": [theta, idle], "kind": "matrix"}], tasks=2, lr=0.1, dual="exact")
    optimizer.minimize(lambda: {"0": theta[0, 0] + 0 * idle.sum()})
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0, 0] = -0.1
    assert torch.allclose(theta.detach(), expected, atol=1e-15)
    assert (idle == 0).all()


def test_a_task_that_touches_no_matrix_has_no_say():
    targets = _targets(2)
    theta = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    free = nn.Parameter(torch.ones(2, dtype=torch.float64))
    groups = [{"params": [theta], "kind": "matrix"}, {"params": [free], "kind": "vector"}]
    optimizer = MOON(groups, tasks=["a", "b", "free"], lr=0.01, dual="exact")
    fits = (theta - targets).square().sum((1, 2)) / 2
    optimizer.minimize(lambda: {"a": fits[0], "b": fits[1], "free": free.square().sum()})
    assert torch.allclose(theta.detach(), -0.01 * solve_dual(-targets).direction[0])
    assert (free < 1).all()


@pytest.mark.parametrize("shape", [(3, 0), (0, 4)], ids=str)
def test_an_empty_matrix_changes_nothing_for_the_others(shape):
    targets, moved = _targets(), []
    for beside in ([], [nn.Parameter(torch.zeros(shape, dtype=torch.float64))]):
        theta = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
        optimizer = MOON([{"params": [*beside, theta], "kind": "matrix"}], tasks=3, dual="exact", scale="spectral")
        optimizer.minimize(lambda: (theta - targets).square().sum((1, 2)) + sum(p.sum() for p in beside))
        moved.append(theta.detach())
    assert torch.equal(*moved)


def test_a_zero_gradient_is_named():
    theta = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer = _on(theta, tasks=["moves", "idle"])
    with pytest.warns(UserWarning, match="No direction helps all tasks: the gradient of idle is zero in every matrix"):
        optimizer.minimize(lambda: [(theta - 1).square().sum(), theta.square().sum()])


def test_log_losses_make_scales_irrelevant():
    targets, steps = _targets(), []
    for scales in ([1.0, 1.0, 1.0], [1.0, 1e4, 1e-3]):
        theta = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
        optimizer = _on(theta, loss="log")
        weights = torch.tensor(scales, dtype=torch.float64)
        optimizer.minimize(lambda w=weights, t=theta: w * (t - targets).square().sum((1, 2)))
        steps.append(theta.detach())
    assert torch.allclose(*steps, atol=1e-7)


def test_the_closure_is_evaluated_once():
    calls = []
    theta = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer = _on(theta, delta="loss_difference")

    def losses():
        calls.append(1)
        return _quadratics(theta, _targets())()

    optimizer.minimize(losses)
    assert len(calls) == 1
    optimizer.zero_grad()
    optimizer.combine(losses()).backward()  # and losses that were computed already need no again=
    optimizer.step()


def test_resume_and_copies_go_on_alike(two_heads, batch):
    x, y = batch()
    model = two_heads()
    optimizer = MOON(model, tasks=2, dual="exact")
    for _ in range(3):
        optimizer.minimize(model.losses, x, y)
    other = two_heads()
    other.load_state_dict(model.state_dict())
    resumed = MOON(other, tasks=2, dual="exact")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        optimizer.minimize(model.losses, x, y)
        resumed.minimize(other.losses, x, y)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_nan_leaves_everything_as_it_was(nonfinite):
    theta = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
    optimizer = _on(theta, nonfinite=nonfinite)
    factor = torch.tensor([1.0, float("nan"), 1.0], dtype=torch.float64)
    step = lambda: optimizer.minimize(lambda: factor * _quadratics(theta, _targets())())  # noqa: E731
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match="loss of task '1'"):
            step()
    else:
        step()
        assert optimizer.diagnostics()["skipped_steps"] == 1
    assert (theta == 1).all()
    assert optimizer.task_weights.tolist() == pytest.approx([1 / 3] * 3)


def test_a_gradient_that_overflows_is_no_direction():
    """The loss and the weighted gradient may be finite where a task's own gradient is not."""
    theta = nn.Parameter(torch.ones(2, 2))
    optimizer = _on(theta, tasks=2)

    class Overflows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            return torch.where(gradient > 1, torch.inf, gradient).expand(2, 2)

    optimizer.minimize(lambda: [Overflows.apply(theta), theta.sum()])
    assert (theta == 1).all()
    assert optimizer.diagnostics()["rejected_duals"] == 1


def test_reentrant_checkpointing_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = MOON(model, tasks=4, dual="exact")
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r'dual="exact" does not work with reentrant checkpointing: use dual="online"'):
        optimizer.combine(lambda: checkpoint(model, x, use_reentrant=True).mean(0))


def test_learning_rate_zero_moves_nothing(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=2, lr=0.0, dual="exact")
    before = model.trunk[0].weight.detach().clone()
    optimizer.minimize(model.losses, *batch())
    assert torch.equal(model.trunk[0].weight, before)


def test_unknown_dual():
    with pytest.raises(ValueError, match="Did you mean 'exact'"):
        _on(nn.Parameter(torch.zeros(2, 2)), dual="exakt")
