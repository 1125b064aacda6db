"""Set2Set as one operation: against the one of torch's own parts, and differences."""

import pytest
import torch
from torch import nn

from moonopt.bench.models.mpnn import Set2Set
from moonopt.bench.models.mpnn_readout import fused_readout

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def rows(dtype=torch.float64, width=5):
    """Atoms, two molecules in a row: of three atoms each, of six and one, of seven and none, of none at all."""
    torch.manual_seed(0)
    members = torch.zeros(4, 7, 2, dtype=torch.bool)
    for row, (one, other) in enumerate([(3, 3), (6, 1), (7, 0), (0, 0)]):
        members[row, :one, 0] = members[row, one : one + other, 1] = True
    return torch.randn(4, 7, width, dtype=dtype, requires_grad=True), members


def readout(steps, dtype=torch.float64, width=5):
    torch.manual_seed(1)
    return Set2Set(width, steps).to(dtype)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_it_is_what_torchs_own_parts_make(steps):
    model, (x, members) = readout(steps), rows()
    found, expected = model(x, members, fused=True), model(x, members)
    torch.testing.assert_close(found, expected)
    inputs, along = [x, *model.parameters()], torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(each, inputs, along) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_without_steps_it_is_zeros():
    model, (x, members) = readout(0), rows()
    assert model(x, members, fused=True).tolist() == [[0] * 10] * 8


def test_its_gradients_are_those_of_differences():
    model, (x, members) = readout(2, width=3), rows(width=3)
    unlikely = (-10.0 * ~members.mT).double()

    def after(x, *parameters):
        cell = nn.LSTMCell(6, 3).double()
        for name, value in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), parameters, strict=True):
            del cell._parameters[name]
            setattr(cell, name, value)
        return fused_readout(x, unlikely, cell, 2)

    assert torch.autograd.gradcheck(after, [x, *model.lstm.parameters()])


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_of_several_losses_at_once_are_those_of_each(steps):
    model, (x, members) = readout(steps), rows()
    found, inputs = model(x, members, fused=True), [x, *model.parameters()]
    along = torch.randn(4, *found.shape, dtype=x.dtype)

    def gradients(direction):
        return torch.autograd.grad(found, inputs, direction, retain_graph=True)

    for number, at_once in enumerate(zip(*torch.vmap(gradients)(along), strict=True)):
        for one, other in zip(at_once, gradients(along[number]), strict=True):
            torch.testing.assert_close(one, other)


def test_several_forward_passes_at_once_are_refused():
    model, (x, members) = readout(2), rows()

    def gradient(x):
        return torch.autograd.grad(model(x, members, fused=True).sum(), x)

    with pytest.raises(RuntimeError):
        torch.vmap(gradient)(torch.stack([x, x]))


def test_atoms_that_are_not_there_are_not_looked_at():
    model, (x, members) = readout(3), rows()
    nobody = ~members.any(2, keepdim=True)
    found = model(x, members, fused=True)
    (gradient,) = torch.autograd.grad(found[:6].sum(), x)
    assert not gradient[:3].masked_select(nobody[:3]).any()
    torch.testing.assert_close(model(x + 3 * nobody, members, fused=True)[:5], found[:5])


def test_under_autocast_it_stays_in_single_precision():
    model, (x, members) = readout(3, torch.float32), rows(torch.float32)
    expected = model(x, members, fused=True)
    gradients = torch.autograd.grad(expected.sum(), [x, *model.parameters()])
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x, members, fused=True)
        again = torch.autograd.grad(found.sum(), [x, *model.parameters()])
        half = model(x.bfloat16(), members, fused=True)  # as the layer before may give it
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients, again))
    torch.testing.assert_close(half, expected, rtol=0.1, atol=0.1)


def test_it_is_not_differentiated_twice():
    model, (x, members) = readout(2), rows()
    (gradient,) = torch.autograd.grad(model(x, members, fused=True).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@NEEDS_GPU
def test_on_a_gpu_it_is_what_it_is_on_a_cpu():
    found = []
    for device in ("cpu", "cuda"):
        model, (x, members) = readout(3, torch.float32).to(device), rows(torch.float32)
        x, members = x.detach().to(device).requires_grad_(), members.to(device)
        after = model(x, members, fused=True)
        inputs, along = [x, *model.parameters()], torch.linspace(-1, 1, after.numel()).view(1, *after.shape).to(device)
        along = torch.cat([along, along.square()])
        gradients = torch.vmap(lambda each: torch.autograd.grad(after, inputs, each, retain_graph=True))(along)
        alone = torch.autograd.grad(after, inputs, along[1])
        found.append([each.cpu() for each in (after, *gradients, *alone)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
