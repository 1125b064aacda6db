"""Balanced as an ordinary optimizer, for every balancer: groups, state, resuming, schedulers, scalers, bad losses, presence."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from moonopt import MOON, Muon
from moonopt.balance.balanced import Balanced
from moonopt.balance.base import Aggregator
from moonopt.balance.dwa import DWA
from moonopt.balance.famo import FAMO
from moonopt.balance.linear import LS, SI, STL
from moonopt.balance.mgda import MGDA
from moonopt.balance.nash import NashMTL
from moonopt.linalg.schedules import polar_express
from moonopt.methods import BALANCERS, build
from two_heads import TwoHeads

WITH_MUON = ["ls+muon", "rlw+muon", "mgda+muon", "gradnorm+muon", "graddrop+muon", "famo+muon"]
METHODS = [*BALANCERS, *WITH_MUON]
LOSS_BASED = [name for name, each in BALANCERS.items() if not each.needs_gradients]
WEIGHTING = [name for name, each in BALANCERS.items() if not issubclass(each, Aggregator)]
SETTINGS = {"dwa": {"window": 2}}  # so that its weights move in a short run

every_method = pytest.mark.parametrize("name", METHODS)


def make(name, model, tasks=2, **options):
    return build(name, model, tasks, balancer=SETTINGS.get(name.partition("+")[0]), **options)


def separate(model):
    """A closure whose losses depend on their own head alone."""

    def losses(x, y):
        hidden = model.trunk(x)
        return [(head(hidden)[:, 0] - target).square().mean() for head, target in zip(model.heads, y.mT, strict=True)]

    return losses


def named(model, names):
    """The same as a dict of those tasks whose names are asked for."""

    def losses(x, y, wanted=names):
        return {name: loss for name, loss in zip(names, separate(model)(x, y), strict=True) if name in wanted}

    return losses


def train(model, optimizer, batch, seeds, closure=None):
    tasks = len(model.heads)
    for seed in seeds:
        x, y = batch(seed=seed, tasks=tasks, dtype=next(model.parameters()).dtype)
        optimizer.minimize(closure or separate(model), x, y)


def snapshot(model, optimizer):
    """Everything that a run goes on from, copied."""
    return copy.deepcopy(
        {
            "parameters": list(model.parameters()),
            "state": [optimizer.state[p] for p in model.parameters() if p in optimizer.state],
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        }
    )


def assert_same(found, expected, path="", near=0.0):
    assert type(found) is type(expected), path
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, path
        assert torch.allclose(found.nan_to_num(7e7), expected.nan_to_num(7e7), rtol=near, atol=near), path
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}.{key}", near)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{path}[{index}]", near)
    else:
        assert found == expected, path


def parameters_of(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_unmoved(model, before):
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


# An ordinary optimizer


@every_method
def test_groups_and_state_are_the_inner_optimizers(two_heads, batch, name):
    model = two_heads()
    optimizer = make(name, model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults is optimizer.optimizer.defaults
    train(model, optimizer, batch, range(1))
    assert set(optimizer.state) == set(model.parameters())
    assert repr(optimizer).startswith(f"Balanced({type(optimizer.balancer).__name__}(['0', '1']")


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=12),
    "warm-up from 0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 5),
}


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
@every_method
def test_schedulers_drive_it(two_heads, batch, name, schedule):
    model = two_heads()
    optimizer = make(name, model, optimizer={"lr": 0.01})
    scheduler = schedule(optimizer)
    rates, first = [], separate(model)(*batch())
    for _ in range(10):
        before = parameters_of(model)
        optimizer.minimize(separate(model), *batch())
        rates.append(scheduler.get_last_lr()[0])
        assert optimizer.diagnostics()["lr/0"] == pytest.approx(rates[-1])
        if rates[-1] == 0:
            assert_unmoved(model, before)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the scheduler notices that steps are made
            scheduler.step()
    assert len(set(rates)) > 3
    assert separate(model)(*batch())[0] < first[0]


def test_hooks_run(two_heads, batch):
    model = two_heads()
    optimizer = make("famo", model)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before the step"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after the step"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after loading"))
    train(model, optimizer, batch, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    expected = ["step", "step", "saving", "saving", "loading", "loading"]
    assert [each.split()[-1] for each in seen] == expected
    assert [each.split()[0] for each in seen] == ["before", "after"] * 3


@pytest.mark.parametrize("name", ["uw", "mgda", "graddrop", "famo"])
def test_a_group_can_be_added_later(two_heads, batch, name):
    model = two_heads()
    inner = torch.optim.SGD(model.trunk.parameters(), lr=0.1)
    optimizer = Balanced(BALANCERS[name](2), inner, module=model)
    optimizer.add_param_group({"params": list(model.heads.parameters()), "lr": 0.5})
    before = parameters_of(model)
    train(model, optimizer, batch, range(1))
    assert inner.param_groups[1]["lr"] == 0.5
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    for p, start in zip(model.heads.parameters(), before[4:], strict=True):
        torch.testing.assert_close(p.detach(), start - 0.5 * p.grad)


def test_it_drives_optimizers_of_all_kinds(two_heads, batch):
    for inner in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        model = two_heads()
        optimizer = Balanced(FAMO(2), inner(model.parameters(), lr=0.01), module=model)
        first = sum(separate(model)(*batch()))
        for _ in range(10):
            optimizer.minimize(separate(model), *batch())
        assert sum(separate(model)(*batch())) < first


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in [*METHODS, "moon", "muon"]]
    + [("mgda", {"engine": engine}) for engine in ("stored:batched", "stored:anew", "columns", "blocked:2")]
    + [("moon", {"optimizer": {"delta": mode}}) for mode in ("per_task", "forward_mode", "double_backward")]
    + [("moon", {"optimizer": {"dual": "exact"}}), ("mgda", {"balancer": {"normalisation": "loss+"}})],
    ids=str,
)
def test_a_model_trains_where_it_lies_whatever_the_default_device(two_heads, batch, name, options):
    found = []
    for default in ("cpu", "meta"):  # tensors of the latter have no values
        model, (x, y) = two_heads(), batch()
        polar_express.cache_clear()
        with torch.device(default):
            optimizer = build(name, model, 2, **options)
            for group in optimizer.param_groups[1:]:
                group["lr"] = torch.tensor(0.01, device="cpu")
            for wanted in (["0", "1"], ["1"], ["0", "1"]):
                optimizer.zero_grad()
                for half in (slice(16), slice(16, None)):
                    optimizer.combine(named(model, ["0", "1"]), x[half], y[half], wanted).backward()
                optimizer.step()
            optimizer.diagnostics()
        found.append(snapshot(model, optimizer))
    assert_same(*found)


# The orders in which loops, scalers and trainers call


def _by_hand(optimizer, losses, data):
    optimizer.zero_grad()
    optimizer.combine(losses, *data).backward()
    optimizer.step()


def _zero_grad_last(optimizer, losses, data):
    optimizer.combine(losses, *data).backward()
    optimizer.step()
    optimizer.zero_grad()


def _zero_grad_between_loss_and_backward(optimizer, losses, data):
    loss = optimizer.combine(losses, *data)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _step_with_closure(optimizer, losses, data):
    def closure():
        loss = optimizer.combine(losses, *data)
        optimizer.zero_grad()
        loss.backward()
        return loss

    assert optimizer.step(closure).ndim == 0


def _losses_with_again(optimizer, losses, data):
    optimizer.zero_grad()
    optimizer.combine(losses(*data), again=lambda: losses(*data)).backward()
    optimizer.step()


ORDERS = [_by_hand, _zero_grad_last, _zero_grad_between_loss_and_backward, _step_with_closure, _losses_with_again]


@pytest.mark.parametrize("run", ORDERS)
@every_method
def test_all_orders_give_the_same(two_heads, batch, name, run):
    model, reference = two_heads(dtype=torch.float64), two_heads(dtype=torch.float64)
    optimizer, plain = make(name, model), make(name, reference)
    for seed in range(6):
        data = [each.double() for each in batch(seed=seed)]
        plain.minimize(separate(reference), *data)
        run(optimizer, separate(model), data)
    near = 1e-8 if optimizer.balancer.uses_gram else 0.0  # minimize adds up the task gradients: one backward pass less
    assert_same(snapshot(model, optimizer), snapshot(reference, plain), near=near)
    assert optimizer.diagnostics()["step"] == 6


@pytest.mark.parametrize("unscale_first", [False, True])
@every_method
def test_a_grad_scaler_changes_nothing(two_heads, batch, name, unscale_first):
    model, reference = two_heads(dtype=torch.float64), two_heads(dtype=torch.float64)
    optimizer, plain = make(name, model), make(name, reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(4):
        data = batch(seed=seed, dtype=torch.float64)
        plain.minimize(separate(reference), *data)
        optimizer.zero_grad()
        scaler.scale(optimizer.combine(separate(model), *data)).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(parameters_of(model), parameters_of(reference), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(optimizer.task_weights, plain.task_weights)


@every_method
def test_a_step_that_a_scaler_skips_is_void_and_counted(two_heads, batch, name):
    model = two_heads()
    optimizer = make(name, model)
    train(model, optimizer, batch, range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before, memory = snapshot(model, optimizer), dict(optimizer.memory)
    optimizer.zero_grad()
    scaler.scale(optimizer.combine(separate(model), *batch())).backward()
    model.trunk[0].weight.grad[0, 0] = math.inf  # an overflow
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    after = snapshot(model, optimizer)
    assert_same([after["parameters"], after["state"]], [before["parameters"], before["state"]])
    for learned in ("step", "s", "s_square", "logits", "logits_square", "history", "seen"):
        if learned in memory:
            assert_same(optimizer.memory[learned], memory[learned])
    train(model, optimizer, batch, range(1))
    assert optimizer.diagnostics()["skipped_steps"] == 1
    assert optimizer.diagnostics()["step"] == 3


@pytest.mark.parametrize("name", ["famo", "nash-mtl", "graddrop"])
@pytest.mark.parametrize("manual", [False, True])
def test_lightning_trains_like_a_plain_loop(two_heads, batch, tmp_path, name, manual):
    """Automatic optimization: loss, zero_grad, backward, step, all inside of step's closure, on a wrapped optimizer."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model, self.automatic_optimization = model, not manual

        def configure_optimizers(self):
            return make(name, self.model)

        def training_step(self, data, index):
            optimizer = self.optimizers()
            loss = optimizer.combine(separate(self.model), *data)
            if self.automatic_optimization:
                return loss
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

    reference = two_heads()
    plain = make(name, reference)
    train(reference, plain, batch, range(4))
    module = Module(two_heads())
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader([batch(seed=seed) for seed in range(4)], batch_size=None))
    torch.testing.assert_close(parameters_of(module.model), parameters_of(reference))
    torch.testing.assert_close(trainer.optimizers[0].task_weights, plain.task_weights)
    assert trainer.optimizers[0].diagnostics()["step"] == 4


