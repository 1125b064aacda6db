"""MOON against the paper: a transcription of Algorithm 1 in NumPy, the appendix's example, the toy case."""

import numpy as np
import pytest
import torch
from numpy.linalg import norm, svd
from torch import nn

from moonopt import MOON, Muon
from moonopt.linalg.schedules import POLAR_EXPRESS_SAFETY, polar_express

SHAPES = {"one block": [(5, 4)], "several blocks": [(5, 4), (3, 7), (6, 6)]}


class Quadratics:
    """l_i = sum_b 1/2 ||A_ib Theta_b B_ib - C_ib||^2, with its gradients written out."""

    def __init__(self, shapes, tasks, seed=0):
        random = np.random.default_rng(seed)
        self.shapes, self.tasks = shapes, tasks
        self.a = [[np.eye(p) + 0.3 * random.normal(size=(p, p)) for p, q in shapes] for _ in range(tasks)]
        self.b = [[np.eye(q) + 0.3 * random.normal(size=(q, q)) for p, q in shapes] for _ in range(tasks)]
        self.c = [[3 * random.normal(size=shape) for shape in shapes] for _ in range(tasks)]
        self.start = [random.normal(size=shape) for shape in shapes]

    def gradient(self, task, block, theta):
        a, b, c = self.a[task][block], self.b[task][block], self.c[task][block]
        return a.T @ (a @ theta @ b - c) @ b.T

    def torch_losses(self, thetas):
        losses = []
        for a, b, c in zip(self.a, self.b, self.c, strict=True):
            terms = zip(a, thetas, b, c, strict=True)
            losses.append(
                sum((torch.tensor(a) @ t @ torch.tensor(b) - torch.tensor(c)).square().sum() / 2 for a, t, b, c in terms)
            )
        return torch.stack(losses)


def polar_by_svd(m):
    u, s, vt = svd(m, full_matrices=False)
    assert s[-1] >= 1e-3 * s[0], "the problem must keep the momentum well away from rank deficiency"
    return u @ vt


def polar_by_newton_schulz(m):
    x = m if m.shape[0] <= m.shape[1] else m.T
    x = x / (norm(x @ x.T) ** 0.5 * POLAR_EXPRESS_SAFETY)
    for a, b, c in polar_express(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if m.shape[0] <= m.shape[1] else x.T


def algorithm_1(problem, steps, alpha, beta, gamma, mu, polar):
    """The paper's Algorithm 1, line by line, the same z for all blocks."""
    theta = [block.copy() for block in problem.start]
    momentum = [np.zeros_like(block) for block in theta]
    xi = np.zeros(problem.tasks)
    path = []
    for _ in range(steps):
        z = np.exp(xi) / np.exp(xi).sum()
        gradients = [[problem.gradient(i, b, theta[b]) for b in range(len(theta))] for i in range(problem.tasks)]
        for b in range(len(theta)):
            g = sum(z[i] * gradients[i][b] for i in range(problem.tasks))
            momentum[b] = (1 - mu) * momentum[b] + mu * g
        w = [polar(m) for m in momentum]
        theta = [t - alpha * each for t, each in zip(theta, w, strict=True)]
        delta = np.array([sum((w[b] * g[b]).sum() for b in range(len(theta))) for g in gradients])
        xi = xi - beta * (delta + gamma * xi)
        path.append((theta, xi))
    return path


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("schedule", "polar", "tolerance"), [("svd", polar_by_svd, 1e-10), ("polar_express", polar_by_newton_schulz, 1e-8)]
)
def test_moon_equals_algorithm_1(shapes, schedule, polar, tolerance):
    problem = Quadratics(shapes, tasks=3)
    expected = algorithm_1(problem, steps=100, alpha=0.005, beta=5e-3, gamma=0.05, mu=0.1, polar=polar)
    thetas = [nn.Parameter(torch.tensor(block)) for block in problem.start]
    optimizer = MOON(
        [{"params": thetas, "kind": "matrix"}],
        tasks=3,
        lr=0.005,
        beta=5e-3,
        gamma=0.05,
        momentum=0.9,
        schedule=schedule,
        delta="per_task",
    )
    for theta, xi in expected:
        optimizer.minimize(lambda: problem.torch_losses(thetas))
        for ours, theirs in zip(thetas, theta, strict=True):
            torch.testing.assert_close(ours.detach(), torch.tensor(theirs), rtol=0, atol=tolerance)
        torch.testing.assert_close(optimizer.logits, torch.tensor(xi - xi.mean()), rtol=0, atol=tolerance)
    assert optimizer.task_weights.std() > 0.02, "the weights must have moved, or nothing was compared"


