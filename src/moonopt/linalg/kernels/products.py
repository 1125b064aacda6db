"""The products of a Newton-Schulz step over a stack of matrices, and who computes them.

Most results are symmetric: X X', and products of polynomials in one symmetric matrix, which commute. Half of such a result is
half of the work, if one has a kernel that leaves the other half out.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from moonopt.linalg.kernels.panels import panel_product
from moonopt.linalg.kernels.presence import has_kernels, has_wide_tiles, multiplies_in_tf32
from moonopt.linalg.schedules import Schedule, Triple

#: Matrices whose short side is shorter than this have too few tiles for the kernels to win (measured: docs/performance.md).
SYMMETRIC_SIDE = 1024
TILE, DEPTH = 256, 64  # of the kernels; sizes must be multiples
#: Matrices with sides up to these, in float32 that may be multiplied in TensorFloat-32, are iterated in one launch.
SMALL_SIDES = 64, 128
#: On a CPU, panels win from this short side on: by 1.3 at 1024 and 1.4 to 1.5 at 2048, not yet at 512.
PANEL_SIDE = 768
PANEL_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Products:
    """By torch: any device, dtype and size."""

    name = "torch"
    #: All steps at once over a stack (n, p, q) of any scale, where there is a way to.
    whole_iteration: Callable[[Tensor, Schedule], Tensor] | None = None

    def gram(self, x: Tensor, out: Tensor) -> None:
        """X X'."""
        torch.bmm(x, x.mT, out=out)

    def polynomial(self, a: Tensor, coefficients: Triple, out: Tensor) -> None:
        """constant I + linear A + quadratic A^2 for a symmetric A."""
        constant, linear, quadratic = coefficients
        torch.baddbmm(a, a, a, beta=linear, alpha=quadratic, out=out)
        _add_to_diagonal(out, constant)

    def rescale(self, stack: Tensor, factors: Tensor) -> None:
        """Multiply every matrix by its factor, of shape (n, 1, 1), in place."""
        if stack.dtype in (torch.float16, torch.bfloat16) and has_kernels(stack.device):
            from moonopt.linalg.kernels.streaming import rescale  # needs triton

            rescale(stack, factors)
        else:  # on a CPU, two dtypes in one product take ten times as long
            stack.mul_(factors.to(stack.dtype) if stack.device.type == "cpu" else factors)

    def sandwich(self, a: Tensor, b: Tensor, spare: Tensor, out: Tensor) -> None:
        """A B A for symmetric matrices; ``out`` may be ``b``."""
        torch.bmm(a, b, out=spare)
        torch.bmm(spare, a, out=out)

    def commuting(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """A B for symmetric matrices that commute."""
        torch.bmm(a, b, out=out)


class SymmetricProducts(Products):
    """One triangle is computed and mirrored, by a product A B' of its own for results that are symmetric."""

    def __init__(self, name: str, product: Callable[..., None]) -> None:
        self.name = name
        self._product = product

    def gram(self, x: Tensor, out: Tensor) -> None:
        self._product(x, x, out)

    def polynomial(self, a: Tensor, coefficients: Triple, out: Tensor) -> None:
        constant, linear, quadratic = coefficients
        self._product(a, a, out, alpha=quadratic, beta=linear, addend=a)
        _add_to_diagonal(out, constant)

    def sandwich(self, a: Tensor, b: Tensor, spare: Tensor, out: Tensor) -> None:
        torch.bmm(a, b, out=spare)  # whole: what it lacks in symmetry by rounding, an iteration would let grow
        self._product(a, spare, out)

    def commuting(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self._product(a, b, out)


class PanelProducts(SymmetricProducts):
    """By panels of rows, on a CPU."""

    def __init__(self) -> None:
        super().__init__("panels", panel_product)

    def commuting(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.bmm(a, b, out=out)  # whole: mirrored, its rounding on rank-deficient input would be three times as large


class SmallProducts(Products):
    """All steps in one launch."""

    name = "small"

    def __init__(self) -> None:
        self.whole_iteration = _in_one_launch


def products_for(p: int, q: int, dtype: torch.dtype, device: torch.device) -> Products:
    """The faster ones for stacks of matrices p x q, p <= q."""
    if device.type == "cpu":
        return _PANELS if p >= PANEL_SIDE and dtype in PANEL_DTYPES else _PLAIN
    if p <= SMALL_SIDES[0] and q <= SMALL_SIDES[1] and dtype == torch.float32:
        return _SMALL if has_kernels(device) and multiplies_in_tf32() else _PLAIN
    fits = p >= SYMMETRIC_SIDE and p % TILE == 0 and q % DEPTH == 0 and dtype in (torch.float16, torch.bfloat16)
    return _TRITON if fits and has_wide_tiles(device) else _PLAIN


def _add_to_diagonal(stack: Tensor, constant: float) -> None:
    if constant:
        stack.diagonal(dim1=-2, dim2=-1).add_(constant)


def _in_one_launch(x: Tensor, schedule: Schedule) -> Tensor:
    from moonopt.linalg.kernels.small import iterate  # needs triton

    return iterate(x, schedule)


def _triton_product(*arguments: Tensor, **options: float | Tensor) -> None:
    _kernel()(*arguments, **options)


@functools.cache
def _kernel():  # type: ignore[no-untyped-def]
    from moonopt.linalg.kernels.symmetric import symmetric_product  # needs triton

    return symmetric_product


_PLAIN = Products()
_TRITON = SymmetricProducts("triton", _triton_product)
_PANELS = PanelProducts()
_SMALL = SmallProducts()
