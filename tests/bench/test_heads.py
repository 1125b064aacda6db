"""Heads and losses that are computed together, against torch's own one by one."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from moonopt.bench.models.heads import LOGISTIC, SQUARED, mean_losses, of_first, predictions
from moonopt.tasks.gradients import depends_on, shared_by

TASKS = ("a", "b", "c")


def made(dtype=torch.float64, width=5, count=7):
    torch.manual_seed(0)
    heads = nn.ModuleDict({task: nn.Linear(width, 1) for task in TASKS}).to(dtype)
    return torch.randn(count, width, dtype=dtype, requires_grad=True), heads


def one_by_one(features, heads):
    return {task: head(features) for task, head in heads.items()}


def squared_one_by_one(predicted, wanted):
    return {task: functional.mse_loss(predicted[task].flatten(), wanted[:, i]) for i, task in enumerate(TASKS)}


def logistic_one_by_one(predicted, signs):
    columns = {task: (predicted[task].flatten(), (signs[:, i] + 1) / 2) for i, task in enumerate(TASKS)}
    return {task: functional.binary_cross_entropy_with_logits(*each) for task, each in columns.items()}


LOSSES = {"squared": (SQUARED, squared_one_by_one), "logistic": (LOGISTIC, logistic_one_by_one)}


def wanted_by(loss, count=7, dtype=torch.float64):
    found = torch.randn(count, len(TASKS), generator=torch.Generator().manual_seed(1), dtype=dtype)
    return found.sign() if loss == "logistic" else found


@pytest.mark.parametrize("chosen", [TASKS, ("b",), ("a", "c")], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_torch(loss, chosen):
    features, heads = made()
    pointwise, reference = LOSSES[loss]
    wanted = wanted_by(loss)
    ours = mean_losses(predictions(features, heads), wanted, pointwise)
    torchs = reference(one_by_one(features, heads), wanted)
    assert list(ours) == list(torchs) == list(TASKS)
    leaves = [features, *heads.parameters()]
    found, expected = (
        torch.autograd.grad(sum((2 + i) * losses[task] for i, task in enumerate(chosen)), leaves, allow_unused=True)
        for losses in (ours, torchs)
    )
    for task in TASKS:
        torch.testing.assert_close(ours[task], torchs[task])
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("loss", LOSSES)
def test_they_can_be_differentiated_forwards_and_twice(loss):
    features, heads = made(count=3, width=2)
    weights = [p.detach().clone().requires_grad_() for p in heads.parameters()]
    names = [name for name, _ in heads.named_parameters()]
    wanted = wanted_by(loss, 3)

    def losses(x, *values):
        replaced = dict(zip(names, values, strict=True))
        given = nn.ModuleDict({task: _Head(replaced[f"{task}.weight"], replaced[f"{task}.bias"]) for task in TASKS})
        return tuple(mean_losses(predictions(x, given), wanted, LOSSES[loss][0]).values())

    assert torch.autograd.gradcheck(losses, (features, *weights), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(losses, (features, *weights))


class _Head(nn.Linear):
    """One whose parameters are tensors of a graph."""

    def __init__(self, weight, bias):
        super().__init__(weight.shape[1], 1)
        del self.weight, self.bias
        self.weight, self.bias = weight, bias


def test_no_task_touches_the_head_of_another():
    features, heads = made()
    losses = list(mean_losses(predictions(features, heads), wanted_by("squared"), SQUARED).values())
    own = [[name.startswith(task) for name, _ in heads.named_parameters()] for task in TASKS]
    assert depends_on(losses, list(heads.parameters())) == own
    assert shared_by(losses, [features, *heads.parameters()]) == [features]
    assert all(depends_on([sum(losses)], [features, *heads.parameters()])[0])
    losses[1].backward()
    assert {name for name, p in heads.named_parameters() if p.grad is not None} == {"b.weight", "b.bias"}


def test_one_loss_after_another_over_one_graph_adds_up():
    features, heads = made()
    losses = mean_losses(predictions(features, heads), wanted_by("squared"), SQUARED)
    expected = torch.autograd.grad(sum(losses.values()), features, retain_graph=True)[0]
    found = sum(torch.autograd.grad(losses[task], features, retain_graph=True)[0] for task in TASKS)
    torch.testing.assert_close(found, expected)


def test_frozen_heads_and_features_are_left_alone():
    features, heads = made()
    heads["b"].requires_grad_(False)
    sum(mean_losses(predictions(features.detach(), heads), wanted_by("squared"), SQUARED).values()).backward()
    assert features.grad is None
    assert {name for name, p in heads.named_parameters() if p.grad is not None} == {"a.weight", "a.bias", "c.weight", "c.bias"}


def test_half_precision_is_near_single_precision():
    features, heads = made(torch.float32, width=64, count=32)
    wanted = wanted_by("logistic", 32, torch.float32)

    def gradients(amp):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            losses = mean_losses(predictions(features, heads), wanted, LOGISTIC)
        return torch.autograd.grad(sum(losses.values()), [features, *heads.parameters()])

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("way", ["backward", "kept graph", "forward alone"])
def test_nothing_is_kept_when_nobody_holds_it(way):
    """Without the garbage collector, which does not find a node of several outputs that hold it."""
    features, heads = made()
    inner = features * 2
    predicted = predictions(inner, heads)
    losses = mean_losses(predicted, wanted_by("squared"), SQUARED)
    watched = [weakref.ref(each) for each in (inner, predicted["a"], losses["b"], losses["b"].grad_fn, predicted["a"].grad_fn)]
    gc.disable()
    try:
        if way == "backward":
            sum(losses.values()).backward()
        if way == "kept graph":
            torch.autograd.grad(losses["a"], features, retain_graph=True)
        del inner, predicted, losses
        assert [each() for each in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_as_many_columns_as_tasks_are_wanted():
    features, heads = made()
    with pytest.raises(ValueError, match="3 tasks of 7 predictions"):
        mean_losses(predictions(features, heads), torch.zeros(7, 1, dtype=torch.float64), SQUARED)


def test_of_all_predictions_no_part_is_taken():
    predicted = {"a": torch.arange(3.0), "b": torch.arange(4.0)}
    found = of_first(predicted, 3)
    assert found["a"] is predicted["a"]
    assert found["b"].tolist() == [0, 1, 2]
