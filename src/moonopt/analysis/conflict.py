"""How much the tasks are in each other's way: what the best step of one does to another.

"Best" depends on the norm in which a step is measured. In the Euclidean norm it is the gradient itself; in the spectral norm,
MOON's, it is the polar factor, and tasks that look opposed in one geometry may agree in the other.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from moonopt.errors import unknown_name
from moonopt.linalg.dual import Gradients, Scale, read_blocks
from moonopt.linalg.polar import polar

Geometry = Literal["euclidean", "spectral"]

#: A cosine nearer to zero than this is rounding: no conflict.
ROUNDING = 1e-12


@torch.no_grad()
def cosine_matrix(gradients: Gradients, geometry: Geometry = "euclidean", scale: Scale = None) -> Tensor:
    """What share of its largest possible decrease task j gets from the best step of task i: a matrix (m, m) in float64.

    Euclidean: <g_i, g_j> / (|g_i| |g_j|) over all blocks. Spectral: sum_b scale_b <polar(g_ib), g_jb> over
    sum_b scale_b ||g_jb||_S1, which is not symmetric. Both lie in [-1, 1] and have ones on the diagonal. The cosines of a task
    whose gradient is zero are 0, with itself, too.

    Args:
        gradients: (m, p, q), or one such tensor per block.
        geometry: "euclidean" or "spectral".
        scale: one number per block, or one for all: how far a step goes in it. The Euclidean geometry has none.

    >>> gradients = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[-1.0, 0.0], [0.0, 2.0]]])
    >>> cosine_matrix(gradients)[0, 1] < 0, cosine_matrix(gradients, "spectral")[0, 1] > 0
    (tensor(True), tensor(True))

    """
    if geometry not in _COSINES:
        raise ValueError(unknown_name(geometry, _COSINES, "geometry"))
    blocks, scales = read_blocks(gradients, scale)
    return _COSINES[geometry](_without_task_scale(blocks), scales).clamp(-1, 1)


def conflict_rate(gradients: Gradients, geometry: Geometry = "euclidean", scale: Scale = None) -> float:
    """The share of ordered pairs of different tasks (i, j) where the best step of i makes j worse: its cosine is negative.

    It is 0 for a single task, and a task whose gradient is zero is in conflict with nobody. The arguments are those of
    ``cosine_matrix``.

    >>> conflict_rate(torch.tensor([[[1.0, 0.0]], [[-1.0, 1.0]], [[0.0, 1.0]]])) == 2 / 6
    True
    """
    cosines = cosine_matrix(gradients, geometry, scale)
    tasks = len(cosines)
    return int((cosines < -ROUNDING).sum()) / max(tasks * (tasks - 1), 1)


def _without_task_scale(blocks: list[Tensor]) -> list[Tensor]:
    """Every task divided by its largest entry, so that no product underflows or overflows; a task of zeros stays one."""
    largest = torch.stack([block.abs().amax(dim=(1, 2)) for block in blocks]).amax(dim=0)[:, None, None]
    return [block / torch.where(largest > 0, largest, 1.0) for block in blocks]


def _euclidean(blocks: list[Tensor], _: list[float]) -> Tensor:
    products = _products(blocks, blocks, [1.0] * len(blocks))
    norms = products.diagonal().sqrt()
    return torch.where(products == 0, 0.0, products / (norms[:, None] * norms))


def _spectral(blocks: list[Tensor], scales: list[float]) -> Tensor:
    decreases = _products([polar(block, "svd") for block in blocks], blocks, scales)
    largest = decreases.diagonal()  # <polar(g), g> is the nuclear norm
    return torch.where(decreases == 0, 0.0, decreases / largest)


def _products(steps: list[Tensor], blocks: list[Tensor], scales: list[float]) -> Tensor:
    """sum_b scale_b <step_ib, g_jb> for all pairs of tasks."""
    each = [scale * (step.flatten(1) @ block.flatten(1).mT) for step, block, scale in zip(steps, blocks, scales, strict=True)]
    return torch.stack(each).sum(dim=0)


_COSINES: dict[str, Callable[[list[Tensor], list[float]], Tensor]] = {"euclidean": _euclidean, "spectral": _spectral}
