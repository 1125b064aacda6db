"""Balancers that compare task gradients, in two processes with gloo: the same on both, and as in one with the joined batch."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moonopt.methods import BALANCERS, build
from moonopt.tasks.gradients import STATIC_GRAPH
from two_processes import NEEDS_GLOO, TASKS, assert_identical, both, data, joined

pytestmark = NEEDS_GLOO

STEPS = 5
METHODS = [name for name, each in BALANCERS.items() if each.needs_gradients]
ENGINES = ("stored", "stored:batched")
CASES = [(name, engine) for name in [*METHODS, "nash-mtl+muon"] for engine in ENGINES]
SEVERAL = ("mgda", "pcgrad", "graddrop", "gradnorm", "nash-mtl")
REFUSED = ("blocked:2", "stored:anew", "columns")
PLACES = ("the first model", "the second model")


# What each process does


def run(rank):
    found = {f"train {name} {engine}": train(name, engine, parallel, lambda seed: data(seed, rank)) for name, engine in CASES}
    found |= {f"experts {name}": experts(name, rank) for name in SEVERAL if name != "graddrop"}
    found |= {f"accumulate {name}": accumulate(name, parallel, lambda seed: data(seed, rank)) for name in SEVERAL}
    found |= {f"raise {name}": refusal(name, rank, spoiled=rank == 0) for name in SEVERAL}
    found |= {f"skip {name}": skip(name, rank) for name in SEVERAL}
    found |= {f"refuse {engine}": refusal("mgda", rank, engine=engine) for engine in REFUSED}
    found |= {f"expanded {name}": expanded(name, rank) for name in SEVERAL}
    found |= {f"static graph {name}": refusal(name, rank, static_graph=True) for name in SEVERAL}
    found |= {f"static graph in {place}": refusal_of_two(place) for place in PLACES}
    return found


def train(name, engine, wrapped, batch):
    model = network()
    optimizer, forward = build(name, model, TASKS, engine=engine), wrapped(model)
    weights = []
    for seed in range(STEPS):
        optimizer.minimize(losses_of(forward), *batch(seed))
        weights.append(optimizer.task_weights)
    return result(model, optimizer) | {"weights": torch.stack(weights)}


def experts(name, rank):
    """In each step, a process trains one of two layers, which may be the other's."""
    model = network()
    model.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)).double()
    optimizer, forward = build(name, model, TASKS), DistributedDataParallel(model, find_unused_parameters=True)
    for seed in range(STEPS):
        optimizer.minimize(losses_of(forward, expert=(seed * rank) % 2), *data(seed, rank))
    return result(model, optimizer)


def accumulate(name, wrapped, batch):
    """Two micro-batches per step, of which the gradients of the first are not reduced by themselves."""
    model = network()
    optimizer, forward = build(name, model, TASKS), wrapped(model)
    for seed in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with forward.no_sync() if part == 0 and forward is not model else contextlib.nullcontext():
                (optimizer.combine(losses_of(forward), *batch(2 * seed + part)) / 2).backward()
        optimizer.step()
    return result(model, optimizer)


def expanded(name, rank):
    """A loss that is the sum of a parameter, whose gradient is expanded from one number."""
    model = network()
    optimizer, forward = build(name, model, (*TASKS, "sum")), parallel(model)

    def losses(x, y):
        return [*losses_of(forward)(x, y), model.trunk[0].bias.sum()]

    for seed in range(STEPS):
        optimizer.minimize(losses, *data(seed, rank))
    return result(model, optimizer)


