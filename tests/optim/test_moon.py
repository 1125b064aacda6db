"""What MOON's options do, and what it says to bad input."""

import math

import pytest
import torch
from torch import nn

from moonopt import MOON, Muon


def _on(theta, **settings):
    return MOON([{"params": [theta], "kind": "matrix"}], **({"tasks": 2, "lr": 0.1, "delta": "per_task"} | settings))


def _theta(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(3, 4, dtype=dtype))


def _targets(theta, scales=(1.0, 1.0, 1.0)):
    generator = torch.Generator().manual_seed(3)
    targets = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in scales]
    return {f"t{i}": s * (theta - t).square().sum() for i, (s, t) in enumerate(zip(scales, targets, strict=True))}


def test_weights_start_equal_and_stay_on_the_simplex():
    theta = _theta()
    optimizer = _on(theta, tasks=["t0", "t1", "t2"], beta=2.0)
    assert optimizer.task_weights.tolist() == pytest.approx([1 / 3] * 3)
    for _ in range(50):
        optimizer.minimize(lambda: _targets(theta, (1.0, 3.0, 9.0)))
        assert optimizer.task_weights.min() >= 0
        assert optimizer.task_weights.sum().item() == pytest.approx(1)
        assert optimizer.logits.sum().item() == pytest.approx(0, abs=1e-9)


def test_the_task_that_falls_fastest_loses_weight():
    theta = _theta()
    optimizer = _on(theta, tasks=["t0", "t1", "t2"], beta=0.01)
    optimizer.minimize(lambda: _targets(theta, (1.0, 1.0, 10.0)))
    deltas = optimizer.diagnostics()
    fastest = max(range(3), key=lambda i: deltas[f"delta/t{i}"])
    assert optimizer.task_weights.argmin().item() == fastest == 2


def test_an_omitted_task_keeps_its_logit_and_the_others_move_around_their_mean():
    theta = _theta()
    optimizer = _on(theta, tasks=["t0", "t1", "t2"], beta=0.1, gamma=0.5)
    raw = optimizer.param_groups[0]["logits"]
    raw.copy_(torch.tensor([0.3, -0.2, 0.7]))

    def two_of_three():
        losses = _targets(theta, (1.0, 5.0, 1.0))
        del losses["t2"]
        return losses

    weights = optimizer.task_weights
    combined = optimizer.combine(two_of_three)
    expected = sum(weights[i] * loss for i, loss in enumerate(two_of_three().values()))
    assert combined.item() == pytest.approx(expected.item())  # not renormalised
    optimizer.minimize(two_of_three)
    d = optimizer.diagnostics()
    mean = (d["delta/t0"] + d["delta/t1"]) / 2
    start = [x - 0.8 / 3 for x in (0.3, -0.2, 0.7)]  # centred
    moved = [x - 0.1 * (d[f"delta/t{i}"] - mean + 0.5 * x) for i, x in enumerate(start[:2])]
    assert raw.tolist() == pytest.approx([*moved, start[2]])


def test_a_rare_task_does_not_drift():
    """Three equal losses, one of them there every second time only: their weights stay equal."""
    theta = _theta()
    optimizer = _on(theta, tasks=["a", "b", "rare"], lr=1e-3, beta=0.1, gamma=1e-2)
    for step in range(300):
        names = ["a", "b", "rare"] if step % 2 else ["a", "b"]
        optimizer.minimize(lambda names: {name: (theta - 5).square().sum() for name in names}, names)
    assert optimizer.task_weights.tolist() == pytest.approx([1 / 3] * 3, abs=1e-6)


def test_logits_of_a_long_run_still_move_in_float32():
    """What the logits have in common must not grow until their differences are lost in rounding."""
    theta = nn.Parameter(torch.zeros(2, 2))
    optimizer = _on(theta, lr=1e-6, beta=1e-2)
    optimizer.param_groups[0]["logits"].fill_(-60000.0)
    for _ in range(20):
        optimizer.minimize(lambda: [1.00 * theta.sum(), 1.01 * theta.sum()])
    assert optimizer.logits[0] > optimizer.logits[1]


