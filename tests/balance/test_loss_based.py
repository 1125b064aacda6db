"""The loss-based balancers and GradNorm against their public formulas, written out here once more."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from moonopt.balance.balanced import Balanced
from moonopt.balance.dwa import DWA
from moonopt.balance.famo import FAMO
from moonopt.balance.gradnorm import GradNorm
from moonopt.balance.linear import LS, SI, STL
from moonopt.balance.rlw import RLW
from moonopt.balance.uncertainty import UW
from moonopt.methods import build
from moonopt.tasks.gradients import task_gradients

DOUBLE = torch.float64


def separate(model, scales=(1.0, 1.0, 1.0)):
    """A closure whose losses, each times a number, depend on their own head alone."""

    def losses(x, y):
        hidden = model.trunk(x)
        triples = zip(model.heads, y.mT, scales, strict=False)
        return [scale * (head(hidden)[:, 0] - target).square().mean() for head, target, scale in triples]

    return losses


class Recorded:
    """A balancer on numbers that stand for losses: what it weighs them by, and what it makes of them."""

    def __init__(self, balancer, dtype=DOUBLE):
        self.theta = nn.Parameter(torch.ones(len(balancer.tasks), dtype=dtype))
        self.optimizer = Balanced(balancer, torch.optim.SGD([self.theta], lr=0.0), module=nn.Module())

    def step(self, numbers):
        """One step on losses of these values; the weights that they had."""
        values = torch.as_tensor(numbers, dtype=self.theta.dtype)
        self.optimizer.minimize(lambda: self.theta * values)
        return self.optimizer.task_weights.numpy().copy()


def random_losses(steps, tasks=3, seed=0):
    return np.exp(np.random.default_rng(seed).normal(size=(steps, tasks)))


# LS, SI, STL


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_si_has_the_gradient_of_the_logs(two_heads, batch, reduction):
    model = two_heads(tasks=3, dtype=DOUBLE)
    data = batch(tasks=3, dtype=DOUBLE)
    logs = torch.stack(separate(model)(*data)).log()
    expected = torch.autograd.grad(logs.mean() if reduction == "mean" else logs.sum(), list(model.parameters()))
    Balanced(SI(3, reduction), torch.optim.SGD(model.parameters())).combine(separate(model), *data).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ls_has_the_gradient_of_the_losses(two_heads, batch, reduction):
    model = two_heads(tasks=3, dtype=DOUBLE)
    data = batch(tasks=3, dtype=DOUBLE)
    losses = torch.stack(separate(model)(*data))
    expected = torch.autograd.grad(losses.mean() if reduction == "mean" else losses.sum(), list(model.parameters()))
    Balanced(LS(3, reduction), torch.optim.SGD(model.parameters())).combine(separate(model), *data).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_factors_say_how_much_a_task_counts(two_heads, batch, reduction):
    model = two_heads(tasks=3, dtype=DOUBLE)
    data = batch(tasks=3, dtype=DOUBLE)
    optimizer = Balanced(LS(["a", "b", "c"], reduction, factors=[1, 2, 5]), torch.optim.SGD(model.parameters(), lr=0.0))
    optimizer.load_state_dict(Balanced(LS(["a", "b", "c"]), torch.optim.SGD(model.parameters(), lr=0.0)).state_dict())
    for names, factors in (("abc", (1, 2, 5)), ("ac", (1, 5))):
        values = dict(zip("abc", separate(model)(*data), strict=True))
        counted = torch.stack([values[name] for name in names])
        total = (torch.tensor(factors) * counted).sum()
        expected = total / sum(factors) if reduction == "mean" else total
        gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True, retain_graph=True)
        optimizer.zero_grad()
        combined = optimizer.combine({name: values[name] for name in names})
        combined.backward()
        optimizer.step()
        torch.testing.assert_close(combined, expected)
        torch.testing.assert_close([p.grad for p in model.parameters()], list(gradients))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_si_shows_the_logs_of_these_losses_whenever_its_weights_were_made(reduction):
    theta = torch.ones((), dtype=DOUBLE, requires_grad=True)
    optimizer = Balanced(SI(2, reduction), torch.optim.SGD([theta], lr=0.0), every=3)
    for values in ([2.0, 3.0], [7.0, 8.0]):
        logs = torch.tensor(values, dtype=DOUBLE).log()
        loss = optimizer.combine(theta * torch.tensor(values, dtype=DOUBLE))
        torch.testing.assert_close(loss.detach(), logs.mean() if reduction == "mean" else logs.sum())
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(optimizer.combine(theta * torch.tensor(values, dtype=DOUBLE)), loss.detach())


@pytest.mark.parametrize(
    "factors", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.inf], [1.0, math.nan], "12", {"0": 1.0, "1": 2.0}, 3]
)
def test_factors_must_be_a_positive_number_for_each_task(factors):
    with pytest.raises(ValueError, match="one number above 0 for each of 2 tasks"):
        LS(2, factors=factors)


@pytest.mark.parametrize("task", [0, 1, 2])
def test_stl_trains_one_task_alone(two_heads, batch, task):
    model, reference = two_heads(tasks=3), two_heads(tasks=3)
    optimizer = Balanced(STL(3, task=str(task)), torch.optim.Adam(model.parameters()))
    plain = torch.optim.Adam(reference.parameters())
    for seed in range(10):
        data = batch(tasks=3, seed=seed)
        optimizer.minimize(separate(model), *data)
        plain.zero_grad()
        separate(reference)(*data)[task].backward()
        plain.step()
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()))
    start = two_heads(tasks=3)
    for index, (head, before) in enumerate(zip(model.heads, start.heads, strict=True)):
        assert torch.equal(head.weight, before.weight) == (index != task)


# RLW


def test_rlw_draws_the_softmax_of_standard_normals():
    run = Recorded(RLW(4))
    weights = np.stack([run.step(np.ones(4)) for _ in range(3000)])
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    logits = np.log(weights) - np.log(weights).mean(1, keepdims=True)
    np.testing.assert_allclose(logits.mean(0), 0, atol=5 * math.sqrt(0.75 / 3000))
    covariance = np.eye(4) - 1 / 4  # of four standard normals after their mean is taken away
    np.testing.assert_allclose(np.cov(logits.T), covariance, atol=0.1)
    next_to = [np.corrcoef(logits[1:, task], logits[:-1, task])[0, 1] for task in range(4)]
    np.testing.assert_allclose(next_to, 0, atol=0.1)
    fourth = ((logits / np.sqrt(0.75)) ** 4).mean()
    assert fourth == pytest.approx(3, abs=0.3), "normal, not uniform"


def test_rlw_repeats_itself_from_the_same_seed():
    first, same, other = (Recorded(RLW(4, seed=seed)) for seed in (5, 5, 6))
    for _ in range(20):
        a, b, c = (run.step(np.ones(4)) for run in (first, same, other))
        np.testing.assert_array_equal(a, b)
        assert not np.allclose(a, c)


def test_rlw_leaves_torchs_generator_alone():
    run = Recorded(RLW(4))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    run.step(np.ones(4))
    assert torch.equal(torch.get_rng_state(), state)


# DWA


class PublicDWA:
    """That of nash-mtl's code: a buffer of two windows, first in first out, filled with ones."""

    def __init__(self, tasks, window, temperature):
        self.window, self.temperature, self.tasks = window, temperature, tasks
        self.costs = np.ones((2 * window, tasks))

    def weights_after(self, losses):
        self.costs[:-1] = self.costs[1:]
        self.costs[-1] = losses
        ratios = self.costs[self.window :].mean(0) / self.costs[: self.window].mean(0)
        exponentials = np.exp(ratios / self.temperature)
        return self.tasks * exponentials / exponentials.sum()


