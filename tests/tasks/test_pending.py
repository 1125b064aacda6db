"""Between combine and step: the orders in which plain loops, scalers and trainers call, and micro-batches."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

from moonopt import MOON, build


def _logits_after(model, optimizer, batch, run):
    for seed in range(4):
        run(optimizer, model, batch(seed=seed))
    return optimizer.logits, [p.detach().clone() for p in model.parameters()]


def _minimize(optimizer, model, data):
    optimizer.minimize(model.losses, *data)


def _by_hand(optimizer, model, data):
    optimizer.zero_grad()
    optimizer.combine(model.losses, *data).backward()
    optimizer.step()


def _zero_grad_last(optimizer, model, data):
    optimizer.combine(model.losses, *data).backward()
    optimizer.step()
    optimizer.zero_grad()


def _zero_grad_between_loss_and_backward(optimizer, model, data):
    loss = optimizer.combine(model.losses, *data)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _step_with_closure(optimizer, model, data):
    def closure():
        loss = optimizer.combine(model.losses, *data)
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)


def _losses_with_again(optimizer, model, data):
    optimizer.zero_grad()
    optimizer.combine(model.losses(*data), again=lambda data=data: model.losses(*data)).backward()
    optimizer.step()


ORDERS = [_by_hand, _zero_grad_last, _zero_grad_between_loss_and_backward, _step_with_closure, _losses_with_again]


@pytest.mark.parametrize("run", ORDERS)
def test_all_orders_give_the_same(two_heads, batch, run):
    first, second = two_heads(), two_heads()
    expected = _logits_after(first, MOON(first, tasks=2, beta=0.1), batch, _minimize)
    found = _logits_after(second, MOON(second, tasks=2, beta=0.1), batch, run)
    assert expected[0].abs().max() > 0
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("delta", ["loss_difference", "per_task"])
def test_a_grad_scaler_changes_nothing(two_heads, batch, unscale_first, delta):
    first, second = two_heads(), two_heads()
    expected = _logits_after(first, MOON(first, tasks=2, beta=0.1, delta=delta), batch, _minimize)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def run(optimizer, model, data):
        optimizer.zero_grad()
        scaler.scale(optimizer.combine(model.losses, *data)).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()

    found = _logits_after(second, MOON(second, tasks=2, beta=0.1, delta=delta), batch, run)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_step_that_a_scaler_marks_is_void_counted_and_never_raised(two_heads, batch, unscale_first):
    model = two_heads()
    optimizer = MOON(model, tasks=2, beta=0.1, gamma=0.5)
    optimizer.param_groups[0]["logits"].copy_(torch.tensor([0.5, -0.5]))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch()
    optimizer.zero_grad()
    scaler.scale(optimizer.combine(model.losses, x, y)).backward()
    model.trunk[0].weight.grad[0, 0] = math.inf  # an overflow
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.logits.tolist() == [0.5, -0.5]
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())
    optimizer.minimize(model.losses, x, y)
    assert optimizer.diagnostics()["skipped_steps"] == 1


def test_a_step_that_never_comes_is_forgotten_by_zero_grad_and_counted(two_heads, batch):
    model, reference = two_heads(), two_heads()
    optimizer, plain = MOON(model, tasks=2, beta=0.1), MOON(reference, tasks=2, beta=0.1)
    optimizer.combine(model.losses, *batch(seed=50)).backward()  # and some trainer decides not to step
    optimizer.zero_grad()
    for seed in range(2):
        optimizer.minimize(model.losses, *batch(seed=seed))
        plain.minimize(reference.losses, *batch(seed=seed))
    assert torch.equal(optimizer.logits, plain.logits)
    assert optimizer.diagnostics()["skipped_steps"] == 1


def test_a_loss_whose_backward_never_ran_has_no_part_in_the_step(two_heads, batch):
    model, reference = two_heads(), two_heads()
    optimizer, plain = MOON(model, tasks=2, beta=0.1), MOON(reference, tasks=2, beta=0.1)
    optimizer.combine(model.losses, *batch(seed=50))
    optimizer.minimize(model.losses, *batch())
    plain.minimize(reference.losses, *batch())
    assert torch.equal(optimizer.logits, plain.logits)
    assert optimizer.diagnostics()["losses_without_backward"] == 1


#: What rlw and pcgrad draw for a batch that is left out is gone.
REPEATABLE = ["moon", "muon", "ls", "si", "uw", "dwa", "gradnorm", "mgda", "cagrad", "imtl-g", "nash-mtl", "famo"]


def _before_the_backward(optimizer, model, loss):
    optimizer.zero_grad()


def _after_it_by_the_optimizer(optimizer, model, loss):
    loss.backward()
    optimizer.zero_grad()


def _after_it_by_the_model(optimizer, model, loss):
    loss.backward()
    model.zero_grad()


@pytest.mark.parametrize("leave_out", [_before_the_backward, _after_it_by_the_optimizer, _after_it_by_the_model])
@pytest.mark.parametrize("factor", [100.0, math.nan], ids=["outlier", "nan"])
@pytest.mark.parametrize("name", REPEATABLE)
@pytest.mark.filterwarnings("ignore:The second evaluation")
def test_a_batch_that_a_loop_leaves_out_has_no_part_in_later_steps(two_heads, batch, name, factor, leave_out):
    found = []
    for with_another in (False, True):
        model = two_heads()
        optimizer = build(name, model, tasks=2)
        for seed in range(3):
            if with_another:
                x, y = batch(seed=50 + seed)
                leave_out(optimizer, model, optimizer.combine(model.losses, x, y * factor))
            _by_hand(optimizer, model, batch(seed=seed))
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["si", "famo", "uw", "dwa", "gradnorm", "mgda", "moon"])
def test_losses_that_are_not_finite_do_not_stop_a_loop_that_clears_gradients_after_steps_alone(two_heads, batch, name):
    model = two_heads()
    optimizer, steps = build(name, model, tasks=2), 0
    for seed in range(6):
        x, y = batch(seed=seed)
        loss = optimizer.combine(model.losses, x, y * (math.nan if seed in (2, 3) else 1))
        if loss.isfinite():
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == 4
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["si", "famo", "uw", "dwa", "gradnorm", "mgda", "moon"])
@pytest.mark.filterwarnings("ignore:The second evaluation")
def test_a_gradient_that_is_not_finite_is_forgotten_with_its_step(two_heads, batch, name):
    found = []
    for with_another in (False, True):
        model = two_heads()
        more = {"optimizer": {"nonfinite": "skip"}} if name == "moon" else {"nonfinite": "skip"}
        optimizer = build(name, model, tasks=2, **more)

        def of_root(x, y, model=model):  # finite, and its gradient is zero times infinity
            return model.losses(x, y) + (0 * model.trunk[0].weight[0, 0]).sqrt()

        for seed in range(3):
            if with_another:
                optimizer.minimize(of_root, *batch(seed=50 + seed))
            optimizer.minimize(model.losses, *batch(seed=seed))
        found.append([p.detach().clone() for p in model.parameters()])
    assert optimizer.diagnostics()["skipped_steps"] == 3
    assert all(map(torch.equal, *found))


def test_gradients_may_be_cleared_between_the_losses_and_their_backward(two_heads, batch):
    found = []
    for late in (False, True):
        model = two_heads()
        optimizer = MOON(model, tasks=2, beta=0.1)
        for seed in range(3):
            if not late:
                optimizer.zero_grad()
            loss = optimizer.combine(model.losses, *batch(seed=seed))
            if late:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append([optimizer.logits, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("between", "name"), [("validation", "moon"), ("validation", "famo"), ("another", "moon")])
def test_losses_whose_gradients_are_cleared_late_stay_though_others_are_combined(two_heads, batch, name, between):
    found = []
    for late in (False, True):
        model = two_heads()
        optimizer = build(name, model, tasks=2)
        for seed in range(3):
            if not late:
                optimizer.zero_grad()
            loss = optimizer.combine(model.losses, *batch(seed=seed))
            if late:
                optimizer.zero_grad()
            with torch.set_grad_enabled(between == "another"):
                other = optimizer.combine(model.losses, *batch(seed=50 + seed))
            ((loss + other) / 2 if between == "another" else loss).backward()
            optimizer.step()
        found.append([optimizer.task_weights, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *found))
    assert optimizer.diagnostics().get("losses_without_backward", 0) == 0


@pytest.mark.parametrize("name", ["moon", "famo", "muon"])
def test_gradients_may_be_collected_elsewhere(two_heads, batch, name):
    """As with buffers in float32 beside the parameters, or with torch.autograd.grad by hand."""
    found = []
    for elsewhere in (False, True):
        model = two_heads()
        optimizer = build(name, model, tasks=2)
        collected = {p: torch.zeros_like(p) for p in model.parameters()}

        def collect(p, collected=collected):
            collected[p] += p.grad
            p.grad = None

        for p in model.parameters() if elsewhere else ():
            p.register_post_accumulate_grad_hook(collect)
        for seed in range(2):
            optimizer.zero_grad()
            for part in range(3):
                (optimizer.combine(model.losses, *batch(seed=3 * seed + part)) / 3).backward()
            for p in model.parameters() if elsewhere else ():
                p.grad = collected[p].clone()
                collected[p].zero_()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
        assert optimizer.diagnostics()["skipped_steps"] == 0
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["si", "famo"])
def test_a_batch_of_fewer_tasks_that_is_left_out_does_not_void_the_next(two_heads, batch, name):
    model = two_heads()
    optimizer = build(name, model, tasks=["a", "b"])

    def losses(x, y, names="ab"):
        return {task: loss for task, loss in zip("ab", model.losses(x, y), strict=True) if task in names}

    x, y = batch()
    optimizer.minimize(losses, x, y)
    assert not optimizer.combine(losses, x, y * math.nan, "a").isfinite()
    loss = optimizer.combine(losses, x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert optimizer.task_weights.isfinite().all()


def test_gradnorm_learns_nothing_of_a_skipped_step(two_heads, batch):
    """The next batch is good, or is left out itself."""
    ends = []
    for skipped in (False, True):
        model = two_heads()
        optimizer = build("gradnorm", model, tasks=2)
        _by_hand(optimizer, model, batch(seed=0))
        x, y = batch(seed=1)
        if skipped:
            optimizer.combine(model.losses, x, y).backward()
            optimizer.zero_grad()
        optimizer.combine(model.losses, x, y * math.nan)
        _by_hand(optimizer, model, batch(seed=2))
        ends.append(optimizer.memory["w"])
    assert torch.equal(*ends)


def test_losses_may_be_combined_before_any_of_them_has_a_backward(two_heads, batch):
    found = []
    for at_once in (False, True):
        model = two_heads(dtype=torch.float64)
        optimizer = MOON(model, tasks=2, beta=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            halves = [optimizer.combine(model.losses, *batch(dtype=torch.float64, seed=10 * seed + part)) for part in (0, 1)]
            if at_once:
                sum(halves).backward()
            else:
                for half in halves:
                    half.backward()
            optimizer.step()
        found.append(optimizer.logits)
    torch.testing.assert_close(*found, rtol=1e-10, atol=0)
    assert optimizer.diagnostics()["losses_without_backward"] == 0


@pytest.mark.parametrize(("dtype", "tolerance", "steps"), [(torch.float32, 1e-6, 1), (torch.float64, 1e-10, 20)], ids=str)
@pytest.mark.parametrize("delta", ["loss_difference", "per_task"])
@pytest.mark.parametrize("number", [1, 4])
def test_micro_batches_equal_one_large_batch(two_heads, batch, dtype, tolerance, steps, delta, number):
    whole, parts = two_heads(dtype=dtype), two_heads(dtype=dtype)
    one = MOON(whole, tasks=2, beta=0.1, delta=delta)
    several = MOON(parts, tasks=2, beta=0.1, delta=delta)
    for step in range(steps):
        x, y = batch(size=32, seed=step, dtype=dtype)
        one.minimize(whole.losses, x, y)
        several.zero_grad()
        for piece, target in zip(x.chunk(number), y.chunk(number), strict=True):
            (several.combine(parts.losses, piece, target) / number).backward()
            del piece, target  # bound early: the loop's variables may go
        several.step()
        for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
        torch.testing.assert_close(one.logits, several.logits, rtol=0, atol=1e-4 if dtype == torch.float32 else tolerance)


def test_rebinding_the_batch_in_the_loop_does_not_reach_the_second_evaluation(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=2)
    seen = []

    def losses(x, y):
        seen.append(x[0, 0].item())
        return model.losses(x, y)

    for seed in range(3):
        x, y = batch(seed=seed)
        (optimizer.combine(losses, x, y) / 3).backward()
    optimizer.step()
    assert seen[:3] == seen[3:]
    assert len(set(seen)) == 3


def test_each_tasks_delta_is_the_mean_over_the_micro_batches_that_have_it(two_heads, batch):
    model = two_heads(dtype=torch.float64)
    optimizer = MOON(model, tasks=["left", "right"], delta="per_task", beta=0.1)
    data = [batch(seed=seed, dtype=torch.float64) for seed in range(2)]

    def losses(x, y, names):
        return {name: loss for name, loss in zip(["left", "right"], model.losses(x, y), strict=True) if name in names}

    optimizer.combine(losses, *data[0], ["left", "right"]).backward()
    optimizer.combine(losses, *data[1], ["left"]).backward()
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    gradients = [
        torch.autograd.grad(model.losses(*d)[task], optimizer.param_groups[0]["params"]) for d in data for task in range(2)
    ]
    optimizer.step()
    directions = [(b - p.detach()) / 0.02 for b, p in zip(before, optimizer.param_groups[0]["params"], strict=True)]
    inner = [sum((d * g).sum() for d, g in zip(directions, row, strict=True)).item() for row in gradients]
    d = optimizer.diagnostics()
    assert d["delta/left"] == pytest.approx((inner[0] + inner[2]) / 2)
    assert d["delta/right"] == pytest.approx(inner[1])


def test_lightning_trains_like_a_plain_loop(two_heads, batch, tmp_path):
    """Automatic optimization: loss, zero_grad, backward, step, all inside of step's closure, on a wrapped optimizer."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model, manual):
            super().__init__()
            self.model, self.automatic_optimization = model, not manual

        def configure_optimizers(self):
            return MOON(self.model, tasks=2, beta=0.1)

        def training_step(self, data, index):
            optimizer = self.optimizers()
            loss = optimizer.combine(self.model.losses, *data)
            if self.automatic_optimization:
                return loss
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

    reference = two_heads()
    plain = MOON(reference, tasks=2, beta=0.1)
    for seed in range(4):
        plain.minimize(reference.losses, *batch(seed=seed))
    for manual in (False, True):
        module = Module(two_heads(), manual)
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        loader = torch.utils.data.DataLoader([batch(seed=seed) for seed in range(4)], batch_size=None)
        trainer.fit(module, loader)
        for a, b in zip(module.model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(trainer.optimizers[0].logits, plain.logits)
        assert trainer.optimizers[0].logits.abs().max() > 0


def test_accelerate_accumulates_like_micro_batches(two_heads, batch):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # other tests have set it up otherwise
    reference, model = two_heads(), two_heads()
    plain = MOON(reference, tasks=2, beta=0.1)
    for step in range(2):
        plain.zero_grad()
        for seed in (2 * step, 2 * step + 1):
            (plain.combine(reference.losses, *batch(seed=seed)) / 2).backward()
        plain.step()

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    moon = MOON(model, tasks=2, beta=0.1)
    prepared, optimizer = accelerator.prepare(model, moon)
    for seed in range(4):
        with accelerator.accumulate(prepared):
            accelerator.backward(moon.combine(model.losses, *batch(seed=seed)))
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(moon.logits, plain.logits)
    assert moon.param_groups[0]["step"] == 2


def test_autocast_trains(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=2, beta=0.1)
    x, y = batch()
    first = model.losses(x, y).sum()
    for _ in range(20):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = optimizer.combine(lambda x, y: nn.functional.mse_loss(model(x).float(), y, reduction="none").mean(0), x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model.losses(x, y).sum() < first


@pytest.mark.parametrize("whole", [False, True], ids=["in parts", "whole"])
@pytest.mark.parametrize("name", ["moon", "famo", "muon", "mgda"])
@pytest.mark.filterwarnings("ignore:The second evaluation")
def test_the_backward_pass_may_be_compiled(two_heads, batch, name, whole):
    """Also of a batch that is left out then."""
    found = []
    for compiled in (False, True):
        model = two_heads()
        optimizer = build(name, model, tasks=2)
        for seed in range(3):
            compiler = torch.compile(backend="eager", fullgraph=whole)
            with compiled_autograd._enable(compiler) if compiled else contextlib.nullcontext():
                _after_it_by_the_model(optimizer, model, optimizer.combine(model.losses, *batch(seed=50 + seed)))
                optimizer.combine(model.losses, *batch(seed=seed)).backward()
                optimizer.step()
                model.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
    torch.compiler.reset()
    assert all(map(torch.equal, *found))
