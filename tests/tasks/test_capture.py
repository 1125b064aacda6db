"""A step as a CUDA graph makes the same numbers as a step without; most of this needs a GPU."""

import copy
import functools

import pytest
import torch
from torch import nn

import moonopt
from moonopt import MOON, Balanced, Muon
from moonopt.balance import DWA, FAMO, IMTLG, LS, MGDA, UW, CAGrad, GradDrop, GradNorm, NashMTL, PCGrad
from moonopt.bench.qm9 import QM9
from moonopt.methods import METHODS
from moonopt.speed.molecules import molecules
from moonopt.tasks.capture import CaptureError, _settings

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MODES = ("loss_difference", "forward_mode", "double_backward", "per_task")


class Net(nn.Module):
    """Attention, dropout and batch norm, a matrix that is iterated in half precision, and a head per task."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32))
        self.body = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
        self.norm = nn.BatchNorm1d(32)
        self.heads = nn.ModuleList(nn.Linear(32, 1) for _ in range(2))

    def losses(self, x, y):
        hidden = self.norm(self.body(self.lift(x)).mean(1))
        return {name: (head(hidden)[:, 0] - y).square().mean() for name, head in zip("ab", self.heads, strict=True)}


def batches(count, size=16, device="cuda"):
    generator = torch.Generator().manual_seed(1)
    shapes = ((size, 5, 32), (size,))
    return [tuple(torch.randn(shape, generator=generator).to(device) for shape in shapes) for _ in range(count)]


def trained(build, data, captured, schedule=None, make=Net):
    """The model and the optimizer after a step on each batch, and the losses on the way; without a graph by a long warm-up."""
    torch.manual_seed(0)
    model = make().cuda()
    optimizer = build(model)
    step = moonopt.capture(optimizer, model.losses, warmup=3 if captured else 1000)
    scheduler = None if schedule is None else schedule(optimizer)
    losses = []
    for batch in data:
        losses.append(step(*batch))
        if scheduler is not None:
            scheduler.step()
    assert (step.graphs > 0) == captured
    return model, optimizer, losses


def assert_equal(one, other):
    (model, _, losses), (other_model, _, other_losses) = one, other
    for found, expected in zip(losses, other_losses, strict=True):
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in found)
    for (name, value), expected in zip(model.state_dict().items(), other_model.state_dict().values(), strict=True):
        assert value.equal(expected), name


def moon(mode="loss_difference", **settings):
    return lambda model: MOON(model, tasks=["a", "b"], lr=0.01, beta=0.3, delta=mode, **settings)


#: Their step is two graphs, and between them the host solves a problem.
BY_GRAM = (MGDA, PCGrad, CAGrad, IMTLG, NashMTL)


def by_gram(balancer, model):
    return Balanced(balancer(["a", "b"]), torch.optim.Adam(model.parameters(), lr=1e-3, fused=True))


def test_without_a_gpu_it_is_minimize():
    data = batches(4, device="cpu")
    models = []
    for captured in (True, False):
        torch.manual_seed(0)
        model = Net()
        optimizer = moon()(model)
        step = moonopt.capture(optimizer, model.losses) if captured else None
        for batch in data:
            step(*batch) if step else optimizer.minimize(model.losses, *batch)
        models.append(model)
    assert all(p.equal(q) for p, q in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda model: MOON(model, tasks=2, dual="exact"), 'dual="online"'),
        (lambda model: MOON(model, tasks=2, delta="auto"), "name the mode"),
        (lambda model: Muon(model, schedule="svd"), 'use "polar_express"'),
        (
            lambda model: Balanced(GradDrop(2), torch.optim.Adam(model.parameters())),
            "graddrop computes its weights",
        ),
        (
            lambda model: Balanced(MGDA(2), torch.optim.Adam(model.parameters()), engine="blocked:1"),
            'mgda computes its weights on the host, and none but engine="stored" and "stored:batched" waits for them',
        ),
        (lambda model: Balanced(DWA(2, sliding=False), torch.optim.Adam(model.parameters())), "dwa computes its weights"),
        (lambda model: Balanced(LS(2), torch.optim.SGD(model.parameters())), "has no capturable form"),
        (lambda model: Balanced(LS(2), torch.optim.Adam(model.parameters()), every=2), "every > 1"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_reason(build, text):
    with pytest.raises(ValueError, match=text):
        moonopt.capture(build(Net()), Net().losses)


def test_hooks_on_parameters_are_an_obstacle_where_weights_come_from_inner_products():
    model = Net()
    optimizer = by_gram(MGDA, model)
    assert optimizer.obstacle_to_capture() is None
    model.lift[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="hooks on parameters"):
        moonopt.capture(optimizer, model.losses)


def test_several_processes_are_an_obstacle(monkeypatch):
    monkeypatch.setattr("moonopt.tasks.capture.world_size", lambda: 2)
    model = Net()
    with pytest.raises(ValueError, match="what several processes exchange"):
        moonopt.capture(Muon(model), model.losses)


def test_capturable_keeps_rates_as_tensors_that_schedulers_change_and_checkpoints_restore():
    model = Net()
    optimizer = Muon(model, lr=0.5, vector_lr=0.25, capturable=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [rate.item() for rate in rates] == [0.5, 0.25]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.minimize(lambda: model.losses(*batches(1, device="cpu")[0]))
    scheduler.step()
    assert [rate.item() for rate in rates] == [0.25, 0.125]
    optimizer.load_state_dict(saved)
    assert [rate.item() for rate in rates] == [0.5, 0.25]
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))


def test_a_checkpoint_of_a_captured_adam_goes_on_on_a_cpu():
    def build():
        model = Net()
        return model, Balanced(LS(["a", "b"]), torch.optim.AdamW(model.parameters()), module=model)

    (model, optimizer), (other, loaded) = build(), build()
    batch = batches(1, device="cpu")[0]
    optimizer.minimize(model.losses, *batch)
    optimizer.prepare_for_capture()
    loaded.load_state_dict(optimizer.state_dict())
    loaded.minimize(other.losses, *batch)
    assert not any(group["capturable"] for group in loaded.param_groups)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "stl" and name != "stl+muon"])
def test_what_a_step_counts_and_remembers_is_no_setting_of_it(name):
    """Or every step would be of another kind, and none ever captured."""
    torch.manual_seed(0)
    model = Net()
    optimizer = moonopt.build(name, model, list("ab"))
    assert optimizer.known_module() is model
    settings = []
    for each in batches(3, device="cpu"):
        optimizer.minimize(model.losses, *each)
        settings.append([_settings(optimizer, group) for group in optimizer.param_groups])
    assert settings[0] == settings[1] == settings[2]
    known = {key for group in settings[0] for key, _ in group}
    assert {"weight_decay", "betas"} <= known
    assert not known & {"params", "rows", "tasks", "step", "lr"}
    assert not any(key.startswith("balancer_") for key in known)


@needs_gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["plain", "log"])
def test_a_captured_moon_step_is_the_step_with_dropout_and_buffers(mode, loss):
    data = batches(12)
    build = moon(mode, loss=loss)
    one, other = (trained(build, data, captured) for captured in (True, False))
    assert_equal(one, other)
    assert one[1].logits.equal(other[1].logits)
    assert one[1].logits.abs().max() > 0
    found, expected = one[1].diagnostics(), other[1].diagnostics()
    assert found.keys() == expected.keys()
    assert found["step"] == expected["step"] == 12
    assert found["delta/a"] == expected["delta/a"]


class Penalised(nn.Module):
    """Its losses are differentiated inside of their computation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def losses(self, x, y):
        x = x.mean(1).detach().requires_grad_()
        output = self.layers(x)[:, 0]
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return {"a": slope.square().sum(1).mean(), "b": (output - y).square().mean()}


