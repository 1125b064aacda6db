"""How far a point is from Pareto stationary, and what Euclidean weights miss there."""

import torch

from moonopt.linalg.dual import Gradients, Scale, read_blocks, solve_dual
from moonopt.linalg.simplex import min_norm_weights


def pareto_stationarity(gradients: Gradients, scale: Scale = None) -> float:
    """min_z sum_b scale_b ||sum_i z_i G_ib||_S1: the measure of the convergence theorems, 0 at a Pareto stationary point.

    It is the rate at which the slowest task falls along the best direction of spectral norm 1. ``moonopt.solve_dual`` has that
    direction, the weights and the certificate.

    Args:
        gradients: (m, p, q), or one such tensor per block.
        scale: one number per block, or one for all.

    >>> pareto_stationarity(torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[-2.0, 0.0], [0.0, -2.0]]])) < 1e-9
    True

    """
    return solve_dual(gradients, scale).value


def certificate_gap(gradients: Gradients, scale: Scale = None) -> float:
    """By how much the nuclear norm at the Euclidean minimum-norm weights, MGDA's, is above the least there is.

    Where it is 0, both geometries have the same weights (though not the same direction). It is never negative.

    >>> round(certificate_gap(torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, -1.0]]])), 5)
    0.33333

    """
    blocks, scales = read_blocks(gradients, scale)
    gram = torch.stack([block.flatten(1) @ block.flatten(1).mT for block in blocks]).sum(0)
    weights = min_norm_weights(gram)
    at_theirs = sum(
        s * float(torch.linalg.svdvals(torch.tensordot(weights, block, 1)).sum())
        for s, block in zip(scales, blocks, strict=True)
    )
    return max(at_theirs - solve_dual(blocks, scales).value, 0.0)
