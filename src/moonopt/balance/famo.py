"""Fast adaptive multitask optimization."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moonopt.balance import adam
from moonopt.balance.base import Balancer, Learned, Memory, Tasks
from moonopt.tasks.presence import pick, selection
from moonopt.tasks.watch import any_not_finite

EPS = 1e-8


class FAMO(Balancer):
    """FAMO (Liu et al., 2023): weights z = softmax(xi) of log-losses, which follow how much each has fallen in the last step.

    The gradient is that of sum_i z_i log(D_i) / c with D_i = l_i - lowest_i and c = sum_i z_i / D_i held constant, so that the
    losses have weights z_i / (c D_i), which sum to 1; the combined loss shows their weighted sum. After the whole step the
    losses are evaluated again on the same batch, and Adam moves xi along J' (log D - log D'), J the Jacobian of the softmax.
    Where a loss is then not finite or not above its lowest, xi stays, and ``rejected`` in the memory counts it.

    Args:
        tasks: their names, or how many.
        lr: of xi.
        gamma: weight decay of xi.
        lowest: a number below each loss, or one for all.
        max_norm: what the norm of the shared parameters' gradient is clipped to.

    """

    name: ClassVar[str] = "famo"
    capturable: bool = True
    evaluates_again: ClassVar[bool] = True
    takes_logarithms: ClassVar[bool] = True

    def __init__(
        self,
        tasks: int | Sequence[str],
        lr: float = 0.025,
        gamma: float = 1e-3,
        lowest: float | Sequence[float] = 0.0,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(tasks)
        self.lr, self.gamma, self.max_norm = lr, gamma, max_norm
        self._bounds: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.lowest = [float(lowest)] * len(self.tasks) if isinstance(lowest, int | float) else [float(b) for b in lowest]
        if len(self.lowest) != len(self.tasks):
            raise ValueError(f"lowest must have one number per task: found {len(self.lowest)} for {len(self.tasks)} tasks.")

    def initial(self, like: Tensor) -> dict[str, Any]:
        return adam.initial("logits", torch.zeros_like(like)) | {"rejected": torch.zeros_like(like[0])}

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        z = pick(memory["logits"].softmax(0), tasks.losses.present)
        distances = self._above_lowest(tasks.values, tasks.losses.present)
        weights = z.to(distances) / torch.where(distances > 0, distances, torch.nan)
        return weights / weights.nansum()

    def learn(self, learned: Learned, memory: Memory) -> None:
        if learned.after is None:
            raise RuntimeError("FAMO learns from the losses after the step, and found none.")
        before, after = (self._above_lowest(each, [True] * len(self.tasks)) for each in (learned.before, learned.after))
        fallen = before.log() - after.log()
        z, here = memory["logits"].softmax(0), None
        if not all(learned.present):
            here = selection(learned.present, fallen)
            fallen, z = torch.where(here > 0, fallen, 0.0), z * here
            z = z / z.sum()  # among the tasks that are there, or one that is rarely there would drift
        rejected = any_not_finite(fallen)
        memory["rejected"] = memory["rejected"] + rejected
        fallen, moves = torch.where(rejected, 0.0, fallen), (~rejected).to(fallen)
        moves = moves if here is None else here * moves
        adam.step(memory, "logits", z * (fallen - (z * fallen).sum()), moves, self.lr, self.gamma)

    def _above_lowest(self, losses: Tensor, present: Sequence[bool]) -> Tensor:
        if not any(self.lowest):
            return losses + EPS
        kind = losses.device, losses.dtype
        if kind not in self._bounds:  # from the steps before a capture, which cannot fetch them
            self._bounds[kind] = losses.new_tensor(self.lowest)
        return losses - pick(self._bounds[kind], present) + EPS
