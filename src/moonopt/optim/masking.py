"""Steps that may turn out void: on the host they are not taken, on an accelerator they are taken with no effect.

``finite`` is True where the host knows that the step is good, else a flag on the device, which is never waited for.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from moonopt.linalg.kernels import LARGE, can_stream
from moonopt.tasks.directional import Rate
from moonopt.tasks.losses import HALF_DTYPES

Tensors = tuple[Tensor, ...] | list[Tensor]
Finite = Literal[True] | Tensor


def usable(gradients: Tensors, state: Tensors, finite: Finite, scale: Tensor | None) -> Tensors:
    """The gradients in the dtypes of the state, divided by the factor of a GradScaler, and 0 where the step is void."""
    ready = gradients if finite is True else _masked(gradients, state, finite)
    pairs = zip(ready, state, strict=True)
    ready = [each if each.dtype == like.dtype else each.to(like.dtype) for each, like in pairs]
    return ready if scale is None else torch._foreach_div(ready, scale.to(ready[0].device).reshape(()))


def _masked(tensors: Tensors, state: Tensors, finite: Tensor) -> Tensors:
    """Small ones together, in one dtype: a launch takes longer than they do."""
    small = [each for each in tensors if each.numel() < LARGE]
    parts: Iterator[Tensor] = iter(())
    if small:
        dtype = functools.reduce(torch.promote_types, {each.dtype for each in state})
        together = torch.where(finite, torch.cat([each.flatten() for each in small]), 0.0).to(dtype)
        parts = _parts(together, small)
    return [next(parts) if each.numel() < LARGE else torch.where(finite, each, 0.0) for each in tensors]


def _parts(together: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    parts = torch.split_with_sizes(together, [each.numel() for each in like])
    return (part.view(each.shape) for part, each in zip(parts, like, strict=True))


def follow(averages: Tensors, new: Tensors, weight: float, finite: Finite) -> None:
    """average <- average + weight * (new - average), where ``new`` is 0 if the step is void."""
    if finite is True:
        torch._foreach_lerp_(averages, new, weight)
    else:
        torch._foreach_mul_(averages, 1 - weight * finite.to(averages[0].dtype))
        torch._foreach_add_(averages, new, alpha=weight)


def effective(finite: Finite, rate: Rate, dtype: torch.dtype) -> Rate:
    """``rate`` where the step is good, else 0."""
    return rate if finite is True else finite.to(dtype) * rate


def move(parameters: Tensors, directions: Tensors, rate: Rate) -> None:
    """p <- p - rate * direction, in float32 or better."""
    if not isinstance(rate, Tensor):
        torch._foreach_add_(parameters, directions, alpha=-rate)
        return
    pairs = list(zip(parameters, directions, strict=True))
    alike = [pair for pair in pairs if pair[0].dtype == pair[1].dtype and pair[0].dtype not in HALF_DTYPES]
    if alike:
        torch._foreach_sub_([p for p, _ in alike], torch._foreach_mul([direction for _, direction in alike], rate))
        pairs = [pair for pair in pairs if pair[0].dtype != pair[1].dtype or pair[0].dtype in HALF_DTYPES]
    streamed, rest = streams(pairs) if rate.device == parameters[0].device else ([], range(len(pairs)))
    for indices in streamed:
        from moonopt.linalg.kernels.streaming import move as move_all  # needs triton

        move_all([pairs[index][0] for index in indices], [pairs[index][1] for index in indices], rate)
    for index in rest:
        pairs[index][0].addcmul_(pairs[index][1], rate, value=-1)


def streams(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[list[int]], list[int]]:
    """Which pairs of tensors one launch of a kernel can go over, and which are left."""
    streamed: dict[tuple[Any, ...], list[int]] = {}
    rest: list[int] = []
    for index, (one, other) in enumerate(pairs):
        if can_stream(one, other):
            streamed.setdefault((one.shape, one.dtype, other.dtype), []).append(index)
        else:
            rest.append(index)
    return list(streamed.values()), rest
