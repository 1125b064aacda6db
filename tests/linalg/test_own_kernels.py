"""Kernels of our own against torch and float64; they need a GPU."""

import subprocess
import sys

import pytest
import torch

from moonopt.linalg import polar as module
from moonopt.linalg.kernels import Products, can_stream, products_for
from moonopt.linalg.polar import polar, polar_each
from moonopt.linalg.schedules import schedule
from moonopt.tasks.modes import multiplying

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HALF = (torch.float16, torch.bfloat16)


def test_where_there_is_no_gpu_torch_computes():
    cpu = torch.device("cpu")
    assert products_for(4096, 4096, torch.float16, cpu).name == "torch"
    assert not can_stream(torch.zeros(8), torch.zeros(8))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("pass", False),
        ("torch.set_float32_matmul_precision('high')", True),
        ("torch.set_float32_matmul_precision('highest')", False),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", True),
        ("torch.backends.cuda.matmul.allow_tf32 = True", True),
        ("torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'", False),
    ],
)
def test_any_of_torchs_switches_may_say_what_float32_is_multiplied_in(said, expected):
    asked = "from moonopt.linalg.kernels.presence import multiplies_in_tf32; print(multiplies_in_tf32())"
    done = subprocess.run([sys.executable, "-c", f"import torch; {said}; {asked}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected)


def test_the_plain_products_are_what_they_say():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    gram, out, spare = (torch.empty(2, 3, 3, dtype=torch.float64) for _ in range(3))
    plain = Products()
    plain.gram(x, gram)
    assert torch.allclose(gram, x @ x.mT)
    plain.polynomial(gram, (0.5, 2.0, -0.5), out)
    assert torch.allclose(out, polynomial(gram, 0.5, 2.0, -0.5))
    expected = out @ gram @ out
    plain.sandwich(out, gram, spare, gram)
    assert torch.allclose(gram, expected)


def polynomial(a, constant, linear, quadratic):
    return constant * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) + linear * a + quadratic * a @ a


@needs_gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("tall", [False, True])
def test_symmetric_products_are_those_of_torch(dtype, tall):
    torch.manual_seed(0)
    x = torch.randn(2, 1280, 2048, device="cuda").div(2048**0.5).to(dtype)
    x = x.mT.contiguous().mT if tall else x
    ours, plain = products_for(1280, 2048, dtype, x.device), Products()
    assert ours.name == "triton"
    found, expected, spare = (x.new_empty(2, 1280, 1280) for _ in range(3))

    def check(tolerance):
        largest = expected.double().abs().max()
        assert (found.double() - expected.double()).abs().max() <= tolerance * largest
        assert (found.double() - found.mT.double()).abs().max() <= torch.finfo(dtype).eps * largest

    ours.gram(x, found)
    plain.gram(x, expected)
    check(torch.finfo(dtype).eps)
    a = expected.clone()
    expected.copy_(polynomial(a.double(), 0.5, 2.0, -0.5))
    for products in (ours, plain):
        products.polynomial(a, (0.5, 2.0, -0.5), found)
        check(2 * torch.finfo(dtype).eps)
    b = expected.clone()
    ours.sandwich(b, a, spare, found)
    plain.sandwich(b, a, spare, expected)
    check(4 * torch.finfo(dtype).eps)
    ours.commuting(a, b, found)
    plain.commuting(a, b, expected)
    check(4 * torch.finfo(dtype).eps)
    factors = torch.tensor([0.3, 1e-3], device="cuda")[:, None, None]
    rescaled = (x.double() * factors.double()).to(dtype)
    ours.rescale(x, factors)
    assert (x.double() - rescaled.double()).abs().max() <= torch.finfo(dtype).eps * rescaled.abs().max()


def spectrum(p, q, values):
    u, v = (torch.linalg.qr(torch.randn(n, p, device="cuda", dtype=torch.float64))[0] for n in (p, q))
    return (u * values) @ v.mT, (u * (values > 0)) @ v.mT


@needs_gpu
@pytest.mark.parametrize("steps", [5, 8])
@pytest.mark.parametrize("shape", [(1024, 3072), (1024, 1024), (512, 2048), (3072, 1024)])
@pytest.mark.parametrize("kind", ["ill-conditioned", "rank 64", "rank 1", "flat"])
def test_fast_paths_are_no_less_accurate_than_the_standard_iteration(kind, shape, steps, monkeypatch):
    torch.manual_seed(0)
    p = min(shape)
    ones, zeros = torch.ones(p, device="cuda", dtype=torch.float64), torch.zeros(p, device="cuda", dtype=torch.float64)
    values = {
        "ill-conditioned": torch.logspace(0, -3, p, device="cuda", dtype=torch.float64),
        "rank 64": torch.cat([ones[:64], zeros[64:]]),
        "rank 1": torch.cat([ones[:1], zeros[1:]]),
        "flat": ones,
    }[kind]
    matrix, exact = spectrum(p, max(shape), values)
    if shape[0] > shape[1]:
        matrix, exact = matrix.mT.contiguous(), exact.mT
    matrix = matrix.float()

    def error(dtype):
        return ((polar(matrix, steps=steps, dtype=dtype).double() - exact).norm() / exact.norm()).item()

    found, half = error(None), torch.finfo(torch.float16).eps
    monkeypatch.setattr(module, "GRAM_RATIO", float("inf"))
    monkeypatch.setattr(module, "products_for", lambda *args: Products())
    assert found <= 1.1 * error(torch.float16) + 8 * half
    assert found <= 1.1 * max(error(torch.bfloat16), error(torch.float32)) + 8 * half


def by_one_rounding(values, name):
    """How far singular values end from where they would, if they are rounded to TensorFloat-32 once, before the first step."""
    steps, values = schedule(name, 5), values[values > 0]
    size = values.pow(4).sum() ** 0.25 if steps.norm == "schatten-4" else values.norm()
    start = values / size / steps.safety
    off = 1 + torch.finfo(torch.float16).eps / 2 * torch.linspace(-1, 1, 401, device=values.device)[:, None]
    exact, found = start, start * off
    for a, b, c in steps.coefficients:
        exact, found = (a * x + b * x**3 + c * x**5 for x in (exact, found))
    return (found - exact).abs().amax(0).norm().item()


def test_one_rounding_of_ten_bits_is_seen_in_the_factor():
    one = torch.ones(1, dtype=torch.float64)
    assert by_one_rounding(one, "polar_express") > 0.05  # the composed polynomial is steep between its many extrema
    assert by_one_rounding(one, "muon") < 1e-3


@needs_gpu
@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (128, 64), (5, 128), (33, 70), (1, 1), (1, 128)], ids=str)
@pytest.mark.parametrize("kind", ["ill-conditioned", "rank 1", "flat", "zero"])
@pytest.mark.parametrize("name", ["polar_express", "muon"])
def test_small_matrices_in_one_launch_are_no_less_accurate_than_by_products(name, kind, shape, monkeypatch):
    torch.manual_seed(0)
    p = min(shape)
    values = torch.ones(p, device="cuda", dtype=torch.float64)
    if kind == "ill-conditioned":
        values = torch.logspace(0, -3, p, device="cuda", dtype=torch.float64)
    elif kind != "flat":
        values[int(kind == "rank 1") :] = 0
    matrix, exact = spectrum(p, max(shape), values)
    if shape[0] > shape[1]:
        matrix, exact = matrix.mT.contiguous(), exact.mT
    matrix = matrix.float()
    iterated = polar(matrix.double(), name)  # the same steps in float64

    def errors():
        factor = polar(matrix, name).double()
        return (factor - exact).norm().item(), (factor - iterated).norm().item()

    with multiplying(tf32=True):
        assert products_for(p, max(shape), torch.float32, matrix.device).name == "small"
        found, together = errors(), polar_each([matrix, torch.full_like(matrix, torch.nan), matrix * 2.0**40])
        monkeypatch.setattr(module, "products_for", lambda *args: Products())
        by_products = errors()
    rounding = 8 * torch.finfo(torch.float16).eps  # TensorFloat-32 has as many bits
    assert found[0] <= 1.1 * by_products[0] + rounding
    # Products of tiny matrices, and of those of rank one, happen to be exact: another way to round is as far off as it may be.
    assert found[1] <= 3 * by_products[1] + rounding + by_one_rounding(values, name)
    assert torch.equal(together[0], together[2])
    assert together[1].isnan().all()


