"""The polar factor U V' of a matrix U S V': the steepest descent direction under the spectral norm (Proposition 1).

``polar`` takes one stack, ``polar_each`` a list of matrices of any shapes. Newton-Schulz schedules are a chain of batched
products per shape; ``svd`` and ``eigh`` are exact. Nothing here is differentiable: an update is never differentiated.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from moonopt.errors import unknown_name
from moonopt.linalg.kernels import Products, can_stream, products_for
from moonopt.linalg.schedules import SCHEDULES, Schedule, Triple, schedule as named_schedule

#: Exact factorisations, beside the Newton-Schulz schedules.
EXACT = ("svd", "eigh")
#: On an accelerator, matrices whose short side is at least this long are iterated in half precision.
HALF_PRECISION_SIDE = 256
#: From this ratio r of the sides on, iterating on the Gram matrix is less work: with one restart 8 r + 28 against
#: 20 r + 10 short sides cubed for five steps. It is more products, so that below this short side it takes longer.
GRAM_RATIO = 1.5
GRAM_SIDE = 64
#: The Gram matrix is formed anew when its rounding error may have grown by this. At five steps the result is then as
#: accurate as the standard one, also on rank-deficient input (measured on ranks 1 to 100 of up to 512 x 2048).
GRAM_GROWTH = 1e3
#: In float16 with more than five steps, or it would be less accurate than the standard iteration.
HALF_GRAM_GROWTH = 1e2
#: What a float32 step rounds off outside of the input's row and column space, all later steps multiply, each by its a. The
#: first steps are done in float64 until no more than this is left: five steps of Polar Express (1008) need none.
LENIENT_GROWTH = 1100.0


@torch.no_grad()
def polar(matrix: Tensor, schedule: str = "polar_express", steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """The polar factor of every matrix in a stack of shape (..., p, q).

    For M = U S V' (compact) it is U V': same singular spaces, all singular values 1, and <polar(M), M> = ||M||_S1.
    polar(0) = 0. The result does not depend on the scale of M, has the dtype of ``matrix`` and carries no gradient.

    Args:
        matrix: floating point, at least two dimensions, tall or wide.
        schedule: ``polar_express`` (default), ``you``, ``muon``, ``classical``, ``cubic``; ``none`` for M / ||M||_F;
            ``svd`` or ``eigh`` (in float64) for the exact factor. Singular values below max(p, q) * eps * largest count
            as zero; ``eigh``, which sees their squares, cannot tell those below 1e-7 * largest from zero either.
        steps: number of Newton-Schulz steps. Five bring singular values above 1e-2 of the norm to within 0.15 of 1,
            eight to within rounding.
        dtype: in which to compute. By default float16 on a GPU where min(p, q) >= 256 (bfloat16 on other accelerators),
            else float32, and float64 for float64 input. Half precision fills the null space of a rank-deficient matrix
            with rounding (singular values of 0.3 to 1 in place of 0 in bfloat16, 0.1 to 0.3 in float16); float32 keeps it
            below 1e-3 up to ten steps of every schedule.

    >>> polar(torch.tensor([[3.0, 0.0], [0.0, -2.0]]), schedule="svd")
    tensor([[ 1.,  0.],
            [ 0., -1.]])

    """
    _check_matrix(matrix)
    wide = _wide(matrix)
    stack = (wide.flatten(0, -3) if wide.ndim > 2 else wide.unsqueeze(0)).clone()
    x = _without_scale(stack, polar_dtype(matrix, dtype, schedule))
    factor = _polar_stack(x, schedule, steps, matrix.dtype).reshape(wide.shape)
    return (factor if wide is matrix else factor.mT).to(matrix.dtype)


@torch.no_grad()
def polar_each(
    matrices: Sequence[Tensor],
    schedule: str = "polar_express",
    steps: int = 5,
    dtype: torch.dtype | None = None,
    ran: Counter[str] | None = None,
    cast: bool = True,
) -> list[Tensor]:
    """The polar factors of several matrices of two dimensions: those of one shape share one chain.

    On a CPU those that are each other's transpose share it, too; an accelerator would take longer to transpose them.

    ``ran`` counts the matrices by what computed them, as "schedule/backend/dtype". Without ``cast``, factors stay in the dtype
    that they were computed in.

    >>> [factor.shape for factor in polar_each([torch.ones(2, 3), torch.ones(3, 2)])]
    [torch.Size([2, 3]), torch.Size([3, 2])]
    """
    alike: dict[tuple[int, int, torch.dtype, torch.device], list[int]] = {}
    for index, matrix in enumerate(matrices):
        if matrix.ndim != 2:
            raise ValueError(f"polar_each needs matrices of two dimensions, found shape {tuple(matrix.shape)}.")
        rows, columns = matrix.shape if matrix.device.type != "cpu" else sorted(matrix.shape)
        alike.setdefault((rows, columns, matrix.dtype, matrix.device), []).append(index)

    factors = list(matrices)
    for (rows, _, original, device), indices in alike.items():
        _check_matrix(matrices[indices[0]])
        together = [matrices[i] if matrices[i].shape[0] == rows else matrices[i].mT for i in indices]
        computed_in = polar_dtype(together[0], dtype, schedule)
        x = _wide(_scaled_stack(together, computed_in))
        if ran is not None:
            backend = "torch" if schedule in EXACT else products_for(x.shape[1], x.shape[2], computed_in, device).name
            ran[f"{schedule}/{backend}-{device.type}/{str(computed_in).removeprefix('torch.')}"] += len(indices)
        results = _polar_stack(x, schedule, steps, original)
        for i, factor in zip(indices, (results.to(original) if cast else results).unbind(), strict=True):
            factors[i] = factor if matrices[i].shape == factor.shape else factor.mT
    return factors


def polar_dtype(matrix: Tensor, dtype: torch.dtype | None = None, schedule: str = "polar_express") -> torch.dtype:
    """In which dtype ``polar`` computes the factor of ``matrix`` when asked for ``dtype``."""
    if schedule == "eigh" or (dtype is None and matrix.dtype == torch.float64):
        return torch.float64
    if schedule == "svd":
        return torch.promote_types(dtype or matrix.dtype, torch.float32)
    if dtype is not None:
        return dtype
    if matrix.device.type in ("cpu", "meta") or min(matrix.shape[-2:]) < HALF_PRECISION_SIDE:
        return torch.float32
    return torch.float16 if matrix.device.type == "cuda" else torch.bfloat16


def check_schedule(name: str, steps: int) -> None:
    """Raise where ``polar`` knows no such schedule."""
    if name in EXACT:
        return
    if name not in SCHEDULES:
        raise ValueError(unknown_name(name, EXACT + SCHEDULES, "schedule"))
    named_schedule(name, steps)


def _check_matrix(matrix: Tensor) -> None:
    if matrix.ndim < 2:
        raise ValueError(f"polar needs at least two dimensions, found shape {tuple(matrix.shape)}.")
    if not matrix.is_floating_point():
        raise ValueError(f"polar needs a real floating point matrix, found {matrix.dtype}.")


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT


def _polar_stack(x: Tensor, schedule: str, steps: int, original: torch.dtype) -> Tensor:
    """The polar factors of a stack (n, p, q) with p <= q, which is overwritten; its scale is gone already.

    On a CPU, fresh memory for a large stack can take longer than a product: everything here works in place where it can.
    """
    check_schedule(schedule, steps)
    if x.numel() == 0:
        return torch.zeros_like(x)
    with without_autocast(x.device.type):
        if schedule in EXACT:
            resolution = max(torch.finfo(each).eps for each in (x.dtype, torch.promote_types(original, torch.float32)))
            return (_by_svd if schedule == "svd" else _by_eigh)(x, resolution)
        return _by_newton_schulz(x, named_schedule(schedule, steps))


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Autocast would compute products in its own dtype, whatever was asked for."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def _without_scale(stack: Tensor, dtype: torch.dtype) -> Tensor:
    """Every matrix divided by a power of two, so that neither it nor its Gram matrix leaves the range of ``dtype``.

    The division is exact: matrices that differ by a power of two become equal. The largest entry ends near 1 / sqrt(q); in
    float16, whose range has two short ends, near q^(-1/4), so that the Gram matrix lies between 1 / sqrt(q) and sqrt(q).
    """
    if stack.numel() == 0:
        return stack.to(dtype)
    stack = stack.to(torch.promote_types(stack.dtype, torch.float32))
    # On CPUs this is 20 times faster than the norm that it is, and needs no memory, as abs() would.
    largest = torch.maximum(stack.amax(dim=(-2, -1), keepdim=True), -stack.amin(dim=(-2, -1), keepdim=True))
    return stack.div_(_power_of_two(largest, max(stack.shape[-2:]), dtype)).to(dtype)


def _power_of_two(largest: Tensor, side: int, dtype: torch.dtype) -> Tensor:
    """By what a matrix with that largest entry and that long side is divided."""
    bits, mantissa, highest = (torch.int64, 52, 0x7FE) if largest.dtype == torch.float64 else (torch.int32, 23, 0xFE)
    headroom = math.ceil(math.log2(side) / (4 if dtype == torch.float16 else 2))
    # The bits of the exponent alone are those of a power of two. Zero is divided by a tiny one, and stays zero.
    exponent = (largest.view(bits) >> mantissa) + headroom
    return (exponent.clamp(1, highest) << mantissa).view(largest.dtype)


def _scaled_stack(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The matrices without their scale, in one stack of that dtype; large ones on an accelerator in as few passes as can be."""
    first = matrices[0]
    if first.dtype != torch.float32 or dtype == torch.float32 or not can_stream(*matrices):
        return _without_scale(torch.stack(list(matrices)), dtype)
    from moonopt.linalg.kernels.streaming import divide  # needs triton

    largest = torch.stack(torch._foreach_norm(list(matrices), math.inf))
    divisors = _power_of_two(largest, max(first.shape), dtype).unbind()
    stack = first.new_empty(len(matrices), *first.shape, dtype=dtype)
    for matrix, divisor, place in zip(matrices, divisors, stack.unbind(), strict=True):
        divide(matrix, divisor, place)
    return stack


