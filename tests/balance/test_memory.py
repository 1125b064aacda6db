"""Peak memory of the gradient engines at 40 tasks, on a convolutional net of the size of CelebA's (CUDA only)."""

import gc
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from moonopt.balance.balanced import Balanced
from moonopt.balance.linear import LS
from moonopt.balance.mgda import MGDA

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is measured on a GPU")

TASKS = 40


class Net(nn.Module):
    """Seven convolutions and two linear layers with batch norm, 5.2 million parameters, and a linear head per task."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, width in ((3, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)):
            layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            if inputs in (3, width) and width < 512:
                layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        for _ in range(2):
            layers += [nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(512, 1) for _ in range(TASKS))

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.trunk(x)
        return [nn.functional.binary_cross_entropy_with_logits(h(hidden)[:, 0], y[:, i]) for i, h in enumerate(self.heads)]


def peak(step: Callable[[], object]) -> int:
    """Bytes above those before, at the highest point of a second step."""
    step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = Net().cuda()
    x, y = torch.randn(256, 3, 64, 64, device="cuda"), torch.rand(256, TASKS, device="cuda").round()
    return model, x, y


def minimize(problem, balancer, engine="stored"):
    model, x, y = problem
    optimizer = Balanced(balancer(TASKS), torch.optim.SGD(model.parameters(), lr=1e-3), module=model, engine=engine)

    def step():
        optimizer.minimize(model.losses, x, y)
        optimizer.zero_grad()

    return step


def retained(problem):
    """A backward pass over a graph that stays, whose activations are not freed on the way: what several passes need."""
    model, x, y = problem

    def step():
        loss = sum(model.losses(x, y))
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)

    return step


def test_columns_need_little_more_than_a_summed_loss_and_stored_rows_a_gradient_per_task(problem, capsys):
    gradient = sum(p.numel() * p.element_size() for p in problem[0].parameters())
    plain, kept = peak(minimize(problem, LS)), peak(retained(problem))
    columns, blocked, stored = (peak(minimize(problem, MGDA, engine)) for engine in ("columns", "blocked:4", "stored"))
    sizes = {
        "plain": plain,
        "kept graph": kept,
        "columns": columns,
        "blocked:4": blocked,
        "stored": stored,
        "gradient": gradient,
    }
    with capsys.disabled():
        sys.stdout.write(f"\npeak MiB: { {name: round(size / 2**20, 1) for name, size in sizes.items()} }\n")
    assert columns <= 1.2 * plain
    assert stored <= 1.02 * kept + (TASKS + 1) * gradient
    assert blocked <= 1.02 * kept + 7 * gradient
