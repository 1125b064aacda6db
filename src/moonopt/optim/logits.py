"""The online dual: how the logits xi of the task weights follow the deltas (Algorithm 1, line 7)."""

import math

import torch
from torch import Tensor

#: With beta="auto", how fast the running mean of the deltas' size forgets, and how far one step moves the logits.
AUTO_DECAY = 0.98
AUTO_RATE = 0.01


def auto_rate(beta: float | str) -> float | None:
    """How far "auto" or "auto:RATE" moves the logits; None where beta is a number. Raises where it is neither."""
    if isinstance(beta, str):
        word, colon, number = beta.partition(":")
        try:
            rate = float(number) if colon else AUTO_RATE
        except ValueError:
            rate = math.nan
        if word == "auto" and 0 <= rate < math.inf:
            return rate
    elif isinstance(beta, int | float) and 0 <= beta < math.inf:
        return None
    raise ValueError(f'beta must be a number of at least 0, "auto" or "auto:RATE" such as "auto:0.03", found {beta!r}.')


def next_logits(
    logits: Tensor, size: Tensor, delta: Tensor, here: Tensor | None, *, beta: float | str, gamma: float
) -> tuple[Tensor, Tensor]:
    """xi - beta * (delta + gamma * xi) for the tasks that were there, and the running mean of the deltas' size.

    ``here`` is 1 for a task that was there and 0 for another; None where all were.

    The logits are centred first, which changes no weight: what all have in common would grow without end. With "auto", delta
    is centred over the tasks and divided by the mean. It is also centred where a task was not there, so that this one
    keeps its place among the others.
    """
    rate = auto_rate(beta)
    logits = logits - logits.mean()
    if here is not None:
        delta = torch.where(here > 0, delta, 0.0)
    if rate is not None or here is not None:
        centred = _centred(delta, here)
        delta = centred if rate is not None or here is None else torch.where(here.all(), delta, centred)
    if rate is not None:
        size = _followed(size, delta, here)
        delta = torch.where(size > 0, delta / size, 0.0)
    step = rate if rate is not None else float(beta)
    move = step * (delta + gamma * logits)
    return logits - (move if here is None else move * here), size


def _centred(delta: Tensor, here: Tensor | None) -> Tensor:
    return delta - delta.sum() / len(delta) if here is None else (delta - delta.sum() / here.sum()) * here


def _followed(size: Tensor, delta: Tensor, here: Tensor | None) -> Tensor:
    """The running mean; the delta of a single task, once centred, tells nothing."""
    count = torch.full_like(size, len(delta)) if here is None else here.sum()
    now = delta.abs().sum() / count
    return torch.where(count > 1, torch.where(size > 0, AUTO_DECAY * size + (1 - AUTO_DECAY) * now, now), size)
