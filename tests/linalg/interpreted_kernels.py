"""Kernels of our own on a CPU, in Triton's interpreter; ``test_interpreted_kernels.py`` runs this in a process of its own."""

import pytest
import torch

from moonopt.linalg.kernels.products import DEPTH, TILE
from moonopt.linalg.kernels.small import iterate
from moonopt.linalg.kernels.streaming import advance, divide, move, rescale
from moonopt.linalg.kernels.symmetric import symmetric_product
from moonopt.linalg.polar import polar
from moonopt.linalg.schedules import schedule

SHAPES = [(64, 64), (64, 128), (5, 128), (33, 70), (1, 1), (1, 128)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["polar_express", "muon", "you", "classical", "cubic"])
def test_small_matrices_in_one_launch_are_as_by_products(name, shape):
    matrices = torch.randn(3, *shape)
    matrices[1] = matrices[1, :, :1] @ matrices[1, :1, :]  # of rank one
    torch.testing.assert_close(iterate(matrices, schedule(name, 5)), polar(matrices, name), rtol=0, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_they_take_any_number_of_steps(steps):
    matrices = torch.randn(2, 20, 30)
    torch.testing.assert_close(iterate(matrices, schedule("polar_express", steps)), polar(matrices, steps=steps))


@pytest.mark.parametrize("name", ["polar_express", "muon"])
def test_their_scale_does_not_matter(name):
    matrix = torch.randn(20, 30)
    first, *others = iterate(torch.stack([matrix * 2.0**power for power in (0, 90, -90, 124)]), schedule(name, 5))
    assert all(other.equal(first) for other in others)
    for other in iterate(torch.stack([matrix * 1e30, matrix * 1e-30]), schedule(name, 5)):
        torch.testing.assert_close(other, first, rtol=0, atol=1e-4)


def test_zero_stays_zero_and_not_a_number_stays_with_its_matrix():
    matrices = torch.randn(3, 5, 7)
    matrices[0], matrices[1, 2, 3] = 0, torch.nan
    zero, bad, good = iterate(matrices, schedule("polar_express", 5))
    assert zero.eq(0).all()
    assert bad.isnan().all()
    torch.testing.assert_close(good, polar(matrices[2]))


def test_small_matrices_may_lie_in_any_order_and_are_left_alone():
    matrices = torch.randn(2, 7, 5).mT
    before = matrices.clone()
    torch.testing.assert_close(iterate(matrices, schedule("muon", 5)), polar(matrices.contiguous(), "muon"))
    assert matrices.equal(before)


@pytest.mark.parametrize("tall", [False, True])
def test_symmetric_products_are_those_of_float64(tall):
    side, dtype = 2 * TILE, torch.float16  # in bfloat16 the interpreter has no products
    x = torch.randn(2, side, 2 * DEPTH).to(dtype)
    x = x.mT.contiguous().mT if tall else x
    addend = torch.randn(2, side, side)
    addend = (addend + addend.mT).to(dtype)
    out = torch.full((2, side, side), torch.nan, dtype=dtype)
    for options in ({"alpha": 0.5}, {"alpha": 0.5, "beta": -2.0, "addend": addend}):
        symmetric_product(x, x, out, **options)
        expected = 0.5 * x.double() @ x.double().mT - (2 * addend.double() if "addend" in options else 0)
        assert (out.double() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()
        assert out[:, :TILE, TILE:].equal(out[:, TILE:, :TILE].mT), "what is above the diagonal is mirrored"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_momenta_advance_where_all_is_finite(dtype):
    momenta, gradients = ([torch.randn(70, 130) for _ in range(3)] for _ in range(2))
    gradients = [each.to(dtype) for each in gradients]
    before = [each.clone() for each in momenta]
    bad = [torch.full_like(each, torch.nan) for each in gradients]
    for given, finite in ((bad, False), (gradients, True)):
        largest = advance(momenta, given, 0.95, torch.tensor(finite))
        expected = [old.lerp(new.float(), 0.05) if finite else old for old, new in zip(before, given, strict=True)]
        torch.testing.assert_close(momenta, expected)
        assert largest.tolist() == [each.abs().max().item() for each in momenta]


def test_matrices_are_divided_into_a_stack_and_rescaled():
    matrices, divisors = [torch.randn(70, 130) for _ in range(2)], torch.tensor([4.0, 0.5])
    stack = torch.empty(2, 70, 130, dtype=torch.float16)
    divide(matrices, divisors, stack)
    assert stack.equal(torch.stack([matrices[0] / 4, matrices[1] * 2]).half())
    factors = torch.tensor([0.3, 1e-3])[:, None, None]
    expected = (stack.float() * factors).half()
    rescale(stack, factors)
    assert stack.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parameters_move_along_directions(dtype):
    parameters, directions = [torch.randn(70, 130).to(dtype) for _ in range(2)], [torch.randn(70, 130).half() for _ in range(2)]
    expected = [(p.float() - 0.1 * d.float()).to(dtype) for p, d in zip(parameters, directions, strict=True)]
    move(parameters, directions, torch.tensor(0.1))
    torch.testing.assert_close(parameters, expected)
