"""The exact deltas agree with one backward pass per task, whatever is trained, and leave no trace."""

import copy
import math
import pickle

import pytest
import torch
from cubed import Cubed, CubedForwardsOnly, CubedOnceOnly
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from moonopt import MOON, Muon
from moonopt.tasks.directional import GRADIENT_ONLY, MODES, SUPPORT, Auto, DoubleBackward, ForwardMode
from moonopt.tasks.gradients import STATIC_GRAPH

ONE_MORE = ["forward_mode", "double_backward"]  # evaluation than the first
EXACT = [*ONE_MORE, "auto"]
TASKS = ("a", "b", "c")

# The models


class Problem(nn.Module):
    """Three regressions on the output of a stock module with 8 features."""

    def __init__(self, body, shape):
        super().__init__()
        self.body, self.shape = body, shape
        self.register_buffer("targets", torch.randn(3, 8))

    def output(self, x):
        answer = self.body(x)
        return answer[0] if isinstance(answer, tuple) else answer

    def forward(self, x):
        output = self.output(x)
        return torch.stack([(output - target).square().mean() for target in self.targets])

    def by_name(self, x, names=TASKS):
        return {name: loss for name, loss in zip(TASKS, self(x), strict=True) if name in names}

    def data(self, size=6, seed=1):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, *self.shape, generator=generator, dtype=torch.float64).to(self.targets.dtype)


def _convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 8),
    )


BODIES = {
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8)),
    "transformer without dropout": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (5, 8)),
    "convolutions": (_convolutions, (3, 8, 8)),
    "lstm": (lambda: nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True), (5, 8)),
    "lstm without dropout": (lambda: nn.LSTM(8, 8, 2, batch_first=True), (5, 8)),
    "gru": (lambda: nn.GRU(8, 8, 2, batch_first=True), (5, 8)),
    "layers": (lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 8)), (8,)),
}


def _built(body, dtype=torch.float64):
    torch.manual_seed(0)
    build, shape = BODIES[body]
    return Problem(build(), shape).to(dtype)


def _moon(model, delta, **settings):
    optimizer = MOON(model, **({"tasks": TASKS, "delta": delta, "beta": 0.1} | settings))
    torch.manual_seed(1)  # for the same dropout
    return optimizer


def _deltas(optimizer):
    diagnostics = optimizer.diagnostics()
    return torch.tensor([diagnostics[f"delta/{task}"] for task in optimizer.tasks], dtype=torch.float64)


def _assert_close(found, expected, tolerance):
    """Relative to the largest delta; what a task that was not there would have had is NaN."""
    largest = expected.nan_to_num().abs().max().item()
    assert largest > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * largest, equal_nan=True)


# The numbers


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"])
@pytest.mark.parametrize("body", ["transformer", "convolutions", "lstm"])
def test_exact_modes_agree_with_per_task_on_stock_modules(body, dtype, tolerance):
    deltas = {}
    for delta in ("per_task", *EXACT):
        model = _built(body, dtype)
        optimizer = _moon(model, delta)
        optimizer.minimize(model, model.data())
        deltas[delta] = _deltas(optimizer)
    for delta in EXACT:
        _assert_close(deltas[delta], deltas["per_task"], tolerance)


@pytest.mark.parametrize("delta", EXACT)
@pytest.mark.parametrize("body", ["transformer", "convolutions", "lstm"])
def test_exact_modes_agree_under_autocast_to_the_digits_of_bfloat16(body, delta):
    deltas = []
    for mode in (delta, "per_task"):
        model = _built(body, torch.float32)
        optimizer = _moon(model, mode)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = optimizer.combine(model, model.data())
        loss.backward()
        optimizer.step()
        deltas.append(_deltas(optimizer))
    _assert_close(*deltas, 2e-2)


@pytest.mark.parametrize("delta", EXACT)
def test_the_second_evaluation_is_under_the_autocast_of_the_first(delta):
    model, dtypes = _built("layers", torch.float32), []
    optimizer = _moon(model, delta)
    model.body[3].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = optimizer.combine(model, model.data())
    loss.backward()
    optimizer.step()
    assert len(dtypes) > 1
    assert set(dtypes) == {torch.bfloat16}


