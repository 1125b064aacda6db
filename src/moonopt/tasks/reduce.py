"""The same numbers on all ranks."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from moonopt.tasks.gradients import Rows
from moonopt.tasks.presence import mean_by_task, selection


def world_size() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def mean_over_ranks(numbers: Tensor) -> Tensor:
    """The mean over all processes, equal on each of them."""
    if world_size() == 1:
        return numbers
    total = numbers.detach().clone()
    distributed.all_reduce(total)
    return total / world_size()


def means_by_task_over_ranks(
    quantities: Sequence[Sequence[Tensor]], present: Sequence[Sequence[bool]], like: Tensor
) -> tuple[list[Tensor], Tensor | None]:
    """``mean_by_task`` of several quantities, over the micro-batches of all processes, which need not have the same tasks.

    Beside it 1 for every task that some process had, 0 for the others; None where all were there. One exchange.
    """
    means = [mean_by_task(numbers, present, like) for numbers in quantities]
    if world_size() == 1 and all(map(any, zip(*present, strict=True))):
        return means, None
    counts = functools.reduce(torch.add, [selection(here, like) for here in present])
    if world_size() > 1:
        total = torch.stack([*(torch.where(counts > 0, mean * counts, 0.0) for mean in means), counts])
        distributed.all_reduce(total)
        *sums, counts = total.unbind()
        means = [each / counts for each in sums]
    return means, (counts > 0).to(like)


def gradients_over_ranks(rows: Rows, parameters: Sequence[Tensor]) -> Rows:
    """The means of the task gradients over all processes, a row at a time.

    Where a task does not depend on a parameter in this process, it may in another, as with experts: its gradient here is zero.
    """
    if world_size() == 1 or not rows or not parameters:
        return rows
    known = torch.tensor([[each is not None for each in row] for row in rows], dtype=torch.float32, device=parameters[0].device)
    distributed.all_reduce(known)
    for row, counts in zip(rows, known.tolist(), strict=True):
        for index, (p, count) in enumerate(zip(parameters, counts, strict=True)):
            if count and row[index] is None:
                row[index] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        _average(row)
    return rows


def _average(row: list[Tensor | None]) -> None:
    """Put the means where the gradients are, in one exchange for all of a dtype; nothing is written into a gradient.

    Some are expanded from fewer numbers, as that of ``p.sum()``.
    """
    here = [(index, each) for index, each in enumerate(row) if each is not None]
    for dtype in sorted({each.dtype for _, each in here}, key=str):
        alike = [(index, each) for index, each in here if each.dtype == dtype]
        together = torch.cat([each.flatten() for _, each in alike])
        distributed.all_reduce(together)
        means = torch.split(together / world_size(), [each.numel() for _, each in alike])
        for (index, each), mean in zip(alike, means, strict=True):
            row[index] = mean.view(each.shape)


def on_any_rank(flags: Tensor) -> Tensor:
    """Which flags are raised by some process."""
    return flags if world_size() == 1 else mean_over_ranks(flags.float()) > 0


def with_other_ranks(flags: Tensor) -> Tensor:
    """The flags, and with several processes one more: whether none is raised here, and some by another.

    However many flags a process has, they exchange one.
    """
    if world_size() == 1:
        return flags
    here = flags.any().reshape(1)
    return torch.cat([flags, on_any_rank(here) & ~here])


def refuse_several_ranks(text: str) -> None:
    """Raise where there is more than one process."""
    if world_size() > 1:
        raise RuntimeError(f"{text}: found a world of {world_size()} processes, expected one.")


def refuse_different_tasks(names: Sequence[str], present: Sequence[bool], device: torch.device) -> None:
    """Raise, on all processes, where not all of them have the same tasks: what they learn would drift apart."""
    if world_size() == 1:
        return
    counts = torch.tensor(present, dtype=torch.float32, device=device)
    distributed.all_reduce(counts)
    for name, count in zip(names, counts.tolist(), strict=True):
        if count not in (0, world_size()):
            raise RuntimeError(
                f"All processes must have the same tasks in a step: {int(count)} of {world_size()} have task {name!r}."
            )