def _by_svd(x: Tensor, resolution: float) -> Tensor:
    finite, x = _finite_part(x)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    cutoff = max(x.shape[-2:]) * resolution * s[..., :1]
    return torch.where(finite, (u * (s > cutoff).to(x.dtype).unsqueeze(-2)) @ vh, math.nan)


def _by_eigh(x: Tensor, resolution: float) -> Tensor:
    """Eigenvalues of X X' count as zero where they are rounding, of this product or of the input."""
    finite, x = _finite_part(x)
    values, vectors = torch.linalg.eigh(x @ x.mT)
    side = max(x.shape[-2:])
    cutoff = max(side * torch.finfo(x.dtype).eps, (side * resolution) ** 2) * values[..., -1:]
    inverse_root = torch.where(values > cutoff, values.clamp_min(0).rsqrt(), 0.0)
    return torch.where(finite, (vectors * inverse_root.unsqueeze(-2)) @ vectors.mT @ x, math.nan)


def _finite_part(x: Tensor) -> tuple[Tensor, Tensor]:
    """Which matrices are finite, and the stack with zeros in place of the others: LAPACK refuses all for one NaN."""
    finite = torch.isfinite(x).all(dim=(-2, -1), keepdim=True)
    return finite, torch.where(finite, x, 0.0)


