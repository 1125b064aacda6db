"""Forward-mode differentiation of a closure whose parameters are not its arguments: they carry their tangents in place."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Rule = Callable[..., Tensor]

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
        rule = RULES.get(func)
        usual = len(args) == 2 or func is functional.linear
        if rule is not None and usual and not kwargs and _only_forwards(args):
            return rule(func, *args)
        answer = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            torch._C._set_fwd_grad_enabled(*args)
        elif func in NORMS:
            value, tangent = _unpacked(answer)
            if tangent is not None and tangent.dtype != value.dtype:
                return forward_ad.make_dual(value, tangent.to(value.dtype))  # type: ignore[no-untyped-call]
        return answer


def _only_forwards(args: tuple[Any, ...]) -> bool:
    """Whether nothing but tangents is wanted of these arguments: no graph beside them, and no transform of torch.func."""
    tensors = [each for each in args if isinstance(each, Tensor)]
    return (
        torch._C._is_fwd_grad_enabled()
        and torch._C._functorch.maybe_current_level() is None
        and all(type(each) in (Tensor, nn.Parameter) and not each.requires_grad for each in tensors)
    )


def _unpacked(value: Any) -> tuple[Any, Tensor | None]:
    return forward_ad.unpack_dual(value) if isinstance(value, Tensor) else (value, None)  # type: ignore[no-untyped-call]


def _dual(value: Tensor, *tangents: Tensor | None) -> Tensor:
    """A value whose derivative is the sum of ``tangents``, which must be nobody else's: operations in place write into it."""
    terms = [each for each in tangents if each is not None]
    if not terms:
        return value
    tangent = functools.reduce(torch.add, terms).to(value.dtype)
    return forward_ad.make_dual(value, tangent)  # type: ignore[no-untyped-call, no-any-return]


def _linear(func: Rule, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    (x, dx), (weight, d_weight), (bias, d_bias) = map(_unpacked, (x, weight, bias))
    value = func(x, weight, bias)
    return _dual(
        value,
        None if dx is None else func(dx, weight),
        None if d_weight is None else func(x, d_weight),
        None if d_bias is None else d_bias.expand_as(value).clone(),
    )


def _sum(func: Rule, left: Any, right: Any) -> Tensor:
    """Or difference."""
    (a, da), (b, db) = _unpacked(left), _unpacked(right)
    if (da is None) == (db is None):
        return func(left, right)
    return _dual(func(a, b), func(da, _zero(b)) if db is None else func(_zero(a), db))


def _product(func: Rule, left: Any, right: Any) -> Tensor:
    (a, da), (b, db) = _unpacked(left), _unpacked(right)
    if (da is None) == (db is None):
        return func(left, right)
    return _dual(func(a, b), func(da, b) if db is None else func(a, db))


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else 0


#: Where torch takes zeros for the derivative of a constant, and finds out in Python what shape their sum has: 0.1 to 0.3 ms
#: each time, in every loss.
RULES: dict[Callable[..., Any], Rule] = {
    functional.linear: _linear,
    **dict.fromkeys((Tensor.add, torch.add, Tensor.sub, torch.sub, Tensor.__rsub__), _sum),
    **dict.fromkeys((Tensor.mul, torch.mul), _product),
}