def test_accelerate_accumulates_like_micro_batches(two_heads, batch):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # other tests have set it up otherwise
    reference, model = two_heads(), two_heads()
    plain, optimizer = make("famo", reference), make("famo", model)
    for step in range(2):
        plain.zero_grad()
        for seed in (2 * step, 2 * step + 1):
            (plain.combine(separate(reference), *batch(seed=seed)) / 2).backward()
        plain.step()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    for seed in range(4):
        with accelerator.accumulate(prepared):
            accelerator.backward(optimizer.combine(separate(model), *batch(seed=seed)))
            wrapped.step()
            wrapped.zero_grad()
    torch.testing.assert_close(parameters_of(model), parameters_of(reference))
    torch.testing.assert_close(optimizer.memory["logits"], plain.memory["logits"])
    assert optimizer.diagnostics()["step"] == 2


def test_a_step_that_never_comes_is_forgotten_by_zero_grad_and_counted(two_heads, batch):
    model, reference = two_heads(), two_heads()
    optimizer, plain = make("famo", model), make("famo", reference)
    optimizer.combine(separate(model), *batch(seed=50)).backward()
    optimizer.zero_grad()
    train(model, optimizer, batch, range(2))
    train(reference, plain, batch, range(2))
    assert_same(snapshot(model, optimizer), snapshot(reference, plain))
    assert optimizer.diagnostics()["skipped_steps"] == 1


