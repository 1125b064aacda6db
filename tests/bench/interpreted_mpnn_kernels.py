"""Kernels of QM9's gradients in Triton's interpreter, for ``test_interpreted_kernels.py``, or on a GPU, if there is one."""

import pytest
import torch

from moonopt.bench.models import mpnn_kernels, mpnn_parts
from moonopt.bench.models.mpnn_kernels import (
    edge_matrices,
    gru_backward_of_several,
    masked_sums,
    positive_products,
    spread,
    through_edges,
)
from moonopt.bench.models.mpnn_rounds import Cell, Factors, all_rounds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Rounding of what is written in float16, of the largest number there is.
HALF = torch.finfo(torch.float16).eps


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def few_at_a_time(monkeypatch):
    """So that small tensors take every loop and every program more than once."""
    monkeypatch.setattr(mpnn_kernels, "BUSY", 1)
    monkeypatch.setattr(mpnn_kernels, "NUMBERS", 16)


def draw(*shape, dtype=torch.float16):
    return torch.randn(*shape).to(DEVICE, dtype)


def hidden_tensor(batch=2, atoms=7, channels=136):
    """Of which half is hidden."""
    return draw(batch, atoms, atoms, channels).relu()


@pytest.mark.parametrize(("atoms", "channels", "width", "count"), [(7, 136, 64, 3), (37, 8, 64, 2), (1, 3, 5, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_factors_are_spread_as_in_double_precision(atoms, channels, width, count, turned):
    hidden = hidden_tensor(2, atoms, channels)
    hidden = hidden.transpose(1, 2) if turned else hidden
    values = draw(2, atoms, count, 3, width)[:, :, :, 1]  # of the middle one of three rounds
    found = spread(hidden, values)
    expected = torch.einsum("bsac,bsmw->bamcw", hidden.double(), values.double())
    assert found.is_contiguous()
    assert found.dtype == torch.float16
    assert (found - expected).abs().max() <= HALF * expected.abs().max()


@pytest.mark.parametrize(("total", "features", "channels"), [(200, 8, 136), (3, 1, 1), (64, 17, 256)])
def test_products_are_cut_off_at_zero(total, features, channels):
    rows, weights = draw(total, features), draw(channels, features)
    found = positive_products(rows, weights)
    expected = (rows.double() @ weights.double().T).relu()
    assert (found - expected).abs().max() <= HALF * expected.abs().max()
    rows[1, 0] = torch.nan
    assert positive_products(rows, weights).isnan().nonzero()[:, 0].unique().tolist() == [1]


def given_to(hidden, features=5):
    """Something for two thirds of the edges, never in the last column; nothing is hidden where nothing is given."""
    there = (torch.rand(hidden.shape[:3]).to(DEVICE) < 2 / 3).unsqueeze(3)
    given = draw(*hidden.shape[:3], features) * there
    given[..., -1] = 0
    return given, hidden * there


def alike_in_both_directions(given, hidden):
    """Of some pairs of atoms the edges are the same from either to the other, of others not."""
    first, second = torch.tril_indices(*given.shape[1:3], -1)[:, ::2]
    for each in (given, hidden):
        each[:, first, second] = each[:, second, first]
    return given, hidden


@pytest.mark.parametrize(("atoms", "channels", "width", "count"), [(7, 136, 64, 3), (13, 8, 64, 18), (1, 3, 5, 1)])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.usefixtures("few_at_a_time")
def test_gradients_go_back_through_the_matrices_of_the_edges(atoms, channels, width, count, alike):
    given, hidden = given_to(hidden_tensor(2, atoms, channels))
    given, hidden = alike_in_both_directions(given, hidden) if alike else (given, hidden)
    matrices, values = draw(width, channels * width), draw(2, atoms, count, 3, width)[:, :, :, 1]
    found = through_edges(*edge_matrices(hidden, given, matrices), values)
    several = matrices.double().view(width, channels, width)
    expected = torch.einsum("bijc,vcw,bimw->bjmv", hidden.double(), several, values.double()).flatten(0, 1)
    assert found.dtype == torch.float32
    assert (found - expected).norm() <= HALF * expected.norm()


def test_where_nothing_is_given_there_is_no_matrix():
    given, hidden = given_to(hidden_tensor())
    given[1] = 0
    places, matrices = edge_matrices(hidden, given, draw(64, 136 * 64))
    there = (given != 0).any(3)
    assert places[there].tolist() == list(range(int(there.sum())))
    assert places[~there].eq(-1).all()
    assert through_edges(places, matrices, draw(2, 7, 3, 64))[7:].eq(0).all()


def test_edges_of_which_the_same_is_given_in_both_directions_have_one_matrix():
    given, hidden = alike_in_both_directions(*given_to(hidden_tensor()))
    places, _ = edge_matrices(hidden, given, draw(64, 136 * 64))
    there, same = (given != 0).any(3), (given == given.transpose(1, 2)).all(3)
    assert torch.equal(places[same], places.mT[same])
    assert places[~there].eq(-1).all()
    numbers = there.sum() - (there & same).tril(-1).sum()
    assert places[there].unique().tolist() == list(range(int(numbers)))
    assert numbers < there.sum()


def test_an_edge_that_is_not_a_number_shows():
    given, hidden = given_to(hidden_tensor())
    given[1, 2, 3, 0] = hidden[1, 2, 3, 4] = torch.nan
    found = through_edges(*edge_matrices(hidden, given, draw(64, 136 * 64)), draw(2, 7, 3, 64))
    assert found.isnan().all(2).all(1).nonzero().flatten().tolist() == [7 + 3]


@pytest.mark.parametrize(("atoms", "channels", "count"), [(7, 136, 3), (37, 8, 2), (1, 200, 1)])
@pytest.mark.parametrize("busy", [1, 512])
def test_sums_are_of_what_is_not_hidden(atoms, channels, count, busy, monkeypatch):
    monkeypatch.setattr(mpnn_kernels, "BUSY", busy)
    hidden, gradients, given = (
        hidden_tensor(2, atoms, channels),
        draw(2, atoms, count, atoms, channels),
        draw(2, atoms, atoms, 8),
    )
    gradients = torch.where((hidden == 0).unsqueeze(2), torch.inf, gradients)
    found = masked_sums(gradients, hidden, given)
    shown = torch.where((hidden > 0).unsqueeze(2), gradients.double(), 0.0)
    expected = torch.einsum("bikjc,bijf->kcf", shown, given.double())
    assert found.shape == (count, channels, 8)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_not_a_number_is_no_zero_and_stays_with_its_channel():
    hidden, gradients, given = hidden_tensor(), draw(2, 7, 3, 7, 136), draw(2, 7, 7, 8)
    hidden[1, 2, 3, 4], gradients[0, 1, 2, 3, 5] = torch.nan, torch.nan
    hidden[0, 1, 3, 5] = 1
    gradients[1, 2, :, 3, 4] = torch.nan
    bad = masked_sums(gradients, hidden, given).isnan().all(2).nonzero().tolist()
    assert bad == [[0, 4], [1, 4], [2, 4], [2, 5]]


@pytest.mark.usefixtures("few_at_a_time")
def test_gates_of_all_gradients_are_differentiated_as_one_by_one():
    gradients, gates = draw(9, 3, 5, dtype=torch.float32), draw(9, 25, dtype=torch.float32)
    out = torch.full((9, 3, 20), torch.nan, device=DEVICE)
    of_state = gru_backward_of_several(gradients, gates, out)
    for number in range(3):
        found = out[:, number], of_state[:, number]
        torch.testing.assert_close(found, mpnn_parts.gru_backward(gradients[:, number], gates))


def half_precision_rounds(batch, atoms, width=16, channels=24, features=8, turned=None):
    """All rounds and what they depend on, in float32 but for what is kept; one may lie column by column."""
    given, _ = given_to(hidden_tensor(batch, atoms, channels), features)
    factors = (
        given.float(),
        draw(channels, features, dtype=torch.float32),
        draw(width, channels * width, dtype=torch.float32) / width,
    )
    cell = [
        draw(*shape, dtype=torch.float32) / 4 for shape in ((3 * width, width), (3 * width, width), (3 * width,), (3 * width,))
    ]
    inputs = [draw(batch, atoms, width, dtype=torch.float32), *factors, draw(width, dtype=torch.float32), *cell]
    inputs = [each.T.contiguous().T if place == turned else each for place, each in enumerate(inputs)]
    inputs = [each.requires_grad_() for each in inputs]
    x, edges, weights, matrices, bias, *others = inputs
    return all_rounds(x, Factors(edges, weights, matrices), bias, Cell(*others), 3, torch.float16), inputs


@pytest.mark.parametrize("turned", [2, 3], ids=["weights", "matrices"])
def test_parameters_may_lie_in_any_order_of_memory(turned, monkeypatch):
    monkeypatch.setattr(mpnn_parts, "has_kernels", lambda _: True)
    found = []
    for place in (None, turned):
        torch.manual_seed(0)
        after, inputs = half_precision_rounds(2, atoms=5, turned=place)
        along = torch.ones(12, *after.shape).to(DEVICE).cumsum(0)
        found.append([after, *torch.vmap(lambda each: torch.autograd.grad(after, inputs, each, retain_graph=True))(along)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 12])  # of which many go through the matrices of the edges
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3)], ids=["gradients first", "rows first"])
def test_all_gradients_are_those_of_torch(batch, count, order, monkeypatch):
    found = []
    for kernels in (True, False):
        torch.manual_seed(0)
        monkeypatch.setattr(mpnn_parts, "has_kernels", lambda _, there=kernels: there)
        after, inputs = half_precision_rounds(batch, atoms=5)
        along = torch.randn(count, *after.shape).to(DEVICE).permute(order).contiguous().permute(order)
        gradients = torch.vmap(lambda each: torch.autograd.grad(after, inputs, each, retain_graph=True))(along)
        found.append([after, *gradients])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 4 * HALF * other.norm()
