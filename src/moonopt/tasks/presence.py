"""Numbers by task, where some tasks may not be there: nothing here waits for the device."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def mean_by_task(numbers: Sequence[Tensor], present: Sequence[Sequence[bool]], like: Tensor) -> Tensor:
    """For each task the mean over the micro-batches that have it, NaN where none has.

    ``numbers`` has for each micro-batch one number per task that it has, ``present`` which those are.
    """
    if len(numbers) == 1 and all(present[0]):
        return numbers[0].to(like)
    total = functools.reduce(torch.add, [spread(each.to(like), here) for each, here in zip(numbers, present, strict=True)])
    return total / functools.reduce(torch.add, [selection(here, like) for here in present])


def pick(numbers: Tensor, present: Sequence[bool]) -> Tensor:
    """The numbers of the tasks that are there, without an index that would have to travel to the device."""
    if all(present):
        return numbers
    return torch.stack([number for number, here in zip(numbers.unbind(), present, strict=True) if here])


def spread(numbers: Tensor, present: Sequence[bool]) -> Tensor:
    """One number for every task, 0 for those that are not there."""
    if all(present):
        return numbers
    remaining, zero = iter(numbers.unbind()), numbers.new_zeros(())
    return torch.stack([next(remaining) if here else zero for here in present])


def selection(present: Sequence[bool], like: Tensor) -> Tensor:
    """1 for every task that is there, 0 for the others."""
    return spread(torch.ones_like(like[: sum(present)]), present)
