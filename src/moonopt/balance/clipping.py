"""Clipping of the gradient that tasks share, as Nash-MTL asks for it: which parameters that are outlasts a checkpoint."""

from collections.abc import Sequence

from torch import Tensor

from moonopt.balance.base import Balancer, Memory, Tasks

#: Flags in the memory, in the order of the optimizer's parameters.
CLIPPED = "clipped"


def note_shared(tasks: Tasks, balancer: Balancer, trained: Sequence[Tensor], memory: Memory) -> None:
    """Remember what the tasks share, for a balancer that clips it; one of its several tasks does not tell."""
    if balancer.max_norm is not None and (tasks.count > 1 or len(balancer.tasks) == 1):
        shared = set(tasks.shared)
        memory[CLIPPED] = [p in shared for p in trained]


def noted_shared(trained: Sequence[Tensor], memory: Memory) -> list[Tensor]:
    """What was remembered last; nothing before the first time, and none of the parameters that came later."""
    return [p for p, clipped in zip(trained, memory.get(CLIPPED, ()), strict=False) if clipped]