def test_step_without_combine_leaves_the_weights_alone(two_heads, batch):
    model = two_heads()
    optimizer = make("uw", model)
    train(model, optimizer, batch, range(2))
    memory = copy.deepcopy(dict(optimizer.memory))
    before = parameters_of(model)
    optimizer.zero_grad()
    model.losses(*batch()).sum().backward()
    optimizer.step()
    assert_same(dict(optimizer.memory), memory)
    assert not torch.equal(model.trunk[0].weight, before[0])


@every_method
def test_a_step_without_any_gradient_is_an_error(two_heads, batch, name):
    optimizer = make(name, two_heads())
    with pytest.raises(RuntimeError, match="No parameter has a gradient"):
        optimizer.step()


# Micro-batches and weights that stay


@pytest.mark.parametrize("name", WEIGHTING)
def test_weights_stay_fixed_among_micro_batches(two_heads, batch, name):
    model = two_heads()
    optimizer = make(name, model)
    train(model, optimizer, batch, range(5))
    weights = []
    optimizer.zero_grad()
    for seed in range(3):
        (optimizer.combine(separate(model), *batch(seed=seed)) / 3).backward()
        weights.append(optimizer.task_weights.clone())
    optimizer.step()
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert optimizer.diagnostics()["step"] == 6
    optimizer.combine(separate(model), *batch(seed=9))
    fixed = name in ("ls", "stl")
    assert torch.equal(optimizer.task_weights, weights[0]) == fixed


@pytest.mark.parametrize("name", ["ls", "stl", "rlw", "uw", "famo", "graddrop"])
def test_micro_batches_equal_one_large_batch_where_weights_do_not_depend_on_it(two_heads, batch, name):
    whole, parts = two_heads(dtype=torch.float64), two_heads(dtype=torch.float64)
    one, several = make(name, whole), make(name, parts)
    for step in range(6):
        x, y = batch(seed=step, dtype=torch.float64)
        if name == "famo":  # weights z_i / D_i come from the first micro-batch: let it be as the whole
            x, y = x[:16].repeat(2, 1), y[:16].repeat(2, 1)
        pieces = [(x, y)] if name == "graddrop" else list(zip(x.chunk(2), y.chunk(2), strict=True))
        one.minimize(separate(whole), x, y)
        several.zero_grad()
        for piece in pieces:
            (several.combine(separate(parts), *piece) / len(pieces)).backward()
        several.step()
    torch.testing.assert_close(parameters_of(parts), parameters_of(whole))
    torch.testing.assert_close(several.task_weights, one.task_weights)


def test_what_a_step_has_shown_is_the_mean_over_its_micro_batches(two_heads, batch):
    model = two_heads()
    optimizer = make("dwa", model)
    found = [torch.stack(separate(model)(*batch(seed=seed))).detach() for seed in range(3)]
    for seed in range(3):
        optimizer.combine(separate(model), *batch(seed=seed)).backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.memory["history"][-1], torch.stack(found).mean(0))
    assert optimizer.diagnostics()["loss/0"] == pytest.approx(torch.stack(found).mean(0)[0].item())


@pytest.mark.parametrize("name", WEIGHTING)
def test_a_task_that_joins_in_a_later_micro_batch_has_a_weight(two_heads, batch, name):
    model = two_heads()
    optimizer = make(name, model, tasks=["left", "right"])
    losses = named(model, ["left", "right"])
    optimizer.combine(losses, *batch(seed=0), ["right"]).backward()
    optimizer.combine(losses, *batch(seed=1), ["left"]).backward()
    assert model.heads[0].weight.grad.any()
    assert optimizer.task_weights[0] != 0
    assert (optimizer.task_weights[1] != 0) == (name != "stl"), "the weight of the other stays"
    optimizer.step()


@pytest.mark.parametrize("name", ["rlw", "mgda", "nash-mtl"])
def test_weights_are_computed_every_so_many_steps(two_heads, batch, name):
    model = two_heads()
    optimizer = make(name, model, every=3)
    weights = []
    for seed in range(7):
        train(model, optimizer, batch, [seed])
        weights.append(optimizer.task_weights.tolist())
    assert weights[0] == weights[1] == weights[2] != weights[3]
    assert weights[3] == weights[4] == weights[5] != weights[6]


def test_weights_of_a_step_that_was_skipped_do_not_stay(two_heads, batch):
    model = two_heads()
    optimizer = make("si", model, every=4, nonfinite="skip")
    x, y = batch()
    optimizer.minimize(separate(model), x, y * math.nan)
    optimizer.minimize(separate(model), x, y)
    assert optimizer.task_weights.isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())


