"""Muon against torch.optim: its own Muon for matrices, its AdamW for vectors."""

import pytest
import torch
from torch import nn

from moonopt import Muon
from moonopt.optim.groups import SCALES

SHAPES = [(8, 8), (16, 8), (8, 24), (64, 96)]


def _parameters(seed=0, dtype=torch.float32, shapes=SHAPES):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def _set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scale", "adjust"), [("spectral", "original"), ("rms", "match_rms_adamw")])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float64, 1e-5)], ids=str)
def test_muon_equals_torchs(monkeypatch, nesterov, scale, adjust, weight_decay, dtype, tolerance):
    """To the rounding of bfloat16, in which torch's computes; made to compute in float64, to that of the parameters."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.to(dtype))
    ours, theirs = _parameters(), _parameters()
    lr = 0.1
    muon = Muon(
        [{"params": ours, "kind": "matrix"}],
        lr=lr,
        momentum=0.9,
        nesterov=nesterov,
        scale=scale,
        weight_decay=weight_decay,
        schedule="muon",
        polar_dtype=dtype,
    )
    reference = torch.optim.Muon(theirs, lr=lr, momentum=0.9, nesterov=nesterov, weight_decay=weight_decay, adjust_lr_fn=adjust)
    for step in range(4):
        before = [p.detach().clone() for p in ours]
        with torch.no_grad():  # compare step by step, so that rounding does not add up
            for mine, other in zip(ours, theirs, strict=True):
                other.copy_(mine)
        _set_gradients(ours, step)
        _set_gradients(theirs, step)
        muon.step()
        reference.step()
        for p, q, old in zip(ours, theirs, before, strict=True):
            decayed = (1 - lr * weight_decay) * old
            update, expected = decayed - p.detach(), decayed - q.detach()
            # Theirs decays before the move, ours after it, that is, the move as well.
            error = (update - (1 - lr * weight_decay) * expected).norm() / expected.norm()
            assert error < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_follow_torchs_adamw(dtype):
    shapes = [(7,), (3, 5), ()]
    ours, theirs = _parameters(dtype=dtype, shapes=shapes), _parameters(dtype=dtype, shapes=shapes)
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
    muon = Muon([{"params": ours, "kind": "vector", **settings}])
    reference = torch.optim.AdamW(theirs, **settings)
    for step in range(20):
        for parameters, optimizer in ((ours, muon), (theirs, reference)):
            _set_gradients(parameters, step)
            if step % 3 == 1:
                parameters[1].grad = None  # its own step count must stay behind
            optimizer.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def test_gradients_are_never_changed():
    parameters = _parameters()
    _set_gradients(parameters, 0)
    before = [p.grad.clone() for p in parameters]
    Muon([{"params": parameters, "kind": "matrix"}], nesterov=True, weight_decay=0.1).step()
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=True))


def test_update_has_the_given_length_in_the_spectral_norm():
    parameters = _parameters()
    before = [p.detach().clone() for p in parameters]
    _set_gradients(parameters, 0)
    Muon([{"params": parameters, "kind": "matrix"}], lr=0.5, schedule="svd").step()
    for p, old in zip(parameters, before, strict=True):
        assert torch.linalg.matrix_norm(p.detach() - old, 2).item() == pytest.approx(0.5, rel=1e-4)


def test_a_zero_gradient_moves_nothing():
    parameters = _parameters()
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    Muon([{"params": parameters, "kind": "matrix"}]).step()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0, 0), (3, 0, 2)], ids=str)
def test_an_empty_matrix_changes_nothing_for_the_others(scale, shape):
    moved = []
    for shapes in ([(8, 4)], [(8, 4), shape]):
        parameters = _parameters(shapes=shapes)
        optimizer = Muon([{"params": parameters, "kind": "matrix"}], scale=scale)
        _set_gradients(parameters, 0)
        optimizer.step()
        moved.append(parameters[0].detach())
    assert torch.equal(*moved)
    assert optimizer.diagnostics()["nuclear_norm"] > 0


def test_a_compiled_step_is_the_step():
    results = []
    for compiled in (False, True):
        parameters = _parameters(shapes=[(4, 3), (4,)])
        optimizer = Muon([{"params": parameters[:1], "kind": "matrix"}, {"params": parameters[1:], "kind": "vector"}])
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for seed in range(3):
            _set_gradients(parameters, seed)
            step()
        results.append([p.detach() for p in parameters])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_a_split_parameter_is_updated_as_its_parts():
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(12, 6))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split([4, 6, 2])]
    gradient = torch.randn(12, 6)
    whole.grad = gradient
    for part, piece in zip(parts, gradient.split([4, 6, 2]), strict=True):
        part.grad = piece
    settings = {"lr": 0.1, "scale": "spectral"}
    Muon([{"params": [whole], "kind": "matrix", "rows": [[4, 6, 2]]}], **settings).step()
    Muon([{"params": parts, "kind": "matrix"}], **settings).step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in parts]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_updated_as_out_by_everything_else(memory_format):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 8, 3, bias=False).to(memory_format=memory_format)
    flat = nn.Parameter(layer.weight.detach().reshape(8, 27).clone())
    gradient = torch.randn(8, 3, 3, 3)
    layer.weight.grad, flat.grad = gradient.to(memory_format=memory_format), gradient.reshape(8, 27)
    Muon(layer, lr=0.1).step()
    Muon([{"params": [flat], "kind": "matrix"}], lr=0.1).step()
    torch.testing.assert_close(layer.weight.detach().reshape(8, 27), flat.detach(), rtol=1e-6, atol=1e-6)


def test_parameters_without_a_gradient_stay():
    parameters = _parameters()
    _set_gradients(parameters, 0)
    parameters[1].grad = None
    before = parameters[1].detach().clone()
    optimizer = Muon([{"params": parameters, "kind": "matrix"}], weight_decay=0.5)
    optimizer.step()
    assert torch.equal(parameters[1], before)
    assert not optimizer.state[parameters[1]]["momentum"].any()


def test_combine_is_the_mean_and_minimize_returns_the_structure():
    p = nn.Parameter(torch.eye(2))
    optimizer = Muon([{"params": [p], "kind": "matrix"}])
    assert optimizer.combine({"a": p.sum(), "b": 3 * p.sum()}).item() == 4
    losses = optimizer.minimize(lambda scale: {"a": p.sum(), "b": scale * p.sum()}, 3)
    assert losses == {"a": torch.tensor(2.0), "b": torch.tensor(6.0)}
    assert not losses["a"].requires_grad
    assert p.grad is not None


def test_step_with_a_closure_evaluates_it_with_gradients():
    p = nn.Parameter(torch.eye(2))
    optimizer = Muon([{"params": [p], "kind": "matrix"}])

    def closure():
        optimizer.zero_grad()
        loss = optimizer.combine([p.sum(), p.square().sum()])
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2
    assert not torch.equal(p, torch.eye(2))
