"""What is kept of a micro-batch until the step: its weights, and what the balancer has noted of its tasks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from moonopt.tasks.pending import MicroBatch


class Observed(NamedTuple):
    """Of one micro-batch; None where nothing was noted."""

    weights: Tensor
    noted: Any = None


def notes_of(batches: Sequence[MicroBatch]) -> list[Any]:
    """Of each task once, of the first batch that has it."""
    firsts = [each for place, each in enumerate(batches) if not are_noted(each.present, batches[:place])]
    return [each.observed.noted for each in firsts if each.observed.noted is not None]


def are_noted(present: Sequence[bool], batches: Sequence[MicroBatch]) -> bool:
    """Whether every task that is there is in a batch of which something was noted."""
    noted = [each.present for each in batches if each.observed.noted is not None]
    return all(any(other[place] for other in noted) for place, here in enumerate(present) if here)
