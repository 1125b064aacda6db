"""The second evaluation repeats the first and leaves no trace."""

import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from moonopt import MOON, build
from moonopt.tasks.replay import Replay


class Noisy(nn.Module):
    """Dropout, BatchNorm, spectral norm, and a buffer that is bound anew at every call."""

    def __init__(self):
        super().__init__()
        self.first = spectral_norm(nn.Linear(6, 16))
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(16, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        noise = torch.randn(16)  # not from a module
        return self.second(self.dropout(self.norm(self.first(x)) + noise))


@pytest.fixture
def noisy():
    torch.manual_seed(0)
    return Noisy()


def _buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("switch", ["train", "eval"])
def test_the_second_forward_repeats_the_first(noisy, autocast, switch):
    """At rate 0 nothing moves, so that equal losses are bit-equal only if everything else is the same."""
    optimizer = MOON(noisy, tasks=2, lr=torch.tensor(0.0))
    x = torch.randn(8, 6)
    losses, masks, flags, dtypes = [], [], [], []
    noisy.dropout.register_forward_hook(lambda module, args, output: masks.append(output == 0))
    noisy.second.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))

    def closure(x):
        answer = noisy(x).float().square().mean(0)
        losses.append(answer.detach().clone())
        flags.append([module.training for module in noisy.modules()])
        return answer

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = optimizer.combine(closure, x)
    loss.backward()
    if switch == "eval":
        noisy.eval()
    before, generator = _buffers(noisy), torch.get_rng_state()
    optimizer.step()

    assert torch.equal(*losses)
    assert torch.equal(*masks)
    assert masks[0].any()
    assert flags[0] == flags[1]
    assert dtypes == [torch.bfloat16 if autocast else torch.float32] * 2
    assert all(torch.equal(buffer, before[name]) for name, buffer in noisy.named_buffers())
    assert torch.equal(torch.get_rng_state(), generator)
    assert noisy.training == (switch == "train")
    assert not torch.is_autocast_enabled("cpu")


def test_the_second_forward_sees_moved_weights_under_an_open_autocast(noisy):
    """Autocast caches casts of weights: within one region, the cast of a moved weight must not be the old one."""
    noisy.eval()
    optimizer = MOON(noisy, tasks=2, lr=0.5)
    x, losses = torch.randn(8, 6), []

    def closure():
        answer = noisy.second(noisy.first(x)).float().square().mean(0)
        losses.append(answer.detach())
        return answer

    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.minimize(closure)
        again = closure()
    assert not torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[1], again, rtol=0.2, atol=0.1)


