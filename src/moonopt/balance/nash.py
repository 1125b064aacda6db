"""The Nash bargaining solution."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from moonopt.balance.base import Balancer, Memory, Tasks
from moonopt.linalg.bargaining import nash_weights
from moonopt.tasks.presence import pick, spread


class NashMTL(Balancer):
    """Nash-MTL (Navon et al., 2022): weights a > 0 with G a = 1 / a, where all tasks gain the same relative to their utility.

    Where there is no such point (a task without gradient, or a Pareto stationary one) the weights stay as they were, and
    ``unsolved`` in the memory counts it.

    Args:
        tasks: their names, or how many.
        max_norm: what the norm of the shared parameters' gradient is clipped to; None for nothing.

    """

    name: ClassVar[str] = "nash-mtl"
    needs_gradients: ClassVar[bool] = True
    uses_gram: bool = True

    def __init__(self, tasks: int | Sequence[str], max_norm: float | None = 1.0) -> None:
        super().__init__(tasks)
        self.max_norm = max_norm

    def initial(self, like: Tensor) -> dict[str, Any]:
        return {"alpha": like.new_ones(len(like)).double().cpu(), "unsolved": 0}

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        present = tasks.losses.present
        before = pick(memory["alpha"], present)
        answer = nash_weights(tasks.gram(), before)
        memory["unsolved"] += not answer.solved
        weights = answer.weights if answer.solved else before
        memory["alpha"] = memory["alpha"] * (1 - spread(weights * 0 + 1, present)) + spread(weights, present)
        return weights
