"""Scenes and faces on a GPU: steps that are CUDA graphs, and one seed that gives one run, with deterministic algorithms."""

import pytest
import torch

from moonopt.bench.celeba import CelebaCNN
from moonopt.bench.cityscapes import CityScapes
from moonopt.bench.nyuv2 import NYUv2
from moonopt.runs.cell import Machine, make_cell
from moonopt.runs.interrupt import Stop
from moonopt.runs.run import run_cell

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHORT = {"train.epochs": 2, "train.batch_size": 4, "train.steps_per_epoch": 6, "train.log_every": 3}
TINY = {
    "nyuv2": {"model.width": 8},
    "cityscapes": {"model.width": 8},
    "celeba-cnn": {"model.width": 8, "data.image_size": 32},
    "celeba-vit": {"model.width": 32, "model.depth": 2, "model.attention_heads": 4, "data.image_size": 32},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    for bench in (NYUv2, CityScapes):
        bench().make(data, count=8, size=(32, 64))
    CelebaCNN().make(data, 40)
    return data


def run(name, method, folder, root, amp, **settings):
    """The result of a short run, and what was noted in it."""
    notes = []
    cell = make_cell(name, method, 0, [("test", SHORT | TINY[name] | settings)], Machine("cuda", amp))
    tell = lambda record: notes.append(record["text"]) if record["kind"] == "note" else None  # noqa: E731
    return run_cell(cell, root, folder, stop=Stop(), tell=tell), notes


def test_one_task_alone_is_captured(folder, tmp_path):
    result, notes = run("nyuv2", "stl", folder, tmp_path, amp=False, **{"balancer.task": "depth"})
    assert not notes
    assert {name for name, value in result["metrics"].items() if value is not None} == {"absolute error", "relative error"}


@pytest.mark.parametrize("bench", [NYUv2, CityScapes])
def test_a_batch_on_the_gpu_is_that_of_the_host(bench, folder):
    here = bench().load(folder, 0).train
    indices, there = torch.arange(8), here.to(torch.device("cuda"))
    batches = [each.batch(indices, torch.Generator().manual_seed(1)) for each in (here, there)]
    for ours, found in zip(*batches, strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), ours, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("method", "amp"), [("moon", False), ("moon", True), ("nash-mtl", False)])
@pytest.mark.parametrize("name", TINY)
def test_a_run_is_captured_and_the_same_again(name, method, amp, folder, tmp_path):
    (first, notes), (again, _) = (run(name, method, folder, tmp_path / part, amp) for part in ("first", "again"))
    assert not notes
    assert first["metrics"] == again["metrics"]
    assert all(value is not None for value in first["metrics"].values())
