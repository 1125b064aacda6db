"""Molecules as tensors: what QM9 is, wherever it was read from, and the features that the protocol's network sees.

The features are those of PyTorch Geometric's ``QM9``, which the protocol reads. Four of its eleven node features (aromatic,
sp, sp2, sp3) and one of its four kinds of bonds (aromatic) are zero for every molecule there, because it does not let rdkit
perceive them (its issue 8370). They stay zero here, so that the network has the same widths and inputs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: Atomic numbers of H, C, N, O and F.
ELEMENTS = (1, 6, 7, 8, 9)
HYDROGEN = 1
#: The tasks and their units, in the protocol's order. The energies U0, U, H and G are those of atomisation (negative: what the
#: molecule has less than its atoms), and the gap, PyTorch Geometric's target 4, is left out.
TARGETS = {
    "mu": "D",
    "alpha": "a0^3",
    "homo": "meV",
    "lumo": "meV",
    "r2": "a0^2",
    "zpve": "meV",
    "U0": "meV",
    "U": "meV",
    "H": "meV",
    "G": "meV",
    "cv": "cal/(mol K)",
}
UNPERCEIVED = 4  # node features that are zero


class Padded(NamedTuple):
    """Molecules of one size, that of the largest; what is not there is 0.

    ``numbers`` (n, most) and ``bonds`` (n, most, most), symmetric, are bytes, ``positions`` (n, most, 3) floats.
    """

    numbers: Tensor
    positions: Tensor
    bonds: Tensor


@dataclass(frozen=True)
class Molecules:
    """Molecules, their atoms and bonds one after the other.

    Attributes:
        index: the number of each molecule in QM9, from 1 to 133,885, of which 3,054 are missing; (n), int64.
        atoms: how many atoms each has; (n), int64.
        numbers: atomic numbers; (all atoms), uint8.
        positions: in Angstrom; (all atoms, 3), float32.
        bond_counts: how many bonds each molecule has; (n), int64.
        bonds: two atoms of the molecule, the earlier first, and the kind of bond; (all bonds, 3), uint8.
        targets: in the order and units of ``TARGETS``; (n, 11), float32.

    """

    index: Tensor
    atoms: Tensor
    numbers: Tensor
    positions: Tensor
    bond_counts: Tensor
    bonds: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def padded(self) -> Padded:
        """Atoms and bonds as rectangular tensors."""
        count, most = len(self), int(self.atoms.max())
        there = torch.arange(most) < self.atoms.unsqueeze(1)
        numbers = self.numbers.new_zeros(count, most)
        positions = self.positions.new_zeros(count, most, 3)
        numbers[there], positions[there] = self.numbers, self.positions
        bonds = self.bonds.new_zeros(count, most, most)
        molecule = torch.repeat_interleave(torch.arange(count), self.bond_counts)
        first, second = self.bonds[:, 0].long(), self.bonds[:, 1].long()
        bonds[molecule, first, second] = bonds[molecule, second, first] = self.bonds[:, 2]
        return Padded(numbers, positions, bonds)


def node_features(numbers: Tensor, bonds: Tensor) -> Tensor:
    """The protocol's features (..., most, 11) of padded atoms as bytes, which are zero where there is no atom.

    Element one-hot (5), atomic number, four zeros, and the number of hydrogens bonded to the atom.

    >>> water = torch.tensor([8, 1, 1]), torch.tensor([[0, 1, 1], [1, 0, 0], [1, 0, 0]])
    >>> node_features(*water)[0]
    tensor([0, 0, 0, 1, 0, 8, 0, 0, 0, 0, 2], dtype=torch.uint8)
    """
    kinds = torch.stack([numbers == element for element in ELEMENTS], -1)
    hydrogens = ((bonds > 0) & (numbers == HYDROGEN).unsqueeze(-2)).sum(-1, keepdim=True, dtype=torch.uint8)
    zeros = kinds.new_zeros(*numbers.shape, UNPERCEIVED)
    return torch.cat([each.byte() for each in (kinds, numbers.unsqueeze(-1), zeros, hydrogens)], -1)