def test_weights_of_a_task_that_joins_in_a_skipped_step_do_not_stay(two_heads, batch):
    model = two_heads()
    optimizer = make("si", model, ["left", "right"], every=4, nonfinite="skip")
    losses, (x, y) = named(model, ["left", "right"]), batch()
    optimizer.minimize(losses, x, y, ["left"])
    optimizer.minimize(losses, x, y * math.nan)
    optimizer.minimize(losses, x, y)
    assert optimizer.task_weights.isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("every", [0, -1])
def test_every_counts_steps(two_heads, every):
    with pytest.raises(ValueError, match=f"every must be a number of steps of at least 1, found {every}"):
        make("mgda", two_heads(), every=every)
    with pytest.raises(ValueError, match="2 with GradDrop, which has no weights to keep"):
        make("graddrop", two_heads(), every=2)


# Clipping


def test_gradients_can_be_clipped_before_the_step(two_heads, batch):
    model = two_heads()
    optimizer = Balanced(LS(2), torch.optim.SGD(model.parameters(), lr=0.5))
    before = parameters_of(model)
    optimizer.combine(separate(model), *batch()).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.01
    optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.005, rel=1e-4)


def test_a_balancer_clips_the_shared_parameters_alone(two_heads, batch):
    model = two_heads()
    optimizer = Balanced(FAMO(2, max_norm=0.01), torch.optim.SGD(model.parameters(), lr=1.0), module=model)
    before = parameters_of(model)
    train(model, optimizer, batch, range(1))
    moved = [a - b for a, b in zip(model.parameters(), before, strict=True)]
    assert torch.cat([each.flatten() for each in moved[:4]]).norm().item() == pytest.approx(0.01, rel=1e-4)
    assert torch.cat([each.flatten() for each in moved[4:]]).norm() > 0.05


@pytest.mark.parametrize("name", ["ls", "nash-mtl", "famo", "ls+muon"])
def test_a_checkpoint_of_a_model_of_another_size_is_refused(batch, name):
    """By the state itself: the fused Adam of torch would write beyond its end."""
    (small, optimizer), (large, other) = ((model, make(name, model)) for model in (TwoHeads(width=12), TwoHeads(width=24)))
    optimizer.minimize(separate(small), *batch())
    with pytest.raises(ValueError, match=r"The checkpoint's \w+ has shape \(12.*, expected \(24"):
        other.load_state_dict(optimizer.state_dict())
    other.minimize(separate(large), *batch())


def test_what_is_no_balancer_and_what_cannot_be_balanced_is_refused(two_heads):
    parameters = list(two_heads().parameters())
    with pytest.raises(ValueError, match=r"needs a balancer such as NashMTL\(3\), found 'mgda'"):
        Balanced("mgda", torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(ValueError, match="LBFGS evaluates the losses as often as it likes"):
        Balanced(LS(2), torch.optim.LBFGS(parameters))


@pytest.mark.parametrize("name", ["mgda", "ls", "moon", "muon"])
def test_a_loss_without_a_graph_beside_others_is_told_once(two_heads, batch, name, recwarn):
    model = two_heads()
    optimizer = make(name, model, ["left", "right"]) if name != "moon" else MOON(model, tasks=["left", "right"])
    for _ in range(2):
        optimizer.minimize(lambda x, y: named(model, ["left", "right"])(x, y) | {"right": torch.tensor(0.0)}, *batch())
    told = [each for each in recwarn if "does not depend on anything that is trained" in str(each.message)]
    assert len(told) == 1
    assert "The loss of task 'right'" in str(told[0].message)


@pytest.mark.parametrize(("name", "told"), [("mgda", "or its gradient is"), ("ls", "though all losses are finite")])
def test_a_bad_gradient_of_a_good_loss_is_not_called_a_bad_loss(two_heads, batch, name, told):
    model = two_heads()

    def losses(x, y):
        found = named(model, ["left", "right"])(x, y)
        found["right"].register_hook(lambda gradient: gradient * math.nan)
        return found

    with pytest.raises(FloatingPointError, match=told):
        make(name, model, ["left", "right"]).minimize(losses, *batch())


@pytest.mark.parametrize("balancer", [FAMO, NashMTL])
def test_what_is_clipped_outlasts_a_checkpoint_and_a_copy(two_heads, batch, balancer):
    """A step with one of two tasks does not tell what they share: that is remembered from the steps before."""

    def made():
        model = two_heads()
        optimizer = Balanced(balancer(["a", "b"], max_norm=0.01), torch.optim.SGD(model.parameters(), lr=1.0), module=model)
        return model, optimizer

    model, optimizer = made()
    optimizer.minimize(named(model, ["a", "b"]), *batch(seed=0))
    resumed, again = made()
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, twin = copy.deepcopy((model, optimizer))
    for network, each in ((model, optimizer), (resumed, again), (copied, twin)):
        each.minimize(lambda x, y, network=network: named(network, ["a", "b"])(x, y, ["a"]), *batch(seed=1))
    for network in (resumed, copied):
        assert all(map(torch.equal, network.parameters(), model.parameters()))

    old = copy.deepcopy(optimizer.state_dict())  # of a version that did not remember it
    del old["param_groups"][0]["balancer_clipped"]
    again.load_state_dict(old)
    again.minimize(named(resumed, ["a", "b"]), *batch(seed=2))
    assert again.memory["clipped"] == optimizer.memory["clipped"] == [True] * 4 + [False] * 4


# State: saving, loading, copying


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@every_method
def test_resume_continues_bit_for_bit(two_heads, batch, name, dtype):
    _check_resume(two_heads, batch, lambda model: make(name, model), dtype)


@pytest.mark.parametrize("name", ["nash-mtl", "pcgrad", "rlw", "famo", "gradnorm+muon"])
def test_resume_between_two_refreshes_of_the_weights(two_heads, batch, name):
    _check_resume(two_heads, batch, lambda model: make(name, model, every=3), torch.float32)


def _check_resume(two_heads, batch, construct, dtype):
    model = two_heads(dtype=dtype)
    optimizer = construct(model)
    train(model, optimizer, batch, range(7))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, batch, range(7, 14))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = two_heads(dtype=dtype, seed=7)
    resumed = construct(other)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, batch, range(7, 14))
    assert_same(snapshot(other, resumed), snapshot(model, optimizer))
    assert resumed.diagnostics()["step"] == 14


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
@every_method
def test_resume_through_distributed_checkpoint_helpers(two_heads, batch, name, options):
    model = two_heads()
    optimizer = make(name, model)
    train(model, optimizer, batch, range(5))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options)))
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, batch, range(5, 10))

    other = two_heads(seed=7)
    resumed = make(name, other)
    other.load_state_dict(weights)
    set_optimizer_state_dict(other, resumed, saved, options=StateDictOptions(**options))
    train(other, resumed, batch, range(5, 10))
    assert_same(snapshot(other, resumed)["parameters"], snapshot(model, optimizer)["parameters"])
    assert_same(dict(resumed.memory), dict(optimizer.memory))


