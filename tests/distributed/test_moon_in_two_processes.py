"""MOON in two processes with gloo: the same on both, bit for bit, and as in one that has their batches as micro-batches."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moonopt import MOON
from moonopt.tasks.directional import SUPPORT
from moonopt.tasks.gradients import STATIC_GRAPH
from two_processes import NEEDS_GLOO, TASKS, WORLD, assert_identical, both, data, joined

pytestmark = NEEDS_GLOO

STEPS = 6
MODES = ("loss_difference", "per_task", "forward_mode", "double_backward")
KINDS = {"plain": {"beta": 0.5}, "auto": {"beta": "auto:0.3"}, "log": {"beta": "auto:0.3", "loss": "log"}}
REFUSED = {"exact": {"dual": "exact"}, "auto": {"delta": "auto"}}
ONE_PASS = [delta for delta in MODES if STATIC_GRAPH in SUPPORT[delta]]
CASES = {f"{delta} {kind}": {"delta": delta, **KINDS[kind]} for delta, kind in itertools.product(MODES, KINDS)}


# What each process does


def run(rank):
    found = {f"{case} {tasks}": train(options, rank, tasks) for case, options in CASES.items() for tasks in ("all", "some")}
    found |= {f"static graph {delta}": train(CASES[f"{delta} plain"], rank, "all", static_graph=True) for delta in ONE_PASS}
    found |= {f"accumulate {kind}": accumulate(KINDS[kind], rank) for kind in KINDS}
    found["random"] = train_at_random(rank)
    found["skip"] = skip(rank)
    found |= {f"refuse {word}": refusal(options, rank) for word, options in REFUSED.items()}
    found["refuse static graph"] = refusal({"delta": "per_task"}, rank, static_graph=True)
    found["validate"] = validate(rank)
    return found


def train(options, rank, tasks, **parallel):
    model = network()
    optimizer, forward = moon(model, **options), DistributedDataParallel(model, **parallel)
    for seed in range(STEPS):
        optimizer.minimize(losses_of(forward, there(tasks, seed, rank)), *data(seed, rank))
    return result(model, optimizer)


def accumulate(options, rank):
    """Two micro-batches in each process, of which the gradients of the first are not reduced by themselves."""
    model = network()
    optimizer, forward = moon(model, **options), DistributedDataParallel(model)
    for seed in range(STEPS):
        optimizer.zero_grad()
        for part, context in enumerate((forward.no_sync(), contextlib.nullcontext())):
            with context:
                (optimizer.combine(losses_of(forward), *data(2 * seed + part, rank)) / 2).backward()
        optimizer.step()
    return result(model, optimizer)


def train_at_random(rank):
    """With dropout of each process's own, and a BatchNorm whose buffers DDP copies from the first process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, len(TASKS))).double()
    optimizer, forward = moon(model, beta=0.5), DistributedDataParallel(model)
    torch.manual_seed(rank)
    for seed in range(STEPS):
        optimizer.minimize(losses_of(forward), *data(seed, rank))
    assert model[1].num_batches_tracked == STEPS
    return result(model, optimizer)


def skip(rank):
    """A step of which one process alone has a bad loss."""
    model = network()
    optimizer, forward = moon(model, beta=0.5, nonfinite="skip"), DistributedDataParallel(model)
    for seed in range(STEPS):
        x, y = data(seed, rank)
        if (seed, rank) == (2, 1):
            y[0, 1] = torch.nan
        optimizer.minimize(losses_of(forward), x, y)
    return result(model, optimizer) | {"skipped": optimizer.diagnostics()["skipped_steps"]}


def refusal(options, rank, **parallel):
    model = network()
    optimizer, forward = moon(model, **options), DistributedDataParallel(model, **parallel)
    try:
        optimizer.minimize(losses_of(forward), *data(0, rank))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def validate(rank):
    """One process looks at the combined loss alone, between two steps."""
    model = network()
    optimizer, forward = moon(model, beta=0.5), DistributedDataParallel(model)
    for seed in range(2):
        optimizer.minimize(losses_of(forward), *data(seed, rank))
        if rank == 0:
            with torch.no_grad():
                assert optimizer.combine(losses_of(model), *data(9, rank)).isfinite()
    return result(model, optimizer)