def test_two_task_example_projections_parabolas_and_crossing():
    """The appendix's two-task example: projections 5/2 and 3, exact losses, and where they cross."""
    a, b = torch.tensor([[2.0, 0], [0, 1]]).double(), torch.tensor([[0, 1.0], [-1, 0]]).double()

    def losses(theta):
        return torch.stack([theta.square().sum() / 2 + ((a + sign * b) * theta).sum() for sign in (1, -1)])

    def moon_after(eta):
        theta = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        optimizer = MOON(
            [{"params": [theta], "kind": "matrix"}], tasks=2, lr=eta, momentum=0.0, schedule="svd", delta="per_task"
        )
        optimizer.minimize(lambda: losses(theta))
        return losses(theta.detach()), optimizer.diagnostics()

    _, diagnostics = moon_after(0.1)
    assert [diagnostics["delta/0"], diagnostics["delta/1"]] == pytest.approx([3, 3], abs=1e-12)

    theta = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    g1, g2 = (torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in losses(theta))
    z = ((g2 - g1) * g2).sum() / (g1 - g2).square().sum()  # min-norm point of two gradients
    mgda = z * g1 + (1 - z) * g2
    mgda = mgda / torch.linalg.matrix_norm(mgda, 2)
    assert [(g1 * mgda).sum().item(), (g2 * mgda).sum().item()] == pytest.approx([2.5, 2.5], abs=1e-12)

    for eta in (0.25, 1.0, 4 / 3, 2.0):
        moon, _ = moon_after(eta)
        euclidean = losses(-eta * mgda)
        assert moon.tolist() == pytest.approx([-3 * eta + eta**2] * 2, abs=1e-12)
        assert euclidean.tolist() == pytest.approx([-2.5 * eta + 5 / 8 * eta**2] * 2, abs=1e-12)
        assert torch.sign((moon - euclidean).round(decimals=12)).tolist() == [np.sign(round(eta - 4 / 3, 12))] * 2


def _train(optimizer, model, batch, steps=15):
    for step in range(steps):
        optimizer.minimize(model.losses, *batch(seed=step, tasks=len(model.heads)))
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("tasks", "moon"), [(3, {"beta": 0.0}), (1, {"beta": 0.5}), (1, {"beta": "auto", "loss": "log"})])
@pytest.mark.parametrize("delta", ["loss_difference", "per_task"])
def test_moon_with_beta_0_or_one_task_is_muon_on_the_mean_loss_bit_for_bit(two_heads, batch, tasks, moon, delta):
    settings = {"lr": 0.03, "weight_decay": 0.1, "vector_weight_decay": 0.1, "nesterov": True}
    first, second = two_heads(tasks), two_heads(tasks)
    ours = _train(MOON(first, tasks=tasks, delta=delta, **moon, **settings), first, batch)
    muons = _train(Muon(second, **settings), second, batch)
    assert all(torch.equal(a, b) for a, b in zip(ours, muons, strict=True))
    third = two_heads(tasks)
    plain = Muon(third, **settings)
    for step in range(15):
        plain.zero_grad()
        third.losses(*batch(seed=step, tasks=tasks)).mean().backward()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, third.parameters(), strict=True))


def test_loss_difference_converges_linearly_to_per_task(two_heads, batch):
    """Also beside AdamW vectors and weight decay, because it is taken before they act."""
    data = batch(dtype=torch.float64)
    rates, errors = np.logspace(-1, -4, 7), []
    for lr in rates:
        found = {}
        for delta in ("loss_difference", "per_task"):
            model = two_heads(dtype=torch.float64)
            optimizer = MOON(model, tasks=2, lr=lr, delta=delta, vector_lr=0.1, weight_decay=0.5, vector_weight_decay=0.5)
            optimizer.minimize(model.losses, *data)
            diagnostics = optimizer.diagnostics()
            found[delta] = np.array([diagnostics["delta/0"], diagnostics["delta/1"]])
        errors.append(np.abs(found["loss_difference"] - found["per_task"]).max())
    slope = np.polyfit(np.log(rates), np.log(errors), 1)[0]
    assert slope == pytest.approx(1, abs=0.1)


def test_delta_counts_groups_with_other_rates_and_scales(two_heads, batch):
    """D_b = (lr_b / lr) * scale_b * W_b: what the loss difference measures is what per_task computes."""
    found = {}
    for delta in ("loss_difference", "per_task"):
        model = two_heads(dtype=torch.float64)
        first, second = model.trunk[0].weight, model.trunk[2].weight
        groups = [
            {"params": [first], "kind": "matrix", "lr": 1e-6, "scale": "rms"},
            {"params": [second], "kind": "matrix", "lr": 3e-6},
            {"params": list(model.heads.parameters()), "kind": "vector"},
        ]
        optimizer = MOON(groups, tasks=2, delta=delta, module=model)
        optimizer.minimize(model.losses, *batch(dtype=torch.float64))
        found[delta] = optimizer.diagnostics()["delta/0"]
    assert found["loss_difference"] == pytest.approx(found["per_task"], rel=1e-4)
