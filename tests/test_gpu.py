"""What only an accelerator shows: no waiting, masking on the device, its random numbers, half precision."""

import math

import pytest
import torch
from torch import nn

from moonopt import MOON, Muon, polar
from moonopt.tasks.kernels import plain_kernels
from moonopt.tasks.modes import multiplying

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def no_waiting():
    """Synchronising with the device is an error inside."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def _model(width=64, dropout=0.0):
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, width))
    return nn.Sequential(trunk, nn.Sequential(nn.Tanh(), nn.Linear(width, 2))).cuda()


def _losses(model):
    return lambda x, y: (model(x) - y).float().square().mean(0)


def _data(size=64):
    return torch.randn(size, 16, device="cuda"), torch.randn(size, 2, device="cuda")


@pytest.mark.parametrize("shape", [(64, 64), (3, 128, 512), (512, 128), (320, 1024), (1024, 320)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-2), (torch.float64, 1e-9), (None, 6e-2)], ids=str)
def test_polar_agrees_with_float64_svd(shape, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    matrix = u * (1 + s / s.amax(-1, keepdim=True)).unsqueeze(-2) @ vh  # condition below 2
    single = matrix.to(torch.float64 if dtype == torch.float64 else torch.float32).cuda()
    factor = polar(single, steps=8, dtype=dtype)
    error = torch.linalg.matrix_norm(factor.double().cpu() - u @ vh, 2).max().item()
    assert error < tolerance
    assert factor.dtype == single.dtype


def test_scale_does_not_matter():
    matrix = torch.randn(8, 96, 200, device="cuda")
    for schedule in ("polar_express", "muon", "svd"):
        reference = polar(matrix, schedule=schedule)
        assert torch.equal(polar(matrix * 2.0**90, schedule=schedule), reference)
        torch.testing.assert_close(polar(matrix * 1e-30, schedule=schedule), reference, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": "auto", "loss": "log"},
        {"delta": "per_task"},
        {"lr": "tensor", "weight_decay": 0.1},
        {"lr": "tensor on the host"},
    ],
    ids=str,
)
def test_combine_and_step_never_wait(no_waiting, settings):
    torch.cuda.set_sync_debug_mode("default")
    model = _model(dropout=0.3)
    if "lr" in settings:
        settings = settings | {"lr": torch.tensor(0.02, device="cuda" if settings["lr"] == "tensor" else "cpu")}
    optimizer = MOON(model, tasks=2, **({"beta": 0.1} | settings))
    batches = [_data() for _ in range(20)]
    optimizer.minimize(_losses(model), *batches[0])
    torch.cuda.set_sync_debug_mode("error")
    for x, y in batches:
        optimizer.minimize(_losses(model), x, y)
    torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(optimizer.diagnostics()["weight/0"])


def test_omitted_tasks_do_not_wait(no_waiting):
    torch.cuda.set_sync_debug_mode("default")
    model = _model()
    optimizer = MOON(model, tasks=["a", "b"], beta=0.1)
    x, y = _data()

    def one(x, y):
        return {"a": _losses(model)(x, y)[0]}

    optimizer.minimize(one, x, y)
    torch.cuda.set_sync_debug_mode("error")
    optimizer.minimize(one, x, y)


def test_a_nonfinite_step_is_masked_on_the_device_and_told_later():
    model = _model()
    optimizer = MOON(model, tasks=["left", "right"], beta=0.1, weight_decay=0.1, vector_weight_decay=0.1)
    optimizer.minimize(_losses(model), *_data())
    group = optimizer.param_groups[0]

    def everything():
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [t.clone() for t in (*model.parameters(), *states, group["logits"], group["delta_size"])]

    before = everything()
    x, y = _data()
    y[3, 1] = math.nan
    torch.cuda._sleep(200_000_000)  # keeps the device busy, so that the flag is still on its way at the end of the step
    optimizer.minimize(_losses(model), x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    with pytest.raises(FloatingPointError, match="At step 2, the loss of task 'right' is NaN"):
        optimizer.state_dict()
    optimizer.minimize(_losses(model), *_data())
    assert optimizer.diagnostics()["skipped_steps"] == 1


def test_a_void_first_step_leaves_the_vectors_finite():
    model = _model()
    optimizer = Muon(model, nonfinite="skip")
    x, y = _data()
    optimizer.minimize(_losses(model), x * math.nan, y)
    assert all(p.isfinite().all() for p in model.parameters())
    optimizer.minimize(_losses(model), x, y)
    assert optimizer.diagnostics()["skipped_steps"] == 1


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_the_second_forward_repeats_the_first(autocast):
    model = _model(dropout=0.5)
    optimizer = MOON(model, tasks=2, lr=torch.tensor(0.0, device="cuda"))
    seen = []

    def closure(x, y):
        answer = _losses(model)(x, y)
        seen.append(answer.detach().clone())
        return answer

    with torch.autocast("cuda", dtype=autocast or torch.float16, enabled=autocast is not None):
        loss = optimizer.combine(closure, *_data())
    loss.backward()
    model.eval()
    buffers = [b.clone() for b in model.buffers()]
    generators = torch.get_rng_state(), torch.cuda.get_rng_state()
    optimizer.step()
    assert torch.equal(*seen)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert torch.equal(torch.cuda.get_rng_state(), generators[1])


@pytest.mark.parametrize("delta", ["loss_difference", "per_task"])
def test_float16_autocast_with_a_scaler_trains(delta):
    model = _model()
    optimizer = MOON(model, tasks=2, beta=0.1, delta=delta, lr=0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)  # overflows at first
    x, y = _data()
    first = _losses(model)(x, y).sum().item()
    for _ in range(60):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = optimizer.combine(_losses(model), x, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    diagnostics = optimizer.diagnostics()
    assert diagnostics["skipped_steps"] > 0
    assert _losses(model)(x, y).sum().item() < 0.9 * first


def test_training_agrees_with_the_cpu():
    torch.manual_seed(0)
    on_cpu = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    on_gpu = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).double().cuda()
    on_gpu.load_state_dict(on_cpu.state_dict())
    x, y = torch.randn(64, 16).double(), torch.randn(64, 2).double()
    optimizers = [MOON(model, tasks=2, beta=0.1, lr=0.01) for model in (on_cpu, on_gpu)]
    for _ in range(10):
        for model, optimizer, device in zip((on_cpu, on_gpu), optimizers, ("cpu", "cuda"), strict=True):
            optimizer.minimize(lambda x, y, model=model: (model(x) - y).square().mean(0), x.to(device), y.to(device))
    for a, b in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(optimizers[0].logits, optimizers[1].logits.cpu(), rtol=1e-6, atol=1e-9)


def test_wide_matrices_are_iterated_in_float16_and_the_diagnostics_say_so():
    model = _model(width=256)
    optimizer = MOON(model, tasks=2)
    optimizer.minimize(_losses(model), *_data())
    diagnostics = optimizer.diagnostics()
    assert diagnostics["polar/polar_express/torch-cuda/float16"] == 1
    assert diagnostics["polar/polar_express/torch-cuda/float32"] == 2


def test_small_matrices_are_iterated_in_one_launch_where_tensorfloat_may_multiply_them():
    model = _model(width=32)
    optimizer = MOON(model, tasks=2)
    with multiplying(tf32=True):
        optimizer.minimize(_losses(model), *_data())
    assert optimizer.diagnostics()["polar/polar_express/small-cuda/float32"] == 3


def test_a_model_moved_after_construction_takes_its_state_along():
    model = _model().cpu()
    optimizer = MOON(model, tasks=2, beta=0.1)
    model.cuda()
    for _ in range(2):
        optimizer.minimize(_losses(model), *_data())
    assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cuda"}
    assert optimizer.logits.device.type == "cuda"
    assert math.isfinite(optimizer.diagnostics()["delta/0"])


def test_accelerate_prepares_an_optimizer_that_was_built_on_the_host():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # other tests have set it up otherwise
    model = _model().cpu()
    moon = MOON(model, tasks=2, beta=0.1)
    accelerator = accelerate.Accelerator(mixed_precision="bf16")
    prepared, optimizer = accelerator.prepare(model, moon)
    for _ in range(3):
        accelerator.backward(moon.combine(lambda x, y: (prepared(x) - y).float().square().mean(0), *_data()))
        optimizer.step()
        optimizer.zero_grad()
    assert moon.param_groups[0]["step"] == 3


# The exact deltas

STOCK = {
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (7, 16)),
    "transformer without dropout": (lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), (7, 16)),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(12, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(16, 16)),
        ),
        (3, 12, 12),
    ),
    "lstm": (lambda: nn.LSTM(16, 16, 2, dropout=0.3, batch_first=True), (7, 16)),
    "lstm without dropout": (lambda: nn.LSTM(16, 16, 2, batch_first=True), (7, 16)),
}


def _stock(name):
    """A stock module, three regressions on its output, and an input."""
    torch.manual_seed(0)
    build, shape = STOCK[name]
    model, targets = build().cuda(), torch.randn(3, 16, device="cuda").unbind()

    def losses(x):
        answer = model(x)
        output = (answer[0] if isinstance(answer, tuple) else answer).float()
        return torch.stack([(output - target).square().mean() for target in targets])

    return model, losses, torch.randn(32, *shape, device="cuda")


def _deltas(name, delta, autocast=False):
    """Of one step; the reference takes the kernels that the others take, whose dropout draws other random numbers."""
    model, losses, x = _stock(name)
    optimizer = MOON(model, tasks=3, delta=delta, beta=0.1)
    torch.manual_seed(1)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        if delta == "per_task":
            with plain_kernels():
                loss = optimizer.combine(losses, x)
        else:
            loss = optimizer.combine(losses, x)
    loss.backward()
    optimizer.step()
    diagnostics = optimizer.diagnostics()
    return torch.tensor([diagnostics[f"delta/{i}"] for i in range(3)])


@pytest.fixture
def all_digits():
    """Products of float32 are not rounded to TF32."""
    backends = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed


@pytest.mark.parametrize("delta", ["forward_mode", "double_backward", "auto"])
@pytest.mark.parametrize("name", STOCK)
def test_exact_deltas_agree_with_per_task(all_digits, name, delta):
    expected = _deltas(name, "per_task")
    torch.testing.assert_close(_deltas(name, delta), expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("delta", ["forward_mode", "double_backward", "auto"])
@pytest.mark.parametrize("name", STOCK)
def test_exact_deltas_agree_with_per_task_under_autocast(name, delta):
    expected = _deltas(name, "per_task", autocast=True)
    found = _deltas(name, delta, autocast=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-2 * expected.abs().max().item())


@pytest.mark.parametrize("delta", ["forward_mode", "double_backward"])
@pytest.mark.parametrize("name", STOCK)
def test_exact_deltas_never_wait(no_waiting, name, delta):
    torch.cuda.set_sync_debug_mode("default")
    model, losses, x = _stock(name)
    optimizer = MOON(model, tasks=3, delta=delta, beta=0.1)
    optimizer.minimize(losses, x)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(5):
        optimizer.minimize(losses, x)
    torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(optimizer.diagnostics()["delta/0"])
    assert optimizer.logits.abs().max() > 0


@pytest.mark.parametrize("delta", ["forward_mode", "double_backward", "auto"])
def test_exact_deltas_repeat_the_dropout_of_the_first_evaluation_and_leave_no_trace(delta):
    """At any rate: the exact modes evaluate where the matrices were."""
    model, losses, x = _stock("transformer")
    optimizer, seen = MOON(model, tasks=3, delta=delta), []

    def closure(x):
        answer = losses(x)
        seen.append(answer.detach().clone())
        return answer

    optimizer.combine(closure, x).backward()
    generators = torch.get_rng_state(), torch.cuda.get_rng_state()
    optimizer.step()
    assert len(seen) > 1
    for again in seen[1:]:
        torch.testing.assert_close(again, seen[0], rtol=1e-5, atol=0)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert torch.equal(torch.cuda.get_rng_state(), generators[1])
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize("delta", ["forward_mode", "double_backward", "auto"])
def test_exact_deltas_with_float16_and_a_scaler(delta):
    """A step that overflows changes neither parameters nor logits, and later ones train."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2)).cuda()
    optimizer = MOON(model, tasks=2, beta=0.1, delta=delta, lr=0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)  # overflows at first
    x, y = _data()
    first = _losses(model)(x, y).sum().item()
    for step in range(60):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = optimizer.combine(_losses(model), x, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            assert optimizer.logits.tolist() == [0, 0]
    diagnostics = optimizer.diagnostics()
    assert diagnostics["skipped_steps"] > 0
    assert math.isfinite(diagnostics["delta/0"])
    assert _losses(model)(x, y).sum().item() < 0.9 * first