@needs_gpu
@pytest.mark.parametrize("build", [moon(), lambda model: by_gram(FAMO, model)], ids=["moon", "famo"])
def test_a_closure_that_differentiates_inside_is_the_same_captured(build):
    runs = [trained(build, batches(8), captured, make=Penalised) for captured in (True, False)]
    assert_equal(*runs)


@needs_gpu
def test_a_captured_step_is_that_of_minimize():
    data, models = batches(6), []
    for captured in (True, False):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = moon("per_task")(model)
        step = moonopt.capture(optimizer, model.losses) if captured else None
        for batch in data:
            step(*batch) if step else optimizer.minimize(model.losses, *batch)
        models.append(model)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@needs_gpu
@pytest.mark.parametrize(
    "build",
    [
        lambda model: Muon(model, lr=0.01, weight_decay=0.1, vector_weight_decay=0.1),
        lambda model: Muon(model, lr=0.01, nesterov=True, scale="rms"),
        lambda model: Balanced(LS(["a", "b"]), torch.optim.Adam(model.parameters(), lr=1e-3), module=model),
        lambda model: Balanced(UW(["a", "b"]), torch.optim.AdamW(model.parameters(), lr=1e-3), module=model),
        lambda model: Balanced(FAMO(["a", "b"]), torch.optim.Adam(model.parameters(), lr=1e-3), module=model),
        lambda model: Balanced(FAMO(["a", "b"]), Muon(model, lr=0.01), module=model),
        lambda model: Balanced(DWA(["a", "b"], window=2), torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)),
        lambda model: Balanced(GradNorm(["a", "b"]), Muon(model, lr=0.01)),
        *(functools.partial(by_gram, balancer) for balancer in BY_GRAM),
        lambda model: Balanced(NashMTL(["a", "b"]), torch.optim.Adam(model.parameters()), engine="stored:batched"),
    ],
    ids=[
        "muon",
        "nesterov",
        "ls+adam",
        "uw+adamw",
        "famo+adam",
        "famo+muon",
        "dwa",
        "gradnorm",
        *(each.name for each in BY_GRAM),
        "batched",
    ],
)
def test_other_methods_and_schedulers_and_shapes_are_the_same_captured(build):
    data = batches(6) + batches(1, size=7) + batches(6) + batches(1, size=7)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    assert_equal(*(trained(build, data, captured, schedule) for captured in (True, False)))


