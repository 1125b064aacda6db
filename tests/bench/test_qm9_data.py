"""QM9's molecules: known facts about them, and what is said of missing, broken and wrong files."""

import errno
import os
import re
import sys
from pathlib import Path

import pytest
import qm9_small
import torch

from moonopt.bench.data import qm9, qm9_wheel
from moonopt.bench.data.qm9_check import check
from moonopt.bench.data.qm9_molecules import ELEMENTS, TARGETS, node_features
from moonopt.bench.models.mpnn_molecules import dense_batch
from moonopt.errors import UserError

ROWS = qm9_small.rows()
NAMES = tuple(TARGETS)
MASSES = {1: 1.00782503, 6: 12.0, 7: 14.0030740, 8: 15.9949146, 9: 18.9984032}
GHZ = 505.379006  # times the moment of inertia in atomic mass units and square Angstrom
KCAL = 43.36414  # meV in kcal/mol, as PyTorch Geometric has it
#: Of all 130,831 molecules, as users of PyTorch Geometric's QM9 report it, energies in meV.
MEANS = (
    2.672953,
    75.28118,
    -6536.453,
    322.0437,
    1189.4105,
    4056.937,
    -76116.005,
    -76580.490,
    -77018.257,
    -70836.655,
    31.620365,
)
STDS = (1.503479, 8.173831, 597.7412, 1274.8554, 280.47815, 901.7231, 10323.753, 10415.176, 10489.270, 9498.3425, 4.0675807)
COUNTS = {1: 1_208_486, 6: 831_925, 7: 132_498, 8: 183_265, 9: 3_036}  # of atoms by element, together 2,359,210