@pytest.mark.parametrize(("protocol", "factor"), [("paper", 1), ("nash-mtl", 1 / 3), ("famo", 1 / 3)])
def test_dwa_follows_the_public_window_once_it_is_full(two_heads, protocol, factor):
    """Which the public code waits for but a half, dividing by the ones that it was filled with."""
    settings = build("dwa", two_heads(), 3, protocol=protocol).balancer
    assert (settings.window, settings.temperature, settings.sliding) == (25, 2.0, True)
    run, public = Recorded(settings), PublicDWA(3, 25, 2.0)
    expected = np.ones(3)
    for step, losses in enumerate(random_losses(80)):
        weights = run.step(losses)
        np.testing.assert_allclose(weights, factor * expected, rtol=1e-6, err_msg=f"step {step}")
        following = public.weights_after(losses)
        if step >= 49:
            expected = following
    assert np.ptp(expected) > 0.01


@pytest.mark.parametrize("temperature", [2.0, 0.5])
def test_dwa_by_epochs_compares_the_means_of_the_last_two(temperature):
    window, epochs = 4, 5
    run = Recorded(DWA(3, window=window, sliding=False, temperature=temperature))
    losses = random_losses(window * epochs)
    means = losses.reshape(epochs, window, 3).mean(1)
    for epoch in range(epochs):
        ratios = np.ones(3) if epoch < 2 else means[epoch - 1] / means[epoch - 2]
        expected = 3 * np.exp(ratios / temperature) / np.exp(ratios / temperature).sum()
        for step in range(window):
            np.testing.assert_allclose(run.step(losses[epoch * window + step]), expected, rtol=1e-6)


