"""The polar factor against float64 SVDs, torch.optim's Newton-Schulz, and the polynomials applied to singular values."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

import moonopt.linalg.polar as polar_module
from moonopt.linalg.kernels import Products
from moonopt.linalg.polar import EXACT, check_schedule, polar, polar_dtype, polar_each
from moonopt.linalg.schedules import SCHEDULES, schedule

EVERY_SCHEDULE = (*SCHEDULES, *EXACT)
FLOATING_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ill_conditioned(p: int, q: int, condition: float = 1e4, seed: int = 0) -> Tensor:
    """Singular values in geometric progression from 1 to 1 / condition."""
    left, _ = torch.linalg.qr(gaussian(p, p, seed=seed, dtype=torch.float64))
    right, _ = torch.linalg.qr(gaussian(q, p, seed=seed + 1, dtype=torch.float64))
    return (left * torch.logspace(0, -math.log10(condition), p, dtype=torch.float64)) @ right.mT


def low_rank(p: int, q: int, rank: int, seed: int = 0) -> Tensor:
    """Of exactly this rank in every dtype that holds its small integers, which float32 does and bfloat16 does not."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randint(-3, 4, shape, generator=generator) for shape in ((p, rank), (rank, q)))
    return (left @ right).double()


def compact_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    rank = int((s > 1e-9 * s[0]).sum())
    return u[:, :rank], s[:rank], vh[:rank]


def exact_factor(matrix: Tensor) -> Tensor:
    u, _, vh = compact_svd(matrix)
    return u @ vh


def by_singular_values(matrix: Tensor, name: str, steps: int) -> Tensor:
    """What the steps would give without any rounding: the polynomials applied to the singular values."""
    u, s, vh = compact_svd(matrix)
    named = schedule(name, steps)
    norm = torch.linalg.vector_norm(s, ord=2 if named.norm == "frobenius" else 4)
    s = s / (norm * named.safety)
    for a, b, c in named.coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


def spectral_norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix.double(), ord=2).item()


def outside_of(matrix: Tensor, factor: Tensor) -> float:
    """The spectral norm of what lies outside of the row and column space of ``matrix``."""
    u, _, vh = compact_svd(matrix)
    factor = factor.double()
    return spectral_norm(factor - u @ (u.mT @ factor @ vh.mT) @ vh)


# Exact factors


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (5, 5), (6, 11), (11, 6), (64, 100), (100, 64)])
@pytest.mark.parametrize(
    ("name", "steps", "tolerance"), [("svd", 5, 1e-12), ("eigh", 5, 1e-9), ("polar_express", 14, 1e-9), ("classical", 35, 1e-9)]
)
def test_factor_of_one_matrix_is_that_of_its_svd(shape, name, steps, tolerance):
    matrix = gaussian(*shape, dtype=torch.float64)
    torch.testing.assert_close(polar(matrix, name, steps), exact_factor(matrix), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(4, 6, 9), (4, 9, 6), (2, 3, 5, 8), (2, 3, 8, 5), (2, 1, 3, 4, 4), (3, 64, 96), (3, 96, 64)])
@pytest.mark.parametrize(("name", "steps"), [("svd", 5), ("eigh", 5), ("polar_express", 14)])
def test_factor_of_a_stack_is_that_of_every_svd(shape, name, steps):
    stack = gaussian(*shape, dtype=torch.float64)
    factors = polar(stack, name, steps)
    assert factors.shape == stack.shape
    for matrix, factor in zip(stack.flatten(0, -3), factors.flatten(0, -3), strict=True):
        torch.testing.assert_close(factor, exact_factor(matrix), rtol=0, atol=1e-8)


