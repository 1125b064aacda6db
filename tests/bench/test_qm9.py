"""Benchmark qm9 on 200 real molecules: splits, scaling, the two forms of the network, errors in units, and a short run."""

import json
import sys

import pytest
import qm9_small
import torch

from moonopt import cli, route_parameters
from moonopt.bench import find
from moonopt.bench.data import qm9, qm9_compact, qm9_wheel
from moonopt.bench.data.qm9_made_up import ATOMS
from moonopt.bench.data.qm9_pairs import WIDTHS, pairs
from moonopt.bench.models.mpnn_pyg import to_pyg
from moonopt.bench.paper import QM9_STL
from moonopt.bench.qm9 import QM9
from moonopt.errors import UserError

FEW = {"data.valid_molecules": 40, "data.test_molecules": 30}
SMALL = {"model.width": 16, "model.edge_width": 16}


@pytest.fixture(scope="module")
def molecules(tmp_path_factory):
    return qm9_small.molecules(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, molecules):
    """A data folder whose QM9 is the 200 molecules."""
    data = tmp_path_factory.mktemp("data")
    place = data / qm9.FOLDER
    place.mkdir()
    qm9_compact.write(place / qm9.FILE, molecules, "tests")
    return data


def whole(data):
    return data.batch(torch.arange(len(data)), torch.Generator())


def test_the_splits_are_other_ones_for_every_seed_and_have_every_molecule_once(folder, molecules):
    splits = [QM9(FEW).load(folder, seed) for seed in (0, 0, 1)]
    assert [len(part) for part in vars(splits[0]).values()] == [130, 40, 30]
    test = [whole(each.test)[1] for each in splits]
    assert torch.equal(test[0], test[1])
    assert not torch.equal(test[0], test[2])
    found = torch.cat([part.tensors[1].flatten(1) for part in vars(splits[0]).values()])
    assert torch.equal(found.sort(0).values, molecules.padded().positions.flatten(1).sort(0).values)


def test_what_nobody_changes_is_the_protocol():
    expected = {
        "data.valid_molecules": 10_000,
        "data.test_molecules": 10_000,
        "data.protocol": "paper",
        "train.epochs": 300,
        "train.batch_size": 120,
        "train.schedule": "plateau:0.7:5",
        "train.select": "best",
    }
    assert QM9().settings.items() >= expected.items()
    assert qm9_wheel.MOLECULES - 20_000 == 110_831


