"""MOON and Muon as ordinary optimizers: state, resuming, copying, groups, schedulers, dtypes."""

import copy
import io
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
from moonopt.optim.groups import load_into

OPTIMIZERS = {
    "moon": lambda model: MOON(model, tasks=["left", "right"], beta=0.1, lr=0.05, weight_decay=0.1),
    "moon per_task": lambda model: MOON(model, tasks=["left", "right"], beta=0.1, delta="per_task"),
    "moon auto log": lambda model: MOON(model, tasks=["left", "right"], beta="auto", loss="log"),
    "muon": lambda model: Muon(model, lr=0.05, nesterov=True),
}


def _everything(model, optimizer):
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    group = optimizer.param_groups[0]
    return [*tensors, *(value for value in group.values() if isinstance(value, torch.Tensor))]


def _assert_equal(first, second):
    for a, b in zip(_everything(*first), _everything(*second), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def _continue(model, optimizer, batch, seeds=range(5, 10)):
    for seed in seeds:
        x, y = batch(seed=seed, dtype=next(model.parameters()).dtype)
        optimizer.minimize(lambda x, y: model.losses(x, y).float(), x, y)


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_resume_continues_bit_for_bit(two_heads, batch, build, dtype):
    model = two_heads(dtype=dtype)
    optimizer = build(model)
    _continue(model, optimizer, batch, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    _continue(model, optimizer, batch)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = two_heads(dtype=dtype, seed=7)
    resumed = build(other)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    _continue(other, resumed, batch)
    _assert_equal((model, optimizer), (other, resumed))
    assert resumed.param_groups[0]["step"] == 10


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_through_distributed_checkpoint_helpers(two_heads, batch, options, dtype):
    model = two_heads(dtype=dtype)
    optimizer = OPTIMIZERS["moon auto log"](model)
    _continue(model, optimizer, batch, range(5))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options)))
    weights = copy.deepcopy(model.state_dict())
    _continue(model, optimizer, batch)

    other = two_heads(dtype=dtype, seed=7)
    resumed = OPTIMIZERS["moon auto log"](other)
    other.load_state_dict(weights)
    set_optimizer_state_dict(other, resumed, saved, options=StateDictOptions(**options))
    _continue(other, resumed, batch)
    _assert_equal((model, optimizer), (other, resumed))


def test_resume_from_a_distributed_checkpoint_on_disk(two_heads, batch, tmp_path):
    model = two_heads(dtype=torch.bfloat16)
    optimizer = OPTIMIZERS["moon"](model)
    _continue(model, optimizer, batch, range(5))
    checkpoint = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    torch.distributed.checkpoint.save(checkpoint, checkpoint_id=tmp_path, no_dist=True)
    _continue(model, optimizer, batch)

    other = two_heads(dtype=torch.bfloat16, seed=7)
    resumed = OPTIMIZERS["moon"](other)
    loaded = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, resumed)}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(loaded["model"])
    set_optimizer_state_dict(other, resumed, loaded["optimizer"])
    _continue(other, resumed, batch)
    _assert_equal((model, optimizer), (other, resumed))
    assert resumed.tasks == ("left", "right")


def test_state_is_float32_for_bfloat16_parameters_and_stays_so_when_loaded(two_heads):
    model = two_heads(dtype=torch.bfloat16)
    optimizer = OPTIMIZERS["moon"](model)
    optimizer.load_state_dict(optimizer.state_dict())
    values = [value for state in optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in values} == {torch.float32}
    assert len(optimizer.state) == len(list(model.parameters())), "state exists from construction"
    assert optimizer.logits.dtype == torch.float32


def test_loading_copies_in_place(two_heads, batch):
    model = two_heads()
    optimizer = OPTIMIZERS["moon"](model)
    _continue(model, optimizer, batch)
    saved = copy.deepcopy(optimizer.state_dict())
    before = _everything(model, optimizer)
    _continue(model, optimizer, batch)
    optimizer.load_state_dict(saved)
    after = _everything(model, optimizer)
    assert all(a is b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_a_copy_continues_bit_for_bit_and_apart(two_heads, batch, build, copied):
    model = two_heads()
    optimizer = build(model)
    _continue(model, optimizer, batch, range(5))
    optimizer.combine(model.losses, *batch(seed=99))  # waits for its backward: must not travel
    other, twin = copied((model, optimizer))
    optimizer.zero_grad()
    _continue(model, optimizer, batch)
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    _continue(other, twin, batch)
    _assert_equal((model, optimizer), (other, twin))


def test_a_checkpoint_of_other_tasks_is_refused(two_heads):
    saved = MOON(two_heads(), tasks=["left", "right"]).state_dict()
    with pytest.raises(
        ValueError, match=r"checkpoint has other tasks: found \[\['left', 'right'\]\], expected \[\['a', 'b'\]\]"
    ):
        MOON(two_heads(), tasks=["a", "b"]).load_state_dict(saved)


def test_a_checkpoint_of_another_model_is_refused(two_heads):
    saved = MOON(two_heads(tasks=2), tasks=2).state_dict()
    with pytest.raises(ValueError, match=r"other sizes of parameter groups: found \[2, 6\], expected \[2, 8\]"):
        MOON(two_heads(tasks=3), tasks=2).load_state_dict(saved)
    other = nn.Sequential(nn.Linear(6, 13), nn.Linear(13, 12))
    other.head = nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 1))
    optimizer = MOON(other, tasks=2)
    with pytest.raises(ValueError, match=r"checkpoint's momentum has shape \(12, 6\), expected \(13, 6\)"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="other kinds of parameter groups"):
        optimizer.load_state_dict(torch.optim.AdamW(other.parameters()).state_dict())