@pytest.fixture(scope="module")
def molecules(tmp_path_factory):
    return qm9_small.molecules(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def contents(monkeypatch):
    """The tables of a wheel of 200 molecules, which stands for QM9's."""
    contents = qm9_small.tables(ROWS)
    monkeypatch.setattr(qm9_wheel, "SHA256", qm9_small.checksums(contents))
    return contents


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    """A folder that pip looks into instead of asking anybody."""
    pytest.importorskip("pip")
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


def place(folder, contents):
    return qm9_small.write_wheel(folder / "qm9", contents)


def same(some, others):
    return all(torch.equal(value, getattr(others, name)) for name, value in vars(some).items())


def column(name):
    return torch.tensor([float(row[name]) for row in ROWS], dtype=torch.float64)


def changed(row, **values):
    """The tables, with other values in one row."""
    return qm9_small.tables([each | (values if number == row else {}) for number, each in enumerate(ROWS)])


def test_every_tensor_has_its_shape_and_type(molecules):
    atoms, bonds = int(molecules.atoms.sum()), int(molecules.bond_counts.sum())
    assert atoms == sum(int(row["N_atoms"]) for row in ROWS)
    found = {name: (tuple(value.shape), value.dtype) for name, value in vars(molecules).items()}
    assert found == {
        "index": ((200,), torch.int64),
        "atoms": ((200,), torch.int64),
        "numbers": ((atoms,), torch.uint8),
        "positions": ((atoms, 3), torch.float32),
        "bond_counts": ((200,), torch.int64),
        "bonds": ((bonds, 3), torch.uint8),
        "targets": ((200, 11), torch.float32),
    }
    assert molecules.index.tolist() == [int(row["Index"]) for row in ROWS]


def test_methane_has_the_published_values_in_the_protocols_order_and_units(molecules):
    atomisation = [energy * KCAL for energy in (-395.999594594, -398.643290011, -401.014646522, -372.471772148)]  # kcal/mol
    expected = [0, 13.21, -0.3877 * 27211.386, 0.1171 * 27211.386, 35.3641, 0.044749 * 27211.386, *atomisation, 6.469]
    torch.testing.assert_close(molecules.targets[0], torch.tensor(expected), rtol=1e-6, atol=0)


def test_the_gap_is_lumo_less_homo(molecules):
    homo, lumo = (molecules.targets[:, NAMES.index(name)].double() for name in ("homo", "lumo"))
    rounding = 1.01e-4 * qm9_wheel.MEV  # three numbers of four decimals
    torch.testing.assert_close(lumo - homo, column("HOMO_LUMO_gap_au") * qm9_wheel.MEV, rtol=0, atol=rounding)


def test_rotational_constants_follow_from_the_geometry(molecules):
    found = []
    atoms = molecules.atoms.tolist()
    for numbers, positions in zip(molecules.numbers.split(atoms), molecules.positions.double().split(atoms), strict=True):
        mass = torch.tensor([MASSES[number] for number in numbers.tolist()], dtype=torch.float64).unsqueeze(1)
        centred = positions - (mass * positions).sum(0) / mass.sum()
        products = (mass * centred).T @ centred
        found.append(GHZ / torch.linalg.eigvalsh(products.trace() * torch.eye(3, dtype=torch.float64) - products)[1:])
    torch.testing.assert_close(torch.stack(found), torch.stack([column("RotB_GHz"), column("RotC_GHz")], 1), rtol=3e-5, atol=0)


def test_atomisation_energies_are_negative_and_the_free_energy_is_the_smallest_loss(molecules):
    u0, u, h, g = (molecules.targets[:, NAMES.index(name)] for name in ("U0", "U", "H", "G"))
    assert bool(((h < u) & (u < u0) & (u0 < g) & (g < 0)).all())


def test_padded_tensors_hold_the_same_atoms_and_bonds(molecules):
    numbers, positions, bonds = molecules.padded()
    assert (numbers.shape, positions.shape, bonds.shape) == ((200, 29), (200, 29, 3), (200, 29, 29))
    there = numbers > 0
    assert torch.equal(there.sum(1), molecules.atoms)
    assert torch.equal(numbers[there], molecules.numbers)
    assert torch.equal(positions[there], molecules.positions)
    assert torch.equal(bonds, bonds.mT)
    assert torch.equal((bonds > 0).sum((1, 2)), 2 * molecules.bond_counts)
    assert not bonds[~there].any()


def test_features_are_the_protocols(molecules):
    padded = molecules.padded()
    nodes = node_features(padded.numbers, padded.bonds)
    edges = dense_batch(nodes, padded.positions, padded.bonds).edges
    assert (nodes.shape, edges.shape) == ((200, 29, 11), (200, 29, 29, 5))
    assert nodes[0, :2].tolist() == [[0, 1, 0, 0, 0, 6, 0, 0, 0, 0, 4], [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]]
    assert not nodes[padded.numbers == 0].any()
    assert edges[0, 0, 1].tolist() == pytest.approx([1, 0, 0, 0, 1.0920], abs=1e-4)  # Angstrom, C-H
    assert edges[0, 1, 2].tolist() == pytest.approx([0, 0, 0, 0, 1.7831], abs=1e-4)
    assert torch.equal(edges[..., :4].argmax(-1) + edges[..., :4].sum(-1), padded.bonds.float())


def test_fetching_makes_the_compact_file_and_leaves_nothing_else(contents, folder, no_network, molecules, monkeypatch):
    qm9_small.write_wheel(no_network, contents)
    qm9.fetch(folder)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [qm9.FILE]
    assert same(qm9.read(folder), molecules)
    monkeypatch.setattr(qm9_wheel, "download", None)  # it is not called again
    qm9.fetch(folder)
    qm9.verify(folder)


def test_a_wheel_that_is_there_is_not_fetched(contents, folder, molecules, monkeypatch):
    monkeypatch.setattr(qm9_wheel, "download", None)
    place(folder, contents)
    assert qm9.missing(folder) is None
    qm9.verify(folder)
    qm9.fetch(folder)
    assert same(qm9.read(folder), molecules)


def test_where_pip_fails_one_sentence_says_what_it_said(contents, folder, no_network):
    with pytest.raises(UserError) as raised:
        qm9.fetch(folder)
    text = str(raised.value)
    assert text.startswith(
        "pip could not fetch qm9pack==1.0.3: No matching distribution found for qm9pack==1.0.3. You can put "
    )
    assert text.endswith(f"{qm9_wheel.WHEEL} by hand into {folder / 'qm9'} and run `moonopt data fetch qm9` again.")
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_where_there_is_no_pip_that_is_said(folder, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match=r"could not fetch qm9pack==1.0.3: python: No module named pip. You can put"):
        qm9.fetch(folder)


def test_another_wheel_is_not_taken_for_qm9s(contents, folder, no_network):
    qm9_small.write_wheel(no_network, changed(5, Dipole_debye="1.5"))
    with pytest.raises(UserError, match=r"qm9_part1.csv in .* is not QM9's: its SHA-256 is .* Remove it and run"):
        qm9.fetch(folder)
    assert not (folder / "qm9" / qm9.FILE).exists()


@pytest.mark.parametrize("step", [qm9.read, qm9.verify, qm9.fetch])
@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda wheel: b"<html>", "is truncated or damaged (File is not a zip file)"),
        (lambda wheel: b"", "is truncated or damaged (File is not a zip file)"),
        (lambda wheel: wheel[: len(wheel) // 2], "is truncated or damaged (File is not a zip file)"),
        (lambda wheel: wheel[:5000] + bytes(100) + wheel[5100:], "is truncated or damaged ("),
    ],
    ids=["no zip", "empty", "truncated", "overwritten"],
)
def test_a_broken_wheel_is_named(broken, text, step, contents, folder):
    wheel = place(folder, contents)
    wheel.write_bytes(broken(wheel.read_bytes()))
    with pytest.raises(UserError) as raised:
        step(folder)
    assert str(raised.value).startswith(f"{wheel} {text}")
    assert str(raised.value).endswith(" Remove it and run `moonopt data fetch qm9`.")