def test_factor_of_a_view_with_strides_is_that_of_its_svd():
    view = gaussian(3, 12, 20, dtype=torch.float64).permute(2, 0, 1)[::2, :, ::3]
    for matrix, factor in zip(view, polar(view, "svd"), strict=True):
        torch.testing.assert_close(factor, exact_factor(matrix), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_transposing_the_matrix_transposes_the_factor(name):
    matrix = gaussian(2, 9, 16)
    torch.testing.assert_close(polar(matrix.mT, name), polar(matrix, name).mT, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "none"])
@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("shape", [(8, 8), (24, 10), (64, 128)])
def test_steps_apply_their_polynomials_to_the_singular_values(name, steps, shape):
    matrix = gaussian(*shape, dtype=torch.float64)
    torch.testing.assert_close(polar(matrix, name, steps), by_singular_values(matrix, name, steps), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(6, 11), (11, 6), (2, 3, 5, 8)])
def test_no_schedule_divides_by_the_frobenius_norm(shape):
    matrix = gaussian(*shape)
    expected = matrix / torch.linalg.matrix_norm(matrix.double(), keepdim=True)
    torch.testing.assert_close(polar(matrix, "none"), expected.float(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("shape", [(128, 128), (128, 256), (192, 768)])
def test_five_steps_give_the_descent_of_the_exact_factor_on_large_gaussian_matrices(shape):
    matrix = gaussian(*shape)
    descent = (polar(matrix) * matrix).sum().item() / torch.linalg.svdvals(matrix.double()).sum().item()
    assert descent == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("shape", [(40, 16), (64, 64), (64, 200), (300, 100)])
@pytest.mark.parametrize("seed", [0, 1])
def test_muon_in_bfloat16_is_that_of_torch_optim(shape, seed):
    matrix = gaussian(*shape, seed=seed)
    found = polar(matrix, "muon", 5, torch.bfloat16)
    expected = _zeropower_via_newtonschulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7).float()
    # Both have an error of about two units of rounding against float64; they normalize in another order.
    assert (found - expected).norm() <= 5 * torch.finfo(torch.bfloat16).eps * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tall_stack_is_computed_as_its_transpose(dtype):
    # Also in memory: CPUs multiply transposed bfloat16 stacks by a kernel that takes hundreds of times as long.
    matrices = gaussian(2, 96, 64)
    assert torch.equal(polar(matrices, dtype=dtype), polar(matrices.mT.contiguous(), dtype=dtype).mT)


# Several matrices


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_each_factor_of_a_list_is_that_of_its_matrix_alone(name):
    shapes = [(6, 10), (10, 6), (8, 8), (6, 10), (1, 5), (5, 1), (64, 100), (100, 64), (10, 6)]
    matrices = [gaussian(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    matrices += [gaussian(6, 10, seed=90, dtype=torch.float64), gaussian(10, 6, seed=91, dtype=torch.bfloat16)]
    factors = polar_each(matrices, name)
    for matrix, factor in zip(matrices, factors, strict=True):
        assert factor.dtype == matrix.dtype
        torch.testing.assert_close(factor, polar(matrix, name), rtol=0, atol=1e-6)


def test_factors_of_no_matrices_are_none():
    assert polar_each([]) == []


def test_list_counts_its_matrices_by_what_computed_them():
    ran: Counter[str] = Counter()
    matrices = [gaussian(3, 4), gaussian(4, 3), gaussian(2, 2, dtype=torch.float64)]
    polar_each(matrices, ran=ran)
    polar_each(matrices[:1], schedule="svd", ran=ran)
    polar_each(matrices[:1], dtype=torch.bfloat16, ran=ran)
    assert ran == {
        "polar_express/torch-cpu/float32": 2,
        "polar_express/torch-cpu/float64": 1,
        "svd/torch-cpu/float32": 1,
        "polar_express/torch-cpu/bfloat16": 1,
    }


@pytest.mark.parametrize(("schedule", "steps"), [("none", 5), ("polar_express", 8), ("cubic", 18), ("polar_express", 5)])
def test_what_is_counted_is_what_computed(schedule, steps, monkeypatch):
    """Small matrices have a kernel that makes all steps, but not those that begin in float64."""
    made, ran = [], Counter()

    class Small(Products):
        name = "small"

        def whole_iteration(self, x, schedule):
            made.append(len(x))
            return x

    monkeypatch.setattr(
        polar_module, "products_for", lambda p, q, dtype, device: Small() if dtype == torch.float32 else Products()
    )
    polar_each([gaussian(3, 4)], schedule, steps, ran=ran)
    assert ran == {f"{schedule}/{'small' if made else 'torch'}-cpu/float32": 1}
    assert bool(made) == (steps == 5 and schedule != "none")


def test_an_unknown_schedule_is_named_with_all_that_are_known():
    with pytest.raises(ValueError, match=r"svd, eigh, .*polar_express"):
        polar_each([gaussian(3, 4)], schedule="bogus")


# Scale


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
@pytest.mark.parametrize("shape", [(12, 20), (30, 9), (64, 100)])
def test_factor_does_not_depend_on_the_scale(name, shape):
    matrix = gaussian(*shape)
    factor = polar(matrix, name)
    for exponent in (-100, -31, 1, 7, 100):
        assert torch.equal(polar(matrix * 2.0**exponent, name), factor)
    for exponent in (-30, -15, -7, -1, 3, 8, 20, 30):
        torch.testing.assert_close(polar(matrix * 10.0**exponent, name), factor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_every_matrix_of_a_stack_has_its_own_scale(name):
    stack = gaussian(4, 6, 9)
    scaled = stack * torch.tensor([1e-30, 1.0, 1e30, 1e-8])[:, None, None]
    torch.testing.assert_close(polar(scaled, name), polar(stack, name), rtol=0, atol=1e-4)


def test_factor_of_the_largest_numbers_is_not_zero():
    matrix = gaussian(16, 16).clamp(-1, 1)
    for name in EVERY_SCHEDULE:
        assert torch.equal(polar(matrix * 2.0**127, name), polar(matrix, name))


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (2, 5, 5), (64, 96)])
def test_polar_of_zero_is_zero(name, shape):
    for dtype in FLOATING_DTYPES:
        assert torch.equal(polar(torch.zeros(shape, dtype=dtype), name), torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_zero_in_a_stack_leaves_the_others_alone(name):
    stack = gaussian(3, 5, 8)
    stack[1] = 0
    factors = polar(stack, name)
    assert torch.equal(factors[1], torch.zeros(5, 8))
    for index in (0, 2):
        torch.testing.assert_close(factors[index], polar(stack[index], name), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "shape",
    [
        (0, 2, 3),
        (0, 3, 2),
        (2, 0, 4, 3),
        *((0, 3), (3, 0), (0, 0), (2, 0, 3), (2, 3, 0), (0, 3, 0)),
    ],
)
def test_polar_of_an_empty_stack_is_empty(shape):
    for name in EVERY_SCHEDULE:
        factor = polar(torch.zeros(shape, dtype=torch.float64), name)
        assert (factor.shape, factor.dtype) == (shape, torch.float64)


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_empty_matrices_in_a_list_stay_empty(name):
    matrices = [torch.zeros(0, 3), gaussian(4, 3), torch.zeros(3, 0), torch.zeros(0, 0)]
    factors = polar_each(matrices, name)
    assert [factor.shape for factor in factors] == [matrix.shape for matrix in matrices]
    torch.testing.assert_close(factors[1], polar(matrices[1], name), rtol=0, atol=1e-6)


# What is not finite


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
@pytest.mark.parametrize("shape", [(3, 5, 8), (3, 8, 5), (3, 64, 96)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps", [5, 8])
def test_what_is_not_finite_spoils_its_own_matrix_alone(name, shape, value, steps):
    if name == "you":
        steps = 5
    stack = gaussian(*shape)
    clean = polar(stack, name, steps)
    assert clean.isfinite().all()
    stack[1, 2, 3] = value
    factors = polar(stack, name, steps)
    assert torch.equal(factors[[0, 2]], clean[[0, 2]])
    assert factors[1].isnan().all()


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_what_is_not_finite_spoils_its_own_matrix_alone_in_a_list(name):
    matrices = [gaussian(5, 8, seed=seed) for seed in range(3)]
    clean = polar_each(matrices, name)
    matrices[1][0, 0] = math.nan
    factors = polar_each(matrices, name)
    assert torch.equal(factors[0], clean[0])
    assert factors[1].isnan().all()
    assert torch.equal(factors[2], clean[2])


# Rank


RANK_DEFICIENT = [
    (3, 3, 1),
    (8, 8, 3),
    (24, 10, 4),
    (64, 64, 1),
    (64, 96, 8),
    (96, 64, 8),
    (256, 64, 1),
    (128, 200, 100),
    (256, 512, 1),
    (256, 512, 128),
    (512, 256, 16),
]


@pytest.mark.parametrize(("p", "q", "rank"), RANK_DEFICIENT)
def test_float32_stays_within_the_row_and_column_space(p, q, rank):
    matrix = low_rank(p, q, rank)
    for steps in range(1, 11):
        assert outside_of(matrix, polar(matrix.float(), steps=steps, dtype=torch.float32)) <= 1e-3


@pytest.mark.parametrize(("p", "q", "rank"), RANK_DEFICIENT)
def test_float64_stays_within_the_row_and_column_space(p, q, rank):
    matrix = low_rank(p, q, rank)
    for name, steps in [("svd", 5), ("eigh", 5), *(("polar_express", steps) for steps in (1, 2, 4, 5, 6, 8, 10))]:
        assert outside_of(matrix, polar(matrix, name, steps)) <= 1e-10


@pytest.mark.parametrize(("p", "q", "rank"), RANK_DEFICIENT)
def test_taking_the_scale_out_of_a_float32_matrix_keeps_its_rank(p, q, rank):
    matrix = low_rank(p, q, rank)
    assert outside_of(matrix, polar(matrix.float(), dtype=torch.float64).double()) <= 1e-6


@pytest.mark.parametrize(("p", "q", "rank"), RANK_DEFICIENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EXACT)
def test_exact_factor_of_a_rank_deficient_matrix_is_that_of_its_compact_svd(p, q, rank, dtype, name):
    matrix = low_rank(p, q, rank)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-10
    assert spectral_norm(polar(matrix.to(dtype), name) - exact_factor(matrix)) <= tolerance


# Not a wish but the limit that the documentation states: rounding to eight bits has full rank, and eight steps grow it.
@pytest.mark.parametrize(("p", "q", "rank"), [(8, 8, 3), (64, 64, 20), (64, 96, 8), (128, 200, 100)])
def test_bfloat16_leaves_the_row_and_column_space(p, q, rank):
    matrix = low_rank(p, q, rank)
    assert outside_of(matrix, polar(matrix.float(), steps=8, dtype=torch.bfloat16)) > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("p", "q"), [(3, 3), (3, 40), (40, 3)])
def test_svd_counts_small_singular_values_as_zero(dtype, p, q):
    cutoff = max(p, q) * torch.finfo(dtype).eps
    matrix = torch.zeros(p, q, dtype=dtype)
    matrix[0, 0], matrix[1, 1], matrix[2, 2] = 1e3, -1.1e3 * cutoff, 0.9e3 * cutoff
    expected = torch.zeros(p, q, dtype=dtype)
    expected[0, 0], expected[1, 1] = 1, -1
    torch.testing.assert_close(polar(matrix, "svd"), expected, rtol=0, atol=1e-6)


# The iteration on the Gram matrix


@pytest.mark.parametrize("steps", [3, 5, 6, 8, 10])
@pytest.mark.parametrize("shape", [(64, 96), (300, 64), (2, 80, 240)])
@pytest.mark.parametrize("kind", [gaussian, ill_conditioned, low_rank])
def test_iterating_on_the_gram_matrix_is_no_less_accurate(monkeypatch, kind, shape, steps):
    *batch, p, q = shape
    short, long = sorted((p, q))
    arguments = (short, long, 20) if kind is low_rank else (short, long)
    stack = torch.stack([kind(*arguments, seed=seed).float() for seed in range(math.prod(batch))])
    stack = stack.reshape(*batch, short, long)
    stack = stack if p < q else stack.mT

    monkeypatch.setattr(polar_module, "GRAM_RATIO", 1.0)
    on_gram = polar(stack, steps=steps)
    monkeypatch.setattr(polar_module, "GRAM_RATIO", math.inf)
    plain = polar(stack, steps=steps)
    assert not torch.equal(on_gram, plain)

    for matrix, by_gram, standard in zip(*(x.reshape(-1, p, q) for x in (stack, on_gram, plain)), strict=True):
        exact = exact_factor(matrix)
        assert spectral_norm(by_gram - exact) <= 2 * spectral_norm(standard - exact) + 1e-4
        # Where a few steps have not converged, that says little of rounding: this does.
        assert spectral_norm(by_gram - by_singular_values(matrix, "polar_express", steps)) <= 3e-4


@pytest.mark.parametrize(("shape", "on_gram"), [((64, 96), True), ((96, 64), True), ((64, 95), False), ((63, 200), False)])
def test_gram_matrix_is_iterated_on_where_a_matrix_is_large_and_long(monkeypatch, shape, on_gram):
    matrix = gaussian(*shape)
    default = polar(matrix)
    monkeypatch.setattr(polar_module, "GRAM_RATIO", math.inf)
    assert torch.equal(polar(matrix), default) != on_gram


# Dtypes and gradients


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
@pytest.mark.parametrize("dtype", FLOATING_DTYPES)
@pytest.mark.parametrize("shape", [(4, 7), (7, 4)])
def test_result_has_the_dtype_of_the_matrix(name, dtype, shape):
    matrix = gaussian(*shape, dtype=dtype)
    assert polar(matrix, name).dtype == dtype
    assert polar(matrix, name, dtype=torch.float64).dtype == dtype
    assert polar_each([matrix], name)[0].dtype == dtype


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_matrices_are_computed_in_float32(name, dtype):
    matrix = gaussian(9, 14, dtype=dtype)
    assert torch.equal(polar(matrix, name), polar(matrix.float(), name).to(dtype))


def test_asking_for_a_dtype_computes_in_it():
    matrix = gaussian(20, 30)
    errors = {
        dtype: spectral_norm(polar(matrix.double(), steps=10, dtype=dtype) - exact_factor(matrix))
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    assert errors[torch.float64] < 1e-9 < errors[torch.float32] < 1e-4 < errors[torch.bfloat16] < 0.1


@pytest.mark.parametrize("side", [4, 191])
@pytest.mark.parametrize("asked", FLOATING_DTYPES)
def test_working_dtype_of_small_matrices_is_float32_unless_the_matrix_or_the_caller_says_otherwise(side, asked):
    for dtype in FLOATING_DTYPES:
        matrix = torch.empty(side, side, dtype=dtype)
        assert polar_dtype(matrix) == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert polar_dtype(matrix, asked) == asked


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (2, 4, 7), (1, 1)])
def test_result_carries_no_gradient_and_leaves_the_matrix_alone(name, shape):
    matrix = gaussian(*shape).requires_grad_()
    before = matrix.detach().clone()
    for factor in (polar(matrix, name), *polar_each([matrix] if matrix.ndim == 2 else list(matrix), name)):
        assert not factor.requires_grad
        assert factor.grad_fn is None
        factor.zero_()
    assert torch.equal(matrix, before)


# Errors


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"^polar needs at least two dimensions, found shape \(3,\)\.$"):
        polar(torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_matrices_that_are_not_real_floating_point_are_refused(dtype):
    text = rf"^polar needs a real floating point matrix, found {dtype}\.$"
    with pytest.raises(ValueError, match=text):
        polar(torch.ones(3, 3, dtype=dtype))
    with pytest.raises(ValueError, match=text):
        polar_each([torch.ones(3, 3), torch.ones(3, 3, dtype=dtype)])


@pytest.mark.parametrize("call", [lambda name: polar(torch.ones(2, 2), name), lambda name: check_schedule(name, 5)])
def test_unknown_schedule_names_the_nearest_of_all_that_polar_knows(call):
    with pytest.raises(ValueError, match=r"^Unknown schedule 'egih': ") as error:
        call("egih")
    assert str(error.value) == (
        "Unknown schedule 'egih': expected one of svd, eigh, polar_express, you, muon, classical, cubic, none. "
        "Did you mean 'eigh'?"
    )


@pytest.mark.parametrize("shape", [(2, 2), (0, 2, 2)])
def test_steps_are_checked_whether_or_not_there_is_a_matrix(shape):
    with pytest.raises(ValueError, match=r"^steps must be a positive integer, found 0\.$"):
        polar(torch.ones(shape), steps=0)
    with pytest.raises(ValueError, match=r"^Schedule 'you' has 5 steps, found steps=6"):
        polar(torch.ones(shape), "you", steps=6)


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_known_schedules_pass_their_check(name):
    check_schedule(name, 5)


def test_eigh_of_a_rank_deficient_float32_matrix_has_its_rank():
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        matrix = torch.randn(4, 2, generator=generator) @ torch.randn(2, 5, generator=generator)
        assert torch.linalg.svdvals(polar(matrix, "eigh"))[2].item() < 1e-3


def test_ran_says_in_which_dtype_an_exact_factor_was_computed():
    ran = Counter()
    polar_each([gaussian(3, 4)], "eigh", ran=ran)
    polar_each([gaussian(3, 4)], "svd", dtype=torch.bfloat16, ran=ran)
    assert ran == {"eigh/torch-cpu/float64": 1, "svd/torch-cpu/float32": 1}


def test_polar_each_needs_two_dimensions():
    with pytest.raises(ValueError, match=r"two dimensions, found shape \(3,\)"):
        polar_each([torch.ones(3)])


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_autocast_changes_nothing(name):
    matrix = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)) @ torch.randn(3, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = polar(matrix, name)
    assert torch.equal(inside, polar(matrix, name))


def test_svd_of_a_rank_deficient_float32_matrix_in_float64_has_its_rank():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(32, 4, generator=generator) @ torch.randn(4, 32, generator=generator)
    assert (torch.linalg.svdvals(polar(matrix, "svd", dtype=torch.float64)) > 0.5).sum() == 4


@pytest.mark.parametrize("steps", [6, 8, 10])
@pytest.mark.parametrize("name", ["polar_express", "muon", "classical", "cubic"])
def test_every_schedule_keeps_float32_within_the_row_and_column_space(name, steps):
    generator = torch.Generator().manual_seed(0)
    for p, q in [(6, 6), (64, 128), (192, 192)]:
        column, row = (torch.randint(-9, 10, shape, generator=generator).double() for shape in ((p, 1), (1, q)))
        factor = polar((column @ row).float(), name, steps=steps, dtype=torch.float32).double()
        left, right = column / column.norm(), row / row.norm()
        outside = [factor - left @ (left.mT @ factor), factor - (factor @ right.mT) @ right]
        assert max(torch.linalg.matrix_norm(each, 2).item() for each in outside) <= 1e-3


@pytest.mark.parametrize("dtype", FLOATING_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (80, 200)])
def test_zero_stays_zero_in_every_precision(dtype, shape):
    assert polar(torch.zeros(2, *shape), dtype=dtype).eq(0).all()
    assert polar_each([torch.zeros(shape), torch.ones(shape)], dtype=dtype)[0].eq(0).all()