@needs_gpu
@pytest.mark.parametrize("build", [moon(), lambda model: Balanced(LS(["a", "b"]), torch.optim.Adam(model.parameters()))])
def test_a_loaded_checkpoint_leaves_the_graph_valid(build):
    torch.manual_seed(0)
    model = Net(dropout=0.0).cuda()
    optimizer = build(model)
    step = moonopt.capture(optimizer, model.losses)
    data = batches(12)
    for batch in data[:6]:
        step(*batch)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    first = [step(*batch) for batch in data[6:]]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    second = [step(*batch) for batch in data[6:]]
    assert all(one[name].equal(other[name]) for one, other in zip(first, second, strict=True) for name in one)


@needs_gpu
def test_what_makes_another_graph():
    model = Net().cuda()
    optimizer = moon()(model)
    step = moonopt.capture(optimizer, model.losses)
    batch = batches(1)[0]
    for expected, change in enumerate(
        (lambda: None, model.norm.eval, lambda: optimizer.param_groups[0].update(momentum=0.9)), 1
    ):
        change()
        for _ in range(4):
            step(*batch)
        assert step.graphs == expected
    before = model.norm.running_mean.clone()
    step(*batch)
    assert model.norm.running_mean.equal(before)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@needs_gpu
def test_a_checkpoint_without_state_makes_the_graph_void():
    torch.manual_seed(0)
    model = Net(dropout=0.0).cuda()
    optimizer = Balanced(LS(["a", "b"]), torch.optim.Adam(model.parameters()), module=model)
    new = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step = moonopt.capture(optimizer, model.losses)
    data = batches(6)
    first = [step(*batch) for batch in data]
    model.load_state_dict(new[0])
    optimizer.load_state_dict(new[1])
    second = [step(*batch) for batch in data]
    assert all(one[name].equal(other[name]) for one, other in zip(first, second, strict=True) for name in one)