def test_a_wheel_without_a_table_is_named(contents, folder):
    del contents[qm9_small.TABLES[2]]
    wheel = place(folder, contents)
    with pytest.raises(UserError, match=r"is not the wheel of qm9pack==1.0.3: it has no qm9pack/data/qm9_part3.csv. Remove it"):
        qm9_wheel.parse(wheel)


def test_a_wheel_without_molecules_is_refused(contents, folder):
    header = contents[qm9_small.TABLES[0]].partition(b"\n")[0]
    wheel = place(folder, dict.fromkeys(contents, header))
    with pytest.raises(UserError, match="has no molecules"):
        qm9_wheel.parse(wheel)


@pytest.mark.parametrize(
    ("absent", "text"), [(["LUMO_au"], "column LUMO_au"), (["Index", "ZPVE_au"], "columns Index, ZPVE_au")]
)
def test_a_missing_column_is_named(absent, text, folder):
    tables = qm9_small.tables([{name: value for name, value in row.items() if name not in absent} for row in ROWS])
    place(folder, tables)
    with pytest.raises(UserError, match=f"qm9_part1.csv in .* lacks the {text}. Remove it and run `moonopt data fetch qm9`."):
        qm9.read(folder)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"R2_bohr2": "nan"}, "found 'nan' in the column R2_bohr2, expected a finite number"),
        ({"HOMO_au": "-inf"}, "found '-inf' in the column HOMO_au, expected a finite number"),
        ({"XYZ_Ang": ROWS[150]["XYZ_Ang"].replace("[[", "[[nan,", 1)}, "found 'nan' in the column XYZ_Ang, expected"),
        ({"Dipole_debye": "1.2.3"}, "found '1.2.3' in the column Dipole_debye, expected"),
        ({"Dipole_debye": ""}, "found '' in the column Dipole_debye, expected"),
        ({"XYZ_Ang": "[[0,0,0],[1,0,x]]"}, "found 'x' in the column XYZ_Ang, expected"),
        ({"XYZ_Ang": "[[0,0,0],[1,0,0]]"}, "as the number of atoms, but [0-9]+ elements and 6 coordinates"),
        ({"Elements": "['C','Xe']"}, "found 'Xe' as an element, expected one of H, C, N, O, F"),
        ({"N_atoms": "1", "Elements": "['C']", "XYZ_Ang": "[[0,0,0]]"}, "no bond orders fit the valences of its atoms"),
        ({"N_atoms": "2", "Elements": "['H','H']", "XYZ_Ang": "[[0,0,0],[0,0,1]]"}, "a molecule of hydrogen alone"),
    ],
)
def test_a_molecule_that_cannot_be_read_is_named(values, text, folder):
    place(folder, changed(150, **values))
    with pytest.raises(
        UserError, match=f"^Molecule {ROWS[150]['Index']} in .* cannot be read: .*{text}.*[.] Remove it and run"
    ):
        qm9.read(folder)


