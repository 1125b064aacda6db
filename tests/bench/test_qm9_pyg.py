"""A root of PyTorch Geometric's QM9: the same tensors come from it as from the wheel."""

import sys
import types

import pytest
import qm9_small
import torch

from moonopt.bench.data import qm9, qm9_pyg
from moonopt.bench.data.qm9_molecules import TARGETS, node_features
from moonopt.bench.models.mpnn_molecules import dense_batch
from moonopt.errors import UserError

SYMBOLS = {1: "H", 6: "C", 7: "N", 8: "O", 9: "F"}
#: PyTorch Geometric's targets; those in capitals have no place among ours.
THEIRS = ["mu", "alpha", "homo", "lumo", "GAP", "r2", "zpve", "u0", "u", "h", "g", "cv", "U0", "U", "H", "G", "A", "B", "C"]
PLACES = [THEIRS.index(name) for name in TARGETS]
MEV = torch.tensor([1000.0 if unit == "meV" else 1.0 for unit in TARGETS.values()])


@pytest.fixture(scope="module")
def molecules(tmp_path_factory):
    return qm9_small.molecules(tmp_path_factory.mktemp("wheel"))


def processed(molecules):
    """What PyTorch Geometric keeps of these molecules: tensors, and where each molecule begins in them."""
    ends = molecules.bond_counts.cumsum(0).tolist()
    edges, kinds = [], []
    for end, count, atoms in zip(ends, molecules.bond_counts.tolist(), molecules.atoms.tolist(), strict=True):
        bonds = molecules.bonds[end - count : end].long()
        both = torch.cat([bonds, bonds[:, [1, 0, 2]]])
        both = both[(both[:, 0] * atoms + both[:, 1]).argsort()]
        edges.append(both[:, :2].T)
        kinds.append(torch.nn.functional.one_hot(both[:, 2] - 1, 4).float())
    y = torch.zeros(len(molecules), 19)
    y[:, PLACES] = molecules.targets / MEV
    z = molecules.numbers.long()
    data = {"z": z, "pos": molecules.positions, "edge_index": torch.cat(edges, 1), "edge_attr": torch.cat(kinds), "y": y}
    data |= {"idx": molecules.index - 1, "x": torch.zeros(len(z), 11), "name": [f"gdb_{each}" for each in molecules.index]}
    of_atoms, of_edges, of_molecules = (
        torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        for counts in (molecules.atoms, 2 * molecules.bond_counts, torch.ones_like(molecules.atoms))
    )
    slices = dict.fromkeys(("z", "pos", "x"), of_atoms) | dict.fromkeys(("edge_index", "edge_attr"), of_edges)
    return data, slices | dict.fromkeys(("y", "idx", "name"), of_molecules)


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Writes a root as PyTorch Geometric does, with its class in the file, whether it is installed or not."""

    def saved(*content):
        names = ("torch_geometric", "torch_geometric.data", "torch_geometric.data.data")
        with monkeypatch.context() as patch:
            modules = [types.ModuleType(name) for name in names]
            for name, module in zip(names, modules, strict=True):
                patch.setitem(sys.modules, name, module)
            modules[0].data, modules[1].data = modules[1:]
            modules[2].Data = type("Data", (), {"__module__": names[2]})
            (tmp_path / "qm9" / "processed").mkdir(parents=True)
            torch.save((*content, modules[2].Data), tmp_path / "qm9" / qm9_pyg.FILE)
        return tmp_path / "qm9"

    return saved


def test_a_root_gives_the_same_tensors(molecules, save):
    root = save(*processed(molecules))
    found = qm9.from_pyg(root)
    for name, value in vars(molecules).items():
        torch.testing.assert_close(getattr(found, name), value, rtol=2e-7, atol=0)


def test_a_root_in_the_data_folder_is_read_where_nothing_else_is(molecules, save):
    folder = save(*processed(molecules)).parent
    assert qm9.missing(folder) is None
    assert torch.equal(qm9.read(folder).bonds, molecules.bonds)
    with pytest.raises(UserError, match=r"data_v3.pt is not QM9's: expected 130831 molecules, found 200."):
        qm9.verify(folder)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=rf"^Not in {tmp_path}: processed.data_v3.pt, which the QM9 of PyTorch Geometric"):
        qm9.from_pyg(tmp_path)


@pytest.mark.parametrize("content", [b"", b"nothing", b"PK\x03\x04nothing"])
def test_a_broken_file_is_named(content, molecules, save):
    root = save(*processed(molecules))
    (root / qm9_pyg.FILE).write_bytes(content)
    with pytest.raises(UserError, match=r"data_v3.pt cannot be read \(.*\). Expected what QM9 of a current PyTorch Geometric"):
        qm9.from_pyg(root)


def test_a_file_that_runs_code_is_refused(molecules, save):
    data, slices = processed(molecules)
    root = save(data | {"name": print}, slices)
    with pytest.raises(UserError, match=r"data_v3.pt cannot be read"):
        qm9.from_pyg(root)


def test_missing_tensors_are_named(molecules, save):
    data, slices = processed(molecules)
    del data["pos"], slices["idx"]
    with pytest.raises(UserError, match=r"data_v3.pt lacks pos, idx: expected what"):
        qm9.from_pyg(save(data, slices))


@pytest.mark.parametrize(("name", "width"), [("y", 12), ("edge_attr", 5), ("edge_attr", 4)])
def test_a_root_with_a_transform_is_refused(name, width, molecules, save):
    data, slices = processed(molecules)
    data[name] = torch.zeros(len(data[name]), width)
    with pytest.raises(UserError, match=r"A root that was made with a pre_transform cannot be read."):
        qm9.from_pyg(save(data, slices))


def with_nan(tensor, *place):
    changed = tensor.clone()
    changed[place] = torch.nan
    return changed


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: {"pos": with_nan(data["pos"], 7, 1)}, "molecule 2 has a position that is no finite number"),
        (lambda data: {"y": with_nan(data["y"], 9, 5)}, "molecule [0-9]+ has a value of r2 that is no finite number"),
        (lambda data: {"z": data["z"].clone().fill_(16)}, "molecule [0-9]+ has an element other than H, C, N, O and F"),
        (lambda data: {"y": data["y"][:-1]}, "it has the targets of 199 molecules, expected 200"),
        (lambda data: {"pos": data["pos"][:-1]}, "it has 3227 positions, but its molecules have 3228"),
        (
            lambda data: {"edge_index": data["edge_index"] + 40},
            "molecule [0-9]+ has a bond of no kind, or not between two of its atoms",
        ),
        (lambda data: {"idx": data["idx"] * 0}, "molecule 1 is there more than once"),
    ],
)
def test_molecules_that_cannot_be_qm9s_are_named(change, text, molecules, save):
    data, slices = processed(molecules)
    root = save(data | change(data), slices)
    with pytest.raises(UserError, match=f"^{root / qm9_pyg.FILE} cannot be used: {text}. Remove the file and let"):
        qm9.from_pyg(root)


def test_fewer_bonds_than_molecules_have_are_told(molecules, save):
    data, slices = processed(molecules)
    few = {"edge_index": data["edge_index"][:, :9], "edge_attr": data["edge_attr"][:9]}
    with pytest.raises(UserError, match="has 9 bonds, fewer than its molecules have"):
        qm9.from_pyg(save(data | few, slices))


def write_raw(root, molecules):
    """The raw files that PyTorch Geometric processes: structures, targets in their units, and a list of what to skip."""
    y = torch.zeros(len(molecules), 19, dtype=torch.float64)
    y[:, PLACES] = molecules.targets.double() / MEV
    y[:, [2, 3, 6]] /= 27.211386246  # eV in a hartree
    y[:, 12:16] /= 0.04336414  # eV in kcal/mol
    names = [f"gdb_{number}" for number in range(1, len(molecules) + 1)]
    table = [",".join(map(str, (name, *row))) for name, row in zip(names, y.roll(3, 1).tolist(), strict=True)]
    parts = [tensor.split(molecules.atoms.tolist()) for tensor in (molecules.numbers, molecules.positions)]
    parts.append(molecules.bonds.split(molecules.bond_counts.tolist()))
    (root / "raw").mkdir()
    (root / "raw" / "gdb9.sdf").write_text("".join(structure(*each) for each in zip(names, *parts, strict=True)))
    (root / "raw" / "gdb9.sdf.csv").write_text("\n".join(["mol_id", *table, ""]))
    (root / "raw" / "uncharacterized.txt").write_text("\n" * 10)


def structure(name, numbers, positions, bonds):
    """A molecule in the format of an MDL structure file."""
    head = [name, "  moonopt", "", f"{len(numbers):3}{len(bonds):3}  0  0  0  0  0  0  0  0999 V2000"]
    places = ["".join(f"{value:10.4f}" for value in position) for position in positions.tolist()]
    atoms = [f"{place} {SYMBOLS[number]:3}" + " 0" + "  0" * 11 for place, number in zip(places, numbers.tolist(), strict=True)]
    pairs = [f"{first + 1:3}{second + 1:3}{kind:3}  0" for first, second, kind in bonds.tolist()]
    return "\n".join([*head, *atoms, *pairs, "M  END", "$$$$", ""])


def test_what_pytorch_geometric_writes_itself_gives_the_same_tensors_and_features(molecules, tmp_path):
    pytest.importorskip("rdkit")
    datasets = pytest.importorskip("torch_geometric.datasets")
    write_raw(tmp_path, molecules)
    theirs = datasets.QM9(str(tmp_path))
    found = qm9.from_pyg(tmp_path)
    for name, value in vars(molecules).items():
        if name != "index":  # the raw files have no others, so that theirs run from 1 to 200
            tolerance = 1e-4 if name == "positions" else 0
            torch.testing.assert_close(getattr(found, name), value, rtol=1e-6, atol=tolerance)
    padded = found.padded()
    nodes = node_features(padded.numbers, padded.bonds)
    edges = dense_batch(nodes, padded.positions, padded.bonds).edges
    for number, graph in enumerate(theirs):
        atoms = graph.num_nodes
        assert torch.equal(nodes[number, :atoms].float(), graph.x)
        dense = torch.zeros(atoms, atoms, 4)
        dense[graph.edge_index[0], graph.edge_index[1]] = graph.edge_attr
        assert torch.equal(edges[number, :atoms, :atoms, :4], dense)