@needs_gpu
def test_after_a_shape_that_cannot_be_captured_the_first_one_goes_on_right():
    def losses(model, x, y):
        found = model.losses(x, y)
        if len(x) == 7:
            found["a"].item()
        return found

    results = []
    for warmup in (3, 1000):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = moon()(model)
        step = moonopt.capture(optimizer, lambda x, y, model=model: losses(model, x, y), warmup=warmup)
        for batch in batches(5) + batches(3, size=7):
            step(*batch)
        if warmup == 3:
            with pytest.raises(CaptureError):
                step(*batches(1, size=7)[0])
        results.append((model, [step(*batch) for batch in batches(3)]))
    (one, first), (other, second) = results
    assert all(a[name].equal(b[name]) for a, b in zip(first, second, strict=True) for name in a)
    assert all(p.equal(q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@needs_gpu
def test_a_bad_loss_is_told_and_leaves_everything_as_it_was():
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = moon()(model)
    step = moonopt.capture(optimizer, model.losses)
    data = batches(7)
    for batch in data[:6]:
        step(*batch)
    before = [p.clone() for p in model.parameters()]
    step(data[6][0], data[6][1] * torch.nan)
    assert all(p.equal(q) for p, q in zip(model.parameters(), before, strict=True))
    with pytest.raises(FloatingPointError, match="At step 7, the loss of tasks 'a', 'b'"):
        optimizer.state_dict()


@needs_gpu
def test_replays_do_not_wait_for_the_device():
    model = Net().cuda()
    optimizer = moon()(model)
    step = moonopt.capture(optimizer, model.losses)
    data = batches(30)
    for batch in data[:6]:
        step(*batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data[6:]:
            step(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("mode", ["loss_difference", "double_backward"])
def test_the_network_of_qm9_is_the_same_captured(mode):
    found = []
    for warmup in (2, 1000):
        torch.manual_seed(0)
        bench = QM9({"model.width": 16, "model.edge_width": 16})
        model = bench.model().cuda()
        batch = *(each.cuda() for each in molecules(12)), torch.ones(11).cuda()
        step = moonopt.capture(MOON(model, tasks=bench.tasks, lr=0.01, delta=mode), lambda *b: bench.losses(model, b), warmup)
        losses = [step(*batch) for _ in range(6)]
        assert (step.graphs > 0) == (warmup < 6)
        found.append((losses, model))
    (losses, model), (expected, reference) = found
    assert all(a[task].equal(b[task]) for a, b in zip(losses, expected, strict=True) for task in a)
    assert all(p.equal(q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


@needs_gpu
@pytest.mark.parametrize("half", [False, True], ids=["float32", "half messages"])
def test_widths_of_qm9_that_alternate_are_the_same_captured_and_after_a_checkpoint(half):
    bench = QM9({"model.width": 16, "model.edge_width": 16, "model.half_messages": half})
    batches = [(*(each.cuda() for each in molecules(120, seed)), torch.ones(11).cuda()) for seed in (2, 0, 1)]
    assert [batch[0].shape[1] for batch in batches] == [37, 38, 40]
    found = []
    for warmup in (2, 1000):
        torch.manual_seed(0)
        model = bench.model().cuda()
        optimizer = MOON(model, tasks=bench.tasks, lr=0.01)
        step = moonopt.capture(optimizer, lambda *batch, model=model: bench.losses(model, batch), warmup)
        losses = [step(*batches[number % 3]) for number in range(24)]
        assert step.graphs == (3 if warmup == 2 else 0)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        losses += [step(*batches[number % 3]) for number in range(6)]
        found.append((losses, model))
    (losses, model), (expected, reference) = found
    assert all(a[task].equal(b[task]) for a, b in zip(losses, expected, strict=True) for task in a)
    assert all(p.equal(q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


@needs_gpu
def test_a_closure_that_waits_is_refused_with_advice():
    model = Net().cuda()
    optimizer = moon()(model)

    def losses(x, y):
        found = model.losses(x, y)
        found["a"].item()
        return found

    step = moonopt.capture(optimizer, losses)
    batch = batches(1)[0]
    for _ in range(3):
        step(*batch)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CaptureError, match="must not wait for the device"):
        step(*batch)
    assert optimizer.param_groups[0]["step"] == 3
    assert all(p.equal(q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.minimize(losses, *batch)
    assert optimizer.diagnostics()["step"] == 4


@needs_gpu
def test_a_step_in_a_graph_of_ones_own():
    model = Net(dropout=0.0).cuda()
    twin = copy.deepcopy(model)
    x, y = batches(1)[0]
    optimizers = [Muon(each, lr=0.01, capturable=True) for each in (model, twin)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizers[0].minimize(model.losses, x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizers[0].minimize(model.losses, x, y)
    for _ in range(4):
        graph.replay()
    for _ in range(7):
        optimizers[1].minimize(twin.losses, x, y)
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@needs_gpu
@pytest.mark.slow
def test_a_compiled_model_is_the_same_captured():
    data = batches(10)

    def build(model):
        model.compile()
        return moon()(model)

    class Compiled(Net):
        def losses(self, x, y):
            return self(x, y)

        def forward(self, x, y):
            return super().losses(x, y)

    assert_equal(*(trained(build, data, captured, make=Compiled) for captured in (True, False)))