def _accumulated(delta):
    model = _built("transformer")
    optimizer = _moon(model, delta)
    for seed, size in enumerate((6, 4, 6)):
        (optimizer.combine(model, model.data(size, seed)) / 3).backward()
    optimizer.step()
    return optimizer


def _omitted(delta):
    model = _built("layers")
    optimizer = _moon(model, delta)
    optimizer.minimize(model.by_name, model.data(), "ca")
    return optimizer


def _omitted_in_some_micro_batches(delta):
    model = _built("layers")
    optimizer = _moon(model, delta)
    for seed, names in enumerate(("ab", "b", "abc")):
        (optimizer.combine(model.by_name, model.data(seed=seed), names) / 3).backward()
    optimizer.step()
    return optimizer


def _of_log_losses(delta):
    model = _built("transformer")
    optimizer = _moon(model, delta, loss="log")
    optimizer.minimize(model, model.data())
    return optimizer


def _in_eval_mode(delta):
    model = _built("transformer").eval()
    optimizer = _moon(model, delta)
    optimizer.minimize(model, model.data())
    return optimizer


def _switched_to_eval_mode_before_the_step(delta):
    model = _built("convolutions")
    optimizer = _moon(model, delta)
    optimizer.combine(model, model.data()).backward()
    model.eval()
    optimizer.step()
    return optimizer


def _with_scales_and_a_second_step(delta):
    model = _built("convolutions")
    optimizer = _moon(model, delta, scale="rms", nesterov=True, weight_decay=0.1, beta="auto")
    for seed in range(2):
        optimizer.minimize(model, model.data(seed=seed))
    return optimizer


def _with_channels_last(delta):
    model = _built("convolutions").to(memory_format=torch.channels_last)
    optimizer = _moon(model, delta)
    optimizer.minimize(model, model.data())
    return optimizer


def _with_groups_of_different_rates(delta):
    model = _built("layers")
    groups = [
        {"params": [model.body[0].weight], "kind": "matrix", "lr": 0.01},
        {"params": [model.body[3].weight], "kind": "matrix", "lr": torch.tensor(0.05)},
        {"params": [model.body[0].bias, model.body[3].bias], "kind": "vector"},
    ]
    optimizer = _moon(groups, delta, module=model)
    optimizer.minimize(model, model.data())
    return optimizer


def _with_losses_computed_already(delta):
    model = _built("transformer without dropout")
    optimizer, x = _moon(model, delta), model.data()
    optimizer.combine(model(x), again=lambda: model(x)).backward()
    optimizer.step()
    return optimizer


def _with_a_branch_per_task(delta):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()  # the last one is touched by no task
    optimizer, x = _moon(model, delta), torch.randn(5, 4, dtype=torch.float64)
    optimizer.minimize(lambda: [model[i](x).square().mean() for i in range(3)])
    return optimizer


def _with_a_frozen_matrix(delta):
    model = _built("layers")
    optimizer = _moon(model, delta)
    model.body[0].weight.requires_grad_(False)
    optimizer.minimize(model, model.data())
    return optimizer


def _with_a_gradient_penalty(delta):
    model = _built("layers").eval()
    optimizer = _moon(model, delta)

    def losses(x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model.output(x).square().sum(), x, create_graph=True)
        left, right, _ = model(x)
        return left, right, slope.square().mean()

    optimizer.minimize(losses, model.data())
    return optimizer


def _with_a_target_computed_without_a_graph(delta):
    """As in distillation from oneself: under no_grad a number is a constant."""
    model = _built("layers").eval()
    optimizer = _moon(model, delta)

    def losses(x):
        with torch.no_grad():
            target = 2 * model.output(x).tanh()
        left, right, _ = model(x)
        return left, right, (model.output(x) - target).square().mean()

    optimizer.minimize(losses, model.data())
    return optimizer


def _with_a_detached_target(delta):
    model = _built("layers").eval()
    optimizer = _moon(model, delta)

    def losses(x):
        left, right, _ = model(x)
        return left, right, (model.output(x) - 2 * model.output(x).detach().tanh()).square().mean()

    optimizer.minimize(losses, model.data())
    return optimizer