def test_beta_auto_does_not_learn_its_scale_from_single_tasks():
    theta = _theta()
    optimizer = _on(theta, tasks=["t0", "t1", "t2"], beta="auto:0.01", gamma=0.0, lr=1e-4)
    optimizer.minimize(lambda: _targets(theta, (1.0, 2.0, 4.0)))
    before = optimizer.logits
    for _ in range(100):
        optimizer.minimize(lambda: {"t0": _targets(theta)["t0"]})
    assert torch.equal(optimizer.logits, before)
    optimizer.minimize(lambda: _targets(theta, (1.0, 2.0, 4.0)))
    assert (optimizer.logits - before).abs().max() < 0.03


def test_log_weights_of_single_tasks_are_their_weights():
    """Tasks that come one at a time, from loaders of their own, keep their weights in log mode as in plain mode."""
    theta = _theta()
    for loss in ("plain", "log"):
        optimizer = _on(theta, tasks=["a", "b"], loss=loss)
        optimizer.param_groups[0]["logits"].copy_(torch.tensor([2.0, -1.0]))
        value = theta.square().sum()
        ratios = [(optimizer.combine({name: theta.square().sum()}) / value).item() for name in ("a", "b")]
        assert ratios == pytest.approx(optimizer.task_weights.tolist())


def test_a_matrix_frozen_after_construction_is_left_out(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=2, delta="per_task")
    model.trunk[0].requires_grad_(False)
    before = model.trunk[0].weight.clone()
    optimizer.minimize(model.losses, *batch())
    assert torch.equal(model.trunk[0].weight, before)


def test_an_open_autocast_does_not_reach_the_update():
    """The polar factor of a low-rank momentum is far off in bfloat16: float32 was asked for."""
    torch.manual_seed(0)
    gradient, results = torch.randn(32, 4) @ torch.randn(4, 48), []
    for enabled in (False, True):
        theta = nn.Parameter(torch.zeros(32, 48))
        optimizer = Muon([{"params": [theta], "kind": "matrix"}], lr=1.0)
        theta.grad = gradient.clone()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            optimizer.step()
        results.append(theta.detach())
    assert torch.equal(*results)


def test_beta_auto_has_no_unit():
    paths = []
    for unit in (1.0, 1e4):
        theta = _theta()
        optimizer = _on(theta, tasks=["t0", "t1", "t2"], beta="auto:0.05", gamma=0.1)
        for _ in range(20):
            optimizer.minimize(lambda unit=unit: _targets(theta, (unit, 2 * unit, 4 * unit)))
        paths.append(optimizer.logits)
    torch.testing.assert_close(*paths)
    assert paths[0].abs().max() > 0.05


def test_beta_auto_follows_its_formula():
    theta = _theta()
    optimizer = _on(theta, tasks=["t0", "t1"], beta="auto", gamma=0.1)
    logits, size = torch.zeros(2, dtype=torch.float64), None
    for _ in range(5):
        optimizer.minimize(lambda: {k: v for k, v in _targets(theta, (1.0, 4.0, 1.0)).items() if k != "t2"})
        d = optimizer.diagnostics()
        delta = torch.tensor([d["delta/t0"], d["delta/t1"]], dtype=torch.float64)
        centred = delta - delta.mean()
        size = centred.abs().mean() if size is None else 0.98 * size + 0.02 * centred.abs().mean()
        logits = logits - 0.01 * (centred / size + 0.1 * logits)
        torch.testing.assert_close(optimizer.param_groups[0]["logits"], logits)


@pytest.mark.parametrize("delta", ["per_task", "loss_difference"])
def test_log_losses_make_the_scale_of_a_task_irrelevant(delta):
    results = []
    for scales in ((1.0, 1.0, 1.0), (1e-3, 1.0, 1e3)):
        theta = _theta()
        optimizer = MOON(
            [{"params": [theta], "kind": "matrix"}],
            tasks=["t0", "t1", "t2"],
            lr=0.01,
            beta=0.1,
            loss="log",
            delta=delta,
            momentum=0.0,  # which averages gradients, and their length does depend on the scales
            module=nn.Module(),
        )
        for _ in range(10):
            optimizer.minimize(lambda scales=scales: _targets(theta, scales))
        results.append((theta.detach().clone(), optimizer.logits))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-8)


def test_log_weights_are_z_over_loss_normalised():
    theta = _theta()
    optimizer = _on(theta, tasks=["t0", "t1", "t2"], loss="log")
    losses = torch.stack(list(_targets(theta).values()))
    weights = (1 / losses) / (1 / losses).sum()
    assert optimizer.combine(_targets(theta)).item() == pytest.approx((weights * losses).sum().item())