def test_training_goes_on_as_if_there_had_been_no_second_forward(noisy):
    """Random numbers and statistics after the step are those of a run with per_task, which evaluates once."""
    ends = []
    for delta in ("loss_difference", "per_task"):
        torch.manual_seed(0)
        model = Noisy()
        optimizer = MOON(model, tasks=2, beta=0.0, delta=delta)
        for _ in range(5):
            optimizer.minimize(lambda x, model=model: model(x).square().mean(0), torch.randn(8, 6))
        ends.append([*model.parameters(), *model.buffers(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Jitter(nn.Module):
    """Has a generator of its own."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return _jittered(x, self.generator)


def _jittered(x, generator):
    return x + torch.randn(x.shape, generator=generator)


class Jittering:
    """A closure that is no function."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, x):
        return _jittered(x, self.generator)


def _decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


#: For a generator and the module of it: a closure that draws from it and its arguments after x.
WITH_GENERATOR = {
    "an argument": lambda generator, module: (_jittered, generator),
    "a part of the batch": lambda generator, module: (lambda x, batch: _jittered(x, batch["own"]), {"own": generator}),
    "a name": lambda generator, module: (lambda x: _jittered(x, generator),),
    "a default": lambda generator, module: (lambda x, own=generator: _jittered(x, own),),
    "a default by name": lambda generator, module: (lambda x, *, own=generator: _jittered(x, own),),
    "bound before": lambda generator, module: (functools.partial(_jittered, generator=generator),),
    "the module's": lambda generator, module: (lambda x: module(x),),
    "the method's object's": lambda generator, module: (Jitter(generator).forward,),
    "a bound method's object's": lambda generator, module: (functools.partial(Jitter(generator).forward),),
    "an object's that is called": lambda generator, module: (Jittering(generator),),
    "another module's": lambda generator, module: (Jitter(generator),),
    "an object's that is found by name": lambda generator, module: _calling(Jittering(generator)),
    "a name in a comprehension": lambda generator, module: (lambda x: sum(_jittered(each, generator) for each in [x]),),
    "a name in a function that is found by name": lambda generator, module: _calling(lambda x: _jittered(x, generator)),
    "a decorated function's": lambda generator, module: (_decorated(lambda x: _jittered(x, generator)),),
}


def _calling(function):
    return (lambda x: function(x),)


@pytest.mark.parametrize("whose", WITH_GENERATOR)
def test_a_generator_of_the_closures_own_gives_the_same_numbers_again_and_then_goes_on(whose):
    generator, reference = (torch.Generator().manual_seed(1) for _ in range(2))
    module = nn.Sequential(nn.Identity(), Jitter(generator))
    closure, *more = WITH_GENERATOR[whose](generator, module)
    x = torch.zeros(3)
    replay = Replay(closure, (x, *more), module, [torch.device("cpu")])
    first = replay.first()
    with replay.again() as again:
        assert torch.equal(again, first)
    assert torch.equal(first, _jittered(x, reference))
    assert torch.equal(generator.get_state(), reference.get_state())


class Proxy:
    """As of a request or a session that is not there."""

    @property
    def __dict__(self):
        raise LookupError("of nothing")


def test_what_a_closure_finds_may_have_no_attributes_to_look_through():
    nothing, generator = Proxy(), torch.Generator().manual_seed(1)

    def closure(x):
        return (nothing, _jittered(x, generator))

    replay = Replay(closure, (torch.zeros(3),), None, [torch.device("cpu")])
    _, first = replay.first()
    with replay.again() as (_, again):
        assert torch.equal(again, first)


class Penalised(nn.Module):
    """A slope in x, for which the closure differentiates, of a network with dropout and a buffer that counts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2))
        self.own = torch.Generator().manual_seed(1)
        self.evaluations = []

    def losses(self, x):
        self.evaluations.append(None)
        x = (x + 0.1 * torch.randn(x.shape, generator=self.own)).requires_grad_()
        output = self.layers(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        self.evaluations[-1] = torch.stack([slope.square().sum(1).mean(), output.square().mean().to(slope)])
        return {"slope": self.evaluations[-1][0], "size": self.evaluations[-1][1]}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["moon", "famo"])
def test_a_closure_that_differentiates_inside_is_repeated_with_a_graph(name, autocast):
    model = Penalised()
    rate = {"moon": {"lr": torch.tensor(0.0)}, "famo": {"lr": 0.0}}[name]
    optimizer = build(name, model, ["slope", "size"], optimizer=rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        before = len(model.evaluations)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = optimizer.combine(model.losses, torch.randn(8, 6))
        scaler.scale(loss).backward()
        after_one = [*_buffers(model).values(), torch.get_rng_state(), model.own.get_state()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ends = [*model.buffers(), torch.get_rng_state(), model.own.get_state()]
        assert all(torch.equal(*pair) for pair in zip(after_one, ends, strict=True))
        first, *failed, again = model.evaluations[before:]
        assert torch.equal(first, again)
        assert failed == ([None] if step == 0 else [])  # it is remembered
    assert not optimizer.task_weights.requires_grad
    copied = pickle.loads(pickle.dumps(optimizer))
    assert not copied._pending.differentiating


@pytest.mark.parametrize("inside", ["backward", "retain_grad", "zero_grad"])
def test_gradients_that_a_closure_leaves_or_clears_are_as_they_were_when_vectors_move(inside):
    ends = []
    for alone in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

        def losses(x, model=model, alone=alone):
            if inside == "zero_grad":
                if not alone:
                    model.zero_grad()
                return model(x).square().mean(0)
            adversary = x.clone().requires_grad_()
            if alone:
                (slope,) = torch.autograd.grad(model(adversary).square().sum(), adversary)
            else:
                adversary = adversary * 1 if inside == "retain_grad" else adversary
                adversary.retain_grad()
                model(adversary).square().sum().backward()
                slope = adversary.grad
                model.zero_grad()
            return model(x + 0.1 * slope.sign()).square().mean(0)

        optimizer = MOON(model, tasks=2, lr=0.01, beta=0.1)
        for seed in range(3):
            torch.manual_seed(seed)
            optimizer.minimize(losses, torch.randn(8, 6, dtype=torch.float64))
            assert all(p.grad is not None for p in model.parameters())
        ends.append([optimizer.logits, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *ends))


def test_the_deltas_of_a_closure_that_differentiates_inside_are_those_of_its_gradients():
    deltas = []
    for mode in ("loss_difference", "per_task"):
        model = Penalised().double()
        optimizer = MOON(model, tasks=["slope", "size"], lr=1e-6, delta=mode)
        torch.manual_seed(1)
        for _ in range(2):
            optimizer.minimize(model.losses, torch.randn(8, 6, dtype=torch.float64))
        found = optimizer.diagnostics()
        deltas.append([found["delta/slope"], found["delta/size"]])
    assert deltas[0] == pytest.approx(deltas[1], rel=1e-3)


def test_a_closure_that_fails_for_another_reason_is_not_tried_once_more():
    calls = []

    def closure(x):
        calls.append(1)
        if not torch.is_grad_enabled():
            raise RuntimeError("CUDA error")
        return x

    replay = Replay(closure, (torch.ones(2),), None, [torch.device("cpu")])
    with torch.no_grad(), pytest.raises(RuntimeError, match="CUDA error"), replay.again():
        pass
    assert len(calls) == 1


def test_in_a_capture_a_graph_is_made_for_a_closure_that_was_seen_to_want_one(monkeypatch):
    """Random numbers can be drawn again once there, and a warm-up comes before."""
    monkeypatch.setattr("moonopt.tasks.replay.is_capturing", lambda device: True)
    monkeypatch.setattr("moonopt.tasks.replay.draw_again", lambda device, again: None)
    model, x = Penalised(), torch.randn(8, 6)
    seen, devices = set(), [torch.device("cpu")]
    replay = Replay(model.losses, (x,), model, devices, differentiating=seen)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"), replay.again():
        pass
    assert len(model.evaluations) == 1
    seen.add(model.losses.__code__)
    with torch.no_grad(), replay.again() as answer:
        assert not any(loss.requires_grad for loss in answer.values())
    assert len(model.evaluations) == 2


def test_buffers_are_restored_also_when_the_closure_fails(noisy):
    optimizer = MOON(noisy, tasks=2)
    x, calls = torch.randn(8, 6), []

    def closure():
        answer = noisy(x).square().mean(0)
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("second evaluation")
        return answer

    loss = optimizer.combine(closure)
    loss.backward()
    before, generator = _buffers(noisy), torch.get_rng_state()
    with pytest.raises(KeyError):
        optimizer.step()
    assert all(torch.equal(buffer, before[name]) for name, buffer in noisy.named_buffers())
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_compiled_model_trains(two_heads, batch):
    model, plain = two_heads(), two_heads()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer, reference = MOON(compiled, tasks=2, beta=0.1), MOON(plain, tasks=2, beta=0.1)
    for seed in range(3):
        x, y = batch(seed=seed)
        optimizer.minimize(lambda x, y: (compiled(x) - y).square().mean(0), x, y)
        reference.minimize(plain.losses, x, y)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(optimizer.logits, reference.logits, rtol=1e-3, atol=1e-5)


def test_buffers_of_a_compiled_model_are_protected():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = MOON(compiled, tasks=2)
    loss = optimizer.combine(lambda x: compiled(x).square().mean(0), torch.randn(8, 6))
    loss.backward()
    before = _buffers(model)
    optimizer.step()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert model[1].num_batches_tracked == 1


@pytest.fixture
def process_group():
    """Of this process alone, for tensors that are distributed."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_buffers_of_all_kinds_come_back(process_group):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.manual_seed(0)
    whole, complex_numbers = torch.randn(8), torch.randn(3, dtype=torch.complex64)
    kinds = {
        "number": torch.tensor(3),
        "nothing": torch.empty(0),
        "flags": torch.tensor([True, False]),
        "short": torch.randn(3).half(),
        "turned": torch.randn(3, 4).T,
        "apart": torch.randn(6, 6)[::2, ::3],
        "first": whole[:5],
        "overlapping": whole[3:],
        "with a graph": torch.randn(2, requires_grad=True),
        "complex": complex_numbers.clone(),
        "conjugate": complex_numbers.conj(),
        "imaginary": complex_numbers.clone().conj().imag,
        "distributed": distribute_tensor(torch.randn(4), init_device_mesh("cpu", (1,)), [Shard(0)]),
    }
    module = nn.Module()
    for name, buffer in kinds.items():
        module.register_buffer(name, buffer)

    @torch.no_grad()
    def closure():
        for buffer in module.buffers():
            buffer.fill_(buffer.numel() == 2)
        return contents()

    def contents():
        return [
            (buffer.full_tensor() if name == "distributed" else buffer).detach().clone()
            for name, buffer in module.named_buffers()
        ]

    before, replay = contents(), Replay(closure, (), module, [torch.device("cpu")])
    with replay.again() as during:
        assert not any(torch.equal(*pair) for pair in zip(before, during, strict=True) if pair[0].numel() > 1)
    assert all(torch.equal(*pair) for pair in zip(before, contents(), strict=True))


def test_buffers_that_are_expanded_or_not_there_yet_are_fine():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 2)
            self.register_buffer("scale", torch.ones(1).expand(2))
            self.register_buffer("average", None)

        def forward(self, x):
            output = self.layer(x) * self.scale
            self.average = output.detach().mean(0) if self.average is None else 0.5 * (self.average + output.detach().mean(0))
            return (output - self.average).square().mean(0)

    model, seen = Odd(), []
    optimizer = MOON(model, tasks=2, lr=torch.tensor(0.0))

    def closure(x):
        answer = model(x)
        seen.append(answer.detach())
        return answer

    optimizer.minimize(closure, torch.randn(8, 6))
    assert torch.equal(*seen)
    assert model.average is not None


@pytest.mark.parametrize("name", ["moon", "famo"])
def test_a_buffer_that_was_made_in_inference_mode_is_fine(name):
    """By a validation before the first step, as Lightning has it."""

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
            self.register_buffer("shift", None)

        def forward(self, x):
            if self.shift is None:
                self.shift = torch.linspace(0, 1, 2)
            return self.layers(x) + self.shift

    ends = []
    for mode in (torch.inference_mode, torch.no_grad):
        model = Lazy()
        optimizer = build(name, model, 2)
        with mode():
            model(torch.ones(1, 6))
        optimizer.minimize(lambda model=model: list(model(torch.ones(3, 6)).square().mean(0)))
        ends.append([*model.parameters(), optimizer.task_weights])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


def test_the_second_forward_does_not_take_attentions_fast_path():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2)).eval()
    optimizer, seen = MOON(model, tasks=2, lr=torch.tensor(0.0)), []
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[:, 3:] = True

    def closure(x):
        output = model[0](x, src_key_padding_mask=mask)
        seen.append(torch.stack([output.square().mean(), output.abs().mean()]))
        return seen[-1]

    optimizer.minimize(closure, torch.randn(4, 5, 8))
    assert torch.equal(*(each.detach() for each in seen))
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_closure_that_finds_another_batch_at_its_second_evaluation_is_told(two_heads, batch, recwarn):
    model = two_heads()
    optimizer = MOON(model, tasks=2)
    x, y = batch()
    for part, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
        (optimizer.combine(model.losses, part, wanted) / 4).backward()
        (optimizer.combine(lambda part=part, wanted=wanted: model.losses(part, wanted)) / 4).backward()
    optimizer.step()
    optimizer.minimize(lambda: model.losses(x, y))
    assert not recwarn.list
    for part, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
        (optimizer.combine(lambda: model.losses(part, wanted)) / 4).backward()
    with pytest.warns(UserWarning, match="looks up part, wanted by name and finds another than") as told:
        optimizer.step()
    assert [each.filename for each in told] == [__file__]