def _with_checkpointing(delta):
    model = _built("layers")
    model.output = lambda x: checkpoint(model.body, x, use_reentrant=False)
    optimizer = _moon(model, delta)
    optimizer.minimize(model, model.data())
    return optimizer


CIRCUMSTANCES = [
    _accumulated,
    _omitted,
    _omitted_in_some_micro_batches,
    _of_log_losses,
    _in_eval_mode,
    _switched_to_eval_mode_before_the_step,
    _with_scales_and_a_second_step,
    _with_channels_last,
    _with_groups_of_different_rates,
    _with_losses_computed_already,
    _with_a_branch_per_task,
    _with_a_frozen_matrix,
    _with_a_gradient_penalty,
    _with_a_target_computed_without_a_graph,
    _with_a_detached_target,
    _with_checkpointing,
]


@pytest.mark.parametrize("delta", EXACT)
@pytest.mark.parametrize("step", CIRCUMSTANCES, ids=lambda step: step.__name__.strip("_"))
def test_exact_modes_agree_with_per_task(step, delta):
    found, expected = step(delta), step("per_task")
    _assert_close(_deltas(found), _deltas(expected), 1e-12)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("delta", ["per_task", *EXACT])
def test_exact_modes_are_the_limit_of_the_loss_difference(delta):
    deltas = []
    for mode in (delta, "loss_difference"):
        model = _built("layers")
        groups = [
            {"params": [model.body[0].weight], "kind": "matrix", "lr": 1e-7, "scale": "rms"},
            {"params": [model.body[3].weight], "kind": "matrix", "lr": 3e-7},
        ]
        optimizer = _moon(groups, mode, module=model)
        optimizer.minimize(model, model.data())
        deltas.append(_deltas(optimizer))
    _assert_close(*deltas, 1e-5)


@pytest.mark.parametrize("delta", ["loss_difference", *EXACT])
@pytest.mark.parametrize("body", [body for body in BODIES if body != "layers"])
def test_stock_modules_can_be_checkpointed(body, delta):
    """What is computed again in a backward pass must be what was computed at first, with the same kernels."""
    deltas = []
    for mode in (delta, "per_task"):
        model = _built(body)
        model.output = lambda x, body=model.body: _first(checkpoint(body, x, use_reentrant=False))
        optimizer = _moon(model, mode, lr=1e-6)
        optimizer.minimize(model, model.data())
        deltas.append(_deltas(optimizer))
    _assert_close(*deltas, 1e-3 if delta == "loss_difference" else 1e-12)


def _first(answer):
    return answer[0] if isinstance(answer, tuple) else answer


@pytest.mark.parametrize("delta", EXACT)
def test_modules_that_are_not_known_agree(delta):
    deltas = []
    for mode in (delta, "per_task"):
        model = _built("lstm")
        optimizer = _moon(model.named_parameters(), mode)
        if mode in ("per_task", "double_backward"):  # which evaluate once
            optimizer.minimize(model, model.data())
        else:
            with pytest.warns(UserWarning, match="protects no buffers"):
                optimizer.minimize(model, model.data())
        deltas.append(_deltas(optimizer))
    _assert_close(*deltas, 1e-12)


@pytest.mark.parametrize(("delta", "where"), [("per_task", "combine"), *((delta, "step") for delta in EXACT)])
def test_an_open_autocast_does_not_reach_the_derivatives(delta, where):
    """Only the closure is the user's: this one computes in float32, and so must we."""
    deltas = []
    for verb in (where, None):
        model = _built("layers", torch.float32).eval()
        optimizer = _moon(model, delta)

        def losses(x, model=model):
            with torch.autocast("cpu", enabled=False):
                return model(x)

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=verb == "combine"):
            loss = optimizer.combine(losses, model.data())
        loss.backward()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=verb == "step"):
            optimizer.step()
        deltas.append(_deltas(optimizer))
    _assert_close(*deltas, 1e-5)