def _by_newton_schulz(x: Tensor, schedule: Schedule) -> Tensor:
    if not schedule.coefficients:
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        return x / torch.where(norm.isfinite(), norm.clamp_min(torch.finfo(norm.dtype).tiny), math.nan)
    coefficients, dtype = schedule.coefficients, x.dtype
    careful = _careful_steps(coefficients) if dtype == torch.float32 and x.device.type != "mps" else 0
    if careful:
        x = x.to(torch.float64)
    products = products_for(x.shape[1], x.shape[2], x.dtype, x.device)
    gram = x.new_empty(*x.shape[:-1], x.shape[-2])
    products.gram(x, gram)
    inverse_norm = _inverse_norm(gram, schedule)
    gram.mul_(inverse_norm.square().to(x.dtype))
    x.mul_(inverse_norm.to(x.dtype))
    if careful:
        x = _iterate(x, gram, coefficients[:careful], products).to(dtype)
        gram, coefficients = torch.bmm(x, x.mT), coefficients[careful:]
    p, q = x.shape[-2:]
    on_gram = p >= GRAM_SIDE and q >= GRAM_RATIO * p and dtype != torch.bfloat16
    return (_iterate_on_gram if on_gram else _iterate)(x, gram, coefficients, products)


def _careful_steps(coefficients: Sequence[Triple]) -> int:
    """How many of the first steps must be done in float64."""
    steps = 0
    while math.prod(a for a, _, _ in coefficients[steps:]) > LENIENT_GROWTH:
        steps += 1
    return steps