@pytest.mark.parametrize("index", ["0", "133886", "1e23", "x"])
def test_a_number_that_no_molecule_has_is_named(index, folder):
    place(folder, changed(150, Index=index))
    with pytest.raises(
        UserError, match=f"Molecule {index} in .* cannot be read: found '{index}' in the column Index, expected"
    ):
        qm9.read(folder)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"Dipole_debye": "1e300"}, f"molecule {ROWS[150]['Index']} has a value of mu that is no finite number"),  # in float32
        ({"Index": ROWS[3]["Index"]}, f"molecule {ROWS[3]['Index']} is there more than once"),
    ],
)
def test_molecules_that_cannot_be_qm9s_are_named(values, text, folder):
    wheel = place(folder, changed(150, **values))
    with pytest.raises(UserError, match=f"^{re.escape(str(wheel))} cannot be used: {text}. Remove it and run"):
        qm9.read(folder)
    assert not (folder / "qm9" / qm9.FILE).exists()


def test_a_row_with_surplus_fields_is_named(contents, folder):
    name = qm9_small.TABLES[0]
    first, second, *rest = contents[name].splitlines()
    place(folder, contents | {name: b"\n".join([first, second + b",1", *rest])})
    with pytest.raises(UserError, match=r"Row 1 of .*qm9_part1.csv in .* has more fields than there are columns"):
        qm9.read(folder)


def test_molecules_may_be_made_up_and_are_marked(folder):
    qm9.make(folder, 50, seed=3)
    found = qm9.read(folder)
    check(found, "here", "")
    assert len(found) == 50
    assert qm9.is_made_up(folder)
    with pytest.raises(UserError, match="its source is 'made up', expected"):
        qm9.verify(folder)
    with pytest.raises(UserError, match="has files already"):
        qm9.make(folder, 50, seed=3)


def test_real_molecules_in_their_place_are_not_called_made_up(contents, folder, monkeypatch):
    monkeypatch.setattr(qm9_wheel, "download", None)
    qm9.make(folder, 50, seed=3)
    (folder / "qm9" / qm9.FILE).unlink()
    place(folder, contents)
    qm9.fetch(folder)
    assert not qm9.is_made_up(folder)


def test_a_table_that_is_cut_is_named(contents, folder):
    third = contents[qm9_small.TABLES[2]]
    place(folder, contents | {qm9_small.TABLES[2]: third[: third.rindex(b"]")]})
    with pytest.raises(UserError, match=r"Row 66 of qm9pack/data/qm9_part3.csv in .* ends too early"):
        qm9.read(folder)


def test_a_table_with_a_stray_quote_is_named(contents, folder):
    first = contents[qm9_small.TABLES[0]]
    place(folder, contents | {qm9_small.TABLES[0]: first + b'"' + b"x" * 200_000})
    with pytest.raises(UserError, match=r"qm9_part1.csv in .* is no table \(field larger than field limit"):
        qm9.read(folder)


def test_what_is_missing_is_said_with_what_to_do(folder):
    text = qm9.missing(folder)
    assert text.startswith(f"Not in {folder / 'qm9'}: {qm9.FILE}. Fetch QM9 with `moonopt data fetch qm9`")
    for step in (qm9.read, qm9.verify):
        with pytest.raises(UserError, match="Fetch QM9 with"):
            step(folder)


