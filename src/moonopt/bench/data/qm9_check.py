"""Whether tensors can be molecules of QM9, wherever they were read from; the first that cannot is named."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moonopt.bench.data.qm9_molecules import ELEMENTS, TARGETS, Molecules
from moonopt.bench.models.mpnn_molecules import BOND_KINDS
from moonopt.errors import UserError

#: The highest number of a molecule in QM9.
LAST = 133_885


def check(molecules: Molecules, where: str, remedy: str) -> None:
    """Raise ``UserError`` where they cannot."""
    trouble = next(_in_lengths(molecules), None) or next(_in_molecules(molecules), None)
    if trouble is not None:
        raise UserError(f"{where} cannot be used: {trouble}. {remedy}")


def _in_lengths(molecules: Molecules) -> Iterator[str]:
    count = len(molecules)
    for name, found in (
        ("targets", molecules.targets),
        ("atom counts", molecules.atoms),
        ("bond counts", molecules.bond_counts),
    ):
        if len(found) != count:
            yield f"it has the {name} of {len(found)} molecules, expected {count}"
    for name, counts, found in (
        ("elements", molecules.atoms, molecules.numbers),
        ("positions", molecules.atoms, molecules.positions),
        ("bonds", molecules.bond_counts, molecules.bonds),
    ):
        if bool((counts < 0).any()):
            yield f"it says of a molecule that it has {int(counts.min())} {name}"
        if len(found) != (expected := int(counts.sum())):
            yield f"it has {len(found)} {name}, but its molecules have {expected}"


def _in_molecules(molecules: Molecules) -> Iterator[str]:
    index = molecules.index
    of_atoms, of_bonds = (torch.repeat_interleave(counts) for counts in (molecules.atoms, molecules.bond_counts))
    unfinite = ~molecules.targets.isfinite()
    elements = torch.isin(molecules.numbers, torch.tensor(ELEMENTS, dtype=molecules.numbers.dtype))
    first, second, kind = molecules.bonds.long().unbind(1)
    no_bond = (first >= second) | (second >= molecules.atoms[of_bonds]) | (kind < 1) | (kind > BOND_KINDS)
    for what, bad in (
        (f"a number that is none of QM9's, 1 to {LAST}", (index < 1) | (index > LAST)),
        ("no atoms", molecules.atoms == 0),
        ("an element other than H, C, N, O and F", _with(of_atoms[~elements], index)),
        ("a position that is no finite number", _with(of_atoms[~molecules.positions.isfinite().all(1)], index)),
        ("a bond of no kind, or not between two of its atoms", _with(of_bonds[no_bond], index)),
        *((f"a value of {name} that is no finite number", bad) for name, bad in zip(TARGETS, unfinite.unbind(1), strict=True)),
    ):
        if bool(bad.any()):
            yield f"molecule {int(index[bad.nonzero()[0]])} has {what}"
    ordered = index.sort().values
    for again in ordered[1:][ordered[1:] == ordered[:-1]].tolist():
        yield f"molecule {again} is there more than once"


def _with(molecules: Tensor, like: Tensor) -> Tensor:
    """Whether each molecule is among those."""
    found = torch.zeros(len(like), dtype=torch.bool)
    found[molecules] = True
    return found