@pytest.mark.parametrize("count", [1, 3, 26])
def test_a_batch_has_two_molecules_in_a_row_each_whole_and_once(count, folder):
    for data in vars(QM9(FEW).load(folder, 0)).values():
        atoms, positions, bonds, targets = data.tensors
        for some in torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).split(count):
            near, places, kinds, members, wanted, _ = data.batch(some, torch.Generator())
            assert members.shape == (-(-len(some) // 2), near.shape[1], 2)
            assert members.sum(2).max() == 1
            assert near.shape[1] in (*WIDTHS, int(members.sum((1, 2)).max()))
            found = []
            for number in range(len(some)):
                there = members[number // 2, :, number % 2]
                (same,) = [each for each in some.tolist() if torch.equal(targets[each], wanted[number])]
                size = int(data.sizes[same])
                assert torch.equal(near[number // 2, there], atoms[same, :size])
                assert torch.equal(places[number // 2, there], positions[same, :size])
                assert torch.equal(kinds[number // 2][there][:, there], bonds[same, :size, :size])
                found.append(same)
            assert sorted(found) == sorted(some.tolist())
            assert members.sum() == data.sizes[some].sum()


def test_rows_of_many_molecules_have_little_padding():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.multinomial(torch.tensor(ATOMS, dtype=torch.float32), 120, generator=generator, replacement=True)
    members = pairs(sizes).members
    assert members.shape[1] in WIDTHS
    assert members.sum() / members[..., 0].numel() > 0.9  # where one molecule in a row would fill 0.7


@pytest.mark.parametrize("form", ["dense", "pyg"])
def test_molecules_that_share_a_row_are_predicted_as_if_alone(form, folder):
    if form == "pyg":
        pytest.importorskip("torch_geometric")
    bench = QM9(FEW | SMALL | {"model.form": form})
    data = bench.load(folder, 0).valid
    torch.manual_seed(0)
    model = bench.model().double()
    seen = {}
    for count in (1, 2, 7):
        for some in torch.arange(len(data)).split(count):
            atoms, positions, *others, wanted, _ = data.batch(some, torch.Generator())
            predicted = bench._predicted(model, [atoms, positions.double(), *others], len(wanted))
            for number, target in enumerate(wanted.tolist()):
                seen.setdefault(tuple(target), []).append(torch.stack([each[number] for each in predicted.values()]))
    assert len(seen) == len(data)
    for alone, *shared in seen.values():
        assert len(shared) == 2
        for each in shared:
            torch.testing.assert_close(each, alone, rtol=1e-12, atol=1e-12)


def test_targets_are_scaled_by_the_training_molecules_alone(folder, molecules):
    splits = QM9(FEW).load(folder, 0)
    *_, wanted, scale = whole(splits.train)
    torch.testing.assert_close(wanted.mean(0), torch.zeros(11), rtol=0, atol=1e-5)
    torch.testing.assert_close(wanted.std(0), torch.ones(11), rtol=0, atol=1e-5)
    assert not torch.allclose(scale, molecules.targets.std(0), rtol=1e-3)
    leaking = QM9(FEW | {"data.protocol": "famo"}).load(folder, 0)
    *_, leaked = whole(leaking.train)
    torch.testing.assert_close(leaked, molecules.targets.std(0))
    of_all = torch.cat([part.tensors[-1] for part in vars(leaking).values()])
    torch.testing.assert_close(of_all.mean(0), torch.zeros(11), rtol=0, atol=1e-5)


def test_the_share_of_the_matrices_is_that_of_the_paper():
    routing = route_parameters(QM9().model())
    assert 0.986 <= routing.matrix_share <= 0.992


def test_both_forms_have_the_same_losses_and_gradients(folder):
    pytest.importorskip("torch_geometric")
    batch = whole(QM9(FEW).load(folder, 0).test)
    found = []
    state = None
    for form in ("dense", "pyg"):
        bench = QM9({"model.form": form})
        torch.manual_seed(0)
        model = bench.model()
        state = to_pyg(model.state_dict()) if state is None else state
        if form == "pyg":
            model.load_state_dict(state)
        losses = torch.stack(list(bench.losses(model, batch).values()))
        losses.sum().backward()
        gradients = {name.removesuffix("_l0"): p.grad for name, p in model.named_parameters()}
        found.append((losses.detach(), gradients))
    (losses, gradients), (expected, expected_gradients) = found
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).abs().max() <= 1e-5 * expected_gradients[name].abs().max(), name


def test_errors_are_in_units_and_relative_to_single_task_learning(folder):
    bench = QM9(FEW)
    data = bench.load(folder, 0).test
    *_, wanted, scale = whole(data)
    stl = torch.tensor([QM9_STL[task] for task in bench.tasks])

    class Off(torch.nn.Module):
        """Predicts every target of the split with twice the error that single-task learning has."""

        def forward(self, molecules):
            return dict(zip(bench.tasks, (wanted + 2 * stl / scale).unbind(1), strict=True))

    found = bench.evaluate(Off(), [whole(data)])
    for task, error in QM9_STL.items():
        assert found[task] == pytest.approx(2 * error, rel=1e-3)
    assert found["relative MAE"] == pytest.approx(2, rel=1e-3)
    assert bench.score(found) == found["relative MAE"]


def test_metrics_do_not_depend_on_how_molecules_are_batched(folder):
    bench = QM9(FEW | SMALL)
    data = bench.load(folder, 0).valid
    torch.manual_seed(0)
    model = bench.model()
    with torch.no_grad():
        one = bench.evaluate(model, [whole(data)])
        parts = [data.batch(some, torch.Generator()) for some in torch.arange(len(data)).split(7)]
        several = bench.evaluate(model, parts)
    assert one == pytest.approx(several, rel=1e-5)


@pytest.mark.parametrize("method", ["moon", "famo", "mgda"])
def test_a_short_run_in_which_the_losses_of_all_tasks_fall(method, folder, tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    settings = FEW | SMALL | {"train.epochs": 12, "train.batch_size": 26, "train.log_every": 5, "optimizer.lr": 0.01}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    monkeypatch.setattr(
        sys, "argv", ["moonopt", "run", "qm9", "--method", method, "--data", str(folder), "--out", str(runs), *words]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    lines = [line for path in runs.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    losses = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]
    assert all(losses[-1][task] < losses[0][task] for task in QM9.tasks)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data.valid_molecules": 150, "data.test_molecules": 50}, "Of 200 molecules, 200 cannot be held out"),
        ({"data.test_molecules": 0}, "data.test_molecules must be at least 1"),
        ({"data.protocol": "nash"}, "data.protocol"),
    ],
)
def test_settings_that_make_no_splits_are_refused(settings, text, folder):
    with pytest.raises(UserError, match=text):
        QM9(FEW | settings).load(folder, 0)


def test_an_unknown_form_is_refused():
    with pytest.raises(UserError, match=r"model\.form"):
        QM9({"model.form": "sparse"}).model()


def test_missing_data_are_told_with_what_to_do(tmp_path, monkeypatch, capsys):
    assert "moonopt data fetch qm9" in find("qm9")().missing(tmp_path)
    monkeypatch.setattr(sys, "argv", ["moonopt", "data", "verify", "qm9", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "moonopt data fetch qm9" in capsys.readouterr().err