@needs_gpu
def test_large_matrices_of_any_scale_share_their_factor():
    torch.manual_seed(0)
    matrix = torch.randn(1024, 1024, device="cuda")
    factors = polar_each([matrix, matrix * 2.0**80, matrix * 2.0**-80, torch.zeros_like(matrix)])
    assert factors[0].equal(factors[1])
    assert factors[0].equal(factors[2])
    assert factors[3].eq(0).all()


@needs_gpu
@pytest.mark.parametrize("side", [64, 300, 1280])
def test_transposes_share_a_chain_in_any_order(side):
    torch.manual_seed(0)
    shapes = [(side, 2 * side), (2 * side, side), (side, 2 * side), (side, side), (2 * side, side)]
    matrices = [torch.randn(shape, device="cuda") for shape in shapes]
    for matrix, factor in zip(matrices, polar_each(matrices), strict=True):
        assert factor.is_contiguous()
        assert (factor - polar(matrix)).norm() <= 5e-3 * factor.norm()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_streaming_kernels_do_what_torch_does(dtype):
    from moonopt.linalg.kernels.streaming import advance, divide, move

    torch.manual_seed(0)
    shape = (700, 513)
    momentum, gradient = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda", dtype=dtype)
    good, bad = torch.tensor(True, device="cuda"), torch.tensor(False, device="cuda")
    assert can_stream(momentum, gradient)
    expected = momentum.lerp(gradient.float(), 0.05)
    before = momentum.clone()
    largest = advance([momentum], [torch.full_like(gradient, torch.nan)], 0.95, bad)
    assert momentum.equal(before)
    assert largest.item() == before.abs().max()
    largest = advance([momentum], [gradient], 0.95, good)
    assert largest.item() == momentum.abs().max()
    assert torch.allclose(momentum, expected, atol=1e-6)
    out = torch.empty(2, *shape, device="cuda", dtype=torch.float16)
    divide([momentum, before], torch.tensor([4.0, 0.5], device="cuda"), out)
    assert out.equal(torch.stack([momentum / 4, before * 2]).half())
    parameter, direction = gradient.clone(), torch.randn(shape, device="cuda").half()
    rate = torch.tensor(0.1, device="cuda")
    move([parameter], [direction], rate)
    exact = gradient.double() - 0.1 * direction.double()
    assert (parameter.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
