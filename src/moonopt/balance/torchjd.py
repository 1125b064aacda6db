"""Any aggregator or weighting of TorchJD as a balancer. TorchJD itself is not needed until one is passed in."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from moonopt.balance.base import Aggregator, Memory, Tasks


class FromTorchJD(Aggregator):
    """An aggregator or weighting of TorchJD: ``FromTorchJD(3, torchjd.aggregation.UPGrad())``.

    Those that need only the Gram matrix of the task gradients get it, in float64; the others get the Jacobian, a row per task.
    As in TorchJD, parameters of one task alone get the plain gradient. What a stateful one remembers is its own: it is not in
    the optimizer's checkpoint.

    Args:
        tasks: their names, or how many.
        method: the aggregator or weighting.

    """

    name: ClassVar[str] = "torchjd"

    def __init__(self, tasks: int | Sequence[str], method: Callable[[Tensor], Tensor]) -> None:
        super().__init__(tasks)
        self.method = method
        kinds = {each.__name__ for each in type(method).__mro__}
        self._on_gram = getattr(method, "gramian_weighting", method if "_GramianWeighting" in kinds else None)
        self.uses_gram = self._on_gram is not None
        self._gives_weights = "Weighting" in kinds

    def direction(self, tasks: Tasks, memory: Memory) -> dict[Tensor, Tensor]:
        if not tasks.shared:
            return {}
        if self._on_gram is not None:
            return tasks.weighted_gradient(self._on_gram(tasks.gram()))
        jacobian = _jacobian(tasks)
        answer = self.method(jacobian)
        if self._gives_weights:
            return tasks.weighted_gradient(answer)
        pieces = torch.split(answer, [p.numel() for p in tasks.shared])
        return {p: piece.reshape(p.shape) for p, piece in zip(tasks.shared, pieces, strict=True)}


def _jacobian(tasks: Tasks) -> Tensor:
    """A row per task, over the shared parameters."""
    rows = [
        torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(tasks.shared, row, strict=True)])
        for row in tasks.rows
    ]
    return torch.stack(rows)
