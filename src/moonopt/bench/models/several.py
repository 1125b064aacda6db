"""Backward passes that take several gradients at once, as ``torch.vmap`` hands them on, and one likewise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Of gradients (K, ...) and what was saved: the gradients (K, ...) of everything that has some.
Gradients = Callable[..., tuple[Tensor, ...]]


def for_one_or_several(gradients: Gradients, gradient: Tensor, *saved: Tensor) -> list[Tensor]:
    """What a backward pass finds, called from within that of a torch.autograd.Function that is differentiated once."""
    return list(_Pass.apply(gradients, gradient, *saved))  # type: ignore[no-untyped-call]


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(gradients: Gradients, gradient: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.squeeze(0) for each in gradients(gradient.unsqueeze(0), *saved))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int | None, ...], gradients: Gradients, gradient: Tensor, *saved: Tensor) -> Any:
        if in_dims[1] is None or any(each is not None for each in in_dims[2:]):
            raise RuntimeError("This takes several gradients of one forward pass, and no forward passes under torch.vmap.")
        found = gradients(gradient.movedim(in_dims[1], 0), *saved)
        return found, (0,) * len(found)
