"""The online dual: how the logits xi of the task weights follow the deltas (Algorithm 1, line 7)."""

import math
from collections.abc import Sequence

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


def mean_by_task(numbers: Sequence[Tensor], present: Sequence[Sequence[bool]], like: Tensor) -> Tensor:
    """For each task the mean over the micro-batches that have it, NaN where none has.

    ``numbers`` has for each micro-batch one number per task that it has, ``present`` which those are.
    """
    total = sum(spread(each.to(like), here) for each, here in zip(numbers, present, strict=True))
    count = sum(selection(here, like) for here in present)
    return torch.as_tensor(total / count)


def pick(numbers: Tensor, present: Sequence[bool]) -> Tensor:
    """The numbers of the tasks that are there, without an index that would have to travel to the device."""
    if all(present):
        return numbers
    return torch.stack([number for number, here in zip(numbers.unbind(), present, strict=True) if here])


def spread(numbers: Tensor, present: Sequence[bool]) -> Tensor:
    """One number for every task, 0 for those that are not there."""
    if all(present):
        return numbers
    remaining, zero = iter(numbers.unbind()), torch.zeros_like(numbers[0])
    return torch.stack([next(remaining) if here else zero for here in present])


def selection(present: Sequence[bool], like: Tensor) -> Tensor:
    """1 for every task that is there, 0 for the others."""
    return spread(torch.ones_like(like[: sum(present)]), present)