@pytest.mark.parametrize("without", ["frozen", "not touched"])
@pytest.mark.parametrize("delta", ["per_task", "loss_difference", *EXACT])
def test_where_no_matrix_moves_all_deltas_are_zero(delta, without):
    """As while the heads of a pretrained trunk are warmed up."""
    model = _built("layers")
    optimizer = _moon(model, delta)
    before, biases = [p.detach().clone() for p in model.parameters()], (model.body[0].bias, model.body[3].bias)
    if without == "frozen":
        for layer in (model.body[0], model.body[3]):
            layer.weight.requires_grad_(False)
        optimizer.minimize(model, model.data())
    else:
        optimizer.minimize(lambda: [sum((bias - i).square().sum() for bias in biases) for i in range(3)])
    assert _deltas(optimizer).tolist() == [0, 0, 0]
    assert optimizer.logits.tolist() == [0, 0, 0]
    assert [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)] == [True, False, True, False]


@pytest.mark.parametrize("delta", ONE_MORE)
def test_twenty_steps_are_those_of_per_task(two_heads, batch, delta):
    models = [two_heads(dtype=torch.float64) for _ in range(2)]
    optimizers = [
        MOON(model, tasks=2, delta=mode, beta=0.1, weight_decay=0.1)
        for model, mode in zip(models, (delta, "per_task"), strict=True)
    ]
    for seed in range(20):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.minimize(model.losses, *batch(dtype=torch.float64, seed=seed))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    torch.testing.assert_close(optimizers[0].logits, optimizers[1].logits, rtol=0, atol=1e-10)
    assert optimizers[0].logits.abs().max() > 1e-3


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("delta", EXACT)
def test_at_rate_zero_the_logits_stay(delta, lr):
    model = _built("layers")
    optimizer = _moon(model, delta, lr=lr, gamma=0.5)
    logits = torch.tensor([0.3, -0.2, -0.1])
    optimizer.param_groups[0]["logits"].copy_(logits)
    weights = [p.detach().clone() for p in model.parameters() if p.ndim == 2]
    optimizer.minimize(model, model.data())
    assert torch.equal(optimizer.param_groups[0]["logits"], logits.double())
    assert optimizer.diagnostics().get("rejected_deltas", 0) == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, (p for p in model.parameters() if p.ndim == 2), strict=True))


# What a step does beside them


@pytest.mark.parametrize(("delta", "evaluations"), [("per_task", 1), ("forward_mode", 2), ("double_backward", 1)])
def test_the_closure_is_evaluated_once_more_at_most(delta, evaluations):
    model = _built("transformer")
    optimizer, calls = _moon(model, delta), []
    for _ in range(3):
        optimizer.minimize(lambda x: calls.append(1) or model(x), model.data())
    assert len(calls) == 3 * evaluations


class Everything(nn.Module):
    """BatchNorm, dropout, attention and recurrence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.recurrence = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        output, _ = self.recurrence(self.attention(x))
        return torch.stack([(output - i).square().mean() for i in range(3)])


def _circumstances(model):
    """All that an evaluation may change, but the parameters' values."""
    cuda = torch.backends.cuda
    backends = (cuda.math_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled())
    with forward_ad.dual_level():
        tangents = [forward_ad.unpack_dual(p).tangent for p in model.parameters()]
    return {
        "buffers": [(name, buffer.tolist()) for name, buffer in model.named_buffers()],
        "random numbers": torch.get_rng_state().tolist(),
        "flags": [module.training for module in model.modules()],
        "attention": (*backends, torch.backends.mha.get_fastpath_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()),
        "function modes": torch._C._len_torch_function_stack(),
        "parameters": [(id(p), p.requires_grad, p.is_leaf, p.grad.tolist()) for p in model.parameters()],
        "tangents": tangents,
    }