# What one process does with the batches of both


def train_alone(options, tasks):
    model = network()
    optimizer = moon(model, **options)
    for seed in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            closure = losses_of(model, there(tasks, seed, rank))
            (optimizer.combine(closure, *data(seed, rank)) / WORLD).backward()
        optimizer.step()
    return result(model, optimizer)


def train_jointly(options):
    model = network()
    optimizer = moon(model, **options)
    for seed in range(STEPS):
        optimizer.minimize(losses_of(model), *joined(seed))
    return result(model, optimizer)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, len(TASKS))).double()


def moon(model, **options):
    return MOON(model, tasks=TASKS, lr=0.05, **options)


def there(tasks, seed, rank):
    """All tasks, or those that a process has in a step: not always the same as the other, and one of them sometimes nowhere."""
    if tasks == "all":
        return TASKS
    return {0: TASKS, 1: TASKS[: 2 + rank], 2: TASKS[rank : 2 + rank], 3: TASKS[1:], 4: TASKS[:1], 5: TASKS}[seed]


def losses_of(forward, names=TASKS):
    def losses(x, y):
        by_task = dict(zip(TASKS, (forward(x) - y).square().mean(0), strict=True))
        return {name: by_task[name] for name in names}

    return losses


def result(model, optimizer):
    numbers = optimizer.diagnostics()
    told = [f"{what}/{name}" for what in ("delta", "loss", "log_loss") for name in TASKS]
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "logits": optimizer.logits,
        "told": [numbers[name] for name in told if name in numbers],
    }


# What they must have done


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return both(run, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("tasks", ["all", "some"])
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_bit_identical_and_do_what_one_does_with_micro_batches(ranks, case, tasks):
    first, second = (found[f"{case} {tasks}"] for found in ranks)
    assert_identical(first, second)
    assert first["logits"].abs().max() > 1e-3
    torch.testing.assert_close(first, train_alone(CASES[case], tasks), rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("delta", ONE_PASS)
def test_a_static_graph_makes_no_difference(ranks, delta):
    for found in ranks:
        assert_identical(found[f"static graph {delta}"], found[f"{delta} plain all"])


def test_a_static_graph_is_refused_where_there_are_several_backward_passes(ranks):
    for found in ranks:
        assert (
            f'delta="per_task" does not work with {STATIC_GRAPH}: use delta="loss_difference"' in found["refuse static graph"]
        )


@pytest.mark.parametrize("case", [f"{delta} {kind}" for delta in MODES for kind in ("plain", "auto")])
def test_with_plain_losses_two_processes_do_what_one_does_with_the_joined_batch(ranks, case):
    torch.testing.assert_close(ranks[0][f"{case} all"], train_jointly(CASES[case]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("what", [*(f"accumulate {kind}" for kind in KINDS), "random", "validate"])
def test_two_processes_are_bit_identical(ranks, what):
    first, second = (found[what] for found in ranks)
    assert_identical(first, second)
    assert first["logits"].abs().max() > 1e-3


def test_a_bad_loss_of_one_process_is_skipped_by_both(ranks):
    first, second = (found["skip"] for found in ranks)
    assert_identical(first, second)
    assert first["skipped"] == 1
    assert all(p.isfinite().all() for p in first["parameters"])


@pytest.mark.parametrize(("word", "remedy"), [("exact", 'use dual="online"'), ("auto", "name the mode")])
def test_what_differs_between_processes_is_refused(ranks, word, remedy):
    for found in ranks:
        assert remedy in found[f"refuse {word}"]
        assert found[f"refuse {word}"].endswith("found a world of 2 processes, expected one.")
