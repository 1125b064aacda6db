"""The polar factor U V' of a matrix U S V': the steepest descent direction under the spectral norm (Proposition 1).

``polar`` takes one stack, ``polar_each`` a list of matrices of any shapes. Newton-Schulz schedules are a chain of batched
products per shape; ``svd`` and ``eigh`` are exact. Nothing here is differentiable: an update is never differentiated.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moonopt.errors import unknown_name
from moonopt.linalg.kernels import Products, cpu_multiplies_bfloat16, products_for
from moonopt.linalg.scaling import scaled_stack, without_scale
from moonopt.linalg.schedules import SCHEDULES, Schedule, Triple, schedule as named_schedule

#: Exact factorisations, beside the Newton-Schulz schedules.
EXACT = ("svd", "eigh")
#: Matrices whose short side is at least this long are iterated in half precision on an accelerator; the second number is for
#: a CPU that multiplies bfloat16. There it takes half the time of float32, which below is fast enough to keep.
HALF_PRECISION_SIDE, HALF_PRECISION_SIDE_ON_CPUS = 256, 192
#: On a CPU, a stack has about so many bytes, or a matrix per thread: a chain of products over it then stays in the caches.
PORTION = 3 * 2**20
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
            bfloat16 where min(p, q) >= 192 on CPUs that multiply it natively, else float32, and float64 for float64 input.
            Half precision fills the null space of a rank-deficient matrix with rounding (singular values of 0.3 to 1 in
            place of 0 in bfloat16, 0.1 to 0.3 in float16); float32 keeps it below 1e-3 up to ten steps of every schedule.

    >>> polar(torch.tensor([[3.0, 0.0], [0.0, -2.0]]), schedule="svd")
    tensor([[ 1.,  0.],
            [ 0., -1.]])

    """
    _check_matrix(matrix)
    check_schedule(schedule, steps)
    wide = _wide(matrix)
    stack = (wide.flatten(0, -3) if wide.ndim > 2 else wide.unsqueeze(0)).clone(memory_format=torch.contiguous_format)
    x = without_scale(stack, polar_dtype(matrix, dtype, schedule))
    products = _computed_by(x.shape[1], x.shape[2], x.dtype, x.device, schedule, steps)
    factor = _polar_stack(x, schedule, steps, matrix.dtype, products).reshape(wide.shape)
    return (factor if wide is matrix else factor.mT).to(matrix.dtype)


@torch.no_grad()
def polar_each(
    matrices: Sequence[Tensor],
    schedule: str = "polar_express",
    steps: int = 5,
    dtype: torch.dtype | None = None,
    ran: Counter[str] | None = None,
    cast: bool = True,
    largest: Mapping[torch.Size, Tensor] | None = None,
) -> list[Tensor]:
    """The polar factors of several matrices of two dimensions: those of one shape share one chain.

    Those that are each other's transpose share it, too, unless they are iterated in half precision on an accelerator, which
    would take longer to transpose them.

    ``ran`` counts the matrices by what computed them, as "schedule/backend/dtype". Without ``cast``, factors stay in the dtype
    that they were computed in. ``largest`` has by shape the largest absolute entries of all matrices of that shape, in their
    order, where they are known already.

    >>> [factor.shape for factor in polar_each([torch.ones(2, 3), torch.ones(3, 2)])]
    [torch.Size([2, 3]), torch.Size([3, 2])]
    """
    check_schedule(schedule, steps)
    alike: dict[tuple[int, int, torch.dtype, torch.device], list[int]] = {}
    for index, matrix in enumerate(matrices):
        if matrix.ndim != 2:
            raise ValueError(f"polar_each needs matrices of two dimensions, found shape {tuple(matrix.shape)}.")
        small = matrix.device.type == "cpu" or polar_dtype(matrix, dtype, schedule) == torch.float32
        rows, columns = sorted(matrix.shape) if small else matrix.shape
        alike.setdefault((rows, columns, matrix.dtype, matrix.device), []).append(index)

    factors = list(matrices)
    for (rows, columns, original, device), everyone in alike.items():
        _check_matrix(matrices[everyone[0]])
        everyone.sort(key=lambda index: matrices[index].shape[0] != rows)
        computed_in = polar_dtype(matrices[everyone[0]], dtype, schedule)
        products = _computed_by(min(rows, columns), max(rows, columns), computed_in, device, schedule, steps)
        for indices in _portions(everyone, rows * columns * computed_in.itemsize, device):
            together = [matrices[i] for i in indices]
            if ran is not None:
                ran[f"{schedule}/{products.name}-{device.type}/{str(computed_in).removeprefix('torch.')}"] += len(indices)
            any_scale = products.whole_iteration is not None and original != torch.float64  # whose range is wider
            x = _stacked(together, rows, computed_in, largest or {}, any_scale)
            results = _polar_stack(_wide(x), schedule, steps, original, products)
            results = results.to(original) if cast else results
            for i, factor in zip(indices, _unstacked(results, together), strict=True):
                factors[i] = factor
    return factors