@pytest.mark.parametrize("fails", [False, True], ids=["", "when the closure fails"])
@pytest.mark.parametrize("switch", ["train", "eval"])
@pytest.mark.parametrize("delta", EXACT)
def test_the_second_evaluation_leaves_no_trace(delta, switch, fails):
    model, calls = Everything(), []
    optimizer = _moon(model, delta)

    def losses(x):
        calls.append(1)
        answer = model(x)
        if fails and len(calls) > 2:
            raise KeyError("second evaluation")
        return answer

    for size in (6, 4):
        (optimizer.combine(losses, torch.randn(size, 5, 8)) / 2).backward()
    assert model.norm.num_batches_tracked == 2
    if switch == "eval":
        model.eval()
    before = _circumstances(model)
    assert before["tangents"] == [None] * len(before["tangents"])
    assert torch.backends.mha.get_fastpath_enabled()
    if fails:
        with pytest.raises(KeyError):
            optimizer.step()
    else:
        optimizer.step()
    assert len(calls) > 2
    assert _circumstances(model) == before


@pytest.mark.parametrize("delta", EXACT)
def test_the_second_evaluation_is_at_the_parameters_of_the_first(delta):
    model, seen = Everything(), []
    optimizer = _moon(model, delta, weight_decay=0.1)

    def losses(x):
        seen.append([p.detach().clone() for p in model.parameters()])
        return model(x)

    optimizer.combine(losses, torch.randn(6, 5, 8)).backward()
    optimizer.step()
    assert len(seen) > 1
    for values in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], values, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(seen[0], model.parameters(), strict=True))


