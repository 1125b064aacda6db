"""Impartial multi-task learning, on gradients."""

from typing import ClassVar

from torch import Tensor

from moonopt.balance.base import Balancer, Memory, Tasks
from moonopt.linalg.bargaining import imtl_g_weights


class IMTLG(Balancer):
    """IMTL-G (Liu et al., 2021): the combined gradient has equal projections on all task gradients, as unit vectors.

    Weights sum to 1 and may be negative.
    """

    name: ClassVar[str] = "imtl-g"
    needs_gradients: ClassVar[bool] = True
    uses_gram: bool = True

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        return imtl_g_weights(tasks.gram())
