"""Multiple-gradient descent."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from moonopt.balance.base import Balancer, Memory, Tasks
from moonopt.errors import unknown_name
from moonopt.linalg.simplex import min_norm_weights

NORMALISATIONS = ("none", "l2", "loss", "loss+")


class MGDA(Balancer):
    """MGDA (Désidéri 2012; Sener and Koltun, 2018): the point of least norm in the convex hull of the task gradients.

    Args:
        tasks: their names, or how many.
        normalisation: divide every gradient first: by its norm ("l2"), by its loss ("loss") or by both ("loss+").
        times_tasks: multiply the weights by K, to match the size of a summed loss.

    """

    name: ClassVar[str] = "mgda"
    needs_gradients: ClassVar[bool] = True
    uses_gram: bool = True

    def __init__(self, tasks: int | Sequence[str], normalisation: str = "none", times_tasks: bool = False) -> None:
        super().__init__(tasks)
        if normalisation not in NORMALISATIONS:
            raise ValueError(unknown_name(normalisation, NORMALISATIONS, "normalisation"))
        self.normalisation, self.times_tasks = normalisation, times_tasks

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        gram = tasks.gram()
        sizes = torch.ones_like(gram[0])
        if self.normalisation in ("l2", "loss+"):
            norms = gram.diagonal().sqrt()
            sizes = sizes * torch.where(norms > 0, norms, 1.0)
        if self.normalisation in ("loss", "loss+"):
            losses = tasks.values.double().cpu()
            sizes = sizes * torch.where(losses != 0, losses, 1.0)
        weights = min_norm_weights(gram / torch.outer(sizes, sizes))
        return weights * tasks.count if self.times_tasks else weights
