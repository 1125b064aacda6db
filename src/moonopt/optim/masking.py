"""Steps that may turn out void: on the host they are not taken, on an accelerator they are taken with no effect.

``finite`` is True where the host knows that the step is good, else a flag on the device, which is never waited for.
"""

from typing import Literal

import torch
from torch import Tensor

from moonopt.linalg.kernels import can_stream
from moonopt.tasks.directional import Rate
from moonopt.tasks.losses import HALF_DTYPES

Tensors = tuple[Tensor, ...] | list[Tensor]
Finite = Literal[True] | Tensor


def kept(finite: Finite, new: Tensors, old: Tensors) -> Tensors:
    """``new`` where the step is good, else ``old``."""
    if finite is True:
        return new
    return [torch.where(finite, n, o) for n, o in zip(new, old, strict=True)]


def effective(finite: Finite, rate: Rate, dtype: torch.dtype) -> Rate:
    """``rate`` where the step is good, else 0."""
    return rate if finite is True else finite.to(dtype) * rate


def move(parameters: Tensors, directions: Tensors, rate: Rate) -> None:
    """p <- p - rate * direction, in float32 or better."""
    if isinstance(rate, Tensor) and directions[0].dtype in HALF_DTYPES:
        for p, direction in zip(parameters, directions, strict=True):
            _move_one(p, direction, rate)
    elif isinstance(rate, Tensor):
        torch._foreach_sub_(parameters, torch._foreach_mul(directions, rate))
    else:
        torch._foreach_add_(parameters, directions, alpha=-rate)


def _move_one(parameter: Tensor, direction: Tensor, rate: Tensor) -> None:
    if rate.device != parameter.device or not can_stream(parameter, direction):
        parameter.addcmul_(direction, rate, value=-1)
        return
    from moonopt.linalg.kernels.streaming import move as kernel  # needs triton

    kernel(parameter, direction, rate)
