"""The plain kernels compute what torch's compute, and can be differentiated in every way."""

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from moonopt import MOON
from moonopt.tasks.kernels import has_dropout, plain_kernels

LENGTHS = [4, 6, 3, 6, 1]  # not sorted

RECURRENT = {
    "lstm": (nn.LSTM, {}),
    "lstm, two layers in both directions, projected, batch first": (
        nn.LSTM,
        {"num_layers": 2, "bidirectional": True, "proj_size": 3, "batch_first": True},
    ),
    "lstm, three layers without biases": (nn.LSTM, {"num_layers": 3, "bias": False}),
    "lstm, projected without biases": (nn.LSTM, {"proj_size": 2, "bias": False}),
    "gru, two layers in both directions": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "gru, three layers without biases, batch first": (nn.GRU, {"num_layers": 3, "bias": False, "batch_first": True}),
    "rnn, two layers in both directions": (nn.RNN, {"num_layers": 2, "bidirectional": True}),
    "rnn with relu, three layers, batch first": (nn.RNN, {"nonlinearity": "relu", "num_layers": 3, "batch_first": True}),
}
FORMS = ["without a state", "with a state", "packed", "packed and sorted, with a state", "unbatched", "unbatched, with a state"]
DROPPING = {
    "lstm": (nn.LSTM, {"num_layers": 3, "dropout": 0.5}),
    "gru in both directions": (nn.GRU, {"num_layers": 2, "dropout": 0.3, "bidirectional": True, "batch_first": True}),
    "rnn": (nn.RNN, {"num_layers": 2, "dropout": 0.5}),
}
CELLS = {
    "lstm": (nn.LSTMCell, {}),
    "lstm without biases": (nn.LSTMCell, {"bias": False}),
    "gru": (nn.GRUCell, {}),
    "gru without biases": (nn.GRUCell, {"bias": False}),
    "rnn_tanh": (nn.RNNCell, {}),
    "rnn_relu": (nn.RNNCell, {"nonlinearity": "relu", "bias": False}),
}


def _operations(call):
    """The names of the operations that a call runs."""
    with torch.autograd.profiler.profile() as profile:
        call()
    return {event.name for event in profile.function_events}


def _built(kind, settings):
    torch.manual_seed(0)
    return kind(4, 5, dtype=torch.float64, **settings)


def _inputs(module, form):
    """The input in one of FORMS and the state, if any; the leaves among them require gradients."""
    torch.manual_seed(1)
    shape = (6, 4) if "unbatched" in form else (5, 6, 4) if module.batch_first else (6, 5, 4)
    data = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs, lengths = data, torch.tensor(LENGTHS)
    if "packed" in form:
        if "sorted" in form:
            lengths = lengths.sort(descending=True).values
        inputs = pack_padded_sequence(data, lengths, module.batch_first, enforce_sorted="sorted" in form)
    if "with a state" not in form:
        return inputs, None, [data]
    layers = module.num_layers * (2 if module.bidirectional else 1)
    batch = () if "unbatched" in form else (5,)
    sizes = (module.proj_size or 5, 5) if isinstance(module, nn.LSTM) else (5,)
    states = [torch.randn(layers, *batch, size, dtype=torch.float64, requires_grad=True) for size in sizes]
    return inputs, tuple(states) if len(states) > 1 else states[0], [data, *states]


def _tensors(answer):
    """Every tensor in what a recurrent module returns."""
    if isinstance(answer, torch.Tensor):
        return [answer]
    return [tensor for each in answer if each is not None for tensor in _tensors(each)]


def _answer_and_gradients(call, leaves):
    torch.manual_seed(2)
    answer = call()
    outputs = [each for each in _tensors(answer) if each.is_floating_point()]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in outputs]
    total = sum((each * weight).sum() for each, weight in zip(outputs, weights, strict=True))
    return answer, torch.autograd.grad(total, leaves, retain_graph=True)  # of the packing, which is done once