# UW


@pytest.mark.parametrize("start", [0.0, -0.5])
def test_uw_is_learned_as_torchs_adam_would(start):
    run = Recorded(UW(3, start=start))
    s = nn.Parameter(torch.full((3,), start, dtype=DOUBLE))
    adam = torch.optim.Adam([s], lr=0.025)
    for numbers in random_losses(50):
        losses = torch.tensor(numbers)
        np.testing.assert_allclose(run.step(numbers), (s.detach().neg().exp() / 2).numpy(), rtol=1e-9)
        adam.zero_grad()
        ((s.neg().exp() * losses + s) / 2).sum().backward()
        adam.step()
    torch.testing.assert_close(run.optimizer.memory["s"], s.detach(), rtol=0, atol=1e-9)
    assert (s - start).abs().max() > 0.1


def test_adam_has_all_its_digits_in_float32():
    run = Recorded(UW(3), dtype=torch.float32)
    s = nn.Parameter(torch.zeros(3))
    adam = torch.optim.Adam([s], lr=0.025)
    for numbers in random_losses(5):
        run.step(numbers)
        adam.zero_grad()
        ((s.neg().exp() * torch.tensor(numbers, dtype=torch.float32) + s) / 2).sum().backward()
        adam.step()
        torch.testing.assert_close(run.optimizer.memory["s"], s.detach(), rtol=1e-6, atol=0)


def test_uw_in_a_network_is_joint_training_with_s(two_heads, batch):
    model, reference = two_heads(dtype=DOUBLE), two_heads(dtype=DOUBLE)
    optimizer = build("uw", model, 2, optimizer={"lr": 0.025})
    s = nn.Parameter(torch.zeros(2, dtype=DOUBLE))
    joint = torch.optim.Adam([*reference.parameters(), s], lr=0.025)
    for seed in range(20):
        data = batch(seed=seed, dtype=DOUBLE)
        optimizer.minimize(separate(model), *data)
        joint.zero_grad()
        ((s.neg().exp() * torch.stack(separate(reference)(*data)) + s) / 2).sum().backward()
        joint.step()
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()))
    torch.testing.assert_close(optimizer.memory["s"], s.detach())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (DOUBLE, 1e-12)], ids=str)
def test_the_state_of_a_task_that_is_not_there_stays(two_heads, batch, dtype, tolerance):
    """Each task's s, its moments and its count of steps are its own: torch's Adam on that task's steps alone."""
    model = two_heads(dtype=dtype)
    optimizer = Balanced(UW(["left", "right"]), torch.optim.SGD(model.parameters(), lr=0.01))
    s = {name: nn.Parameter(torch.zeros((), dtype=dtype)) for name in ("left", "right")}
    adams = {name: torch.optim.Adam([each], lr=0.025) for name, each in s.items()}
    for seed in range(12):
        wanted = [("left", "right"), ("left",), ("right",), ("left",)][seed % 4]
        losses = optimizer.minimize(
            lambda x, y: {n: v for n, v in zip(s, separate(model)(x, y), strict=True) if n in wanted},
            *batch(seed=seed, dtype=dtype),
        )
        for name, loss in losses.items():
            adams[name].zero_grad()
            ((s[name].neg().exp() * loss + s[name]) / 2).backward()
            adams[name].step()
    found = optimizer.memory["s"]
    torch.testing.assert_close(found, torch.stack(list(s.values())).detach(), rtol=0, atol=tolerance)
    assert optimizer.memory["s_steps"].tolist() == [9, 6]


# GradNorm


