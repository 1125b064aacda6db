"""The message-passing network of QM9: the padded form against torch_geometric's, and what a captured step asks of it."""

import sys

import pytest
import torch
from torch.func import functional_call, jvp

from moonopt import MOON, route_parameters
from moonopt.bench.models.mpnn import MPNN
from moonopt.bench.models.mpnn_molecules import MoleculeBatch, dense_batch
from moonopt.bench.models.mpnn_pyg import PyGNet, from_pyg, graphs, to_pyg
from moonopt.errors import UserError

TASKS = ("mu", "alpha", "homo", "lumo", "r2", "zpve", "U0", "U", "H", "G", "Cv")
SIZES = (29, 3, 1, 18, 2)
SMALL = {"width": 8, "edge_width": 12}
LARGEST = 40


def network(form=MPNN, dtype=torch.float64, tasks=TASKS, **sizes):
    """The same parameters in every form. Biases that begin at zero would hide that one is forgotten."""
    torch.manual_seed(0)
    model = form(tasks, **sizes)
    torch.nn.init.normal_(model.conv.bias, generator=torch.Generator().manual_seed(1))
    return model.to(dtype)


def stored(sizes=SIZES, seed=0, most_atoms=29):
    """Made-up molecules as data are kept: features, positions and bonds, a chain in each molecule."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(sizes), LARGEST)  # so that the atoms do not depend on the padding
    there = torch.arange(LARGEST) < torch.tensor(sizes)[:, None]
    features = torch.randint(3, (*shape, 11), generator=generator, dtype=torch.uint8)
    features[..., 5] = torch.tensor([1, 6, 7, 8, 9], dtype=torch.uint8)[torch.randint(5, shape, generator=generator)]
    features = features * there[..., None]
    positions = 2 * torch.randn(*shape, 3, generator=generator, dtype=torch.float64) * there[..., None]
    kinds = torch.randint(1, 5, shape, generator=generator, dtype=torch.uint8)[:, 1:] * there[:, 1:]
    bonds = torch.diag_embed(kinds, 1)
    bonds = (bonds + bonds.mT)[:, :most_atoms, :most_atoms]
    return features[:, :most_atoms], positions[:, :most_atoms], bonds


def batch(sizes=SIZES, dtype=torch.float64, seed=0, most_atoms=29):
    features, positions, bonds = stored(sizes, seed, most_atoms)
    return dense_batch(features, positions.to(dtype), bonds)


def targets(count, dtype=torch.float64):
    return dict(zip(TASKS, torch.randn(11, count, generator=torch.Generator().manual_seed(2), dtype=dtype), strict=True))


def losses(model, given, wanted):
    return {task: (predicted - wanted[task]).square().mean() for task, predicted in model(given).items()}


def outputs_and_gradients(model, given):
    predicted = model(given)
    wanted = targets(given.members[:, 0].numel(), given.atoms.dtype)
    sum((predicted[task] - wanted[task]).square().mean() for task in TASKS).backward()
    return predicted, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal_but_for_rounding(found, expected, tolerance):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max(), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("sizes", [{}, SMALL | {"rounds": 2, "readout_steps": 4}], ids=["protocol", "small"])
def test_both_forms_have_the_same_outputs_and_gradients(dtype, tolerance, sizes):
    pytest.importorskip("torch_geometric")
    given = batch(dtype=dtype)
    found, expected = (outputs_and_gradients(network(form, dtype, **sizes), given) for form in (MPNN, PyGNet))
    assert_equal_but_for_rounding(found[0], expected[0], tolerance)
    assert_equal_but_for_rounding(to_pyg(found[1]), expected[1], tolerance)


def test_both_forms_agree_where_edges_have_a_direction():
    pytest.importorskip("torch_geometric")
    given = batch()
    given = given._replace(edges=torch.randn(given.edges.shape, dtype=torch.float64))
    assert_equal_but_for_rounding(network(MPNN)(given), network(PyGNet)(given), 1e-12)


def test_the_parameters_of_one_form_load_into_the_other():
    pytest.importorskip("torch_geometric")
    fast, reference = MPNN(TASKS, **SMALL), PyGNet(TASKS, **SMALL)
    given = batch(dtype=torch.float32)
    reference.load_state_dict(to_pyg(fast.state_dict()))
    assert_equal_but_for_rounding(fast(given), reference(given), 1e-5)
    other = PyGNet(TASKS, **SMALL)
    fast.load_state_dict(from_pyg(other.state_dict()))
    assert_equal_but_for_rounding(fast(given), other(given), 1e-5)


def test_both_forms_route_the_same_parameters_as_matrices():
    pytest.importorskip("torch_geometric")
    fast, reference = (
        {each.name: (each.kind, each.rows) for each in route_parameters(form(TASKS)).placements} for form in (MPNN, PyGNet)
    )
    assert to_pyg(fast) == reference


def test_without_torch_geometric_the_reference_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.nn", None)
    with pytest.raises(UserError, match=r"moonopt\[graph\]"):
        PyGNet(TASKS)


def test_graphs_are_complete_without_loops_and_keep_their_features():
    given = batch((4, 1, 3))
    found = graphs(given)
    assert found.molecule.tolist() == [0, 0, 0, 0, 1, 2, 2, 2]
    ends = {tuple(each) for each in found.ends.T.tolist()}
    assert ends == {(i, j) for part in (range(4), range(5, 8)) for i in part for j in part if i != j}
    assert len(ends) == found.ends.shape[1]
    number = found.ends.T.tolist().index([5, 7])  # in the last molecule from its atom 0 to its atom 2
    torch.testing.assert_close(found.edges[number], given.edges[2, 2, 0])


def test_the_matrices_are_the_98_91_percent_of_the_paper():
    routing = route_parameters(MPNN(TASKS))
    assert sum(each.parameter.numel() for each in routing.placements) == 616_960 + 715  # shared and heads, as in public codes
    assert routing.matrix_share == pytest.approx(0.9891, abs=5e-5)
    vectors = {each.name for each in routing.of_kind("vector") if each.parameter.ndim > 1}
    assert vectors == {"embedding.weight", *(f"heads.{task}.weight" for task in TASKS)}


def test_the_edge_network_is_one_matrix_and_gates_are_several():
    by_name = {each.name: each for each in route_parameters(MPNN(TASKS)).placements}
    assert by_name["conv.nn.2.weight"].parameter.shape == (4096, 128)
    assert by_name["conv.nn.2.weight"].rows is None
    assert by_name["gru.weight_hh"].rows == [64] * 3
    assert by_name["set2set.lstm.weight_ih"].rows == [64] * 4


def test_a_convolution_is_the_root_weight_and_the_mean_of_a_matrix_of_each_edge():
    model, given = network(**SMALL), batch((5,), most_atoms=6)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    found = model.conv(x, model.conv.edges(given))
    for i in range(5):
        messages = [x[0, j] @ model.conv.nn(given.edges[0, i, j]).view(8, 8) for j in range(5) if j != i]
        torch.testing.assert_close(found[0, i], model.conv.lin(x[0, i]) + sum(messages) / 4 + model.conv.bias)


def test_parameters_that_come_later_are_all_that_it_needs():
    """A model that is made on the meta device has nothing but what it is given then."""
    expected, given = MPNN(TASKS, **SMALL), batch(dtype=torch.float32)
    with torch.device("meta"):
        empty, assigned = MPNN(TASKS, **SMALL), MPNN(TASKS, **SMALL)
    empty.to_empty(device="cpu").load_state_dict(expected.state_dict())
    assigned.load_state_dict(expected.state_dict(), assign=True)
    for model in (empty, assigned):
        assert_equal_but_for_rounding(model(given), expected(given), 0)


def test_more_padding_changes_nothing():
    expected, found = (outputs_and_gradients(network(**SMALL), batch(most_atoms=most)) for most in (29, 35))
    assert_equal_but_for_rounding(found[0], expected[0], 1e-12)
    assert_equal_but_for_rounding(found[1], expected[1], 1e-12)


def test_what_stands_in_the_padding_changes_nothing():
    model, given = network(**SMALL), batch()
    rubbish = MoleculeBatch(
        given.atoms.masked_fill(~given.members.any(2, keepdim=True), 7.0),
        given.edges.masked_fill(~given.neighbours.unsqueeze(3), 7.0),
        given.members,
    )
    assert_equal_but_for_rounding(model(rubbish), model(given), 1e-12)


def test_the_order_of_atoms_and_of_molecules_does_not_matter():
    model, given = network(**SMALL), batch()
    expected = model(given)
    atoms = torch.randperm(29, generator=torch.Generator().manual_seed(3))
    molecule = torch.tensor([3, 0, 4, 1, 2])
    moved = MoleculeBatch(given.atoms[:, atoms], given.edges[:, atoms][:, :, atoms], given.members[:, atoms])
    found = model(MoleculeBatch(*(each[molecule] for each in moved)))
    assert_equal_but_for_rounding(found, {task: value[molecule] for task, value in expected.items()}, 1e-12)


@pytest.mark.parametrize("what", ["atoms", "positions", "bonds"])
def test_predictions_depend_on(what):
    model, given = network(**SMALL), batch((6,))
    atoms, edges = given.atoms.clone(), given.edges.clone()
    {"atoms": atoms[..., 0], "positions": edges[..., 4], "bonds": edges[..., 0]}[what].add_(1)
    assert all(
        (value - model(given)[task]).abs().max() > 1e-6
        for task, value in model(MoleculeBatch(atoms, edges, given.members)).items()
    )


def test_a_task_does_not_touch_the_head_of_another():
    model = network(**SMALL)
    model(batch())["mu"].sum().backward()
    assert model.heads["alpha"].weight.grad is None
    assert all(p.grad is not None for name, p in model.named_parameters() if "heads" not in name)


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bfloat16"])
def test_molecules_without_atoms_give_finite_outputs_and_gradients(amp):
    model = network(dtype=torch.float32, **SMALL)
    given = batch((4, 0, 1, 0), torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        outputs, gradients = outputs_and_gradients(model, given)
    assert all(value.isfinite().all() for value in [*outputs.values(), *gradients.values()])
    assert outputs["mu"][1] == outputs["mu"][3]


def test_half_precision_is_near_single_precision():
    model, given = network(dtype=torch.float32), batch(dtype=torch.float32)
    expected = torch.stack(list(model(given).values()))
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack(list(model(given).values()))
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_no_value_is_looked_at_in_python():
    """On the meta device there are none: what asks for one (.item(), nonzero, a mask as an index) raises."""
    model = MPNN(TASKS, **SMALL).to("meta")
    features, positions, bonds = (each.to("meta") for each in stored())
    given = dense_batch(features, positions.float(), bonds)
    outputs = model(given)
    torch.stack(list(outputs.values())).sum().backward()
    assert all(parameter.grad.is_meta for parameter in model.parameters())
    with pytest.raises(NotImplementedError):
        graphs(given)  # so that such a thing would show


def test_it_compiles_as_one_graph():
    model, given = network(dtype=torch.float32, **SMALL), batch(dtype=torch.float32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = outputs_and_gradients(model, given)
    model.zero_grad()
    found = outputs_and_gradients(compiled, given)
    assert_equal_but_for_rounding(found[0], expected[0], 1e-5)
    assert_equal_but_for_rounding({name.removeprefix("_orig_mod."): g for name, g in found[1].items()}, expected[1], 1e-5)


def test_it_can_be_differentiated_forwards_and_twice():
    model, given = network(tasks=("mu",), **SMALL), batch((4, 3))
    parameters = dict(model.named_parameters())
    directions = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def loss(values):
        return functional_call(model, values, (given,))["mu"].square().mean()

    _, slope = jvp(loss, (parameters,), (directions,))
    gradients = torch.autograd.grad(loss(parameters), parameters.values(), create_graph=True)
    backwards = sum((g * v).sum() for g, v in zip(gradients, directions.values(), strict=True))
    torch.testing.assert_close(slope, backwards)

    curvature = torch.autograd.grad(backwards, parameters.values(), allow_unused=True)
    found = sum((c * v).sum() for c, v in zip(curvature, directions.values(), strict=True) if c is not None)
    h = 1e-5
    at = [loss({name: p + sign * h * directions[name] for name, p in parameters.items()}) for sign in (-1, 1)]
    torch.testing.assert_close(found, (at[0] - 2 * loss(parameters) + at[1]) / h**2, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("delta", ["double_backward", "forward_mode"])
def test_moon_finds_the_deltas_of_all_tasks(delta):
    given, wanted = batch(), targets(len(SIZES))

    def deltas(mode):
        model = network(**SMALL)
        optimizer = MOON(model, tasks=TASKS, delta=mode)
        optimizer.minimize(lambda: losses(model, given, wanted))
        numbers = optimizer.diagnostics()
        return torch.tensor([numbers[f"delta/{task}"] for task in TASKS], dtype=torch.float64)

    expected = deltas("per_task")
    assert expected.abs().min() > 0
    torch.testing.assert_close(deltas(delta), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("delta", ["loss_difference", "double_backward", "forward_mode"])
def test_the_losses_of_all_tasks_fall(delta):
    model, given, wanted = network(width=16, edge_width=16), batch((5, 9, 7, 12, 3, 8)), targets(6)
    optimizer = MOON(model, tasks=TASKS, delta=delta, lr=0.01, vector_lr=0.01)
    before = losses(model, given, wanted)
    for _ in range(60):
        optimizer.minimize(losses, model, given, wanted)
    after = losses(model, given, wanted)
    assert all(after[task] < 0.7 * before[task] for task in TASKS)


def test_dense_molecules_have_bond_types_and_distances():
    features, positions, bonds = stored((3,), most_atoms=4)
    given = dense_batch(features, positions, bonds)
    assert given.members.tolist() == [[[True], [True], [True], [False]]]
    assert torch.equal(given.atoms, features.double())
    for i, j in ((0, 1), (1, 2), (2, 0)):
        expected = [float(bonds[0, i, j] == each) for each in (1, 2, 3, 4)] + [(positions[0, i] - positions[0, j]).norm()]
        torch.testing.assert_close(given.edges[0, i, j], torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(given.edges[0, i, j], given.edges[0, j, i])
