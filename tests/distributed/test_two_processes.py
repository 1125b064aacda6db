"""Two processes with gloo: Muon and loss-based balancers are the same on both and as on the joined batch."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from moonopt import Muon
from moonopt.methods import BALANCERS, build
from two_processes import NEEDS_GLOO, TASKS, assert_identical, both, data, joined

pytestmark = NEEDS_GLOO

STEPS = 5
SETTINGS = {"dwa": {"window": 1}}  # so that its weights move within the steps
LOSS_BASED = [*(name for name, each in BALANCERS.items() if not each.needs_gradients), "ls+muon", "famo+muon"]


# What each process does


def run(rank):
    found = {f"train {name}": train(name, parallel, lambda seed: data(seed, rank)) for name in LOSS_BASED}
    found |= {f"accumulate {name}": accumulate(name, rank) for name in ("ls", "uw", "famo")}
    found |= {
        f"raise {name}": refusal(lambda model, name=name: make(name, model), spoiled=rank == 0) for name in ("ls", "famo")
    }
    found |= {f"skip {name}": skip(name, rank) for name in ("ls", "si", "uw", "famo")}
    found["raise muon"] = muon_refusal(rank)
    found["skip muon"] = muon_skip(rank)
    if rank == 0:
        muon_alone()
    found |= {f"fsdp {original}": fsdp_refusal(use_orig_params=original) for original in (True, False)}
    found["fsdp vectors"] = fsdp_vectors(rank)
    found["fsdp whole"] = muon_steps(whole, rank)
    found["ddp whole"] = muon_steps(parallel, rank)
    found["validate"] = validate(rank)
    found["other tasks"] = other_tasks(rank)
    return found


def train(name, wrapped, batch):
    model = network()
    optimizer = make(name, model)
    forward = wrapped(model)
    weights = []
    for seed in range(STEPS):
        optimizer.minimize(losses_of(forward), *batch(seed))
        weights.append(optimizer.task_weights)
    return result(model, optimizer) | {"weights": torch.stack(weights)}


def accumulate(name, rank):
    """Two micro-batches per step, of which the gradients of the first are not reduced by themselves."""
    model = network()
    optimizer, forward = make(name, model), parallel(model)
    for seed in range(STEPS):
        optimizer.zero_grad()
        for part, context in enumerate((forward.no_sync(), contextlib.nullcontext())):
            with context:
                (optimizer.combine(losses_of(forward), *data(2 * seed + part, rank)) / 2).backward()
        optimizer.step()
    return result(model, optimizer)


def refusal(construct, spoiled=False):
    """The text of the error that one step gives."""
    model = network()
    optimizer, forward = construct(model), parallel(model)
    x, y = data(0, 0)
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
    optimizer = make(name, model, nonfinite="skip")
    forward = parallel(model)
    for seed in range(STEPS):
        x, y = data(seed, rank)
        if (seed, rank) == (2, 1):
            y[0, 1] = torch.nan
        optimizer.minimize(losses_of(forward), x, y)
    return result(model, optimizer) | {"skipped": optimizer.diagnostics()["skipped_steps"]}


def muon_refusal(rank):
    """The text of the error of a step that moves nothing, because one process has no label of a task."""
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, forward = Muon(model), parallel(model)
    try:
        optimizer.minimize(losses_of_labelled(forward), *partly_labelled(0, rank, missing=rank == 0))
    except FloatingPointError as error:
        assert_identical([p.detach() for p in model.parameters()], before)
        return str(error)
    return "nothing"


def muon_skip(rank):
    """A step of which one process has no label of a task, so that its loss is NaN and all gradients are finite."""
    model = network()
    optimizer, forward = Muon(model, nonfinite="skip"), parallel(model)
    for seed in range(STEPS):
        optimizer.minimize(losses_of_labelled(forward), *partly_labelled(seed, rank, missing=(seed, rank) == (2, 1)))
        assert all(p.grad.isfinite().all() for p in model.parameters())
    parameters = [p.detach() for p in model.parameters()]
    return {"parameters": parameters, "skipped": optimizer.diagnostics()["skipped_steps"]}


def muon_alone():
    """A step of one process alone, as of torch's optimizers: it must wait for nobody."""
    model = network()
    optimizer, (x, _) = Muon(model), data(0, 0)
    model(x).square().mean().backward()
    optimizer.step()


def partly_labelled(seed, rank, missing):
    x, y = data(seed, rank)
    if missing:
        y[:, 1] = torch.nan
    return x, y


def losses_of_labelled(forward):
    def losses(x, y):
        columns = zip(TASKS, forward(x).T, y.T, strict=True)
        return {name: nn.functional.mse_loss(found[~true.isnan()], true[~true.isnan()]) for name, found, true in columns}

    return losses


def fsdp_refusal(**options):
    """The texts of the errors for a module in shards, and for its named parameters."""
    texts = []
    for params in (lambda model: model, lambda model: model.named_parameters()):
        try:
            Muon(params(sharded(network(), **options)))
        except ValueError as error:
            texts.append(str(error))
    return texts


