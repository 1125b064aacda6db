"""The online dual: how the logits xi of the task weights follow the deltas (Algorithm 1, line 7)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moonopt.tasks.presence import selection

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
    logits: Tensor, size: Tensor, delta: Tensor, present: Sequence[bool], *, beta: float | str, gamma: float
) -> tuple[Tensor, Tensor]:
    """xi - beta * (delta + gamma * xi) for the tasks that were there, and the running mean of the deltas' size.

    The logits are centred first, which changes no weight: what all have in common would grow without end. With "auto", delta
    is centred over the tasks and divided by the mean. It is also centred where a task was not there, so that this one
    keeps its place among the others.
    """
    rate = auto_rate(beta)
    here = selection(present, logits)
    logits = logits - logits.mean()
    if not all(present):
        delta = torch.where(here > 0, delta, 0.0)
    if rate is not None or not all(present):
        delta = (delta - delta.sum() / here.sum()) * here
    if rate is not None:
        if sum(present) > 1:  # the delta of a single task is nothing but its own mean
            now = delta.abs().sum() / here.sum()
            size = torch.where(size > 0, AUTO_DECAY * size + (1 - AUTO_DECAY) * now, now)
        delta = torch.where(size > 0, delta / size, 0.0)
    step = rate if rate is not None else float(beta)
    return logits - step * (delta + gamma * logits) * here, size
