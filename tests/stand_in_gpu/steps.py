"""Steps on a GPU that has no numbers: none may ask for one, or mix devices. ``test_stand_in_gpu.py`` runs them.

Without delta="forward_mode", of which torch does not know the shapes without computing it.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from moonopt import MOON, Muon, build
from moonopt.bench.data.qm9_molecules import TARGETS
from moonopt.bench.models.heads import SQUARED, mean_losses, of_first
from moonopt.bench.models.mpnn import MPNN
from moonopt.bench.models.mpnn_molecules import dense_batch
from moonopt.speed.molecules import molecules

LOSS_BASED = ("ls", "si", "rlw", "dwa", "uw", "famo")
GRADIENT_BASED = ("mgda", "pcgrad", "cagrad", "imtl-g", "nash-mtl")
MODES = ("loss_difference", "per_task", "double_backward")
BATCH = molecules(6)


class Small(nn.Module):
    """Two tasks on a trunk that draws random numbers and has buffers, and their losses."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1))
        self.heads = nn.ModuleList(nn.Linear(32, 1) for _ in range(2))

    def losses(self, x, y):
        hidden = self.trunk(x)
        return {name: (head(hidden) - y).square().mean() for name, head in zip("ab", self.heads, strict=True)}


@pytest.fixture
def small(gpu):
    with gpu:
        return Small()


@pytest.fixture
def data(gpu):
    return torch.empty(8, 16, device=gpu), torch.empty(8, 1, device=gpu)


@pytest.fixture(params=[False, True], ids=["single", "half"])
def properties(request, gpu):
    """QM9's network, the losses of its tasks, and a batch."""
    with gpu:
        model = MPNN(TARGETS, half_messages=request.param)
    batch = [torch.empty(each.shape, dtype=each.dtype, device=gpu) for each in BATCH]

    def losses(*given):
        *described, wanted = given
        return mean_losses(of_first(model(dense_batch(*described)), len(wanted)), wanted, SQUARED)

    return model, losses, batch


def test_a_number_cannot_be_had(gpu):
    with pytest.raises(DataDependentOutputException):
        torch.empty(3, device=gpu).sum().item()


def test_devices_cannot_be_mixed(gpu):
    with pytest.raises(RuntimeError, match="device"):
        torch.empty(3, device=gpu) + torch.empty(3)


def test_a_captured_step_that_looks_at_numbers_is_found_out(small, data, captured):
    optimizer = build("ls", small, tasks=("a", "b"))
    with pytest.raises(DataDependentOutputException):
        captured(optimizer, lambda x, y: {name: loss * loss.item() for name, loss in small.losses(x, y).items()}, *data)


@pytest.mark.parametrize("delta", MODES)
@pytest.mark.parametrize("options", [{}, {"beta": "auto", "loss": "log"}], ids=["plain", "log"])
def test_moon_waits_for_nothing(small, data, captured, delta, options):
    optimizer = MOON(small, tasks=("a", "b"), delta=delta, weight_decay=0.1, **options)
    for _ in range(2):
        optimizer.minimize(small.losses, *data)
    assert captured(optimizer, small.losses, *data) == 0


def test_muon_waits_for_nothing(small, data, captured):
    optimizer = Muon(small, lr=torch.tensor(0.02, device="cuda:0"), nesterov=True, vector_weight_decay=0.1)
    for _ in range(2):
        optimizer.minimize(small.losses, *data)
    assert captured(optimizer, small.losses, *data) == 0


def test_tasks_that_are_left_out_and_micro_batches_wait_for_nothing(small, data):
    optimizer = MOON(small, tasks=("a", "b"))

    def losses_of(task, x, y):
        return {task: small.losses(x, y)[task]}

    for task in "ab":
        optimizer.zero_grad()
        for _ in range(2):
            optimizer.combine(losses_of, task, *data).backward()
        optimizer.step()


@pytest.mark.parametrize("method", LOSS_BASED)
@pytest.mark.parametrize("suffix", ["", "+muon"], ids=["adam", "muon"])
def test_a_method_of_losses_waits_for_nothing(small, data, captured, method, suffix):
    optimizer = build(method + suffix, small, tasks=("a", "b"))
    for _ in range(2):
        optimizer.minimize(small.losses, *data)
    assert captured(optimizer, small.losses, *data) == 0


@pytest.mark.parametrize("engine", ["stored", "stored:batched"])
@pytest.mark.parametrize("method", GRADIENT_BASED)
def test_a_captured_step_of_a_method_of_gradients_asks_the_host_once(small, data, captured, method, engine):
    optimizer = build(method, small, tasks=("a", "b"), engine=engine)
    assert captured(optimizer, small.losses, *data) == 1


@pytest.mark.parametrize("method", ["moon", "muon", *LOSS_BASED])
def test_a_captured_step_on_molecules_waits_for_nothing(properties, captured, method):
    model, losses, batch = properties
    optimizer = build(method, model, tasks=[*TARGETS])
    optimizer.minimize(losses, *batch)
    assert captured(optimizer, losses, *batch) == 0


@pytest.mark.parametrize("engine", ["stored", "stored:batched"])
@pytest.mark.parametrize("method", GRADIENT_BASED)
def test_a_captured_step_on_molecules_asks_the_host_once(properties, captured, method, engine):
    model, losses, batch = properties
    optimizer = build(method, model, tasks=[*TARGETS], engine=engine)
    assert captured(optimizer, losses, *batch) == 1