def test_load_hooks_run(two_heads):
    optimizer = OPTIMIZERS["moon"](two_heads())
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: seen.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after"]


def test_step_hooks_run(two_heads, batch):
    model = two_heads()
    optimizer = OPTIMIZERS["moon"](model)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.minimize(model.losses, *batch())
    assert seen == ["before", "after"]


def test_thawed_parameters_are_told_and_can_be_added_by_name(two_heads, batch):
    model = two_heads()
    model.attention = nn.MultiheadAttention(12, 2)
    model.attention.requires_grad_(False)
    model.trunk[0].requires_grad_(False)
    optimizer = MOON(model, tasks=2, rules={"attention.out_proj.weight": "vector"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.minimize(model.losses, *batch())
    model.trunk[0].requires_grad_(True)
    before = model.trunk[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="2 parameters of the model have gradients and are not trained"):
        optimizer.minimize(model.losses, *batch())
    assert torch.equal(model.trunk[0].weight, before)
    model.attention.requires_grad_(True)
    model.trunk[0].bias.requires_grad_(False)
    optimizer.add_param_group({"params": model.trunk[0].named_parameters(), "lr": 0.5})
    model.trunk[0].bias.requires_grad_(True)
    optimizer.add_param_group({"params": model.trunk[0].named_parameters(), "lr": 0.5, "vector_lr": 0.1})
    with pytest.raises(ValueError, match="no parameter in this group that requires a gradient and is not trained already"):
        optimizer.add_param_group({"params": model.trunk[0].named_parameters()})
    optimizer.add_param_group({"params": model.attention.named_parameters()})
    added = [(group["kind"], group["lr"], group["rows"]) for group in optimizer.param_groups[2:]]
    assert added == [
        ("matrix", 0.5, [None]),
        ("vector", 0.1, [None]),
        ("matrix", 0.02, [[12, 12, 12]]),
        ("vector", 0.001, [None, None, None]),
    ]
    optimizer = pickle.loads(pickle.dumps(optimizer))
    model = optimizer._module
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.minimize(model.losses, *batch())
    moved = model.trunk[0].weight.detach() - before
    assert torch.linalg.matrix_norm(moved, 2).item() == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_frozen_later_rests_with_its_state_though_it_has_a_gradient(two_heads, batch, build):
    model = two_heads()
    optimizer = build(model)

    def step():
        optimizer.zero_grad(set_to_none=False)
        optimizer.combine(model.losses, *batch()).backward()
        optimizer.step()

    step()
    frozen = model.trunk[2]
    frozen.requires_grad_(False)
    before = copy.deepcopy([[p.detach(), optimizer.state[p]] for p in frozen.parameters()])
    step()
    assert frozen.weight.grad is not None
    torch.testing.assert_close([[p.detach(), optimizer.state[p]] for p in frozen.parameters()], before, rtol=0, atol=0)
    optimizer.load_state_dict(optimizer.state_dict())
    frozen.requires_grad_(True)
    step()
    assert not torch.equal(frozen.weight, before[0][0])


def test_gradients_of_frozen_parameters_alone_make_no_step(two_heads):
    model = two_heads().requires_grad_(False)
    optimizer = Muon([{"params": [*model.parameters()], "kind": "vector"}])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"do not require one, and frozen parameters rest. Use requires_grad_"):
        optimizer.step()


def test_a_part_of_the_model_is_routed_by_its_own_names(two_heads):
    model = two_heads()
    model.trunk[2].requires_grad_(False)
    optimizer = MOON(model.trunk, tasks=2, module=model, rules={"2.weight": "vector"})
    model.trunk[2].requires_grad_(True)
    optimizer.add_param_group({"params": model.trunk[2].named_parameters()})
    assert [(group["kind"], len(group["params"])) for group in optimizer.param_groups[2:]] == [("vector", 2)]


@pytest.mark.parametrize("rules", [None, {"2.weight": "vector"}])
def test_another_part_of_the_model_is_routed_by_the_models_names(two_heads, rules):
    model = two_heads()
    optimizer = MOON(model.trunk, tasks=2, module=model, rules=rules)
    optimizer.add_param_group({"params": model.heads.named_parameters()})
    assert [(group["kind"], len(group["params"])) for group in optimizer.param_groups[2:]] == [("vector", 4)]


def test_a_group_can_be_added_later(two_heads, batch):
    model = two_heads()
    extra = nn.Linear(12, 12, bias=False)
    model.trunk.append(extra)
    named = [(name, p) for name, p in model.named_parameters() if not name.startswith("trunk.4")]
    optimizer = MOON(named, module=model, tasks=2)
    optimizer.add_param_group({"params": [("trunk.4.weight", extra.weight)], "kind": "matrix", "lr": 0.5})
    before = extra.weight.detach().clone()
    optimizer.minimize(model.losses, *batch())
    assert torch.linalg.matrix_norm(extra.weight.detach() - before, 2).item() == pytest.approx(0.5, rel=0.15)
    with pytest.raises(ValueError, match="needs kind="):
        optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(2, 2)))]})
    assert len(optimizer.param_groups) == 3