def fsdp_vectors(rank):
    """How far shards that are vectors are from the parameters that DDP trains so, for those that lie on one process."""
    models = [network(), network()]
    forwards = [sharded(models[0], use_orig_params=True), parallel(models[1])]
    for model, forward in zip(models, forwards, strict=True):
        optimizer = Muon([{"params": list(model.parameters()), "kind": "vector"}])
        optimizer.minimize(losses_of(forward), *data(0, rank))
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return [(mine - all_of_it.flatten()).abs().max().item() for mine, all_of_it in pairs if len(mine) == all_of_it.numel()]


def muon_steps(wrapped, rank):
    model = network()
    forward = wrapped(model)
    optimizer = Muon(forward)
    for seed in range(STEPS):
        optimizer.minimize(losses_of(forward), *data(seed, rank))
    return [group["kind"] for group in optimizer.param_groups], [p.detach().clone() for p in model.parameters()]


def sharded(model, **options):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def whole(model):
    return sharded(model, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)


def other_tasks(rank):
    """The text of the error where the processes do not have the same tasks."""
    model = network()
    optimizer = make("ls", model)
    losses = losses_of(model)(*data(0, rank))
    try:
        optimizer.combine({name: losses[index] for index, name in enumerate(TASKS) if index <= rank})
    except RuntimeError as error:
        return str(error)
    return "nothing"


def validate(rank):
    """One process looks at the combined loss alone, between two steps."""
    model = network()
    optimizer = make("si", model)
    forward = parallel(model)
    for seed in range(2):
        optimizer.minimize(losses_of(forward), *data(seed, rank))
        if rank == 0:
            with torch.no_grad():
                assert optimizer.combine(losses_of(model), *data(9, rank)).isfinite()
    return result(model, optimizer)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, len(TASKS))).double()


def parallel(model):
    return DistributedDataParallel(model)


def make(name, model, **options):
    return build(name, model, TASKS, balancer=SETTINGS.get(name.partition("+")[0]), **options)


def losses_of(forward):
    return lambda x, y: (forward(x) - y).square().mean(0)


def result(model, optimizer):
    memory = {name: value for name, value in optimizer.memory.items() if isinstance(value, torch.Tensor)}
    return {"parameters": [p.detach() for p in model.parameters()], "memory": memory}


# What they must have done


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return both(run, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", LOSS_BASED)
def test_loss_based_balancers_are_bit_identical_on_both(ranks, name):
    first, second = (found[f"train {name}"] for found in ranks)
    assert_identical(first, second)
    fixed = name.partition("+")[0] in ("ls", "stl")
    assert (first["weights"].std(0).max() > 0) != fixed


@pytest.mark.parametrize("name", LOSS_BASED)
def test_loss_based_balancers_do_what_one_process_does_with_the_joined_batch(ranks, name):
    expected = train(name, lambda model: model, joined)
    torch.testing.assert_close(ranks[0][f"train {name}"], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["ls", "uw", "famo"])
def test_micro_batches_are_bit_identical_on_both(ranks, name):
    assert_identical(*(found[f"accumulate {name}"] for found in ranks))


@pytest.mark.parametrize("name", ["ls", "famo"])
def test_a_bad_loss_of_one_process_is_told_by_both(ranks, name):
    for found in ranks:
        assert "FloatingPointError: At step 1, the loss of task 'right' is NaN" in found[f"raise {name}"]


@pytest.mark.parametrize("name", ["ls", "si", "uw", "famo"])
def test_a_bad_loss_of_one_process_is_skipped_by_both(ranks, name):
    first, second = (found[f"skip {name}"] for found in ranks)
    assert_identical(first, second)
    assert first["skipped"] == 1
    assert all(p.isfinite().all() for p in first["parameters"])


def test_a_loss_that_is_bad_on_one_process_is_told_by_muon_on_both(ranks):
    first, second = (found["raise muon"] for found in ranks)
    assert first.startswith("At step 1, the loss of task 'right' is NaN or infinite. Parameters and optimizer state were left")
    assert second.startswith("At step 1, a loss or gradient of another process is not finite, though all are finite here.")


def test_a_loss_that_is_bad_on_one_process_is_skipped_by_muon_on_both(ranks):
    first, second = (found["skip muon"] for found in ranks)
    assert_identical(first, second)
    assert first["skipped"] == 1


@pytest.mark.parametrize("original", [True, False])
def test_parameters_that_fsdp_has_flattened_are_refused(ranks, original):
    for found in ranks:
        assert len(found[f"fsdp {original}"]) == 2
        assert all(text.startswith("Sharded parameters (flattened, as Fully") for text in found[f"fsdp {original}"])


def test_shards_that_are_said_to_be_vectors_are_trained_as_such(ranks):
    distances = [distance for found in ranks for distance in found["fsdp vectors"]]
    assert distances
    assert max(distances) < 1e-12


def test_parameters_that_fsdp_leaves_whole_are_trained_as_with_ddp(ranks):
    for found in ranks:
        (kinds, parameters), (_, expected) = found["fsdp whole"], found["ddp whole"]
        assert kinds == ["matrix", "vector"]
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-9)


def test_one_process_may_validate_alone(ranks):
    assert_identical(*(found["validate"] for found in ranks))


def test_processes_with_different_tasks_are_refused(ranks):
    for found in ranks:
        assert found["other tasks"].startswith("All processes must have the same tasks in a step: 1 of 2 have task")