@pytest.mark.parametrize("name", ["dwa", "famo", "nash-mtl", "uw+muon"])
def test_resume_from_a_distributed_checkpoint_on_disk(two_heads, batch, tmp_path, name):
    model = two_heads()
    optimizer = make(name, model)
    train(model, optimizer, batch, range(5))
    checkpoint = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    torch.distributed.checkpoint.save(checkpoint, checkpoint_id=tmp_path, no_dist=True)
    train(model, optimizer, batch, range(5, 10))

    other = two_heads(seed=7)
    resumed = make(name, other)
    loaded = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, resumed)}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(loaded["model"])
    set_optimizer_state_dict(other, resumed, loaded["optimizer"])
    train(other, resumed, batch, range(5, 10))
    assert_same(snapshot(other, resumed)["parameters"], snapshot(model, optimizer)["parameters"])
    assert_same(dict(resumed.memory), dict(optimizer.memory))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
@every_method
def test_a_copy_continues_bit_for_bit_and_apart(two_heads, batch, name, copied):
    model = two_heads()
    optimizer = make(name, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)  # which wraps step
    train(model, optimizer, batch, range(5))
    scheduler.step()
    waiting = optimizer.combine(separate(model), *batch(seed=99))  # for its backward: must not travel
    other, twin = copied((model, optimizer))
    waiting.backward()
    optimizer.zero_grad()
    train(model, optimizer, batch, range(5, 10))
    assert not torch.equal(model.trunk[0].weight, other.trunk[0].weight)
    assert twin.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
    train(other, twin, batch, range(5, 10))
    assert_same(snapshot(other, twin), snapshot(model, optimizer))


@every_method
def test_balancer_state_is_as_precise_as_the_parameters_and_float32_at_least(two_heads, batch, name):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model = two_heads(dtype=dtype)
        optimizer = make(name, model)
        train(model, optimizer, batch, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        least = torch.promote_types(dtype, torch.float32)
        dtypes = {value.dtype for value in optimizer.memory.values() if isinstance(value, torch.Tensor)}
        assert dtypes <= {least, torch.float64}
        assert optimizer.task_weights.dtype == least


def test_a_checkpoint_of_another_balancer_or_other_tasks_is_refused(two_heads):
    saved = make("famo", two_heads(), ["left", "right"]).state_dict()
    with pytest.raises(ValueError, match=r"checkpoint is of balancer_name 'famo', expected 'uw'"):
        make("uw", two_heads(), ["left", "right"]).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"balancer_tasks \['left', 'right'\], expected \['a', 'b'\]"):
        make("famo", two_heads(), ["a", "b"]).load_state_dict(saved)
    plain = torch.optim.Adam(two_heads().parameters()).state_dict()
    with pytest.raises(ValueError, match="checkpoint is of balancer_name None, expected 'famo'"):
        make("famo", two_heads()).load_state_dict(plain)


def test_loading_forgets_what_waits(two_heads, batch):
    model = two_heads()
    optimizer = make("famo", model)
    train(model, optimizer, batch, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.combine(separate(model), *batch()).backward()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.diagnostics()["step"] == 2
    assert torch.equal(optimizer.memory["logits"], saved["param_groups"][0]["balancer_logits"])


def test_a_refused_checkpoint_changes_nothing(two_heads, batch):
    model = two_heads()
    optimizer = make("famo", model)
    train(model, optimizer, batch, range(2))
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="expected 'famo'"):
        optimizer.load_state_dict(make("uw", two_heads()).state_dict())
    assert_same(snapshot(model, optimizer), before)


