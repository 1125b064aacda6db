"""Derivatives forwards: what has its own rule has torch's derivative, and nothing else's tangent changes."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

from moonopt.tasks import tangents
from moonopt.tasks.tangents import carried, tangent_of

C = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)

EXPRESSIONS = {
    "linear": lambda w, b: functional.linear(C, w, b),
    "linear without bias": lambda w, b: functional.linear(C, w),
    "linear of a dual": lambda w, b: functional.linear(functional.linear(C, w).tanh(), C[:, :4], None),
    "linear with constant weights": lambda w, b: functional.linear(w, C, C[:, 0]),
    "linear in its bias": lambda w, b: functional.linear(C, C, b[:3]),
    "linear of one vector": lambda w, b: functional.linear(C[0], C, b[:3]).mul_(2) + b[:3],
    "sum with a constant": lambda w, b: w + C[0],
    "sum with a larger constant": lambda w, b: C[:, :4] + b,
    "sum with a number": lambda w, b: torch.add(w, 2.5),
    "sum with a multiple": lambda w, b: torch.add(C[0], w, alpha=3),
    "difference": lambda w, b: w - C[1],
    "difference from a constant": lambda w, b: C[1] - w,
    "difference from a number": lambda w, b: 1 - w,
    "difference of two": lambda w, b: w - b,
    "product": lambda w, b: C[0] * w * 2.0,
    "product of two": lambda w, b: w * b,
    "constants": lambda w, b: C * 2 + w.sum(),
    "integers": lambda w, b: w * torch.arange(4) + torch.arange(4),
    "in place after a sum": lambda w, b: (w + C[0]).mul_(3) + w,
    "out": lambda w, b: w * torch.add(C, C, out=torch.empty_like(C))[0],
}


def _parameters():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 4).double()), nn.Parameter(torch.randn(4).double())]
    return parameters, {p: torch.randn_like(p) for p in parameters}


@pytest.mark.parametrize("moving", ["both", "weight", "bias"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_rules_give_the_derivative_of_a_backward_pass(name, moving):
    (w, b), directions = _parameters()
    directions = {p: d for p, d in directions.items() if moving in ("both", {w: "weight", b: "bias"}[p])}
    cotangent = torch.randn_like(EXPRESSIONS[name](w, b))
    gradients = torch.autograd.grad(EXPRESSIONS[name](w, b), (w, b), cotangent, allow_unused=True)
    expected = sum(
        (directions[p] * g).sum() for p, g in zip((w, b), gradients, strict=True) if g is not None and p in directions
    )
    with carried(directions, (w, b)):
        value = EXPRESSIONS[name](w, b)
        found = (tangent_of(value) * cotangent).sum()
        for p, direction in directions.items():
            assert torch.equal(tangent_of(p), direction)
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(value.detach(), EXPRESSIONS[name](w, b).detach())


def test_under_no_grad_the_rules_stop_like_all_others():
    (w, b), directions = _parameters()
    with carried(directions, (w, b)), torch.no_grad():
        assert not tangent_of(functional.linear(C, w, b) + C[0, 0]).any()


@pytest.mark.parametrize(
    "slope",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(x),
        lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
        lambda f, x: torch.autograd.grad(f(x.clone().requires_grad_()).sum(), x, create_graph=True)[0],
    ],
    ids=["grad", "grad of vmap", "vmap of grad", "autograd.grad"],
)
def test_derivatives_inside_are_differentiated_as_before(slope, monkeypatch):
    (w, b), directions = _parameters()
    x = C.clone().requires_grad_()
    found = []
    for rules in (tangents.RULES, {}):
        monkeypatch.setattr(tangents, "RULES", rules)
        with carried(directions, (w, b)):
            found.append(tangent_of(slope(lambda x: (functional.linear(x, w, b).tanh() * 2 - 1).square(), x)).detach())
    assert found[0].abs().max() > 1e-3
    torch.testing.assert_close(*found)


def test_rules_keep_the_dtypes_of_autocast():
    (w, b), directions = _parameters()
    w, b = (nn.Parameter(p.detach().float()) for p in (w, b))
    directions = dict(zip((w, b), (d.float() for d in directions.values()), strict=True))
    with carried(directions, (w, b)), torch.autocast("cpu", dtype=torch.bfloat16):
        value = functional.linear(C.float(), w, b) - C[0].float()
        assert tangent_of(functional.linear(C.float(), w, b)).dtype == torch.bfloat16
        assert tangent_of(value).dtype == value.dtype == torch.float32


def test_constants_cost_no_zeros(monkeypatch):
    """Which is what the rules are for: torch works out the shape of a sum with zeros in Python."""
    calls = []
    monkeypatch.setattr(torch._refs, "_broadcast_shapes", lambda *shapes: calls.append(shapes))
    (w, b), directions = _parameters()
    with carried({w: directions[w]}, (w, b)):
        assert tangent_of((functional.linear(C, w, b)[:, 0] - C[:, 0]) * 2 + 1).any()
    assert not calls


def test_nothing_stays():
    (w, b), directions = _parameters()
    with carried(directions, (w, b)):
        pass
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(w).tangent is None
    assert w.requires_grad