def _stacked(
    matrices: Sequence[Tensor], rows: int, dtype: torch.dtype, largest: Mapping[torch.Size, Tensor], any_scale: bool
) -> Tensor:
    """The matrices, without their scale unless any will do; those with another number of rows come last, and are transposed."""
    if matrices[0].device.type == "cpu":
        return scaled_stack([each if each.shape[0] == rows else each.mT for each in matrices], dtype)
    parts = [[each for each in matrices if (each.shape[0] == rows) == upright] for upright in (True, False)]
    stacks = [
        torch.stack(part).to(dtype) if any_scale else scaled_stack(part, dtype, largest.get(part[0].shape))
        for part in parts
        if part
    ]
    wide = [stack if stack.shape[1] == rows else stack.mT for stack in stacks]
    return wide[0] if len(wide) == 1 else torch.cat(wide)


def _unstacked(factors: Tensor, matrices: Sequence[Tensor]) -> Iterator[Tensor]:
    """The factors in the shapes of the matrices, whose transposed ones come last."""
    count = sum(each.shape == factors.shape[1:] for each in matrices)
    yield from factors[:count].unbind()
    transposed = factors[count:].mT
    yield from (transposed if factors.device.type == "cpu" else transposed.contiguous()).unbind()


def polar_dtype(matrix: Tensor, dtype: torch.dtype | None = None, schedule: str = "polar_express") -> torch.dtype:
    """In which dtype ``polar`` computes the factor of ``matrix`` when asked for ``dtype``."""
    if schedule == "eigh" or (dtype is None and matrix.dtype == torch.float64):
        return torch.float64
    if schedule == "svd":
        return torch.promote_types(dtype or matrix.dtype, torch.float32)
    if dtype is not None:
        return dtype
    device = matrix.device.type
    full = device == "meta" or (device == "cpu" and not cpu_multiplies_bfloat16())
    if full or min(matrix.shape[-2:]) < (HALF_PRECISION_SIDE_ON_CPUS if device == "cpu" else HALF_PRECISION_SIDE):
        return torch.float32
    return torch.float16 if device == "cuda" else torch.bfloat16


def check_schedule(name: str, steps: int) -> None:
    """Raise where ``polar`` knows no such schedule."""
    if name in EXACT:
        return
    if name not in SCHEDULES:
        raise ValueError(unknown_name(name, EXACT + SCHEDULES, "schedule"))
    named_schedule(name, steps)


def _check_matrix(matrix: Tensor) -> None:
    if not isinstance(matrix, Tensor):
        raise TypeError(f"polar needs a tensor, found a {type(matrix).__name__}: torch.as_tensor makes one.")
    if matrix.ndim < 2:
        raise ValueError(f"polar needs at least two dimensions, found shape {tuple(matrix.shape)}.")
    if not matrix.is_floating_point():
        raise ValueError(f"polar needs a real floating point matrix, found {matrix.dtype}.")