# What bad input gets


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda model: make("ls", model, nonfinite="skipp"), "Unknown nonfinite 'skipp'.*Did you mean 'skip'"),
        (lambda model: make("mgda", model, engine="colums"), "engine must be .*\"columns\".*found 'colums'"),
        (lambda model: make("mgda", model, engine="blocked:0"), "engine must be .*found 'blocked:0'"),
        (lambda model: make("nash", model), "Unknown method 'nash'"),
        (lambda model: make("cagrd", model), "Unknown method 'cagrd'.*Did you mean 'cagrad'"),
        (lambda model: make("famo+mun", model), r"Unknown method 'famo\+mun'.*Did you mean 'famo\+muon'"),
        (lambda model: make("ls", model, protocol="papr"), "Unknown protocol 'papr'.*Did you mean 'paper'"),
        (lambda model: MGDA(2, normalisation="los"), "Unknown normalisation 'los'.*Did you mean 'loss'"),
        (lambda model: LS(2, reduction="meen"), "Unknown reduction 'meen'.*Did you mean 'mean'"),
        (lambda model: SI(2, reduction="meen"), "Unknown reduction 'meen'.*Did you mean 'mean'"),
        (lambda model: DWA(2, reduction="summ"), "Unknown reduction 'summ'.*Did you mean 'sum'"),
        (lambda model: STL(["left", "right"], task="lefft"), "Unknown task 'lefft'.*Did you mean 'left'"),
        (lambda model: DWA(2, temperature=0.0), "temperature must be positive, found 0.0"),
        (lambda model: DWA(2, window=0), "window must be a positive number of steps, found 0"),
        (lambda model: FAMO(2, lowest=[1.0]), "lowest must have one number per task: found 1 for 2 tasks"),
        (lambda model: LS(["a", "a"]), "Task names must differ"),
        (lambda model: build("moon", model, 2, engine="stored"), "moon has no balancer: found settings engine"),
        (lambda model: build("monn", model, 2), "Unknown method 'monn'.*Did you mean 'moon'"),
        (lambda model: build("moon", model, 2, lr=0.1), r'Settings of MOON go into optimizer=\{"lr": 0\.1\}'),
        (lambda model: build("nash-mtl", model, 2, lr=0.1), r'Settings of Adam go into optimizer=\{"lr": 0\.1\}'),
        (lambda model: build("ls", model, 2, optimizer={"rl": 1}), "Unknown setting of Adam 'rl': expected one of lr, betas"),
        (lambda model: build("ls+muon", model, 2, optimizer={"betta": 1}), "Unknown setting of Muon 'betta'"),
        (lambda model: build("ls", model, 2, optimizer=torch.optim.SGD(model.parameters())), "has settings.*found SGD"),
        (lambda model: build("ls", model.parameters(), 2), "build needs the model itself, an nn.Module; found generator"),
    ],
)
def test_a_wrong_setting_is_told_with_what_was_expected(two_heads, wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong(two_heads())


@pytest.mark.parametrize("name", ["moon", "muon", "ls", "mgda", "famo", "graddrop"])
def test_losses_without_a_graph_are_told(name, two_heads, batch):
    model = two_heads()
    x, y = batch()
    optimizer = build(name, model, 2)
    with pytest.raises(RuntimeError, match="do not depend on anything that is trained: were they detached"):
        optimizer.minimize(lambda: [loss.detach() for loss in model.losses(x, y)])


def test_an_optimizer_that_weighs_tasks_by_itself_is_refused(two_heads):
    model = two_heads()
    for inner in (MOON(model, tasks=2), make("ls", model)):
        with pytest.raises(ValueError, match=f"{type(inner).__name__} weighs tasks by itself"):
            Balanced(LS(2), inner)


def test_a_method_that_evaluates_again_says_so(two_heads, batch):
    model = two_heads()
    with pytest.raises(ValueError, match="famo evaluates the losses again: pass a closure, or losses with again=function"):
        make("famo", model).combine(model.losses(*batch()))


def test_losses_of_other_tasks_when_evaluated_again_are_refused(two_heads, batch):
    model = two_heads()
    names = iter([["left"], ["right"]])
    optimizer = make("famo", model, ["left", "right"])
    with pytest.raises(ValueError, match="returned the losses of right, expected those of left as before"):
        optimizer.minimize(lambda x, y: named(model, ["left", "right"])(x, y, next(names)), *batch())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@every_method
def test_a_bad_loss_is_told_with_its_task_and_step(two_heads, batch, name, bad):
    model = two_heads(tasks=3)
    optimizer = make(name, model, ["left", "right", "up"])
    train(model, optimizer, batch, range(2))
    before, state = parameters_of(model), copy.deepcopy([optimizer.state[p] for p in model.parameters()])
    x, y = batch(tasks=3)
    y[0, 1] = bad
    with pytest.raises(FloatingPointError, match="At step 3, the loss of task 'right' is NaN or infinite"):
        optimizer.minimize(separate(model), x, y)
    assert_unmoved(model, before)
    assert_same([optimizer.state[p] for p in model.parameters()], state)


@every_method
def test_a_bad_loss_in_a_later_micro_batch_is_told(two_heads, batch, name):
    model = two_heads()
    optimizer = make(name, model, ["left", "right"])
    before, (x, y) = parameters_of(model), batch()
    for wanted in (y, y.index_fill(1, torch.tensor([1]), math.nan)):
        optimizer.combine(separate(model), x, wanted).backward()
    with pytest.raises(FloatingPointError, match="'right'"):
        optimizer.step()
    assert_unmoved(model, before)


def test_factors_are_the_balancers_own(two_heads, batch):
    """A captured step writes into the optimizer's weights in place."""
    balancer = LS(2, factors=[1.0, 2.0], reduction="sum")
    model = two_heads()
    optimizer = Balanced(balancer, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.minimize(separate(model), *batch())
    optimizer.memory["weights"].zero_()
    optimizer.minimize(separate(model), *batch())
    assert optimizer.task_weights.tolist() == [1, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@every_method
def test_a_step_with_a_bad_loss_can_be_skipped_and_is_counted(two_heads, batch, name, bad):
    model, reference = two_heads(tasks=3), two_heads(tasks=3)
    optimizer, plain = make(name, model, 3, nonfinite="skip"), make(name, reference, 3)
    for each in (optimizer, plain):
        train(model if each is optimizer else reference, each, batch, range(2))
    before, state = parameters_of(model), copy.deepcopy([optimizer.state[p] for p in model.parameters()])
    x, y = batch(tasks=3)
    y[0, 1] = bad
    optimizer.minimize(separate(model), x, y)
    assert_unmoved(model, before)
    assert_same([optimizer.state[p] for p in model.parameters()], state)
    assert optimizer.diagnostics()["skipped_steps"] == 1
    train(model, optimizer, batch, range(5, 8))
    train(reference, plain, batch, range(5, 8))
    assert optimizer.task_weights.isfinite().all()
    if "draws" not in optimizer.memory:  # random methods have drawn once more
        torch.testing.assert_close(parameters_of(model), parameters_of(reference))


@pytest.mark.parametrize("name", ["si", "famo"])
@pytest.mark.parametrize("number", [0.0, -0.5])
def test_a_loss_that_has_no_logarithm_is_bad(two_heads, batch, name, number):
    model = two_heads(tasks=3)
    optimizer = make(name, model, ["left", "right", "up"])
    if number == 0 and name == "famo":
        number = -1e-6  # it adds 1e-8

    def losses(x, y):
        first, second, third = separate(model)(x, y)
        return [first, second - second.detach() + number, third]

    before = parameters_of(model)
    with pytest.raises(FloatingPointError, match=r"At step 1, the loss of task 'right' is .*not positive"):
        optimizer.minimize(losses, *batch(tasks=3))
    assert_unmoved(model, before)


# Any number of tasks, present or not, in any structure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tasks", [1, 2, 3, 11, 40])
@every_method
def test_any_number_of_tasks(two_heads, batch, name, tasks, dtype):
    model = two_heads(tasks=tasks, dtype=dtype)
    optimizer = make(name, model, tasks)
    before = parameters_of(model)
    train(model, optimizer, batch, range(3))
    assert optimizer.task_weights.shape == (tasks,)
    assert optimizer.task_weights.isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())
    for p, start in list(zip(model.parameters(), before, strict=True))[:4]:
        assert not torch.equal(p, start)


@every_method
def test_one_task_is_that_task(two_heads, batch, name):
    model, reference = two_heads(tasks=1), two_heads(tasks=1)
    inner = {"momentum": 0.0, "steps": 8} if "+" in name else {}
    optimizer = make(name, model, 1, optimizer=inner)
    plain = make("ls+muon" if "+" in name else "ls", reference, 1, optimizer=inner)
    train(model, optimizer, batch, range(1))
    train(reference, plain, batch, range(1))
    torch.testing.assert_close(parameters_of(model), parameters_of(reference), rtol=1e-3, atol=1e-5)


@every_method
def test_tasks_may_be_left_out(two_heads, batch, name):
    names = ["a", "b", "c"]
    model = two_heads(tasks=3)
    optimizer = make(name, model, names)
    for seed, wanted in enumerate([["a", "b"], ["c"], ["b", "c"], ["a"], names, ["b"], ["c", "a"]]):
        before = parameters_of(model.heads)
        optimizer.minimize(named(model, names), *batch(tasks=3, seed=seed), wanted)
        absent = [name not in wanted for name in names]
        assert (optimizer.task_weights[absent] == 0).all()
        assert optimizer.task_weights.isfinite().all()
        for index, head in enumerate(model.heads):
            if absent[index]:
                assert head.weight.grad is None
                assert torch.equal(head.weight, before[2 * index])
        numbers = optimizer.diagnostics()
        assert [math.isnan(numbers[f"loss/{name}"]) for name in names] == absent
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(value.isfinite().all() for value in optimizer.memory.values() if isinstance(value, torch.Tensor))


@every_method
def test_lists_tuples_and_dicts_of_losses_give_the_same(two_heads, batch, name):
    runs = []
    for structure in (list, tuple, lambda losses: dict(zip(("left", "right"), losses, strict=True))):
        model = two_heads()
        optimizer = make(name, model, ["left", "right"])
        closure = separate(model)
        for seed in range(4):
            answer = optimizer.minimize(lambda x, y: structure(closure(x, y)), *batch(seed=seed))
        assert type(answer) is type(structure(closure(*batch())))
        runs.append(snapshot(model, optimizer))
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


@pytest.mark.parametrize("name", LOSS_BASED)
def test_a_tensor_of_losses_gives_what_a_list_gives(two_heads, batch, name):
    model, reference = two_heads(dtype=torch.float64), two_heads(dtype=torch.float64)
    optimizer, plain = make(name, model), make(name, reference)
    train(model, optimizer, batch, range(5), model.losses)
    train(reference, plain, batch, range(5))
    torch.testing.assert_close(parameters_of(model), parameters_of(reference))
    torch.testing.assert_close(optimizer.task_weights, plain.task_weights)


@every_method
def test_a_tensor_of_losses_trains(two_heads, batch, name):
    model = two_heads()
    optimizer = make(name, model, optimizer={"lr": 0.01})
    first = model.losses(*batch())
    for _ in range(20):
        answer = optimizer.minimize(model.losses, *batch())
    assert answer.shape == (2,)
    assert not answer.requires_grad
    assert answer[0] < first[0]


@every_method
def test_validation_gives_a_number_and_remembers_nothing(two_heads, batch, name):
    model = two_heads()
    optimizer = make(name, model)
    train(model, optimizer, batch, range(3))
    before = snapshot(model, optimizer)
    with torch.no_grad():
        loss = optimizer.combine(separate(model), *batch(seed=9))
    assert loss.ndim == 0
    assert not loss.requires_grad
    assert loss.isfinite()
    assert_same(snapshot(model, optimizer), before)
    optimizer.zero_grad()
    assert optimizer.diagnostics()["skipped_steps"] == 0
    with pytest.raises(RuntimeError, match="No parameter has a gradient"):
        optimizer.step()


# Equal to what is known


@pytest.mark.parametrize("tasks", [2, 3])
def test_ls_is_adam_on_the_mean_loss_bit_for_bit(two_heads, batch, tasks):
    model, reference = two_heads(tasks=tasks), two_heads(tasks=tasks)
    optimizer, plain = make("ls", model, tasks), torch.optim.Adam(reference.parameters(), lr=1e-3, fused=True)
    for seed in range(20):
        data = batch(tasks=tasks, seed=seed)
        optimizer.minimize(model.losses, *data)
        plain.zero_grad()
        reference.losses(*data).mean().backward()
        plain.step()
    assert_unmoved(model, parameters_of(reference))


def test_ls_with_muon_is_muon(two_heads, batch):
    model, reference = two_heads(), two_heads()
    optimizer, plain = make("ls+muon", model), Muon(reference)
    for seed in range(20):
        optimizer.minimize(model.losses, *batch(seed=seed))
        plain.minimize(reference.losses, *batch(seed=seed))
    torch.testing.assert_close(parameters_of(model), parameters_of(reference), rtol=0, atol=1e-6)


def test_the_combined_loss_shows_the_value_of_its_formula(two_heads, batch):
    model = two_heads(tasks=3)
    losses = torch.stack(separate(model)(*batch(tasks=3))).detach()
    values = {
        ("ls", "paper"): losses.mean(),
        ("ls", "nash-mtl"): losses.sum(),
        ("si", "paper"): losses.log().mean(),
        ("si", "nash-mtl"): losses.log().sum(),
        ("stl", "paper"): losses[0],
        ("dwa", "paper"): losses.sum(),
        ("dwa", "nash-mtl"): losses.mean(),
        ("uw", "paper"): losses.sum() / 2,
        ("gradnorm", "paper"): losses.sum(),
        ("graddrop", "paper"): losses.mean(),
    }
    for (name, protocol), expected in values.items():
        loss = build(name, model, 3, protocol=protocol).combine(separate(model), *batch(tasks=3))
        torch.testing.assert_close(loss.detach(), expected, msg=name)
        assert loss.requires_grad
    started = build("uw", model, 3, balancer={"start": -0.5}).combine(separate(model), *batch(tasks=3))
    torch.testing.assert_close(started.detach(), (math.exp(0.5) * losses - 0.5).sum() / 2)


def test_the_value_of_a_delivered_direction_is_not_rounded():
    theta = nn.Parameter(torch.full((3,), 1e6))
    optimizer = Balanced(BALANCERS["graddrop"](2), torch.optim.SGD([theta]))
    loss = optimizer.combine(lambda: [(theta - 1e6 + 1e-3).sum(), (theta - 1e6 + 2e-3).sum()])
    assert loss.item() == torch.tensor([0.003, 0.006]).mean().item()


@pytest.mark.parametrize("name", [name for name in WEIGHTING if name not in ("si", "uw")])
def test_the_combined_loss_shows_the_weighted_sum(two_heads, batch, name):
    model = two_heads(tasks=3)
    optimizer = make(name, model, 3)
    train(model, optimizer, batch, range(5))
    losses = torch.stack(separate(model)(*batch(tasks=3))).detach()
    loss = optimizer.combine(separate(model), *batch(tasks=3))
    torch.testing.assert_close(loss.detach(), optimizer.task_weights @ losses)


@pytest.mark.parametrize("name", WEIGHTING)
def test_the_gradient_of_the_combined_loss_is_the_weighted_sum(two_heads, batch, name):
    model = two_heads(tasks=3, dtype=torch.float64)
    optimizer = make(name, model, 3)
    train(model, optimizer, batch, range(5))
    x, y = batch(tasks=3, dtype=torch.float64)
    rows = [torch.autograd.grad(loss, list(model.trunk.parameters()), retain_graph=True) for loss in separate(model)(x, y)]
    optimizer.zero_grad()
    optimizer.combine(separate(model), x, y).backward()
    for p, *gradients in zip(model.trunk.parameters(), *rows, strict=True):
        expected = sum(weight * each for weight, each in zip(optimizer.task_weights, gradients, strict=True))
        torch.testing.assert_close(p.grad, expected)


@every_method
def test_heads_see_their_weight_or_the_plain_gradient(two_heads, batch, name):
    model = two_heads(tasks=3, dtype=torch.float64)
    optimizer = make(name, model, 3)
    train(model, optimizer, batch, range(2))
    x, y = batch(tasks=3, dtype=torch.float64)
    plain = torch.autograd.grad(sum(separate(model)(x, y)), [head.weight for head in model.heads])
    optimizer.zero_grad()
    optimizer.combine(separate(model), x, y).backward()
    weights = optimizer.task_weights if optimizer.balancer.heads == "weighted" else torch.ones(3)
    assert (optimizer.balancer.heads == "plain") == (name.partition("+")[0] in ("pcgrad", "cagrad", "graddrop"))
    for head, gradient, weight in zip(model.heads, plain, weights, strict=True):
        torch.testing.assert_close(head.weight.grad, weight * gradient)


@every_method
def test_diagnostics_is_a_flat_dict_of_floats(two_heads, batch, name):
    model = two_heads()
    optimizer = make(name, model, ["left", "right"])
    assert all(type(value) is float for value in optimizer.diagnostics().values())
    train(model, optimizer, batch, range(3))
    numbers = optimizer.diagnostics()
    assert all(isinstance(key, str) and type(value) is float and math.isfinite(value) for key, value in numbers.items())
    assert {"step", "skipped_steps", "lr/0", "weight/left", "weight/right", "loss/left", "loss/right"} <= set(numbers)
    assert numbers["step"] == 3
    assert numbers["weight/left"] == pytest.approx(optimizer.task_weights[0].item())


@pytest.mark.parametrize("name", ["ls", "famo", "nash-mtl"])
def test_a_step_without_combined_losses_is_told_once(two_heads, batch, name):
    model = two_heads()
    optimizer = build(name, model, tasks=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            sum(model.losses(*batch())).backward()
            optimizer.step()
    assert [str(each.message) for each in told] == [
        "step() without combine() and its backward(): a step of Adam on the gradients that are there, in which "
        f"{name} has no part."
    ]