def test_log_of_a_loss_that_is_not_positive_names_the_task():
    theta = _theta()
    optimizer = _on(theta, loss="log")
    with pytest.raises(FloatingPointError, match=r"At step 1, the loss of task '1' is NaN, infinite or not positive"):
        optimizer.minimize(lambda: [theta.square().sum(), -theta.square().sum()])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_loss_is_named_and_changes_nothing(two_heads, batch, value):
    model = two_heads()
    optimizer = MOON(model, tasks=["left", "right"], beta=0.1)
    optimizer.minimize(model.losses, *batch())
    before = [
        t.clone() for t in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values()), optimizer.logits)
    ]
    x, y = batch()
    y[0, 1] = value
    with pytest.raises(FloatingPointError, match=r"At step 2, the loss of task 'right' is NaN or infinite.*nonfinite=\"skip\""):
        optimizer.minimize(model.losses, x, y)
    after = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values()), optimizer.logits]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer.minimize(model.losses, *batch())  # and training can go on


def test_a_nonfinite_gradient_of_finite_losses_is_told():
    theta = nn.Parameter(torch.zeros(2, 2))
    optimizer = _on(theta)
    with pytest.raises(FloatingPointError, match="a gradient is NaN or infinite, though all losses are finite"):
        optimizer.minimize(lambda: [theta.abs().sqrt().sum(), theta.sum()])


def test_huge_finite_gradients_are_finite():
    theta = nn.Parameter(torch.eye(2))
    optimizer = _on(theta)
    optimizer.minimize(lambda: [1e30 * theta.square().sum(), 1e30 * theta.sum()])
    assert not torch.equal(theta, torch.eye(2))


def test_nonfinite_steps_can_be_skipped_and_are_counted(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=2, nonfinite="skip", beta=0.1)
    x, y = batch()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.minimize(model.losses, x * math.nan, y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.minimize(model.losses, x, y)
    diagnostics = optimizer.diagnostics()
    assert (diagnostics["skipped_steps"], diagnostics["step"]) == (1, 2)


def test_a_loss_that_is_nonfinite_only_after_the_move_leaves_the_logits_alone_and_is_counted():
    theta = nn.Parameter(torch.full((2, 2), 0.05))
    optimizer = MOON([{"params": [theta], "kind": "matrix"}], tasks=2, lr=1.0, beta=0.1, module=nn.Module())
    optimizer.minimize(lambda: [theta.sum().log(), theta.sum()])  # the move makes the sum negative
    assert theta.sum() < 0
    assert optimizer.logits.tolist() == [0, 0]
    assert optimizer.diagnostics()["rejected_deltas"] == 1


def test_diagnostics_tell_what_ran(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=["left", "right"], lr=0.05, scale="rms", beta=0.1)
    optimizer.minimize(model.losses, *batch())
    d = optimizer.diagnostics()
    assert all(isinstance(value, float) for value in d.values())
    assert d["polar/polar_express/torch-cpu/float32"] == 2
    assert d["weight/left"] + d["weight/right"] == pytest.approx(1)
    assert d["effective_lr/0"] == pytest.approx(0.05 * 0.2 * math.sqrt(12))
    assert d["lr/1"] == pytest.approx(1e-3)
    momenta = [optimizer.state[p]["momentum"] for p in optimizer.param_groups[0]["params"]]
    nuclear = sum(torch.linalg.matrix_norm(m, "nuc").item() for m in momenta)
    assert d["nuclear_norm"] == pytest.approx(nuclear, rel=1e-3)
    assert 0 < d["delta_floor/left"] < 1e-3 * abs(d["delta/left"])


def test_diagnostics_have_the_losses_before_the_step_and_nan_for_a_task_that_was_not_there(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=["left", "right"], beta=0.1)
    losses = model.losses(*batch()).tolist()
    for seed in (1, 2):
        (optimizer.combine(model.losses, *batch(seed=seed)) / 2).backward()
    expected = (torch.tensor(losses) + model.losses(*batch(seed=2)).detach()) / 2
    optimizer.step()
    d = optimizer.diagnostics()
    assert [d["loss/left"], d["loss/right"]] == pytest.approx(expected.tolist())
    optimizer.minimize(lambda x, y: {"left": model.losses(x, y)[0]}, *batch())
    d = optimizer.diagnostics()
    assert math.isnan(d["loss/right"])
    assert math.isnan(d["delta/right"])
    assert math.isfinite(d["delta/left"])
    assert d["rejected_deltas"] == 0


def test_diagnostics_tell_an_exact_factor_from_an_iteration():
    theta = _theta()
    optimizer = _on(theta, schedule="svd")
    optimizer.minimize(lambda: [theta.sum(), theta.square().sum()])
    assert optimizer.diagnostics()["polar/svd/torch-cpu/float64"] == 1


@pytest.mark.filterwarnings("ignore:step.. without combine")
def test_step_without_combine_is_a_muon_step(two_heads, batch):
    models = [two_heads(), two_heads()]
    moon, muon = MOON(models[0], tasks=2, beta=0.5), Muon(models[1])
    for model, optimizer in zip(models, (moon, muon), strict=True):
        model.losses(*batch()).sum().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
    assert moon.logits.tolist() == [0, 0]


def test_parameters_that_a_task_does_not_touch_are_fine(batch):
    torch.manual_seed(0)
    branches = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)) for _ in range(2))
    for delta in ("per_task", "loss_difference"):
        optimizer = MOON(branches, tasks=2, delta=delta, beta=0.1)
        x, y = batch()
        optimizer.minimize(lambda x=x, y=y: [(b(x) - y[:, :1]).square().mean() for b in branches])
        assert all(math.isfinite(value) for value in optimizer.diagnostics().values())


