"""Forward-mode differentiation of a closure whose parameters are not its arguments: they carry their tangents in place."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, graph
from torch.nn import functional
from torch.overrides import TorchFunctionMode

#: Under autocast, the derivatives of these are in another dtype than their values, which no later operation takes.
NORMS = (functional.batch_norm, functional.layer_norm, functional.group_norm, functional.instance_norm, functional.rms_norm)


class GraphNeededError(RuntimeError):
    """A closure differentiates inside, and the graph for that was not kept."""


@contextlib.contextmanager
def carried(tangents: Mapping[Tensor, Tensor], keep_graph: bool = False) -> Iterator[None]:
    """Let parameters carry tangents: what is computed from them meanwhile has its derivative, see ``tangent_of``.

    Values, flags and versions of the parameters stay as they are, so that a graph that waits for its backward is still good.
    Nothing goes backward through what is computed here, so that nothing is kept for it; but a closure may differentiate inside.
    """
    forgetting = contextlib.nullcontext() if keep_graph else graph.saved_tensors_hooks(_forget, _forgotten)
    same_versions = torch.autograd._unsafe_preserve_version_counter(tuple(tangents))  # type: ignore[attr-defined]
    with forward_ad.dual_level(), same_versions:
        with torch.no_grad():
            for p, tangent in tangents.items():
                p.copy_(forward_ad.make_dual(p.detach(), tangent.to(p.dtype)))  # type: ignore[no-untyped-call]
        with torch.enable_grad(), _like_backward(), forgetting:
            yield


def tangent_of(value: Tensor) -> Tensor:
    """The derivative along the carried tangents; zeros where there is no dependence."""
    tangent: Tensor | None = forward_ad.unpack_dual(value).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(value) if tangent is None else tangent


class _like_backward(TorchFunctionMode):  # noqa: N801
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


def _forget(_: Tensor) -> None:
    """Keep nothing."""


def _forgotten(_: None) -> Tensor:
    raise GraphNeededError