def refusal(name, rank, spoiled=False, static_graph=False, **options):
    """The text of the error that one step gives."""
    model = network()
    optimizer, forward = build(name, model, TASKS, **options), DistributedDataParallel(model, static_graph=static_graph)
    x, y = data(0, rank)
    if spoiled:
        y[0, 1] = torch.nan
    try:
        optimizer.minimize(losses_of(forward), x, y)
    except (RuntimeError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def skip(name, rank):
    """A step of which one process alone has a bad loss."""
    model = network()
    optimizer, forward = build(name, model, TASKS, nonfinite="skip"), parallel(model)
    for seed in range(STEPS):
        x, y = data(seed, rank)
        if (seed, rank) == (2, 1):
            y[0, 1] = torch.nan
        optimizer.minimize(losses_of(forward), x, y)
    return result(model, optimizer) | {"skipped": optimizer.diagnostics()["skipped_steps"]}


def refusal_of_two(static):
    """Of a model made of two, each of which averages its gradients by itself."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, len(TASKS))]).double()
    optimizer = build("mgda", model, TASKS)
    first, second = (
        DistributedDataParallel(each, static_graph=place == static, find_unused_parameters=place != static)
        for place, each in zip(PLACES, model, strict=True)
    )
    try:
        optimizer.minimize(lambda x, y: list((second(first(x)) - y).square().mean(0)), *data(0, 0))
    except RuntimeError as error:
        return str(error)
    return "nothing"


class Network(nn.Module):
    """A trunk, maybe one of several layers, and a head for each task."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.experts = nn.ModuleList()
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in TASKS)

    def forward(self, x, expert=None):
        hidden = self.trunk(x)
        if expert is not None:
            hidden = self.experts[expert](hidden).tanh()
        return [head(hidden) for head in self.heads]


def network():
    torch.manual_seed(0)
    return Network().double()


def parallel(model):
    return DistributedDataParallel(model)


def losses_of(forward, expert=None):
    def losses(x, y):
        return [(found.squeeze(1) - true).square().mean() for found, true in zip(forward(x, expert), y.T, strict=True)]

    return losses


def result(model, optimizer):
    memory = {name: value for name, value in optimizer.memory.items() if isinstance(value, torch.Tensor | int)}
    return {"parameters": [p.detach() for p in model.parameters()], "memory": memory}


# What they must have done


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return both(run, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_two_processes_do_what_one_does_with_the_joined_batch(ranks, name, engine):
    first, second = (found[f"train {name} {engine}"] for found in ranks)
    assert_identical(first, second)
    torch.testing.assert_close(first, train(name, engine, lambda model: model, joined), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SEVERAL)
def test_micro_batches_of_two_processes_are_those_of_one_with_joined_batches(ranks, name):
    first, second = (found[f"accumulate {name}"] for found in ranks)
    assert_identical(first, second)
    torch.testing.assert_close(first, accumulate(name, lambda model: model, joined), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in SEVERAL if name != "graddrop"])
def test_a_layer_that_one_process_trains_is_the_same_on_both(ranks, name):
    assert_identical(*(found[f"experts {name}"] for found in ranks))


@pytest.mark.parametrize("name", SEVERAL)
def test_a_bad_loss_of_one_process_is_told_by_both(ranks, name):
    for found in ranks:
        assert "FloatingPointError: At step 1, the loss of task 'right' is NaN" in found[f"raise {name}"]


@pytest.mark.parametrize("name", SEVERAL)
def test_a_bad_loss_of_one_process_is_skipped_by_both(ranks, name):
    first, second = (found[f"skip {name}"] for found in ranks)
    assert_identical(first, second)
    assert first["skipped"] == 1
    assert all(p.isfinite().all() for p in first["parameters"])


@pytest.mark.parametrize("name", SEVERAL)
def test_gradients_that_are_expanded_from_fewer_numbers_are_averaged(ranks, name):
    first, second = (found[f"expanded {name}"] for found in ranks)
    assert_identical(first, second)
    assert all(p.isfinite().all() for p in first["parameters"])


@pytest.mark.parametrize("name", [*SEVERAL, *(f"in {place}" for place in PLACES)])
def test_static_graphs_are_refused(ranks, name):
    for found in ranks:
        assert f"do not work with {STATIC_GRAPH}: leave static_graph out" in found[f"static graph {name}"]


@pytest.mark.parametrize("engine", REFUSED)
def test_engines_that_do_not_keep_gradients_are_refused(ranks, engine):
    for found in ranks:
        assert f'engine="{engine}" has the gradients of one process: use engine="stored"' in found[f"refuse {engine}"]
