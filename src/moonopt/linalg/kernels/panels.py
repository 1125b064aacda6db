"""A B' where it is known to be symmetric, on a CPU: panels of rows up to the diagonal are computed, then mirrored."""

import torch
from torch import Tensor

#: Rows of a panel. Thinner ones multiply more slowly, thicker ones compute more above the diagonal (measured on two cores).
HEIGHT = 256


def panel_product(
    a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0, addend: Tensor | None = None
) -> None:
    """alpha A B' + beta C over stacks (n, p, q), (n, p, q), (n, p, p); ``out`` is none of the others."""
    for matrix in range(a.shape[0]):  # a stack at a time would be slower: in bfloat16, torch first copies parts of a stack
        _one(a[matrix], b[matrix], out[matrix], alpha, beta, None if addend is None else addend[matrix])


def _one(a: Tensor, b: Tensor, out: Tensor, alpha: float, beta: float, addend: Tensor | None) -> None:
    for top in range(0, a.shape[0], HEIGHT):
        rows, width = slice(top, top + HEIGHT), min(top + HEIGHT, a.shape[0])
        panel = out[rows, :width]
        if addend is None:
            torch.mm(a[rows], b[:width].mT, out=panel)
            if alpha != 1:
                panel.mul_(alpha)
        else:
            torch.addmm(addend[rows, :width], a[rows], b[:width].mT, beta=beta, alpha=alpha, out=panel)
        out[:top, rows].copy_(panel[:, :top].mT)
