"""Forward-mode differentiation of a closure whose parameters are not its arguments: they carry their tangents in place."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

#: Under autocast, the derivatives of these are in another dtype than their values, which no later operation takes.
NORMS = (functional.batch_norm, functional.layer_norm, functional.group_norm, functional.instance_norm, functional.rms_norm)


@contextlib.contextmanager
def carried(tangents: Mapping[Tensor, Tensor], parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters carry tangents: what is computed from them meanwhile has its derivative, see ``tangent_of``.

    Values and versions of the parameters stay as they are, so that a graph that waits for its backward is still good. None of
    ``parameters`` requires a gradient meanwhile: nothing is kept for a backward pass that nobody makes.
    """
    versions = torch.autograd._unsafe_preserve_version_counter(tuple(tangents))  # type: ignore[attr-defined]
    trained = [p for p in parameters if p.requires_grad]
    with forward_ad.dual_level(), versions:
        with torch.no_grad():
            for p, tangent in tangents.items():
                p.copy_(forward_ad.make_dual(p.detach(), tangent.to(p.dtype)))  # type: ignore[no-untyped-call]
        for p in trained:
            p.requires_grad_(False)
        try:
            with torch.enable_grad(), _LikeBackward():
                yield
        finally:
            for p in trained:
                p.requires_grad_(True)


def tangent_of(value: Tensor) -> Tensor:
    """The derivative along the carried tangents; zeros where there is no dependence."""
    tangent: Tensor | None = forward_ad.unpack_dual(value).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(value) if tangent is None else tangent


class _LikeBackward(TorchFunctionMode):
    """What is constant to a backward pass is constant here, too: torch.no_grad() alone does not stop tangents."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            torch._C._set_fwd_grad_enabled(*args)
        elif func in NORMS:
            value, tangent = forward_ad.unpack_dual(answer)  # type: ignore[no-untyped-call]
            if tangent is not None and tangent.dtype != value.dtype:
                return forward_ad.make_dual(value, tangent.to(value.dtype))  # type: ignore[no-untyped-call]
        return answer