def _inverse_norm(gram: Tensor, schedule: Schedule) -> Tensor:
    """1 / (safety * norm of X), in float32 or better, from X X': its trace and its own norm cost next to nothing."""
    wide_enough = torch.promote_types(gram.dtype, torch.float32)
    if schedule.norm == "frobenius":
        squared = gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=wide_enough)[..., None, None]
    else:
        squared = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True, dtype=wide_enough)
    inverse = squared.clamp_min(torch.finfo(wide_enough).tiny).rsqrt() / schedule.safety
    return inverse.clamp_max(math.sqrt(torch.finfo(gram.dtype).max))  # finite, and so is its square: zero times this is zero


def _iterate(x: Tensor, gram: Tensor, coefficients: Sequence[Triple], products: Products) -> Tensor:
    """X <- a X + (b A + c A^2) X with A = X X', whose first value is ``gram``; both are overwritten."""
    next_x, polynomial = torch.empty_like(x), torch.empty_like(gram)
    for step, (a, b, c) in enumerate(coefficients):
        if step > 0:
            products.gram(x, gram)
        products.polynomial(gram, b, c, polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=next_x)
        x, next_x = next_x, x
    return x


def _iterate_on_gram(x: Tensor, gram: Tensor, coefficients: Sequence[Triple], products: Products) -> Tensor:
    """The same steps on A alone, A <- P A P with P = a I + b A + c A^2; the product of all P then meets X once.

    All of these are polynomials in one matrix: they commute, and their products are symmetric. bfloat16 never gets here: A
    would have to be formed anew at every step.
    """
    next_x = torch.empty_like(x)
    polynomial, product, spare = (torch.empty_like(gram) for _ in range(3))
    for index, part in enumerate(_parts(coefficients, x.dtype)):
        if index > 0:
            products.gram(x, gram)
        for step, (a, b, c) in enumerate(part):
            if step > 0:
                products.sandwich(polynomial, gram, spare, gram)
            products.polynomial(gram, b, c, polynomial)
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            if step == 0:
                product.copy_(polynomial)
            else:
                products.commuting(polynomial, product, spare)
                product, spare = spare, product
        torch.bmm(product, x, out=next_x)
        x, next_x = next_x, x
    return x


def _parts(coefficients: Sequence[Triple], dtype: torch.dtype) -> list[list[Triple]]:
    """The steps cut where the error of the Gram matrix, which grows by a^2 a step, would have grown too far."""
    many = math.prod(a for a, _, _ in coefficients) > LENIENT_GROWTH
    most = HALF_GRAM_GROWTH if dtype == torch.float16 and many else GRAM_GROWTH
    parts: list[list[Triple]] = []
    growth = math.inf
    for triple in coefficients:
        if growth > most:
            parts.append([])
            growth = 1.0
        parts[-1].append(triple)
        growth *= triple[0] ** 2
    return parts