def test_a_global_batch_is_looked_up_as_well():
    around = {"torch": torch}
    exec("x = torch.ones(2)\ndef losses():\n    return x * scale\nscale = 3.0", around)
    replay = Replay(around["losses"], (), None, [torch.device("cpu")])
    replay.first()
    around["scale"] = 4.0  # no tensor
    with replay.again() as answer:
        assert answer.tolist() == [4.0, 4.0]
    around["x"] = torch.zeros(2)
    with pytest.warns(UserWarning, match="looks up x by name"), replay.again():
        pass


def test_what_a_closure_only_writes_or_calls_by_the_same_name_is_nothing_that_it_looks_up(recwarn):
    around = {"torch": torch, "history": [], "loss": torch.ones(1)}
    code = """
class Found:
    loss = torch.ones(2)
def losses(found):
    global last
    last = torch.ones(1)
    history.append(torch.ones(1))
    return found.loss
"""
    exec(code, around)
    replay = Replay(around["losses"], (around["Found"],), None, [torch.device("cpu")])
    replay.first()
    around["loss"] = torch.zeros(1)
    with replay.again():
        pass
    assert not recwarn.list


def test_an_argument_that_a_comprehension_reads_is_not_looked_up(recwarn):
    around = {"torch": torch, "x": torch.ones(2)}
    exec("def losses(x): return torch.stack([x[i] for i in range(2)])", around)
    replay = Replay(around["losses"], (around["x"],), None, [torch.device("cpu")])
    replay.first()
    around["x"] = torch.zeros(2)
    with replay.again():
        pass
    assert not recwarn.list


def test_what_a_closure_writes_itself_is_no_batch_of_another_though_it_reads_it(recwarn):
    """A global, and a variable of the function around."""
    around = {"torch": torch, "output": torch.ones(1)}
    code = """
def made():
    total = torch.zeros(1)
    def losses(x):
        global output
        nonlocal total
        output = x.square()
        total = total + output.sum()
        return output
    return losses
"""
    exec(code, around)
    replay = Replay(around["made"](), (torch.ones(2),), None, [torch.device("cpu")])
    replay.first()
    with replay.again():
        pass
    assert not recwarn.list


@pytest.mark.parametrize("made", [list, tuple, lambda parts: dict(enumerate(parts))])
def test_a_batch_of_several_tensors_is_looked_up_as_well(made):
    around = {"batch": made([torch.ones(2), torch.ones(1)])}
    exec("def losses():\n    return batch[0]", around)
    replay = Replay(around["losses"], (), None, [torch.device("cpu")])
    replay.first()
    kept, around["batch"] = around["batch"], made([torch.zeros(2), torch.ones(1)])
    with pytest.warns(UserWarning, match="looks up batch by name"), replay.again():
        del kept
