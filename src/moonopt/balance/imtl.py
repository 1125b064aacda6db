"""Impartial multi-task learning, on gradients."""

from typing import ClassVar

import torch
from torch import Tensor

from moonopt.balance.base import Balancer, Memory, Tasks
from moonopt.linalg.bargaining import imtl_g_weights


class IMTLG(Balancer):
    """IMTL-G (Liu et al., 2021): the combined gradient has equal projections on all task gradients, as unit vectors.

    Weights sum to 1 and may be negative. A task without a gradient in the shared parameters, which has no projection, has the
    weight 1 / K for the sake of its own parameters; so have all where no weights do it.
    """

    name: ClassVar[str] = "imtl-g"
    needs_gradients: ClassVar[bool] = True
    uses_gram: bool = True

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        gram = tasks.gram()
        weights = imtl_g_weights(gram)
        equal = torch.full_like(weights, 1 / tasks.count)
        return torch.where(gram.diagonal() > 0, weights, equal) if weights.any() else equal