def _portions(indices: list[int], size: int, device: torch.device) -> Iterator[list[int]]:
    """On a CPU, portions whose matrices, of so many bytes each, stay in the caches, and that its threads can share evenly."""
    if device.type != "cpu":
        return iter([indices])
    threads = torch.get_num_threads()
    together = max(1, PORTION // max(1, size) // threads) * threads
    return (indices[start : start + together] for start in range(0, len(indices), together))


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT


def _polar_stack(x: Tensor, schedule: str, steps: int, original: torch.dtype, products: Products) -> Tensor:
    """The polar factors of a stack (n, p, q) with p <= q, which is overwritten; its scale is gone, unless any will do.

    On a CPU, fresh memory for a large stack can take longer than a product: everything here works in place where it can.
    """
    if x.numel() == 0:
        return torch.zeros_like(x)
    with without_autocast(x.device.type):
        if schedule in EXACT:
            resolution = max(torch.finfo(each).eps for each in (x.dtype, torch.promote_types(original, torch.float32)))
            return (_by_svd if schedule == "svd" else _by_eigh)(x, resolution)
        if products.whole_iteration is not None:
            return products.whole_iteration(x, named_schedule(schedule, steps))
        return _by_newton_schulz(x, named_schedule(schedule, steps), products)


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Autocast would compute products in its own dtype, whatever was asked for."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


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


def _by_newton_schulz(x: Tensor, schedule: Schedule, products: Products) -> Tensor:
    if not schedule.coefficients:
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        return x / torch.where(norm.isfinite(), norm.clamp_min(torch.finfo(norm.dtype).tiny), math.nan)
    coefficients, dtype = schedule.coefficients, x.dtype
    careful = _careful_steps(schedule, dtype, x.device)
    if careful:
        x = x.to(torch.float64)
    gram = x.new_empty(*x.shape[:-1], x.shape[-2])
    products.gram(x, gram)
    inverse_norm = _inverse_norm(gram, schedule)
    products.rescale(gram, inverse_norm.square())
    p, q = x.shape[-2:]
    on_gram = p >= GRAM_SIDE and q >= GRAM_RATIO * p and dtype != torch.bfloat16
    if on_gram and not careful:
        return _iterate_on_gram(x, gram, coefficients, products, inverse_norm)
    products.rescale(x, inverse_norm)
    if careful:
        x = _iterate(x, gram, coefficients[:careful], products).to(dtype)
        gram, coefficients = torch.bmm(x, x.mT), coefficients[careful:]
    return (_iterate_on_gram if on_gram else _iterate)(x, gram, coefficients, products)


def _computed_by(p: int, q: int, dtype: torch.dtype, device: torch.device, schedule: str, steps: int) -> Products:
    """Who computes a stack (n, p, q) with p <= q, or the first steps on it."""
    if schedule in EXACT or not (known := named_schedule(schedule, steps)).coefficients:
        return Products()
    return products_for(p, q, torch.float64 if _careful_steps(known, dtype, device) else dtype, device)


def _careful_steps(schedule: Schedule, dtype: torch.dtype, device: torch.device) -> int:
    """How many of the first steps must be done in float64."""
    steps = 0
    if dtype != torch.float32 or device.type == "mps":
        return steps
    while math.prod(a for a, _, _ in schedule.coefficients[steps:]) > LENIENT_GROWTH:
        steps += 1
    return steps


def _inverse_norm(gram: Tensor, schedule: Schedule) -> Tensor:
    """1 / (safety * norm of X), in float32 or better, from X X': its trace and its own norm cost next to nothing."""
    wide_enough = torch.promote_types(gram.dtype, torch.float32)
    if schedule.norm == "frobenius":
        squared = gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=wide_enough)[..., None, None]
    else:
        # On a CPU the sum is in float32 whatever the dtype, and asking for it takes eight times as long.
        asked = None if gram.device.type == "cpu" and gram.dtype == torch.bfloat16 else wide_enough
        squared = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True, dtype=asked).to(wide_enough)
    inverse = squared.clamp_min(torch.finfo(wide_enough).tiny).rsqrt() / schedule.safety
    return inverse.clamp_max(math.sqrt(torch.finfo(gram.dtype).max))  # finite, and so is its square: zero times this is zero


def _iterate(x: Tensor, gram: Tensor, coefficients: Sequence[Triple], products: Products) -> Tensor:
    """X <- a X + (b A + c A^2) X with A = X X', whose first value is ``gram``; both are overwritten."""
    next_x, polynomial = torch.empty_like(x), torch.empty_like(gram)
    for step, (a, b, c) in enumerate(coefficients):
        if step > 0:
            products.gram(x, gram)
        if x.dtype == torch.float16:  # its digits are enough for a I + b A + c A^2, and one pass over X less
            products.polynomial(gram, (a, b, c), polynomial)
            torch.bmm(polynomial, x, out=next_x)
        else:
            products.polynomial(gram, (0.0, b, c), polynomial)
            torch.baddbmm(x, polynomial, x, beta=a, out=next_x)
        x, next_x = next_x, x
    return x


def _iterate_on_gram(
    x: Tensor, gram: Tensor, coefficients: Sequence[Triple], products: Products, factor: Tensor | None = None
) -> Tensor:
    """The same steps on A alone, A <- P A P with P = a I + b A + c A^2; the product of all P then meets X once.

    All of these are polynomials in one matrix: they commute, and their products are symmetric. bfloat16 never gets here: A
    would have to be formed anew at every step. ``gram`` is that of ``factor`` times X.
    """
    next_x = torch.empty_like(x)
    for index, part in enumerate(_parts(coefficients, x.dtype)):
        if index > 0:
            products.gram(x, gram)
        product = _product_of_polynomials(gram, part, products)
        if index == 0 and factor is not None:
            products.rescale(product, factor)
        torch.bmm(product, x, out=next_x)
        x, next_x = next_x, x
    return x


def _product_of_polynomials(gram: Tensor, coefficients: Sequence[Triple], products: Products) -> Tensor:
    """The product of P = a I + b A + c A^2 over the steps, A being ``gram`` at first, which is overwritten."""
    product, idle, spare, other = (torch.empty_like(gram) for _ in range(4))
    products.polynomial(gram, coefficients[0], product)
    polynomial = product
    for number, triple in enumerate(coefficients[1:], start=2):
        if number < len(coefficients):
            products.sandwich(polynomial, gram, spare, other)
        else:  # as A P^2 it is less work, but too far from symmetric to be iterated further
            products.gram(polynomial, spare)
            products.commuting(gram, spare, other)
        gram, other = other, gram
        products.polynomial(gram, triple, spare)
        products.commuting(spare, product, other)
        free = idle if polynomial is product else polynomial
        polynomial, product, spare, other = spare, other, product, free
    return product


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
