"""The products of a Newton-Schulz step over a stack of matrices, and who computes them.

Most results are symmetric: X X', and products of polynomials in one symmetric matrix, which commute. Half of such a result is
half of the work, if one has a kernel that leaves the other half out.
"""

import functools

import torch
from torch import Tensor

from moonopt.linalg.kernels.presence import has_kernels

#: Matrices whose short side is shorter than this have too few tiles for the kernels to win (measured: docs/performance.md).
SYMMETRIC_SIDE = 1024
TILE, DEPTH = 128, 64  # of the kernels; sizes must be multiples


class Products:
    """By torch: any device, dtype and size."""

    name = "torch"

    def gram(self, x: Tensor, out: Tensor) -> None:
        """X X'."""
        torch.bmm(x, x.mT, out=out)

    def polynomial(self, a: Tensor, linear: float, quadratic: float, out: Tensor) -> None:
        """linear A + quadratic A^2 for a symmetric A."""
        torch.baddbmm(a, a, a, beta=linear, alpha=quadratic, out=out)

    def sandwich(self, a: Tensor, b: Tensor, spare: Tensor, out: Tensor) -> None:
        """A B A for symmetric matrices; ``out`` may be ``b``."""
        torch.bmm(a, b, out=spare)
        torch.bmm(spare, a, out=out)

    def commuting(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """A B for symmetric matrices that commute."""
        torch.bmm(a, b, out=out)


class SymmetricProducts(Products):
    """By Triton: one triangle of tiles is computed and mirrored."""

    name = "triton"

    def gram(self, x: Tensor, out: Tensor) -> None:
        _kernel()(x, x, out)

    def polynomial(self, a: Tensor, linear: float, quadratic: float, out: Tensor) -> None:
        _kernel()(a, a, out, alpha=quadratic, beta=linear, addend=a)

    def sandwich(self, a: Tensor, b: Tensor, spare: Tensor, out: Tensor) -> None:
        torch.bmm(a, b, out=spare)  # whole: what it lacks in symmetry by rounding, an iteration would let grow
        _kernel()(a, spare, out)

    def commuting(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        _kernel()(a, b, out)


def products_for(p: int, q: int, dtype: torch.dtype, device: torch.device) -> Products:
    """The faster ones for stacks of matrices p x q, p <= q."""
    fits = p >= SYMMETRIC_SIDE and p % TILE == 0 and q % DEPTH == 0 and dtype in (torch.float16, torch.bfloat16)
    return _SYMMETRIC if fits and has_kernels(device) else _PLAIN


_PLAIN, _SYMMETRIC = Products(), SymmetricProducts()


@functools.cache
def _kernel():  # type: ignore[no-untyped-def]
    from moonopt.linalg.kernels.symmetric import symmetric_product  # needs triton

    return symmetric_product