@pytest.mark.parametrize("alpha", [1.5, 0.12])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_gradnorm_is_its_algorithm(two_heads, batch, alpha, as_tensor):
    model, reference = two_heads(tasks=3, dtype=DOUBLE), two_heads(tasks=3, dtype=DOUBLE)
    optimizer = Balanced(GradNorm(3, alpha=alpha), torch.optim.SGD(model.parameters(), lr=0.05))
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    w = nn.Parameter(torch.ones(3, dtype=DOUBLE))
    adam = torch.optim.Adam([w], lr=0.025)
    layer = reference.trunk[2].weight
    first = None
    for seed in range(20):
        data = batch(tasks=3, seed=seed, dtype=DOUBLE)
        optimizer.minimize(model.losses if as_tensor else separate(model), *data)
        torch.testing.assert_close(optimizer.task_weights, w.detach(), rtol=1e-9, atol=0)

        losses = torch.stack(separate(reference)(*data))
        first = losses.detach() if first is None else first
        norms = torch.stack(
            [torch.autograd.grad(w[i] * losses[i], layer, create_graph=True, retain_graph=True)[0].norm() for i in range(3)]
        )
        rates = losses.detach() / first
        target = (norms.mean() * (rates / rates.mean()) ** alpha).detach()
        adam.zero_grad()
        (w.grad,) = torch.autograd.grad((norms - target).abs().sum(), w, retain_graph=True)
        plain.zero_grad()
        (w.detach() * losses).sum().backward()
        plain.step()
        adam.step()
        w.data = 3 * w.data / w.data.sum()
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()))
    assert optimizer.memory["w"].sum().item() == pytest.approx(3)
    assert (w - 1).abs().max() > 0.05


def test_gradnorm_compares_in_the_layer_that_it_is_given(two_heads, batch):
    model = two_heads()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    weights = []
    for layer in (None, [model.trunk[2].weight], [model.trunk[0].weight], list(model.trunk.parameters())):
        optimizer = Balanced(GradNorm(2, layer=layer), torch.optim.SGD(inner.param_groups[0]["params"], lr=0.0))
        for seed in range(30):
            optimizer.minimize(separate(model), *batch(seed=seed))
        weights.append(optimizer.memory["w"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])


def test_gradnorm_finds_the_layer_though_its_first_losses_are_few(two_heads, batch):
    model, reference = two_heads(), two_heads()
    optimizer = Balanced(GradNorm(["left", "right"]), torch.optim.SGD(model.parameters(), lr=0.0))
    given = GradNorm(["left", "right"], layer=[reference.trunk[2].weight])
    plain = Balanced(given, torch.optim.SGD(reference.parameters(), lr=0.0))
    for each, owner in ((optimizer, model), (plain, reference)):
        for wanted in ([0], [0, 1], [1], [0, 1], [0, 1]):
            each.minimize(lambda x, y: {("left", "right")[i]: separate(owner)(x, y)[i] for i in wanted}, *batch())
    assert torch.equal(optimizer.memory["w"], plain.memory["w"])
    assert not torch.equal(plain.memory["w"], torch.ones(2))


def test_gradnorm_keeps_one_gradient_at_a_time_while_it_looks_for_its_layer(two_heads, batch, monkeypatch):
    asked = []

    def noting(losses, parameters, **options):
        asked.append((len(losses), len(parameters)))
        return task_gradients(losses, parameters, **options)

    monkeypatch.setattr("moonopt.balance.base.task_gradients", noting)
    model = two_heads(tasks=3)
    Balanced(GradNorm(3), torch.optim.SGD(model.parameters(), lr=0.0)).minimize(separate(model), *batch(tasks=3))
    assert (1, 2) in asked, "both shared matrices, for one task"
    assert all(1 in sizes for sizes in asked)