def _same_with_plain_kernels(module, call, leaves, fused, known=True):
    """And not because the same kernel ran."""
    leaves = [*leaves, *module.parameters()]
    stock, expected = _answer_and_gradients(call, leaves)
    with plain_kernels():
        plain, gradients = _answer_and_gradients(call, leaves)
        assert fused not in _operations(call)
    assert fused in _operations(call)
    assert type(plain) is type(stock)
    torch.testing.assert_close(_tensors(plain), _tensors(stock), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", RECURRENT)
def test_recurrent_layers_are_torchs(case, form):
    module = _built(*RECURRENT[case])
    inputs, state, leaves = _inputs(module, form)
    _same_with_plain_kernels(module, lambda: module(inputs, state), leaves, f"aten::{module.mode.lower()}")
    assert isinstance(module(inputs, state)[0], PackedSequence if "packed" in form else torch.Tensor)


@pytest.mark.parametrize("form", ["without a state", "packed"])
@pytest.mark.parametrize("case", DROPPING)
def test_dropout_between_layers_draws_torchs_random_numbers(case, form):
    module = _built(*DROPPING[case])
    inputs, _, leaves = _inputs(module, form)
    _same_with_plain_kernels(module, lambda: module(inputs), leaves, f"aten::{module.mode.lower()}")
    first, second = (_tensors(module(inputs))[0] for _ in range(2))
    assert not torch.equal(first, second), "there is dropout"
    module.eval()
    _same_with_plain_kernels(module, lambda: module(inputs), leaves, f"aten::{module.mode.lower()}")


@pytest.mark.parametrize("batch", [(), (5,)], ids=["unbatched", "batched"])
@pytest.mark.parametrize("case", CELLS)
def test_recurrent_cells_are_torchs(case, batch):
    cell = _built(*CELLS[case])
    torch.manual_seed(1)
    x, *state = (torch.randn(*batch, size, dtype=torch.float64, requires_grad=True) for size in (4, 5, 5))
    state = tuple(state) if isinstance(cell, nn.LSTMCell) else state[0]
    leaves = [x, *state] if isinstance(state, tuple) else [x, state]
    fused = f"aten::{case.split()[0]}_cell"
    _same_with_plain_kernels(cell, lambda: cell(x, state), leaves, fused)
    _same_with_plain_kernels(cell, lambda: cell(x), [x], fused, known=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize(
    "build",
    [Attention, lambda: nn.LSTM(8, 8, 2, dtype=torch.float64), lambda: nn.GRUCell(8, 8, dtype=torch.float64)],
    ids=["attention", "lstm", "gru cell"],
)
def test_plain_kernels_are_differentiated_forwards_and_twice(build, known):
    torch.manual_seed(0)
    module = build()
    x = torch.randn(3, 8, dtype=torch.float64) if isinstance(module, nn.GRUCell) else torch.randn(3, 4, 8, dtype=torch.float64)
    tangent = torch.randn_like(x)

    def total(x):
        answer = module(x)
        return (answer[0] if isinstance(answer, tuple) else answer).square().sum()

    with plain_kernels():
        with torch.no_grad(), forward_ad.dual_level():
            forwards = forward_ad.unpack_dual(total(forward_ad.make_dual(x, tangent))).tangent
        gradient = torch.func.grad(total)(x)
        _, twice = torch.autograd.functional.hvp(total, x, tangent)
    torch.testing.assert_close(forwards, (gradient * tangent).sum(), rtol=1e-10, atol=1e-12)
    step = 1e-5 * tangent
    along = (torch.func.grad(total)(x + step) - torch.func.grad(total)(x - step)) / 2e-5
    torch.testing.assert_close(twice, along, rtol=1e-5, atol=1e-7)


def test_torchs_own_kernels_are_not():
    """The reason for all this, on a CPU; on a GPU there are more of them."""
    x = torch.randn(3, 4, 8)
    for module in (nn.LSTM(8, 8), Attention().float()):
        with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
            module(forward_ad.make_dual(x, x))


BACKENDS = [
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
]


@pytest.mark.parametrize("fails", [False, True], ids=["", "after an exception"])
@pytest.mark.parametrize("module", [None, nn.LSTM(4, 5), nn.Linear(2, 2)], ids=["unknown", "lstm", "linear"])
def test_only_math_attention_is_enabled_inside_and_everything_afterwards(module, fails):
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # the user's choice, to be found again
    try:
        before = [enabled() for enabled in BACKENDS]
        assert before[:3] == [True, True, False]
        with pytest.raises(KeyError) if fails else contextlib.nullcontext(), plain_kernels():
            assert [enabled() for enabled in BACKENDS] == [True, False, False, False]
            if fails:
                raise KeyError("inside")
        assert [enabled() for enabled in BACKENDS] == before
        assert "aten::lstm" in _operations(lambda: nn.LSTM(4, 5)(torch.randn(6, 5, 4)))
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)


class NamesItsRate(nn.Module):
    """As the attention of transformers does: the rate is a number of its own."""

    def __init__(self, rate):
        super().__init__()
        self.attention_dropout = rate


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval(), False),
        (nn.TransformerEncoderLayer(4, 2, 8), True),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), False),
        (nn.MultiheadAttention(4, 2, dropout=0.2), True),
        (nn.LSTM(2, 2, 2, dropout=0.5), True),
        (nn.LSTM(2, 2, 2), False),
        (nn.Sequential(NamesItsRate(0.1)), True),
        (nn.Sequential(NamesItsRate(0.0)), False),
        (None, True),
    ],
    ids=lambda each: str(each) if isinstance(each, bool) else "",
)
def test_dropout_is_found_by_its_rate_in_parts_that_train(module, expected):
    assert has_dropout(module) is expected


def test_dropout_in_one_part_that_trains_is_enough():
    model = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))).eval()
    assert not has_dropout(model)
    model[1][1].train()
    assert has_dropout(model)


def _kernels():
    return torch.nn.modules.rnn._VF, torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()


def test_two_combined_losses_in_one_backward_pass_leave_the_kernels_as_they_were():
    """Whoever wants plain kernels may come and go in any order."""
    before = _kernels()
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = MOON(model, tasks=2, delta="forward_mode")
    x = torch.randn(3, 4, 8)
    losses = lambda: model(x).square().mean((0, 1))[:2]  # noqa: E731
    ((optimizer.combine(losses) + optimizer.combine(losses)) / 2).backward()
    optimizer.step()
    assert _kernels() == before
