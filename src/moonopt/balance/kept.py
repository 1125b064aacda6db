"""The weights of the tasks, which stay among the micro-batches of a step and between refreshes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moonopt.balance.base import Memory
from moonopt.tasks.losses import TaskLosses
from moonopt.tasks.presence import pick, selection, spread

#: In the memory: the weights, in the order of the tasks, and which tasks they were made for.
WEIGHTS, WEIGHED = "weights", "weighed"


class KeptWeights(NamedTuple):
    """Those in a balancer's memory."""

    memory: Memory

    @staticmethod
    def initial(like: Tensor) -> dict[str, Any]:
        """All alike, and made for none; ``like`` is a tensor with one number per task."""
        return {WEIGHTS: torch.full_like(like, 1 / len(like)), WEIGHED: [False] * len(like)}

    @property
    def weights(self) -> Tensor:
        found: Tensor = self.memory[WEIGHTS]
        return found

    def of(self, losses: TaskLosses) -> Tensor:
        """Of the tasks that are there."""
        return pick(self.weights, losses.present)

    def are_for(self, losses: TaskLosses) -> bool:
        """Whether they were made for all tasks that are there."""
        return all(known or not here for known, here in zip(self.memory[WEIGHED], losses.present, strict=True))

    def take(self, weights: Tensor, losses: TaskLosses, anew: bool) -> Tensor:
        """Keep those of tasks that have none yet, or of all ``anew``; returns what is kept for the tasks that are there."""
        before, known = self.weights, self.memory[WEIGHED]
        if anew:
            before, known = torch.zeros_like(before), [False] * len(known)
        weights = weights.to(losses.values.device, before.dtype)
        new = [here and not old for here, old in zip(losses.present, known, strict=True)]
        found = spread(weights, losses.present)  # and not the balancer's own tensor, which a captured step would write into
        self.memory[WEIGHTS] = found.clone() if all(new) else torch.where(selection(new, before) > 0, found, before)
        self.memory[WEIGHED] = [a or b for a, b in zip(known, losses.present, strict=True)]
        return self.of(losses).to(weights)

    def forget_of_no_use(self, before: Tensor) -> None:
        """Go back to earlier ones, if they are of losses that are not finite: a training loop may have left these out."""
        self.memory[WEIGHTS] = torch.where(self.weights.isfinite().all(), self.weights, before)
