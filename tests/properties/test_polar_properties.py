"""What holds of the polar factor of every matrix: shapes, spectra, ranks, scales and dtypes are drawn."""

import math
from typing import NamedTuple

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from moonopt.linalg.polar import EXACT, polar
from moonopt.linalg.schedules import SCHEDULES

few = settings(max_examples=40, deadline=None, derandomize=True)

#: Singular values above this share of the largest; with 24 of them it is at least 2e-3 of the Frobenius norm.
WELL_CONDITIONED = 1e-2

sides = st.integers(1, 24)
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([torch.float32, torch.float64])
exponents = st.floats(-20, 20)
converged = st.sampled_from([("svd", 5), ("eigh", 5), ("polar_express", 12), ("classical", 25)])
equivariant = st.sampled_from([("svd", 5), ("eigh", 5), ("polar_express", 5), ("polar_express", 12)])


class Drawn(NamedTuple):
    """A matrix and what it was made of: left @ diag(singular_values) @ right'."""

    matrix: Tensor
    singular_values: Tensor
    left: Tensor
    right: Tensor


def orthonormal(side: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(side, count, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


@st.composite
def matrices(draw: st.DrawFn, *, full_rank: bool = True, smallest: float = WELL_CONDITIONED) -> Drawn:
    p, q, seed, dtype = draw(sides), draw(sides), draw(seeds), draw(dtypes)
    rank = min(p, q) if full_rank else draw(st.integers(1, min(p, q)))
    exponent = st.floats(math.log10(smallest), 0)
    s = 10 ** torch.tensor(draw(st.lists(exponent, min_size=rank, max_size=rank)), dtype=torch.float64)
    s = s / s.max()
    left, right = orthonormal(p, rank, seed), orthonormal(q, rank, seed + 1)
    scale = 10 ** draw(exponents)
    return Drawn((scale * (left * s) @ right.mT).to(dtype), scale * s, left, right)


@st.composite
def integer_matrices(draw: st.DrawFn) -> Tensor:
    """Exactly of low rank, and exactly so after multiplication by a power of two."""
    p, q, rank, dtype = draw(sides), draw(sides), draw(st.integers(0, 24)), draw(dtypes)
    generator = torch.Generator().manual_seed(draw(seeds))
    left, right = (torch.randint(-3, 4, shape, generator=generator) for shape in ((p, rank), (rank, q)))
    return (left @ right).to(dtype)


def by_dtype(matrix: Tensor, in_float32: float, in_float64: float) -> float:
    return in_float32 if matrix.dtype == torch.float32 else in_float64


def spectral_norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix.double(), ord=2).item()


@few
@given(integer_matrices(), st.sampled_from((*SCHEDULES, *EXACT)), st.integers(-60, 60))
def test_powers_of_two_change_no_bit(matrix, name, exponent):
    assert torch.equal(polar(matrix * 2.0**exponent, name), polar(matrix, name))


# The scaled matrix is rounded anew: that error is multiplied by the slope of the polynomials, below 1100 at five steps.
@few
@given(matrices(full_rank=False), st.sampled_from(SCHEDULES), exponents)
def test_scale_does_not_matter_for_any_rank(drawn, name, exponent):
    scaled = polar(drawn.matrix * (10**exponent / drawn.singular_values[0].item()), name)
    tolerance = by_dtype(drawn.matrix, 2e-4, 1e-11)
    torch.testing.assert_close(scaled, polar(drawn.matrix, name), rtol=0, atol=tolerance)


@few
@given(matrices(), converged, exponents)
def test_scale_does_not_matter_for_converged_factors(drawn, how, exponent):
    scaled = polar(drawn.matrix * (10**exponent / drawn.singular_values[0].item()), *how)
    tolerance = by_dtype(drawn.matrix, 5e-5, 1e-11)
    torch.testing.assert_close(scaled, polar(drawn.matrix, *how), rtol=0, atol=tolerance)


@few
@given(matrices(), equivariant, seeds)
def test_orthogonal_maps_pass_through(drawn, how, seed):
    matrix = drawn.matrix
    left, right = orthonormal(matrix.shape[0], matrix.shape[0], seed), orthonormal(matrix.shape[1], matrix.shape[1], seed + 1)
    mapped = (left @ matrix.double() @ right).to(matrix.dtype)
    expected = left @ polar(matrix, *how).double() @ right
    tolerance = by_dtype(matrix, 2e-4, 1e-11)
    torch.testing.assert_close(polar(mapped, *how).double(), expected, rtol=0, atol=tolerance)


@few
@given(matrices(), converged)
def test_converged_factor_is_that_of_the_drawn_singular_vectors(drawn, how):
    expected = drawn.left @ drawn.right.mT
    tolerance = by_dtype(drawn.matrix, 5e-5, 1e-11)
    torch.testing.assert_close(polar(drawn.matrix, *how).double(), expected, rtol=0, atol=tolerance)


@few
@given(matrices(), converged)
def test_converged_factor_is_its_own_factor_and_has_norm_one(drawn, how):
    factor = polar(drawn.matrix, *how)
    tolerance = by_dtype(factor, 1e-5, 1e-11)
    torch.testing.assert_close(polar(factor, *how), factor, rtol=0, atol=tolerance)
    assert spectral_norm(factor) <= 1 + tolerance


@few
@given(matrices(full_rank=False, smallest=1e-5))
def test_five_steps_bring_singular_values_near_one(drawn):
    u, s, vh = torch.linalg.svd(drawn.matrix.double(), full_matrices=False)
    visible = s > 1e-2 * s.norm()
    # The factor in the singular basis: diagonal, with the new singular values.
    found = u.mT @ polar(drawn.matrix).double() @ vh.mT
    assert (found - found.diagonal().diag()).abs().max() <= by_dtype(drawn.matrix, 1e-3, 1e-10)
    values = found.diagonal()[visible]
    assert values.min() >= 0.85
    assert values.max() <= 1.15


# The polynomials of five steps oscillate between 0.859 and 1.141: a flat spectrum meets one value, such as 1.135 for the
# identity of side 4. Six oscillate between 0.9977 and 1.0023.
@few
@given(matrices(full_rank=False, smallest=3e-2), st.sampled_from([(5, 0.1412), (6, 2.3e-3), (12, 1e-5)]))
def test_descent_is_that_of_the_exact_factor_but_for_the_oscillation(drawn, steps_and_deviation):
    steps, deviation = steps_and_deviation
    descent = (polar(drawn.matrix, steps=steps).double() * drawn.matrix.double()).sum().item()
    assert abs(descent / drawn.singular_values.sum().item() - 1) <= deviation + 1e-5


@few
@given(matrices(full_rank=False, smallest=1e-5))
def test_descent_of_the_svd_is_the_nuclear_norm(drawn):
    descent = (polar(drawn.matrix, "svd").double() * drawn.matrix.double()).sum().item()
    assert abs(descent / drawn.singular_values.sum().item() - 1) <= by_dtype(drawn.matrix, 1e-5, 1e-12)