SCHEDULERS = {
    "warm-up from 0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.05, 0.01], total_steps=12),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=4),
}


@pytest.mark.parametrize("build", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_drive_both_kinds(two_heads, batch, build, as_tensor):
    model = two_heads()
    rates = (torch.tensor(0.05), torch.tensor(0.01)) if as_tensor else (0.05, 0.01)
    optimizer = MOON(model, tasks=2, lr=rates[0], vector_lr=rates[1], beta=0.1)
    scheduler = build(optimizer)
    first = model.losses(*batch()).mean().item()
    for _ in range(10):
        assert all(value == value for value in optimizer.diagnostics().values())
        optimizer.minimize(model.losses, *batch())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
    assert model.losses(*batch()).mean().item() < first


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_at_rate_0_logits_and_matrices_stay(two_heads, batch, lr):
    model = two_heads()
    optimizer = MOON(model, tasks=2, lr=lr, beta=0.5, gamma=0.1)
    optimizer.param_groups[0]["logits"].copy_(torch.tensor([0.5, -0.5]))
    before = model.trunk[0].weight.detach().clone()
    optimizer.minimize(model.losses, *batch())
    assert torch.equal(optimizer.logits, torch.tensor([0.5, -0.5]))
    assert torch.equal(model.trunk[0].weight, before)


def test_a_tensor_rate_gives_what_a_float_gives(two_heads, batch):
    models = []
    for lr in (0.05, torch.tensor(0.05)):
        model = two_heads()
        optimizer = MOON(model, tasks=2, lr=lr, beta=0.1, weight_decay=0.1)
        _continue(model, optimizer, batch)
        models.append(model)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_bfloat16_parameters_train(two_heads, batch):
    model = two_heads(dtype=torch.bfloat16)
    optimizer = MOON(model, tasks=2, lr=0.05)
    x, y = batch(dtype=torch.bfloat16)

    def losses():
        return model.losses(x, y).float()

    first = losses().sum().item()
    for _ in range(30):
        optimizer.minimize(losses)
    assert losses().sum().item() < 0.8 * first


def test_repr_and_defaults_are_torchs(two_heads):
    text = repr(MOON(two_heads(), tasks=2))
    assert "Parameter Group 0" in text
    assert "kind: matrix" in text


def test_a_group_without_names_can_join_groups_with_names(two_heads):
    optimizer = MOON(two_heads(), tasks=2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "kind": "matrix"})
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(2)), "kind": "vector"})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 6, 1, 1]


def test_an_empty_group_is_refused():
    with pytest.raises(ValueError, match="A matrix parameter group has no parameters"):
        Muon([{"params": [], "kind": "matrix"}])


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_checkpoint_of_another_precision_trains_on_in_its_own(two_heads, batch, before, after):
    model = two_heads(dtype=before)
    optimizer = MOON(model, tasks=2)
    optimizer.minimize(model.losses, *batch(dtype=before))
    other = two_heads(dtype=after)
    resumed = MOON(other, tasks=2)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.state[other.trunk[0].weight]["momentum"].dtype == before
    resumed.minimize(other.losses, *batch(dtype=after))
    assert other.trunk[0].weight.dtype == after


def test_a_model_cast_after_construction_trains(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=2)
    model.double()
    optimizer.minimize(model.losses, *batch(dtype=torch.float64))
    assert model.trunk[0].weight.isfinite().all()


def test_state_is_loaded_onto_the_parameters_device_and_a_rate_stays_where_it_is():
    current = {"momentum": torch.zeros(2), "lr": torch.tensor(0.1)}
    rate = current["lr"]
    load_into(current, {"momentum": torch.ones(2, device="meta"), "lr": torch.tensor(0.2)}, torch.device("meta"))
    assert current["momentum"].device.type == "meta"
    assert current["lr"] is rate
    assert rate.item() == pytest.approx(0.2)


def test_a_failed_step_leaves_no_marks_of_the_scaler(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    calls = []

    def failing(x, y):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("second evaluation")
        return model.losses(x, y)

    scaler.scale(optimizer.combine(failing, *batch())).backward()
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_a_scaler_marks_is_masked_and_counted_though_all_is_finite(name, two_heads, batch):
    model = two_heads()
    optimizer = OPTIMIZERS[name](model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.combine(lambda x, y: list(model.losses(x, y)), *batch()).backward()
    optimizer.found_inf = torch.ones(())  # as another process may have found
    optimizer.step()
    del optimizer.found_inf
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.diagnostics()["skipped_steps"] == 1