@pytest.mark.parametrize("delta", EXACT)
def test_training_goes_on_as_if_there_had_been_no_second_evaluation(delta):
    """Random numbers and statistics are those of a run with per_task, which evaluates once."""
    ends = []
    for mode in (delta, "per_task"):
        model = _built("convolutions")
        model.body.append(nn.Dropout(0.5))
        optimizer = _moon(model, mode, beta=0.0)
        for seed in range(3):
            optimizer.minimize(model, model.data(seed=seed))
        ends.append([*model.parameters(), *model.buffers(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("delta", EXACT)
def test_a_closure_that_fails_the_second_time_leaves_a_whole_step(two_heads, batch, delta):
    models = [two_heads(), two_heads()]
    moon, muon = MOON(models[0], tasks=2, delta=delta, weight_decay=0.1), Muon(models[1], weight_decay=0.1)
    calls = []

    def failing(x, y):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("second evaluation")
        return models[0].losses(x, y)

    moon.combine(failing, *batch()).backward()
    with pytest.raises(KeyError, match="second evaluation"):
        moon.step()
    moon.zero_grad()
    muon.minimize(models[1].losses, *batch())
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
    assert moon.logits.tolist() == [0, 0]
    moon.minimize(failing, *batch())
    assert moon.param_groups[0]["step"] == 2
    assert _deltas(moon).isfinite().all()
    assert moon.logits.abs().max() > 0


# The choice of "auto"


@pytest.fixture
def measured(monkeypatch):
    """The arguments' shapes for which a measurement was made."""
    shapes, measure = [], Auto._measured

    def spy(self, batch, evaluate, move):
        shapes.append(batch.replay.signature())
        return measure(self, batch, evaluate, move)

    monkeypatch.setattr(Auto, "_measured", spy)
    return shapes


def test_auto_measures_once_for_every_shape(measured):
    model = _built("layers")
    optimizer = _moon(model, "auto")
    for size, expected in ((6, 1), (5, 1), (16, 2), (6, 2), (17, 2)):
        optimizer.minimize(model, model.data(size))
        assert len(measured) == expected
    model.eval()
    for expected in (3, 3):
        optimizer.minimize(model, model.data())
        assert len(measured) == expected
    optimizer.minimize(model.by_name, model.data(), "ab")
    assert len(measured) == 4
    chosen = list(optimizer._mode.chosen.values())
    assert len(chosen) == 4
    assert all(isinstance(mode, ForwardMode | DoubleBackward) for mode in chosen)


@pytest.mark.parametrize("faster", [ForwardMode, DoubleBackward])
def test_auto_takes_the_faster_one(monkeypatch, faster):
    monkeypatch.setattr("moonopt.tasks.directional._seconds", lambda mode, *rest: 1.0 if isinstance(mode, faster) else 2.0)
    model = _built("layers")
    optimizer = _moon(model, "auto")
    optimizer.minimize(model, model.data())
    assert [type(mode) for mode in optimizer._mode.chosen.values()] == [faster]


def _through(function):
    model = _built("layers")
    model.output = lambda x: function.apply(model.body(x))
    return model


@pytest.mark.parametrize(
    ("function", "works", "fails"),
    [(Cubed, "double_backward", "forward_mode"), (CubedForwardsOnly, "forward_mode", "double_backward")],
)
def test_auto_takes_the_one_that_works(function, works, fails):
    deltas = {}
    for delta in ("auto", "per_task", works):
        model = _through(function)
        optimizer = _moon(model, delta)
        optimizer.minimize(model, model.data())
        deltas[delta] = _deltas(optimizer)
        if delta == "auto":
            assert [mode.name for mode in optimizer._mode.chosen.values()] == [works]
    _assert_close(deltas["auto"], deltas["per_task"], 1e-12)
    _assert_close(deltas[works], deltas["per_task"], 1e-12)
    model = _through(function)
    with pytest.raises(RuntimeError) as error:
        _moon(model, fails).minimize(model, model.data())
    (note,) = error.value.__notes__
    assert note.startswith(f'If the cause is {GRADIENT_ONLY}, which delta="{fails}" cannot use')
    assert 'delta="loss_difference" or delta="per_task" can' in note


def test_auto_takes_what_works_with_spectral_norm():
    """Whose power iteration writes into buffers, which forward mode refuses."""
    deltas = []
    for delta in ("auto", "per_task"):
        model = _built("layers")
        spectral_norm(model.body[0])
        optimizer = _moon(model, delta)
        optimizer.minimize(model, model.data())
        deltas.append(_deltas(optimizer))
    _assert_close(*deltas, 1e-12)


def test_auto_that_finds_nothing_names_the_modes_that_work():
    model = _through(CubedOnceOnly)
    optimizer = _moon(model, "auto")
    with pytest.raises(
        RuntimeError,
        match=r'delta="auto" found no mode that works: forward_mode fails with .*; double_backward fails with .*\. '
        r'Use delta="loss_difference" or delta="per_task"\.',
    ):
        optimizer.minimize(model, model.data())
    for delta in ("loss_difference", "per_task"):
        model = _through(CubedOnceOnly)
        _moon(model, delta).minimize(model, model.data())


# Going on from a saved state


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("delta", EXACT)
def test_a_copy_trains_on_alike(copied, delta):
    model = _built("transformer")
    optimizer = _moon(model, delta)
    optimizer.minimize(model, model.data())
    pairs = [(model, optimizer), copied((model, optimizer))]
    assert pairs[1][0].body.linear1.weight is not model.body.linear1.weight
    for each, trainer in pairs:
        torch.manual_seed(2)
        for seed in range(3):
            trainer.minimize(each, each.data(seed=seed))
    for a, b in zip(model.parameters(), pairs[1][0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(optimizer.logits, pairs[1][1].logits)
    assert optimizer.logits.abs().max() > 1e-3


@pytest.mark.parametrize("delta", EXACT)
def test_a_run_is_resumed(delta):
    model = _built("layers").eval()
    optimizer = _moon(model, delta)
    saved = None
    for seed in range(6):
        if seed == 3:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.minimize(model, model.data(seed=seed))
    resumed = _built("layers").eval()
    going_on = _moon(resumed, delta)
    resumed.load_state_dict(saved[0])
    going_on.load_state_dict(saved[1])
    for seed in range(3, 6):
        going_on.minimize(resumed, resumed.data(seed=seed))
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(optimizer.logits, going_on.logits, rtol=0, atol=1e-12)


# What each mode works with


@pytest.fixture
def compiled_anew():
    """What was compiled is forgotten."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _with_feature(feature, delta):
    """A tiny model, its optimizer, and its losses with one of the features of SUPPORT, or none."""
    model = _through(CubedOnceOnly) if feature == GRADIENT_ONLY else _built("layers", torch.float32)
    optimizer, losses = _moon(model, delta), model
    if feature.endswith("checkpointing"):
        reentrant = feature == "reentrant checkpointing"
        model.output = lambda x: checkpoint(model.body, x.clone().requires_grad_(), use_reentrant=reentrant)
    if feature in ("compiled models", "donated buffers"):
        losses = torch.compile(model, backend="aot_eager")
    return model, optimizer, losses


def _train(feature, model, optimizer, losses):
    micro_batches = 3 if feature == "accumulation" else 1
    with (
        torch._functorch.config.patch(donated_buffer=feature != "compiled models"),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=feature == "autocast"),
    ):
        waiting = [optimizer.combine(losses, model.data()) / micro_batches for _ in range(micro_batches)]
    for loss in waiting:
        loss.backward()
    optimizer.step()


FEATURES = sorted(set().union(*SUPPORT.values()) - {STATIC_GRAPH})  # which tests/distributed has
PAIRS = [(mode, feature) for mode in MODES for feature in FEATURES]


@pytest.mark.parametrize(("delta", "feature"), [(mode, feature) for mode, feature in PAIRS if feature in SUPPORT[mode]])
def test_a_mode_works_with_what_the_table_says(compiled_anew, delta, feature):
    """Against per_task without the feature."""
    deltas = []
    for mode, of in ((delta, feature), ("per_task", feature if feature in ("accumulation", GRADIENT_ONLY) else "none")):
        model, optimizer, losses = _with_feature(of, mode)
        before = [p.detach().clone() for p in model.parameters()]
        _train(of, model, optimizer, losses)
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert optimizer.logits.abs().max() > 1e-4
        deltas.append(_deltas(optimizer))
    _assert_close(*deltas, 0.3 if delta == "loss_difference" else 5e-2 if feature == "autocast" else 1e-5)


@pytest.mark.parametrize(("delta", "feature"), [(mode, feature) for mode, feature in PAIRS if feature not in SUPPORT[mode]])
def test_a_mode_refuses_the_rest_and_names_the_modes_that_work(compiled_anew, delta, feature):
    model, optimizer, losses = _with_feature(feature, delta)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError) as error:
        _train(feature, model, optimizer, losses)
    text = " ".join([str(error.value), *getattr(error.value, "__notes__", [])])
    if feature == "donated buffers" and "compiled models" not in SUPPORT[delta]:
        feature = "compiled models"
    for mode in MODES:
        named = feature in SUPPORT[mode] or mode == delta or (mode == "auto" and feature == GRADIENT_ONLY)
        assert (f'delta="{mode}"' in text) == named
    if feature != GRADIENT_ONLY:  # which is found out when it is too late
        assert text.startswith(f'delta="{delta}" does not work with {feature}: use delta="loss_difference"')
        assert optimizer.param_groups[0]["step"] == 0
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_table_has_every_mode():
    assert set(SUPPORT) == set(MODES)
    assert all(feature in SUPPORT["loss_difference"] for feature in FEATURES), "it works with everything that trains"


@pytest.mark.parametrize("delta", EXACT)
def test_losses_without_again_are_refused(delta):
    model = _built("layers")
    optimizer = _moon(model, delta)
    with pytest.raises(ValueError, match=rf'delta="{delta}" evaluates the losses again: pass a closure, .*again=.*"per_task"'):
        optimizer.combine(model(model.data()))
    assert optimizer.param_groups[0]["step"] == 0
    optimizer.minimize(model, model.data())


def test_an_operation_that_forward_mode_does_not_know_is_told_with_the_modes_that_work():
    model = _built("layers")
    grid = torch.rand(1, 3, 8, 2, dtype=torch.float64)

    def losses(x):
        picture = model.output(x).reshape(1, 1, -1, 8)
        return nn.functional.grid_sample(picture, grid, align_corners=False).square().flatten(0, 2).mean(1)

    with pytest.raises(NotImplementedError, match="forward AD") as error:
        _moon(model, "forward_mode").minimize(losses, model.data())
    (note,) = error.value.__notes__
    assert note.startswith(f'If the cause is {GRADIENT_ONLY}, which delta="forward_mode" cannot use')
    assert 'delta="loss_difference" or delta="per_task" can' in note
    for delta in ("loss_difference", "per_task"):
        optimizer = _moon(model, delta)
        optimizer.minimize(losses, model.data())
        assert math.isfinite(optimizer.diagnostics()["delta/a"])
