"""Symmetric products by panels on a CPU: the same numbers as whole ones, and polar factors that are no less accurate."""

import pytest
import torch

from moonopt.linalg import polar as polar_module, scaling
from moonopt.linalg.kernels import Products, panels, presence, products, products_for
from moonopt.linalg.polar import HALF_PRECISION_SIDE_ON_CPUS, polar, polar_dtype, polar_each

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture
def small_panels(monkeypatch):
    """Panels for matrices that a test can afford, with a last panel that is thinner than the others."""
    monkeypatch.setattr(products, "PANEL_SIDE", 64)
    monkeypatch.setattr(panels, "HEIGHT", 48)


def test_panels_are_for_large_matrices_on_cpus():
    for dtype in DTYPES:
        assert products_for(products.PANEL_SIDE, 5000, dtype, CPU).name == "panels"
        assert products_for(products.PANEL_SIDE - 1, 5000, dtype, CPU).name == "torch"
    assert products_for(4096, 4096, torch.float16, CPU).name == "torch"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("side", [96, 100])
def test_products_by_panels_are_the_whole_ones(small_panels, dtype, tall, side):
    torch.manual_seed(0)
    x = torch.randn(3, side, 150).div(150**0.5).to(dtype)
    x = x.mT.contiguous().mT if tall else x
    ours, whole = products_for(side, 150, dtype, CPU), Products()
    assert ours.name == "panels"
    found, expected, spare = (torch.full((3, side, side), torch.nan, dtype=dtype) for _ in range(3))

    def check(tolerance):
        largest = expected.double().abs().max()
        assert (found.double() - expected.double()).abs().max() <= tolerance * torch.finfo(dtype).eps * largest
        assert (found.double() - found.mT.double()).abs().max() <= tolerance * torch.finfo(dtype).eps * largest

    ours.gram(x, found)
    whole.gram(x, expected)
    check(16)
    gram = expected.clone()
    ours.polynomial(gram, (0.5, 2.0, -0.5), found)
    whole.polynomial(gram, (0.5, 2.0, -0.5), expected)
    check(16)
    polynomial = expected.clone()
    ours.commuting(polynomial, gram, found)
    whole.commuting(polynomial, gram, expected)
    check(16)
    ours.sandwich(polynomial, gram, spare, found)
    whole.sandwich(polynomial, gram, spare, expected)
    check(16)


def with_singular_values(values, columns):
    rows = len(values)
    left, right = (torch.linalg.qr(torch.randn(n, rows, dtype=torch.float64))[0] for n in (rows, columns))
    return (left * values) @ right.mT


def sample(kind, rows, columns):
    torch.manual_seed(0)
    if kind == "random":
        return torch.randn(rows, columns, dtype=torch.float64)
    if kind == "ill-conditioned":
        return with_singular_values(torch.logspace(0, -6, rows, dtype=torch.float64), columns)
    rank = 1 if kind == "rank 1" else rows // 3
    return with_singular_values((torch.arange(rows) < rank).double(), columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "ill-conditioned", "rank 1", "a third of the rank"])
@pytest.mark.parametrize("shape", [(130, 130), (100, 300)])
@pytest.mark.parametrize("steps", [5, 8, 14])
def test_factors_by_panels_are_no_less_accurate(small_panels, monkeypatch, dtype, kind, shape, steps):
    matrix = sample(kind, *shape)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > 1e-9 * s[0]).sum())
    exact = u[:, :rank] @ vh[:rank]

    def error():
        return ((polar(matrix, steps=steps, dtype=dtype) - exact).norm() / exact.norm()).item()

    by_panels = error()
    monkeypatch.setattr(polar_module, "products_for", lambda *args: Products())
    assert by_panels <= 1.1 * error() + 8 * torch.finfo(dtype).eps


def test_factors_of_large_matrices_are_those_of_the_whole_products(monkeypatch):
    matrix = torch.randn(700, 800, generator=torch.Generator().manual_seed(0))
    found = polar(matrix, dtype=torch.float32)
    monkeypatch.setattr(polar_module, "products_for", lambda *args: Products())
    assert (found - polar(matrix, dtype=torch.float32)).norm() <= 1e-5 * found.norm()


def test_large_matrices_are_brought_to_scale_as_small_ones_are(monkeypatch):
    torch.manual_seed(0)
    wide, tall = torch.randn(300, 400), torch.randn(400, 300)
    matrices = [wide, tall, 2.0**80 * wide, 2.0**-80 * wide, torch.zeros(300, 400), wide.clone()]
    matrices[5][2, 3] = torch.nan
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        monkeypatch.undo()
        factors = polar_each(matrices, dtype=dtype)
        assert factors[0].equal(factors[2])
        assert factors[0].equal(factors[3])
        assert factors[4].eq(0).all()
        assert factors[5].isnan().all()
        monkeypatch.setattr(scaling, "ONE_BY_ONE", 2**60)
        for found, expected in zip(factors, polar_each(matrices, dtype=dtype), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# The precision


@pytest.mark.parametrize("native", [False, True])
def test_default_on_cpus_is_bfloat16_for_large_matrices_where_the_cpu_multiplies_it(monkeypatch, native):
    monkeypatch.setattr(polar_module, "cpu_multiplies_bfloat16", lambda: native)
    large, small = (torch.empty(side, 1000) for side in (HALF_PRECISION_SIDE_ON_CPUS, HALF_PRECISION_SIDE_ON_CPUS - 1))
    assert polar_dtype(large) == (torch.bfloat16 if native else torch.float32)
    assert polar_dtype(large.bfloat16()) == polar_dtype(large)
    assert polar_dtype(small) == torch.float32
    assert polar_dtype(large.double()) == torch.float64
    assert polar_dtype(large, torch.float32) == torch.float32


def test_onednn_can_be_told_not_to_multiply_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    found = presence.cpu_multiplies_bfloat16.__wrapped__
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    assert found()
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "avx2")
    assert not found()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert found()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert not found()


def test_cpus_without_instructions_for_bfloat16_do_not_multiply_it(monkeypatch):
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert not presence.cpu_multiplies_bfloat16.__wrapped__()
