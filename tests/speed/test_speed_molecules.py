"""The measurement of QM9's network: what it times is what it says."""

from collections import Counter

import pytest
import torch

from moonopt.bench.data.qm9_made_up import ATOMS
from moonopt.bench.data.qm9_molecules import ELEMENTS
from moonopt.bench.data.qm9_pairs import pairs
from moonopt.bench.models.mpnn import MPNN
from moonopt.bench.models.mpnn_pyg import PyGNet
from moonopt.speed import molecules


def test_molecules_have_as_many_atoms_as_those_of_qm9():
    features, positions, bonds, members, targets = molecules.molecules(500)
    atoms = members.sum(1)
    assert atoms.shape == (250, 2)
    assert 17.5 < atoms.float().mean() < 18.5
    assert atoms.max() <= 29
    assert (features[..., len(ELEMENTS)] > 0)[members.any(2)].all()
    assert positions.shape == (*members.shape[:2], 3)
    assert targets.shape == (500, 11)
    same = members.unsqueeze(2) & members.unsqueeze(1)
    assert torch.equal((same & (bonds > 0).unsqueeze(3)).sum((1, 2)), 2 * (atoms - 1))


def test_batches_have_the_widths_of_qm9():
    widths = [features.shape[1] for features, *_ in molecules.typical_batches()]
    assert Counter(widths) == molecules.BATCHES
    generator = torch.Generator().manual_seed(0)
    shares, drawn = torch.tensor(ATOMS, dtype=torch.float32), 400
    sizes = torch.multinomial(shares, drawn * molecules.BATCH, replacement=True, generator=generator)
    found = Counter(pairs(each).members.shape[1] for each in sizes.view(drawn, -1))
    for width in molecules.BATCHES:
        assert widths.count(width) / len(widths) == pytest.approx(found[width] / drawn, abs=0.07)


def test_both_forms_start_from_the_same_losses():
    pytest.importorskip("torch_geometric")
    given = [molecules.molecules(5, seed) for seed in (0, 1)]
    steps = [molecules._stepper("ls", form, given) for form in (PyGNet, MPNN)]
    first, second = ([torch.stack(list(step())) for step in steps] for _ in range(2))
    torch.testing.assert_close(*first, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*second, rtol=1e-3, atol=1e-3)  # after a step of Adam
    assert not torch.allclose(first[0], second[0])


def test_it_prints_a_line_per_form_and_method(capsys):
    pytest.importorskip("torch_geometric")
    molecules.main(["--rounds", "2", "--batch", "3"])
    lines = [line for line in capsys.readouterr().out.splitlines() if " ms " in line]
    assert [line.split("  ")[1].strip() for line in lines] == ["ls, pyg", "ls, dense", "moon, pyg", "moon, dense"]