def test_half_precision_losses_warn_once(two_heads, batch):
    model = two_heads(dtype=torch.bfloat16)
    optimizer = MOON(model, tasks=2)
    with pytest.warns(UserWarning, match="half precision") as seen:
        for _ in range(3):
            optimizer.minimize(model.losses, *batch(dtype=torch.bfloat16))
    assert len(seen) == 1


def test_an_unknown_module_warns_once(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model.named_parameters(), tasks=2)
    with pytest.warns(UserWarning, match="protects no buffers.*module=model") as seen:
        for _ in range(3):
            optimizer.minimize(model.losses, *batch())
    assert len(seen) == 1
    assert seen[0].filename == __file__, "a warning points at the user's line"


def test_buffers_outside_of_the_part_that_is_trained_are_protected(batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = MOON(model[0], tasks=2, module=model)
    x, y = batch()
    optimizer.minimize(lambda: (model(x) - y).square().mean(0))
    assert model[1].num_batches_tracked == 1


def test_combine_without_a_graph_leaves_nothing_waiting(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=2)
    with torch.no_grad():
        loss = optimizer.combine(model.losses, *batch())
    assert not loss.requires_grad
    optimizer.minimize(model.losses, *batch())
    assert optimizer.diagnostics()["losses_without_backward"] == 0


BAD_SETTINGS = [
    ({"tasks": 0}, "tasks must be a positive number"),
    ({"tasks": ["a", "a"]}, "must differ"),
    ({"dual": "exakt"}, "Unknown dual 'exakt'"),
    ({"delta": "per_tsk"}, "Did you mean 'per_task'"),
    ({"loss": "logg"}, "Did you mean 'log'"),
    ({"beta": "automatic"}, '"auto:RATE"'),
    ({"beta": "auto:fast"}, '"auto:RATE"'),
    ({"beta": -1.0}, "beta must be a number of at least 0"),
    ({"gamma": -1.0}, "gamma must be a number of at least 0"),
    ({"lr": -1.0}, "lr must be a number of at least 0"),
    ({"momentum": 1.0}, "momentum must be a number of at least 0 and below 1"),
    ({"scale": "spectrall"}, "Did you mean 'spectral'"),
    ({"schedule": "polar_expres"}, "Did you mean 'polar_express'"),
    ({"steps": 0}, "steps must be a positive integer"),
    ({"beta": "auto:-1"}, "beta must be a number of at least 0"),
    ({"lr": "0.1"}, "lr must be a number of at least 0, found '0.1'"),
    ({"lr": math.nan}, "lr must be a number of at least 0, found nan"),
    ({"vector_betas": (0.9,)}, "vector_betas must be two numbers"),
    ({"vector_betas": 0.9}, "vector_betas must be two numbers, found 0.9"),
    ({"polar_dtype": torch.int32}, "polar_dtype must be a floating point torch.dtype"),
    ({"module": "model"}, "module must be a torch.nn.Module"),
    ({"nonfinite": "ignore"}, "Unknown nonfinite 'ignore': expected one of raise, skip"),
]


@pytest.mark.parametrize(("settings", "text"), BAD_SETTINGS, ids=[text for _, text in BAD_SETTINGS])
def test_bad_settings_are_refused_by_name(settings, text):
    with pytest.raises(ValueError, match=text):
        _on(_theta(), **settings)


def test_a_model_without_a_matrix_is_refused():
    with pytest.raises(ValueError, match=r"MOON needs at least one matrix.*route_parameters"):
        MOON(nn.LayerNorm(3), tasks=2)


def test_a_step_without_any_gradient_is_refused():
    optimizer = _on(_theta())
    with pytest.raises(RuntimeError, match=r"No parameter has a gradient. Call backward\(\)"):
        optimizer.step()


def test_losses_without_again_are_refused_where_it_is_needed(two_heads, batch):
    model = two_heads()
    with pytest.raises(ValueError, match=r"evaluates the losses again.*again=function.*per_task"):
        MOON(model, tasks=2).combine(model.losses(*batch()))
    MOON(model, tasks=2, delta="per_task").combine(model.losses(*batch())).backward()


def test_again_is_for_losses_only(two_heads, batch):
    model = two_heads()
    with pytest.raises(ValueError, match="again= is for losses that were computed already"):
        MOON(model, tasks=2).combine(model.losses, *batch(), again=lambda: model.losses(*batch()))
    with pytest.raises(ValueError, match="Arguments are for a closure"):
        MOON(model, tasks=2).combine(model.losses(*batch()), 3)


def test_a_closure_that_answers_otherwise_the_second_time_is_refused(two_heads, batch):
    model = two_heads()
    calls = []

    def fickle(x, y):
        calls.append(1)
        left, right = model.losses(x, y)
        return {"left": left, "right": right} if len(calls) == 1 else {"left": left}

    with pytest.raises(
        ValueError, match="Evaluated again, the closure returned the losses of left, expected those of left, right"
    ):
        MOON(model, tasks=["left", "right"]).minimize(fickle, *batch())


def test_parameters_on_two_devices_are_refused():
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2, device="meta"))]
    with pytest.raises(ValueError, match="must be on one device, found cpu, meta"):
        Muon([{"params": parameters, "kind": "matrix"}])


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = Muon(table)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()


