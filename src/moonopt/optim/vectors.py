"""AdamW for everything that is not a matrix: one foreach step, moments in float32 or better, maskable on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moonopt.optim.masking import Finite, Tensors, follow, move, usable
from moonopt.tasks.directional import Rate


def adamw_state(parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """m, v and the number of steps, all zero."""
    zeros = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    return {
        "step": torch.zeros((), dtype=dtype, device=parameter.device),
        "exp_avg": zeros,
        "exp_avg_sq": zeros.clone(),
    }


def adamw_step(
    parameters: Tensors,
    gradients: Tensors,
    states: Sequence[dict[str, Any]],
    *,
    rate: Rate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    finite: Finite,
    scale: Tensor | None,
) -> None:
    """m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, p <- (1 - rate * decay) p - rate * m^ / (sqrt(v^) + eps)."""
    steps = [state["step"] for state in states]
    means = [state["exp_avg"] for state in states]
    squares = [state["exp_avg_sq"] for state in states]
    if finite is True:
        torch._foreach_add_(steps, 1)
    else:
        torch._foreach_add_(steps, [finite.to(steps[0].dtype)] * len(steps))  # added as one tensor, it would be waited for
    if scale is not None:
        gradients = usable(gradients, means, finite, scale)
    if _can_fuse(finite, parameters, gradients, means, squares):
        # One call for all that follows; a void step is one with infinities.
        torch._fused_adamw_(
            parameters, gradients, means, squares, [], steps, lr=rate, beta1=betas[0], beta2=betas[1],
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
            found_inf=None if finite is True else (~finite).float(),
        )  # fmt: skip
        return
    gradients = usable(gradients, means, finite, None)
    follow(means, gradients, 1 - betas[0], finite)
    follow(squares, torch._foreach_mul(gradients, gradients), 1 - betas[1], finite)

    updates = torch._foreach_sqrt(squares)
    torch._foreach_div_(updates, torch._foreach_sqrt(_bias_corrections(betas[1], steps)))
    torch._foreach_add_(updates, eps)
    torch._foreach_mul_(updates, _bias_corrections(betas[0], steps))
    torch._foreach_reciprocal_(updates)
    torch._foreach_mul_(updates, means)
    if weight_decay:
        torch._foreach_mul_(parameters, 1 - rate * weight_decay)
    move(parameters, updates, rate)


def _can_fuse(finite: Finite, *lists: Tensors) -> bool:
    """Whether torch's fused step takes them: on a CPU, or in float32 on a GPU, in one dtype and laid out alike."""
    if torch.compiler.is_compiling():  # which cannot trace it
        return False
    first = lists[0][0]
    fits = first.device.type == "cpu" if finite is True else first.is_cuda and first.dtype == torch.float32
    return fits and all(
        each.dtype == first.dtype and each.stride() == column[0].stride()
        for column in zip(*lists, strict=True)
        for each in column
    )


def _bias_corrections(beta: float, steps: Tensors) -> Tensors:
    """1 - beta^step. A void step before the first counts as the first, so that nothing is divided by zero."""
    powers = torch._foreach_pow(beta, torch._foreach_clamp_min(steps, 1.0))
    torch._foreach_neg_(powers)
    torch._foreach_add_(powers, 1)
    return powers