DAMAGES = {
    "truncated": lambda content: content[:-7],
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "one bit": lambda content: content[:9000] + bytes([content[9000] ^ 1]) + content[9001:],
    "other": lambda content: b"PK" + content,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_compact_file_is_not_trusted(damage, contents, folder, molecules):
    place(folder, contents)
    qm9.fetch(folder)
    compact = folder / "qm9" / qm9.FILE
    compact.write_bytes(damage(compact.read_bytes()))
    for step in (qm9.verify, qm9.read):
        with pytest.raises(UserError, match=rf"{qm9.FILE} is .* Fetch QM9 with `moonopt data fetch qm9` again.$"):
            step(folder)
    place(folder, contents)
    assert same(qm9.read(folder), molecules)  # from the wheel
    qm9.verify(folder)


def test_fetching_replaces_a_damaged_compact_file(contents, folder, no_network, molecules):
    qm9_small.write_wheel(no_network, contents)
    (folder / "qm9").mkdir(parents=True)
    (folder / "qm9" / qm9.FILE).write_bytes(b"moonopt qm9 1 nothing")
    qm9.fetch(folder)
    assert same(qm9.read(folder), molecules)


def test_other_molecules_can_stand_in_but_are_not_taken_for_qm9(folder):
    place(folder, qm9_small.tables(ROWS[:30]))
    assert len(qm9.read(folder)) == 30
    (folder / "qm9" / qm9_wheel.WHEEL).unlink()
    assert len(qm9.read(folder)) == 30
    for step in (qm9.verify, qm9.fetch):
        with pytest.raises(
            UserError, match=r"is not QM9's: its source is .*, expected tables with SHA-256 .* Unless it is meant to stand in"
        ):
            step(folder)


def test_a_full_disk_leaves_no_part_of_a_file(contents, folder, monkeypatch):
    place(folder, contents)
    write = Path.write_bytes

    def full(path, content):
        write(path, content[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as of a write, which does not say of which file

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=f"No space left on device: .*/{qm9.FILE}'"):
        qm9.fetch(folder)
    assert [path.name for path in (folder / "qm9").iterdir()] == [qm9_wheel.WHEEL]


def test_a_terminal_sees_a_progress_bar(contents, folder, monkeypatch, capsys):
    pytest.importorskip("rich")
    place(folder, contents)
    qm9.read(folder)
    assert capsys.readouterr().err == ""
    (folder / "qm9" / qm9.FILE).unlink()
    monkeypatch.setenv("FORCE_COLOR", "1")
    qm9.read(folder)
    assert "QM9" in (shown := capsys.readouterr().err)
    assert "━" in shown


def test_without_rich_nothing_is_shown(contents, folder, no_network, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    for module in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, module, None)
    qm9_small.write_wheel(no_network, contents)
    qm9.fetch(folder)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_all_of_qm9_has_the_known_counts_and_statistics():
    folder = Path(os.environ.get("MOONOPT_DATA", "nowhere"))
    if not (folder / "qm9" / qm9.FILE).exists():
        pytest.skip("needs QM9 in $MOONOPT_DATA")
    qm9.verify(folder)
    molecules = qm9.read(folder)
    assert len(molecules) == 130_831
    assert {number: int((molecules.numbers == number).sum()) for number in ELEMENTS} == COUNTS
    assert (int(molecules.atoms.max()), int(molecules.index.max())) == (29, 133_885)
    assert molecules.bonds[:, 2].bincount().tolist() == [0, 2_265_741, 137_975, 36_644]
    targets = molecules.targets.double()
    torch.testing.assert_close(targets.mean(0), torch.tensor(MEANS, dtype=torch.float64), rtol=3e-7, atol=0)
    torch.testing.assert_close(targets.std(0), torch.tensor(STDS, dtype=torch.float64), rtol=3e-7, atol=0)