def test_sharded_parameters_are_refused_until_they_are_right():
    class DTensor(nn.Parameter):  # by name: a real one needs processes
        pass

    with pytest.raises(ValueError, match=r"Sharded parameters .* are not supported yet"):
        Muon([{"params": [DTensor(torch.ones(2, 2))], "kind": "matrix"}])


def test_a_bad_vector_setting_is_named_as_it_was_given(two_heads):
    with pytest.raises(ValueError, match="vector_lr must be a number of at least 0, found -1"):
        MOON(two_heads(), tasks=2, vector_lr=-1)


def test_a_model_that_is_frozen_is_refused(two_heads):
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        MOON(two_heads().requires_grad_(False), tasks=2)


def test_minimize_needs_a_closure(two_heads, batch):
    model = two_heads()
    with pytest.raises(TypeError, match="minimize needs a closure that computes the losses, found a Tensor"):
        MOON(model, tasks=2).minimize(model.losses(*batch()))


def test_a_closure_that_fails_the_second_time_leaves_a_whole_step(two_heads, batch):
    models = [two_heads(), two_heads()]
    moon, muon = MOON(models[0], tasks=2), Muon(models[1])
    calls = []

    def failing(x, y):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("second evaluation")
        return models[0].losses(x, y)

    with pytest.raises(KeyError):
        moon.minimize(failing, *batch())
    muon.minimize(models[1].losses, *batch())
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_step_without_combine_says_so_once(two_heads, batch):
    model = two_heads()
    optimizer = MOON(model, tasks=2)
    with pytest.warns(UserWarning, match=r"step\(\) without combine\(\)") as seen:
        for _ in range(3):
            model.losses(*batch()).sum().backward()
            optimizer.step()
    assert len(seen) == 1
    assert seen[0].filename == __file__, "a warning points at the user's line"
