"""A GPU that computes nothing, where there is none: tensors on it have shapes and devices, and asking for a number fails.

A plugin of pytest for a process of its own: torch must not be imported before it. ``test_stand_in_gpu.py`` starts that process.
"""

import ctypes
import os
import sys

import pytest

assert "torch" not in sys.modules, "torch looks for GPUs when it is imported"
ctypes.CDLL(os.environ["STAND_IN_GPU"])

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from moonopt import polar  # noqa: E402
from moonopt.tasks import replay  # noqa: E402


def _gru(of_inputs, of_state, state, bias_ih=None, bias_hh=None):
    return torch.empty_like(state), state.new_empty(len(state), 5 * state.shape[1])


def _gru_backward(gradient, kept, has_bias):
    gates = [gradient.new_empty(len(gradient), 3 * gradient.shape[1]) for _ in range(2)]
    return *gates, torch.empty_like(gradient), *(gates[0].new_empty(gates[0].shape[1]) if has_bias else None for _ in gates)


def _lstm(of_inputs, of_state, cell, bias_ih=None, bias_hh=None):
    return torch.empty_like(cell), torch.empty_like(cell), torch.empty_like(of_inputs)


def _lstm_backward(of_state, of_cell, cell, new_cell, kept, has_bias):
    return torch.empty_like(kept), torch.empty_like(cell), kept.new_empty(kept.shape[1]) if has_bias else None


#: Operations of which torch does not know the shapes without computing them.
SHAPES = torch.library.Library("aten", "IMPL")
for name, function in {
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    **dict.fromkeys(["_fused_adam_", "_fused_adam_.tensor_lr"], lambda *args, **options: None),
    **dict.fromkeys(["_fused_adamw_", "_fused_adamw_.tensor_lr"], lambda *args, **options: None),
}.items():
    SHAPES.impl(name, function, "Meta")

polar(torch.eye(2))  # the coefficients of its schedule are computed once


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Devices are called by their number inside, "cuda:0"."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.empty(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))  # too old for kernels of our own
    with FakeTensorMode():
        yield torch.device("cuda:0")


@pytest.fixture
def captured(monkeypatch):
    """Goes through all parts of a step as if CUDA graphs of them were captured, without what the host does in between."""

    def go_through(optimizer, closure, *args):
        optimizer.prepare_for_capture()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(replay, "draw_again", lambda device, again: None)
        return sum(1 for _ in optimizer.in_parts(closure, args))

    return go_through
