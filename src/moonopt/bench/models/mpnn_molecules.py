"""Molecules as dense batches: every pair of atoms of a row is an edge, and what a row has fewer atoms than others is padding.

A row has one molecule or several, one after the other; between them are no neighbours.

Shapes are those of the tensors given, never of their values, so that a whole training step can be one CUDA graph.
"""

from typing import NamedTuple

import torch
from torch import Tensor

#: Single, double, triple, aromatic: 1 to 4 in a tensor of bonds, where 0 is none.
BOND_KINDS = 4
#: Of QM9: one-hot element, atomic number, aromaticity, sp, sp2, sp3, number of hydrogens.
ATOM_FEATURES = 11
#: One-hot kind of bond, zeros where there is none, and the distance.
EDGE_FEATURES = BOND_KINDS + 1


class MoleculeBatch(NamedTuple):
    """B rows of at most N atoms, of M molecules each."""

    atoms: Tensor  # (B, N, features)
    edges: Tensor  # (B, N, N, features), of the edge to atom i from atom j at [:, i, j]
    members: Tensor  # (B, N, M), true where there is an atom, and it is in that molecule

    @property
    def neighbours(self) -> Tensor:
        """Which atoms send a message to which, (B, N, N): a complete graph of every molecule, without loops."""
        others = ~torch.eye(self.members.shape[1], dtype=torch.bool, device=self.members.device)
        return (self.members.unsqueeze(2) & self.members.unsqueeze(1)).any(3) & others

    @property
    def shares(self) -> Tensor:
        """Of source j in the mean over the neighbours of i, (B, N, N); for an atom that has some, they add up to one."""
        neighbours = self.neighbours.to(self.edges.dtype)
        return neighbours / neighbours.sum(2, keepdim=True).clamp(min=1)


def dense_batch(features: Tensor, positions: Tensor, bonds: Tensor, members: Tensor | None = None) -> MoleculeBatch:
    """The batch that a network takes, in the dtype of the positions and on their device; nothing waits for the device.

    Args:
        features: of the atoms, (B, N, features), of any dtype.
        positions: of the atoms, (B, N, 3), in Angstrom.
        bonds: kinds from 0 to 4, symmetric, (B, N, N). What stands there for atoms of different molecules is not looked at.
        members: which molecule of its row an atom is in, (B, N, M). None is one molecule, of all atoms that have features.

    >>> numbers, positions = torch.tensor([[[8], [1], [0]]]), torch.tensor([[[0.0, 0, 0], [0, 0, 0.96], [0, 0, 0]]])
    >>> bonds = torch.tensor([[[0, 1, 0], [1, 0, 0], [0, 0, 0]]])
    >>> dense_batch(numbers, positions, bonds).edges[0, 0, 1]
    tensor([1.0000, 0.0000, 0.0000, 0.0000, 0.9600])

    """
    kinds = torch.arange(1, BOND_KINDS + 1, dtype=bonds.dtype, device=bonds.device)
    bonded = (bonds.unsqueeze(3) == kinds).to(positions.dtype)
    distances = torch.linalg.vector_norm(positions.unsqueeze(2) - positions.unsqueeze(1), dim=3, keepdim=True)
    members = (features != 0).any(2, keepdim=True) if members is None else members
    return MoleculeBatch(features.to(positions.dtype), torch.cat([bonded, distances], 3), members)
