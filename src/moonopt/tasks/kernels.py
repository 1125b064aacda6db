"""Evaluating with kernels that can be differentiated forwards and twice: math attention, recurrence step by step.

Torch's fused attention and recurrent kernels know their gradient and nothing more. Dropout inside them draws other random
numbers than the plain kernels do, so that a model with dropout must take the plain ones from the first evaluation on.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import rnn

State = tuple[Tensor, ...]  # h, and c for an LSTM
Cell = Callable[[Tensor, State, "_Weights"], State]  # of the input's part of the gates


class _Kernels:
    """Which kernels torch takes, in all threads: plain ones while anybody wants them, in whatever order they come and go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._restore = contextlib.ExitStack()

    def want_plain(self) -> None:
        with self._lock:
            self._wanted += 1
            if self._wanted == 1:
                self._restore.enter_context(sdpa_kernel(SDPBackend.MATH))
                self._restore.callback(setattr, rnn, "_VF", rnn._VF)  # type: ignore[attr-defined]
                rnn._VF = PLAIN  # type: ignore[attr-defined, assignment]

    def release(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0:
                self._restore.close()


KERNELS = _Kernels()


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Math attention, and torch's recurrent modules out of elementary operations."""
    KERNELS.want_plain()
    try:
        yield
    finally:
        KERNELS.release()


def has_dropout(module: nn.Module | None) -> bool:
    """Whether a part of the module that is in training mode has a rate of dropout; an unknown module may."""
    if module is None:
        return True
    return any(
        isinstance(value, float) and value > 0 and (name == "p" or "drop" in name)
        for each in module.modules()
        if each.training
        for name, value in vars(each).items()
    )


class _Weights:
    """The weights of one layer in one direction, in torch's order."""

    def __init__(self, weights: Sequence[Tensor], has_biases: bool) -> None:
        self.input, self.hidden = weights[:2]
        self.input_bias: Tensor | None = weights[2] if has_biases else None
        self.hidden_bias: Tensor | None = weights[3] if has_biases else None
        rest = weights[4 if has_biases else 2 :]
        self.projection = rest[0] if rest else None

    def of_input(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.input, self.input_bias)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.hidden, self.hidden_bias)


def _lstm(gates: Tensor, state: State, weights: _Weights) -> State:
    hidden, cell = state
    into, forget, new, out = (gates + weights.of_hidden(hidden)).chunk(4, -1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    hidden = out.sigmoid() * cell.tanh()
    return hidden if weights.projection is None else functional.linear(hidden, weights.projection), cell


def _gru(gates: Tensor, state: State, weights: _Weights) -> State:
    (hidden,) = state
    reset, update, new = gates.chunk(3, -1)
    reset_hidden, update_hidden, new_hidden = weights.of_hidden(hidden).chunk(3, -1)
    update = (update + update_hidden).sigmoid()
    new = (new + (reset + reset_hidden).sigmoid() * new_hidden).tanh()
    return (new + update * (hidden - new),)


def _rnn_tanh(gates: Tensor, state: State, weights: _Weights) -> State:
    return ((gates + weights.of_hidden(state[0])).tanh(),)


def _rnn_relu(gates: Tensor, state: State, weights: _Weights) -> State:
    return ((gates + weights.of_hidden(state[0])).relu(),)


class _Sequences:
    """Sequences one below the other: at time t the first ``sizes[t]`` of them go on."""

    def __init__(self, flat: Tensor, sizes: list[int], shape: tuple[int, ...] | None, batch_first: bool) -> None:
        self.flat, self.sizes = flat, sizes
        self._shape, self._batch_first = shape, batch_first  # of sequences of equal length, by time and sequence

    def restored(self, flat: Tensor) -> Tensor:
        """The flat outputs in the layout of the input."""
        if self._shape is None:
            return flat
        by_time = flat.reshape(*self._shape, -1)
        return by_time.transpose(0, 1) if self._batch_first else by_time


def _unpacked(*args: Any) -> tuple[_Sequences, State, list[_Weights], int, float]:
    """Torch's arguments for packed and for ordinary sequences, in one form."""
    if isinstance(args[3], list | tuple):  # packed: data, batch sizes, hx, weights, ...
        data, sizes, hx, weights, has_biases, layers, dropout, training, bidirectional = args
        sequences = _Sequences(data, sizes.tolist(), None, batch_first=False)
    else:
        inputs, hx, weights, has_biases, layers, dropout, training, bidirectional, batch_first = args
        by_time = inputs.transpose(0, 1) if batch_first else inputs
        times, batch = by_time.shape[:2]
        sequences = _Sequences(by_time.flatten(0, 1), [batch] * times, (times, batch), batch_first)
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    grouped = [_Weights(weights[at : at + each], has_biases) for at in range(0, len(weights), each)]
    return sequences, state, grouped, directions, dropout if training else 0.0


def _layers(cell: Cell, *args: Any) -> tuple[Tensor, ...]:
    """torch.lstm and the like: the outputs of the last layer, and the last states of all layers and directions."""
    sequences, initial, weights, directions, dropout = _unpacked(*args)
    flat, last = sequences.flat, []
    for start in range(0, len(weights), directions):
        if start and dropout:
            flat = functional.dropout(flat, dropout)
        outputs = []
        for index in range(start, start + directions):
            output, state = _one_direction(
                cell, flat, sequences.sizes, tuple(each[index] for each in initial), weights[index], index > start
            )
            outputs.append(output)
            last.append(state)
        flat = torch.cat(outputs, -1) if directions > 1 else outputs[0]
    return sequences.restored(flat), *(torch.stack(each) for each in zip(*last, strict=True))


def _one_direction(
    cell: Cell, flat: Tensor, sizes: list[int], state: State, weights: _Weights, backwards: bool
) -> tuple[Tensor, State]:
    steps = list(zip(torch.split(weights.of_input(flat), sizes), sizes, strict=True))
    outputs = []
    for gates, size in reversed(steps) if backwards else steps:
        moved = cell(gates, tuple(each[:size] for each in state), weights)
        state = tuple(torch.cat([new, old[size:]]) if len(old) > size else new for new, old in zip(moved, state, strict=True))
        outputs.append(moved[0])
    return torch.cat(outputs[::-1] if backwards else outputs), state


def _one_step(cell: Cell, inputs: Tensor, hx: Tensor | Sequence[Tensor], *weights: Tensor | None) -> Tensor | State:
    """torch.lstm_cell and the like."""
    given = [each for each in weights if each is not None]
    own = _Weights(given, has_biases=len(given) > 2)
    state = cell(own.of_input(inputs), (hx,) if isinstance(hx, Tensor) else tuple(hx), own)
    return state[0] if isinstance(hx, Tensor) else state


CELLS: dict[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn_tanh, "rnn_relu": _rnn_relu}

#: What stands in for the functions that torch's recurrent modules call, on whole sequences and on one step.
PLAIN = SimpleNamespace(
    **{name: functools.partial(_layers, cell) for name, cell in CELLS.items()},
    **{f"{name}_cell": functools.partial(_one_step, cell) for name, cell in CELLS.items()},
)
