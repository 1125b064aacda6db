"""Looking at a model: metrics over all examples, cosines between task gradients, and nothing changed."""

import copy
import random
from collections import namedtuple

import pytest
import torch
from small_runs import TINY, bits

from moonopt.bench import Tensors, find
from moonopt.errors import UserError
from moonopt.runs.evaluate import cosines_of, metrics_of, to_device

CPU = torch.device("cpu")


@pytest.fixture
def bench():
    torch.manual_seed(0)
    return find(TINY)()


def state(model):
    """Parameters, gradients, buffers and modes."""
    gradients = [parameter.grad for parameter in model.parameters()]
    return bits([model.state_dict(), gradients, [module.training for module in model.modules()]])


def test_looking_changes_nothing_of_the_model(bench, tmp_path):
    model, splits = bench.model(), bench.load(tmp_path, 0)
    sum(bench.losses(model, splits.valid.tensors).values()).backward()
    before = state(model)
    metrics_of(bench, model, splits.test, CPU)
    cosines_of(bench, model, splits.test.tensors)
    assert state(model) == before
    assert not model.frozen.training
    assert model.drop.training


def test_metrics_are_over_all_examples_however_many(bench):
    fetched = []

    class Watched(Tensors):
        def batch(self, indices, generator):
            fetched.append(len(indices))
            return super().batch(indices, generator)

    most = bench.evaluation_batch
    x, y = torch.randn(2 * most + 7, 5), torch.randn(2 * most + 7, 3)
    model = bench.model()
    found = metrics_of(bench, model, Watched(x, y), CPU)
    assert fetched == [most, most, 7]
    with torch.no_grad():
        expected = (torch.stack(model.eval()(x), 1) - y).square().mean(0)
    assert [found[name] for name in bench.tasks] == pytest.approx(expected.tolist(), rel=1e-5)


def test_cosines_are_those_of_the_gradients_in_shared_parameters(bench, tmp_path):
    model, batch = bench.model().double(), [each.double() for each in bench.load(tmp_path, 0).test.tensors]
    found = torch.tensor(cosines_of(bench, copy.deepcopy(model), batch))
    losses = bench.losses(model.eval(), batch)
    shared = [parameter for name, parameter in model.named_parameters() if "heads" not in name]
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(loss, shared, retain_graph=True)]) for loss in losses.values()]
    unit = torch.stack([row / row.norm() for row in rows])
    assert torch.allclose(found, (unit @ unit.T).float(), atol=1e-5)


def test_a_batch_of_any_structure_is_moved():
    pair = namedtuple("pair", "x y")
    batch = {"a": [torch.zeros(1), (1, "b")], "c": pair(torch.ones(2), None), "d": random}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["c"].x.device.type == "meta"
    assert moved["a"][1] == (1, "b")
    assert isinstance(moved["c"], pair)
    assert moved["d"] is random


def test_cosines_are_in_the_order_of_the_tasks_and_nan_for_one_that_is_not_there(bench, tmp_path, monkeypatch):
    model, batch = bench.model(), bench.load(tmp_path, 0).test.tensors
    expected = torch.tensor(cosines_of(bench, model, batch))
    losses = bench.losses
    monkeypatch.setattr(bench, "losses", lambda *args: dict(reversed(losses(*args).items())))
    assert torch.equal(torch.tensor(cosines_of(bench, model, batch)), expected)
    monkeypatch.setattr(bench, "losses", lambda *args: {name: losses(*args)[name] for name in ("c", "a")})
    found = torch.tensor(cosines_of(bench, model, batch))
    assert found[1].isnan().all()
    assert found[:, 1].isnan().all()
    assert torch.allclose(found[0, 2], expected[0, 2])


def test_a_metric_that_is_not_returned_is_named(bench, monkeypatch, tmp_path):
    first, *others = (metric.name for metric in bench.metrics)
    monkeypatch.setattr(bench, "evaluate", lambda model, batches: dict.fromkeys(others, 1.0))
    with pytest.raises(UserError, match=f"must return all its metrics: {first} missing"):
        metrics_of(bench, bench.model(), bench.load(tmp_path, 0).test, CPU)
