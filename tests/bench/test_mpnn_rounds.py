"""Rounds of messages as one operation in half precision: against the rounds of ``MPNN``, differences, and float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moonopt import MOON
from moonopt.balance import MGDA, Balanced
from moonopt.bench.models.mpnn import MPNN
from moonopt.bench.models.mpnn_molecules import dense_batch
from moonopt.bench.models.mpnn_pyg import PyGNet
from moonopt.bench.models.mpnn_rounds import Cell, Factors, all_rounds
from moonopt.errors import UserError
from moonopt.speed.molecules import molecules as made_up
from moonopt.tasks.at_once import gradients_at_once
from moonopt.tasks.gradients import task_gradients
from moonopt.tasks.modes import multiplying

TASKS = ("mu", "alpha")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
#: How far products of ten bits may be off, of the norm.
TEN_BITS = 4e-3


def molecules(sizes=(29, 3, 1, 18, 2, 0), dtype=torch.float32, most_atoms=29):
    generator = torch.Generator().manual_seed(0)
    there = torch.arange(most_atoms) < torch.tensor(sizes)[:, None]
    features = torch.randint(1, 4, (*there.shape, 11), generator=generator, dtype=torch.uint8) * there[..., None]
    positions = 2 * torch.randn(*there.shape, 3, generator=generator, dtype=torch.float64) * there[..., None]
    bonds = torch.diag_embed((there[:, 1:]).byte(), 1)
    return dense_batch(features, positions.to(dtype), bonds + bonds.mT)


def network(dtype=torch.float32, tasks=TASKS, **options):
    torch.manual_seed(0)
    model = MPNN(tasks, **options)
    torch.nn.init.normal_(model.conv.bias)
    return model.to(dtype)


def moved(batch, device):
    return type(batch)(*(each.to(device) for each in batch))


def outputs_and_gradients(model, batch, factor=1.0):
    outputs = model(batch)
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = factor * sum(predicted.square().mean() for predicted in outputs.values())
    gradients = torch.autograd.grad(loss, parameters)
    found = {**outputs, **dict(zip(names, gradients, strict=True))}
    return {name: value.detach().double().cpu() for name, value in found.items()}


def farthest(found, expected):
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def test_it_is_the_rounds_of_the_network_where_nothing_is_rounded():
    model, batch = network(torch.float64, width=8, edge_width=12), molecules(dtype=torch.float64)
    start = model.embedding(batch.atoms).relu().detach().requires_grad_()
    expected, edges = start, model.conv.edges(batch)
    for _ in range(3):
        expected = model.gru(model.conv(expected, edges).relu().flatten(0, 1), expected.flatten(0, 1)).view_as(expected)
    found = all_rounds(start, model.conv.factors(batch), model.conv.bias, Cell(*model.gru.parameters()), 3, torch.float64)
    torch.testing.assert_close(found, expected)
    inputs = [start, *model.conv.parameters(), *model.gru.parameters()]
    direction = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(each, inputs, direction) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rounds", [1, 3])
def test_its_gradients_are_those_of_differences(rounds):
    model = network(torch.float64, width=3, edge_width=6)
    batch = molecules((3, 2), torch.float64, most_atoms=3)
    edges, weights, matrices = model.conv.factors(batch)
    drawn = torch.rand(2, 3, 3), torch.randn(edges.shape), torch.randn(weights.shape)  # no edge where relu has a kink
    given = [*drawn, matrices, model.conv.bias, *model.gru.parameters()]
    given = [each.detach().double().requires_grad_() for each in given]

    def after(x, edges, weights, matrices, bias, *cell):
        return all_rounds(x, Factors(edges, weights, matrices), bias, Cell(*cell), rounds, torch.float64)

    assert torch.autograd.gradcheck(after, given)


def test_half_precision_is_as_near_as_ten_bits_allow():
    batch = molecules()
    expected = outputs_and_gradients(network(), batch)
    found = outputs_and_gradients(network(half_messages=True), batch)
    assert 1e-6 < farthest(found, expected) < 1.5e-3  # twice as far if sums, or what the cell gets, were in ten bits


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**40], ids=["small", "large"])
def test_gradients_of_any_size_are_as_exact(factor):
    model, batch = network(half_messages=True), molecules()
    expected = outputs_and_gradients(model, batch)
    found = outputs_and_gradients(model, batch, factor)
    scaled = {name: value * (1 if name in TASKS else factor) for name, value in expected.items()}
    assert farthest(found, scaled) < 1e-5


def test_a_loss_that_depends_on_nothing_has_gradients_of_zero():
    found = outputs_and_gradients(network(half_messages=True), molecules(), 0.0)
    assert all(value.abs().max() == 0 for name, value in found.items() if name not in TASKS)


def test_several_backward_passes_over_one_graph_agree():
    model, batch = network(half_messages=True), molecules()
    loss = model(batch)["mu"].sum()
    first, second = (torch.autograd.grad(loss, model.conv.bias, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kept", [torch.float64, torch.float16])
def test_gradients_of_several_losses_at_once_are_those_of_each(kept):
    dtype = torch.float64 if kept == torch.float64 else torch.float32
    model, batch = network(dtype, width=8, edge_width=12), molecules(dtype=dtype)
    start = model.embedding(batch.atoms).relu().detach().requires_grad_()
    given, weights, matrices = model.conv.factors(batch)
    factors = Factors(given.requires_grad_(), weights, matrices)
    after = all_rounds(start, factors, model.conv.bias, Cell(*model.gru.parameters()), 3, kept)
    inputs = [start, factors.edges, *model.conv.parameters(), *model.gru.parameters()]
    along = torch.randn(4, *after.shape, dtype=dtype) * torch.tensor([1.0, 1e-12, 0.0, 1e9])[:, None, None, None]

    def gradients(direction):
        return torch.autograd.grad(after, inputs, direction, retain_graph=True)

    exact = 1e-10 if kept == torch.float64 else 1e-3
    for number, found in enumerate(zip(*torch.vmap(gradients)(along), strict=True)):
        for one, other in zip(found, gradients(along[number]), strict=True):
            assert (one - other).norm() <= exact * other.norm()


def test_the_edges_have_a_gradient_where_one_is_asked_for():
    batch = molecules((4, 3))
    gradients = []
    for half in (False, True):
        edges = batch.edges.clone().requires_grad_()
        network(half_messages=half)(batch._replace(edges=edges))["mu"].sum().backward()
        gradients.append(edges.grad.double())
    assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()  # one that lies at a kink counts by itself


def test_under_autocast_it_stays_in_single_precision():
    model, batch = network(half_messages=True), molecules()
    with torch.autocast("cpu", torch.bfloat16):
        found = model._after_rounds(model.embedding(batch.atoms).relu(), batch)
    assert found.dtype == torch.float32
    found = model._after_rounds(model.embedding(batch.atoms).relu(), batch)
    expected = torch.autograd.grad(found.sum(), model.conv.bias, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(*torch.autograd.grad(found.sum(), model.conv.bias), *expected)


def test_it_is_not_differentiated_twice():
    model, batch = network(half_messages=True), molecules((3, 2))
    (gradient,) = torch.autograd.grad(model(batch)["mu"].sum(), model.conv.bias, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("delta", ["forward_mode", "double_backward", "auto"])
def test_modes_of_moon_that_differentiate_otherwise_name_those_that_do_not(delta):
    model, batch = network(half_messages=True), molecules((3, 2))
    optimizer = MOON(model, tasks=TASKS, delta=delta)
    with pytest.raises((RuntimeError, UserError)) as caught:
        optimizer.minimize(lambda: {task: each.square().mean() for task, each in model(batch).items()})
    assert "loss_difference" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))


def test_the_engine_that_differentiates_forwards_names_one_that_does_not():
    model, batch = network(half_messages=True), molecules((3, 2))
    optimizer = Balanced(MGDA(TASKS), torch.optim.Adam(model.parameters()), module=model, engine="columns")
    with pytest.raises(RuntimeError) as caught:
        optimizer.minimize(lambda: {task: each.square().mean() for task, each in model(batch).items()})
    assert any('engine="stored"' in note for note in caught.value.__notes__)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_no_number_is_not_hidden(value):
    model, batch = network(half_messages=True), molecules((3, 2))
    outputs = model(batch)["mu"]
    gradients = torch.autograd.grad(outputs, [model.conv.bias, *model.gru.parameters()], torch.tensor([value, 1.0]))
    assert not any(each.isfinite().any() for each in gradients)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that anything has been written into."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.untyped_storage().nbytes() // each.itemsize)
        return found


def test_of_several_losses_at_once_each_keeps_one_round():
    start = torch.rand(6, 29, 64, requires_grad=True)
    after = network(half_messages=True)._after_rounds(start, molecules())
    largest = []
    for count in (1, 4):
        gradients = torch.vmap(lambda direction: torch.autograd.grad(after, start, direction, retain_graph=True))
        with Largest() as found:
            gradients(torch.ones(count, *after.shape))
        largest.append(found.numbers)
    assert largest[1] * 3 == largest[0] * 4


def test_evaluation_gives_the_same_and_keeps_one_round():
    model, batch = network(half_messages=True), molecules()
    with Largest() as learning:
        expected = model(batch)["mu"]
    with Largest() as evaluating, torch.no_grad():
        found = model(batch)["mu"]
    assert (found - expected).norm() <= TEN_BITS * expected.norm()
    assert evaluating.numbers * 3 == learning.numbers


def test_it_learns_below_a_frozen_embedding():
    model, batch = network(half_messages=True), molecules((3, 2))
    expected = torch.autograd.grad(model(batch)["mu"].sum(), model.conv.bias)[0]
    model.embedding.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(model(batch)["mu"].sum(), model.conv.bias)[0], expected)


def test_two_molecules_in_a_row_are_as_near():
    (*batch, _), models = made_up(7), [network(half_messages=half) for half in (False, True)]
    expected, found = (outputs_and_gradients(model, dense_batch(*batch)) for model in models)
    assert farthest(found, expected) < TEN_BITS


def test_a_cell_with_tied_weights_is_taken_as_it_is():
    plain, half = network(), network(half_messages=True)
    for model in (plain, half):
        model.gru.weight_hh = model.gru.weight_ih
    torch.testing.assert_close(half(molecules())["mu"], plain(molecules())["mu"], rtol=TEN_BITS, atol=TEN_BITS)


def test_no_rounds_are_none():
    found, expected = (network(half_messages=half, rounds=0)(molecules())["mu"] for half in (True, False))
    torch.testing.assert_close(found, expected)


def test_it_wants_parameters_in_single_precision():
    with pytest.raises(UserError, match=r"float32, found torch\.float64"):
        network(torch.float64, half_messages=True)(molecules(dtype=torch.float64))


def test_the_reference_does_not_take_it():
    pytest.importorskip("torch_geometric")
    with pytest.raises(UserError, match="half_messages"):
        PyGNet(TASKS, half_messages=True)


@NEEDS_GPU
@pytest.mark.parametrize("half", [False, True], ids=["TensorFloat-32", "half"])
def test_on_a_gpu_both_ways_are_as_near_to_double_precision(half):
    expected = outputs_and_gradients(network(torch.float64), molecules(dtype=torch.float64))
    with multiplying(tf32=True):
        found = outputs_and_gradients(network(half_messages=half).cuda(), moved(molecules(), "cuda"))
    assert farthest(found, expected) < TEN_BITS


@NEEDS_GPU
@pytest.mark.parametrize("tasks", [TASKS, tuple("abcdefghijk")], ids=len)  # few and many, which go different ways
@pytest.mark.parametrize("half", [False, True], ids=["float32", "half"])
def test_on_a_gpu_all_tasks_at_once_are_as_near(half, tasks):
    model, batch = network(tasks=tasks, half_messages=half).cuda(), moved(molecules(), "cuda")
    losses = [each.square().mean() for each in model(batch).values()]
    one_by_one, (at_once, _) = (made(losses, list(model.parameters())) for made in (task_gradients, gradients_at_once))
    for found, expected in zip(at_once, one_by_one, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one - other).norm() <= TEN_BITS * other.norm()


@NEEDS_GPU
def test_on_a_gpu_it_is_what_it_is_on_a_cpu():
    expected = outputs_and_gradients(network(half_messages=True), molecules())
    with multiplying(tf32=False):
        found = outputs_and_gradients(network(half_messages=True).cuda(), moved(molecules(), "cuda"))
    assert farthest(found, expected) < TEN_BITS


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_what_is_not_a_number_in_the_edge_network_shows(device):
    model = network(half_messages=True).to(device)
    with torch.no_grad():
        next(model.conv.nn.parameters())[0] = torch.nan
    assert all(each.isnan().any() for each in model(moved(molecules(), device)).values())