@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("kind", ["sound", "of NaN gradients"])
def test_gradnorm_learns_from_the_batches_of_a_step_alone(two_heads, batch, cleared, kind):
    """Not from one that is combined before them in every step, as for a log, and has no backward pass."""
    found = []
    for with_another in (False, True):
        model = two_heads()
        optimizer = Balanced(GradNorm(2), torch.optim.SGD(model.parameters(), lr=0.01))
        for seed in range(4):
            if with_another:
                losses = separate(model)(*batch(seed=50 + seed))
                root = 0 * model.trunk[2].weight[0, 0]
                optimizer.combine([each + root.sqrt() if kind == "of NaN gradients" else each for each in losses])
                if cleared:
                    optimizer.zero_grad()
            optimizer.combine(separate(model), *batch(seed=seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([optimizer.memory["w"], optimizer.memory["first"], *(p.detach() for p in model.parameters())])
    assert (found[0][0] != 1).any()
    assert all(map(torch.equal, *found))


def test_gradnorm_learns_once_from_micro_batches_however_they_are_differentiated(two_heads, batch):
    found = []
    for together in (False, True):
        model = two_heads()
        optimizer = Balanced(GradNorm(2), torch.optim.SGD(model.parameters(), lr=0.01))
        for seed in range(4):
            optimizer.zero_grad()
            waiting = []
            for part in range(2):
                waiting.append(optimizer.combine(separate(model), *batch(seed=2 * seed + part)))
                if not together:
                    waiting.pop().backward()
            if together:
                sum(waiting).backward()
            optimizer.step()
        found.append([optimizer.memory["w"], optimizer.memory["first"], *(p.detach() for p in model.parameters())])
    torch.testing.assert_close(*found)
    assert torch.equal(found[0][0], found[1][0])


def test_gradnorm_forgets_a_batch_that_waits_when_a_checkpoint_is_loaded(two_heads, batch):
    model = two_heads()
    optimizer = Balanced(GradNorm(2), torch.optim.SGD(model.parameters(), lr=0.01))
    start = copy.deepcopy(optimizer.state_dict())
    optimizer.combine(separate(model), *batch()).backward()
    optimizer.load_state_dict(start)
    with pytest.warns(UserWarning, match="has no part"):
        optimizer.step()
    assert torch.equal(optimizer.memory["w"], torch.ones(2))
    assert optimizer.memory["first"].isnan().all()


def test_gradnorm_does_not_stay_with_a_layer_that_some_tasks_do_not_have():
    """The first two tasks share one more matrix than all three do."""
    weights = []
    for layer in (None, 0, 1):
        torch.manual_seed(0)
        trunk, decoder = nn.Linear(6, 6), nn.Linear(6, 6)
        heads = [nn.Parameter(torch.randn(6)) for _ in range(3)]
        parameters = [trunk.weight, decoder.weight, *heads]
        given = None if layer is None else [parameters[layer]]
        optimizer = Balanced(GradNorm(["a", "b", "c"], layer=given), torch.optim.SGD(parameters, lr=0.0))

        def losses(x, names):
            hidden = [decoder(trunk(x)), decoder(trunk(x)), trunk(x)]
            found = [(each @ head - 1).square().mean() for each, head in zip(hidden, heads, strict=True)]
            return {name: found["abc".index(name)] for name in names}

        optimizer.minimize(losses, torch.randn(8, 6), "ab")
        first = optimizer.memory["w"]
        for _ in range(5):
            optimizer.minimize(losses, torch.randn(8, 6), "abc")
        weights.append((first, optimizer.memory["w"]))
    (found, after), (_, by_trunk), (by_decoder, other) = weights
    assert torch.equal(found, by_decoder)
    assert not torch.equal(after, other)
    torch.testing.assert_close(after.argmax(), by_trunk.argmax())


@pytest.mark.parametrize("first", ["frozen", "trained"])
def test_gradnorm_compares_in_the_same_layer_when_another_is_frozen_or_thawed(two_heads, batch, first):
    weights = []
    for chosen in (False, True):
        model = two_heads()
        last = model.trunk[2].weight
        optimizer = Balanced(GradNorm(2, layer=[last] if chosen else None), torch.optim.SGD(model.parameters(), lr=0.01))
        for frozen in (first == "frozen", first == "trained"):
            model.trunk[0].requires_grad_(not frozen)
            for seed in range(5):
                optimizer.minimize(separate(model), *batch(seed=seed))
        weights.append(optimizer.memory["w"])
    assert torch.equal(*weights)


def test_gradnorm_compares_in_another_layer_once_its_own_is_frozen(two_heads, batch):
    weights = []
    for chosen in (False, True):
        model = two_heads()
        inner, memory = torch.optim.SGD(model.parameters(), lr=0.01), {}
        for index in (2, 0):
            layer = [model.trunk[index].weight] if chosen else None
            optimizer = Balanced(GradNorm(2, layer=layer), inner)
            optimizer.memory.update(memory)
            for seed in range(5):
                optimizer.minimize(separate(model), *batch(seed=seed))
            memory = dict(optimizer.memory)
            model.trunk[2].requires_grad_(False)
        weights.append(memory["w"])
    assert torch.equal(*weights)


def test_gradnorm_goes_on_from_a_checkpoint_that_counted_frozen_layers_out(two_heads, batch):
    """The number 1 was that of the trunk's second matrix, or of the bias of its first: the layer is found anew."""
    found = []
    for is_old in (False, True):
        model = two_heads()
        optimizer = Balanced(GradNorm(2), torch.optim.SGD(model.parameters(), lr=0.01))
        for seed in range(10):
            optimizer.minimize(separate(model), *batch(seed=seed))
            if is_old and seed == 4:
                saved = optimizer.state_dict()
                saved["param_groups"][0]["balancer_layer"] = 1
                optimizer.load_state_dict(saved)
        found.append(dict(optimizer.memory))
    assert torch.equal(found[0]["w"], found[1]["w"])
    assert found[0]["layer"] == found[1]["layer"]


def test_gradnorm_of_one_task_compares_nothing():
    theta = nn.Parameter(torch.ones(3))
    optimizer = Balanced(GradNorm(1), torch.optim.SGD([theta], lr=0.1))
    optimizer.minimize(lambda: [theta.square().sum()])
    torch.testing.assert_close(theta.detach(), torch.full((3,), 0.8))


def test_gradnorm_without_a_shared_matrix_says_so():
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = Balanced(GradNorm(2), torch.optim.SGD(parameters))
    with pytest.raises(ValueError, match=r"last shared matrix, and found none: pass layer=\[...\]"):
        optimizer.minimize(lambda: [parameters[0].sum(), parameters[1].sum()])


def test_gradnorm_stays_where_a_loss_has_no_rate(two_heads, batch):
    model = two_heads()
    optimizer = Balanced(GradNorm(2), torch.optim.SGD(model.parameters(), lr=0.01))
    optimizer.minimize(separate(model), *batch())
    optimizer.minimize(lambda x, y: [loss - 100 for loss in separate(model)(x, y)], *batch())
    optimizer.minimize(lambda x, y: [0 * loss for loss in separate(model)(x, y)], *batch())
    assert optimizer.memory["w"].isfinite().all()
    assert optimizer.memory["w"].sum().item() == pytest.approx(2)


# FAMO


class PublicFAMO:
    """The method's own code, without its parts for devices and clipping."""

    def __init__(self, tasks, gamma=1e-3, w_lr=0.025, min_losses=0.0):
        self.min_losses = torch.as_tensor(min_losses, dtype=DOUBLE)
        self.w = torch.zeros(tasks, dtype=DOUBLE, requires_grad=True)
        self.w_opt = torch.optim.Adam([self.w], lr=w_lr, weight_decay=gamma)

    def get_weighted_loss(self, losses):
        self.prev_loss = losses.detach()
        z = torch.softmax(self.w, -1)
        D = losses - self.min_losses + 1e-8
        c = (z / D).sum().detach()
        return (D.log() * z / c).sum()

    def update(self, curr_loss):
        delta = (self.prev_loss - self.min_losses + 1e-8).log() - (curr_loss - self.min_losses + 1e-8).log()
        d = torch.autograd.grad(torch.softmax(self.w, -1), self.w, grad_outputs=delta.detach())[0]
        self.w_opt.zero_grad()
        self.w.grad = d
        self.w_opt.step()


INNER = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "sgd with decay": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize(("gamma", "lowest"), [(1e-3, 0.0), (0.01, 0.0), (0.0, [-1.0, -21.0, 0.0])])
def test_famo_is_its_public_code_over_50_steps(two_heads, batch, inner, gamma, lowest):
    model, reference = two_heads(tasks=3, dtype=DOUBLE), two_heads(tasks=3, dtype=DOUBLE)
    optimizer = Balanced(FAMO(3, gamma=gamma, lowest=lowest), inner(model.parameters()), module=model)
    public, plain = PublicFAMO(3, gamma, min_losses=lowest), inner(reference.parameters())
    for seed in range(50):
        data = batch(tasks=3, seed=seed, dtype=DOUBLE)
        optimizer.minimize(separate(model), *data)
        plain.zero_grad()
        public.get_weighted_loss(torch.stack(separate(reference)(*data))).backward()
        plain.step()
        with torch.no_grad():
            after = torch.stack(separate(reference)(*data))
        public.update(after)
    torch.testing.assert_close(optimizer.memory["logits"], public.w.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=0, atol=1e-9)
    assert public.w.abs().max() > 0.01


def test_famos_bounds_are_as_exact_as_the_losses_and_outlast_pickling():
    theta = nn.Parameter(torch.ones(()))
    optimizer = Balanced(FAMO(2, lowest=[10.3, 0.0]), torch.optim.SGD([theta], lr=0.0), module=nn.Module())
    for each in (optimizer, pickle.loads(pickle.dumps(optimizer))):
        p = each.param_groups[0]["params"][0]
        each.minimize(lambda p=p: [p.double() * (10.3 + 1e-7), p.double()])
        assert each.task_weights[1].item() == pytest.approx(1.1e-7, rel=1e-3)


def test_famo_in_float32_stays_near_its_public_code(two_heads, batch):
    """As near as float32 lets it: the fall of a loss in one step has few digits, and Adam divides by its size."""
    model, reference = two_heads(tasks=3), two_heads(tasks=3, dtype=DOUBLE)
    reference.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    optimizer = Balanced(FAMO(3), torch.optim.SGD(model.parameters(), lr=0.1), module=model)
    public, plain = PublicFAMO(3), torch.optim.SGD(reference.parameters(), lr=0.1)
    for seed in range(50):
        data = batch(tasks=3, seed=seed)
        optimizer.minimize(separate(model), *data)
        data = [each.double() for each in data]
        plain.zero_grad()
        public.get_weighted_loss(torch.stack(separate(reference)(*data))).backward()
        plain.step()
        with torch.no_grad():
            after = torch.stack(separate(reference)(*data))
        public.update(after)
    torch.testing.assert_close(optimizer.memory["logits"].double(), public.w.detach(), rtol=0, atol=1e-3)


class Noisy(nn.Module):
    """Dropout and BatchNorm, and a record of the masks that were drawn."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.dropout = nn.Dropout(0.5)
        self.heads = nn.ModuleList(nn.Linear(12, 1) for _ in range(2))
        self.masks, self.weights = [], []

    def losses(self, x, y):
        hidden = self.trunk(x)
        self.masks.append(self.dropout(torch.ones_like(hidden)) > 0)
        self.weights.append([p.detach().clone() for p in self.parameters()])
        hidden = hidden * self.masks[-1] * 2
        return [(head(hidden)[:, 0] - target).square().mean() for head, target in zip(self.heads, y.mT, strict=True)]


def test_famos_second_evaluation_leaves_no_trace(batch):
    torch.manual_seed(0)
    model, once = Noisy(), Noisy()
    once.load_state_dict(model.state_dict())
    optimizer = Balanced(FAMO(2), torch.optim.AdamW(model.parameters(), lr=0.01), module=model)
    x, y = batch()
    torch.manual_seed(5)
    optimizer.minimize(model.losses, x, y)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    once.losses(x, y)
    assert torch.equal(torch.get_rng_state(), state), "random numbers go on as after one evaluation"
    assert torch.equal(model.masks[0], model.masks[1])
    for (name, buffer), (_, expected) in zip(model.named_buffers(), once.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert model.training


def test_famos_second_evaluation_comes_after_the_whole_step(batch):
    torch.manual_seed(0)
    model = Noisy()
    optimizer = build("famo+muon", model, 2, optimizer={"weight_decay": 0.1})
    optimizer.minimize(model.losses, *batch())
    assert len(model.weights) == 2
    for p, first, second in zip(model.parameters(), *model.weights, strict=True):
        assert torch.equal(second, p)
        assert not torch.equal(first, p)


def test_famo_warns_once_that_unknown_buffers_are_not_protected(two_heads, batch):
    model = two_heads()
    optimizer = Balanced(FAMO(2), torch.optim.Adam(model.parameters()))
    with pytest.warns(UserWarning, match="protects no buffers.*pass module=model") as record:
        for seed in range(3):
            optimizer.minimize(separate(model), *batch(seed=seed))
    assert len(record) == 1


@pytest.mark.parametrize("after", [math.nan, math.inf, -1.0])
def test_famos_logits_stay_where_a_loss_after_the_step_has_no_logarithm(two_heads, batch, after):
    model = two_heads()
    optimizer = Balanced(FAMO(2), torch.optim.Adam(model.parameters()), module=model)
    optimizer.minimize(separate(model), *batch())
    before, weights = optimizer.memory["logits"], model.trunk[0].weight.detach().clone()
    calls = []

    def losses(x, y):
        calls.append(1)
        left, right = separate(model)(x, y)
        return [left, right if len(calls) == 1 else right * 0 + after]

    optimizer.minimize(losses, *batch())
    assert torch.equal(optimizer.memory["logits"], before)
    assert not torch.equal(model.trunk[0].weight, weights), "the step stands"
    assert optimizer.diagnostics()["rejected"] == 1
    optimizer.minimize(separate(model), *batch())
    assert not torch.equal(optimizer.memory["logits"], before)
    assert optimizer.memory["logits"].isfinite().all()


def test_famo_without_a_task_is_its_public_code_for_the_others(two_heads, batch):
    model, reference = two_heads(tasks=3, dtype=DOUBLE), two_heads(tasks=3, dtype=DOUBLE)
    optimizer = Balanced(FAMO(["a", "b", "c"], gamma=0.0), torch.optim.SGD(model.parameters(), lr=0.1), module=model)
    public, plain = PublicFAMO(2, gamma=0.0), torch.optim.SGD(reference.parameters(), lr=0.1)
    for seed in range(20):
        data = batch(tasks=3, seed=seed, dtype=DOUBLE)
        optimizer.minimize(lambda x, y: dict(zip("ab", separate(model)(x, y)[:2], strict=True)), *data)
        plain.zero_grad()
        public.get_weighted_loss(torch.stack(separate(reference)(*data)[:2])).backward()
        plain.step()
        with torch.no_grad():
            after = torch.stack(separate(reference)(*data)[:2])
        public.update(after)
        assert optimizer.task_weights.sum().item() == pytest.approx(1)
    assert optimizer.memory["logits"][2] == 0
    assert optimizer.memory["logits_steps"].tolist() == [20, 20, 0]
    torch.testing.assert_close(optimizer.memory["logits"][:2], public.w.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=0, atol=1e-6)


def test_famos_logit_of_a_task_that_is_there_alone_stays(two_heads, batch):
    """Or that of a task which comes often would fall, and one that comes rarely would outweigh it."""
    model = two_heads()
    optimizer = Balanced(FAMO(["often", "rare"], gamma=0.0), torch.optim.Adam(model.parameters()), module=model)
    for seed in range(5):
        optimizer.minimize(lambda x, y: {"often": separate(model)(x, y)[0]}, *batch(seed=seed))
    torch.testing.assert_close(optimizer.memory["logits"], torch.zeros(2))


# Other units


SCALES = (7.0, 0.03, 1.5)


def _two_runs(two_heads, batch, balancer, steps=30, lr=0.02):
    """The same run with losses as they are and in other units: for both, updates and weights by step."""
    runs = []
    for scales in ((1.0, 1.0, 1.0), SCALES):
        model = two_heads(tasks=3, dtype=DOUBLE)
        optimizer = Balanced(balancer(), torch.optim.SGD(model.parameters(), lr=lr), module=model)
        updates, weights = [], []
        for seed in range(steps):
            before = torch.cat([p.detach().flatten() for p in model.parameters()])
            optimizer.minimize(separate(model, scales), *batch(tasks=3, seed=seed, dtype=DOUBLE))
            updates.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
            weights.append(optimizer.task_weights)
        runs.append((torch.stack(updates), torch.stack(weights)))
    return runs


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_si_leaves_the_whole_update_unchanged_in_other_units(two_heads, batch, reduction):
    (updates, _), (scaled, _) = _two_runs(two_heads, batch, lambda: SI(3, reduction))
    torch.testing.assert_close(scaled, updates, rtol=1e-9, atol=1e-13)


def test_famo_leaves_the_direction_unchanged_in_other_units(two_heads, batch):
    model = two_heads(tasks=3, dtype=DOUBLE)
    directions, sizes = [], []
    for scales in ((1.0, 1.0, 1.0), SCALES):
        optimizer = Balanced(FAMO(3), torch.optim.SGD(model.parameters()), module=model)
        optimizer.memory["logits"] = torch.tensor([0.5, -0.3, 0.1], dtype=DOUBLE)
        optimizer.zero_grad()
        optimizer.combine(separate(model, scales), *batch(tasks=3, dtype=DOUBLE)).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        directions.append(gradient / gradient.norm())
        sizes.append(gradient.norm())
    torch.testing.assert_close(directions[1], directions[0], rtol=1e-6, atol=1e-8)  # but for the 1e-8 that it adds to losses
    assert not torch.isclose(*sizes)


def test_dwa_and_rlw_leave_the_weights_unchanged_in_other_units(two_heads, batch):
    for balancer in (lambda: DWA(3, window=5), lambda: DWA(3, window=5, sliding=False), lambda: RLW(3)):
        (_, weights), (_, scaled) = _two_runs(two_heads, batch, balancer, lr=0.0)
        assert weights.std(0).max() > 1e-3
        torch.testing.assert_close(scaled, weights, rtol=1e-9, atol=0)


@pytest.mark.parametrize("balancer", [LS, UW, DWA, RLW])
def test_the_others_update_otherwise_in_other_units(two_heads, batch, balancer):
    (updates, weights), (scaled, others) = _two_runs(two_heads, batch, lambda: balancer(3))
    assert torch.cosine_similarity(updates, scaled).mean() < 0.95
    assert torch.allclose(weights, others) == (balancer is not UW)
