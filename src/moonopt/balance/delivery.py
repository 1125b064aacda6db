"""Gradients that were computed already, as those of a loss."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def delivered(directions: Mapping[Tensor, Tensor], value: Tensor) -> Tensor:
    """A loss of this value whose gradient is the direction: scalers, hooks, clipping and accumulation work with it."""
    if not directions:
        raise RuntimeError("The losses depend on no parameter of the optimizer.")
    wanted = [direction.detach().to(p.dtype) for p, direction in directions.items()]
    loss: Tensor = _Delivery.apply(value, wanted, *directions)  # type: ignore[no-untyped-call]
    return loss


def as_of_backward(gradient: Tensor, parameter: Tensor) -> Tensor:
    """In the dtype and the strides of the parameter, as a backward pass leaves it: fused Adam takes them for granted."""
    if gradient.is_sparse or gradient.stride() == parameter.stride():
        return gradient.to(parameter.dtype)
    return torch.empty_like(parameter).copy_(gradient)


class _Delivery(torch.autograd.Function):
    """A number with given gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, wanted: list[Tensor], *_: Tensor) -> Tensor:
        ctx.save_for_backward(*wanted)  # until then, and no longer
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *torch._foreach_mul(ctx.saved_tensors, gradient)
