"""Gradient normalisation."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moonopt.balance import adam
from moonopt.balance.base import Balancer, Learned, Memory, Tasks
from moonopt.tasks.presence import pick, selection, spread

#: The layer is remembered by its place among all parameters, frozen or not: FIRST, FIRST - 1, FIRST - 2, ... Numbers from 0 on
#: are of older checkpoints, which left frozen ones out: nobody knows which those were, and the layer is chosen anew.
NOT_CHOSEN, FIRST = -1, -2


class GradNorm(Balancer):
    """GradNorm (Chen et al., 2018): weights of sum K that bring the norms of the weighted task gradients together.

    With G_i = w_i ||grad l_i|| in one layer, and r_i the relative rate at which task i trains, (l_i / l_i(0)) over its mean:
    the weights take a step of Adam along the gradient of sum_i |G_i - mean(G) r_i^alpha|, and are scaled back to sum K.

    Args:
        tasks: their names, or how many.
        alpha: how strongly slow tasks are favoured; 1.5 in the paper's large experiment, 0.12 in its small one.
        lr: the rate of the weights.
        layer: the parameters whose gradients are compared; by default, as in the paper, the last shared matrix: the last of
            those in which most tasks have a gradient.

    """

    name: ClassVar[str] = "gradnorm"
    needs_gradients: ClassVar[bool] = True
    capturable: bool = True
    takes_notes: ClassVar[bool] = True

    def __init__(
        self, tasks: int | Sequence[str], alpha: float = 1.5, lr: float = 0.025, layer: Sequence[Tensor] | None = None
    ) -> None:
        super().__init__(tasks)
        self.alpha, self.lr = alpha, lr
        self._layer = None if layer is None else list(layer)

    def initial(self, like: Tensor) -> dict[str, Any]:
        return adam.initial("w", torch.ones_like(like)) | {"first": torch.full_like(like, torch.nan), "layer": NOT_CHOSEN}

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        """Those of the moment; what the gradients say is for the next step."""
        return pick(memory["w"], tasks.losses.present)

    def learn(self, learned: Learned, memory: Memory) -> None:
        for slopes, here, first in learned.noted:
            memory["first"] = torch.where(memory["first"].isnan(), first, memory["first"])
            adam.step(memory, "w", slopes, here, self.lr)
            positive = memory["w"].clamp_min(1e-6)
            memory["w"] = positive * len(positive) / positive.sum()

    def note(self, tasks: Tasks, memory: Memory) -> tuple[Tensor, Tensor, Tensor] | None:
        """The slopes of the weights, which tasks are there, and the first losses that are known; of one task nothing."""
        if tasks.count == 1:
            return None
        present = tasks.losses.present
        weights = pick(memory["w"], present)
        losses = spread(tasks.values.to(memory["w"]), present)
        here = selection(present, memory["w"])
        first = torch.where((here > 0) & memory["first"].isnan(), losses, memory["first"])
        norms = _norms(tasks.gradients_in(self._chosen_layer(tasks, memory))).to(weights)
        ratios = tasks.values.to(weights) / pick(first, present)
        scaled = weights * norms
        target = scaled.mean() * (ratios / ratios.mean()) ** self.alpha
        slopes = (scaled - target).sign() * norms  # 0 for a target of NaN, where losses of 0 or less have no rate
        return spread(slopes, present), here, first

    def _chosen_layer(self, tasks: Tasks, memory: Memory) -> list[Tensor]:
        if self._layer is not None:
            return self._layer
        index = FIRST - memory["layer"]
        if index >= 0 and tasks.trained[index].requires_grad:
            return [tasks.trained[index]]
        matrices = [p for p in tasks.shared if p.dim() > 1]
        if not matrices:
            raise ValueError("GradNorm compares gradients in the last shared matrix, and found none: pass layer=[...].")
        users = [0] * len(matrices)
        for row in tasks.gradients_one_by_one(matrices):
            users = [count + (g is not None and bool(g.any())) for count, g in zip(users, row, strict=True)]
        last = max(range(len(matrices)), key=lambda index: (users[index], index))
        if users[last] == len(self.tasks):
            memory["layer"] = FIRST - next(index for index, p in enumerate(tasks.trained) if p is matrices[last])
        return [matrices[last]]


def _norms(rows: Sequence[Sequence[Tensor | None]]) -> Tensor:
    squares = [[g.square().sum() for g in row if g is not None] for row in rows]
    device = next((each.device for row in squares for each in row), torch.device("cpu"))
    return torch.stack([torch.stack(row).sum().sqrt() if row else torch.zeros((), device=device) for row in squares])
