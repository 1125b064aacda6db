"""Molecules in pairs, a large one with a small one in each row of a batch, so that little of it is padding.

Of 120 molecules of QM9 all pairs have about 36 atoms, where rows of one molecule would be as wide as the largest: a pair has
three quarters of the atoms, and about as many edges, as two rows with one molecule each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

#: How many atoms rows may have, each a CUDA graph of its own. Of 120 random molecules the largest pair has at most 37 in four
#: batches of seven, and more than 40 in one of a hundred and fifty.
WIDTHS = (37, 38, 40, 42)


class Pairs(NamedTuple):
    """Which molecules of a batch are in which rows, and where their atoms are."""

    order: Tensor  # (molecules), as they follow each other, row by row
    molecule: Tensor  # (rows, width), that the atom at a place is of, by its number in the batch
    atom: Tensor  # (rows, width), its number in the molecule
    members: Tensor  # (rows, width, 2), whether it is of the first molecule of the row, of the second; else it is padding, a
    # copy of the row's first atom, which is in no molecule


def pairs(sizes: Tensor) -> Pairs:
    """Rows of two molecules with so many atoms each; if their number is odd, the last row has one, and nothing for the second.

    >>> found = pairs(torch.tensor([2, 5, 3, 1]))
    >>> found.order
    tensor([2, 0, 1, 3])
    >>> found.members.sum(1)
    tensor([[3, 2],
            [5, 1]])
    """
    count, sizes = len(sizes), torch.cat([sizes, sizes.new_zeros(len(sizes) % 2)])
    large, small = sizes.argsort(descending=True, stable=True).chunk(2)
    large = large.flip(0)  # from the smallest to the largest, which has the smallest of all beside it
    first, second = sizes[large].unsqueeze(1), sizes[small].unsqueeze(1)
    place = torch.arange(row_width(int((first + second).max())))
    in_first = place < first
    atom = torch.where(in_first, place, place - first)
    in_second = ~in_first & (atom < second)
    members = torch.stack([in_first, in_second], 2)
    molecule = torch.where(in_second, small.unsqueeze(1), large.unsqueeze(1))
    order = torch.stack([large, small], 1).flatten()[:count]
    return Pairs(order, molecule, atom * members.any(2), members)


def row_width(atoms: int) -> int:
    """To how many atoms rows are padded of which the largest has so many.

    >>> [row_width(atoms) for atoms in (3, 37, 39, 58)]
    [37, 37, 40, 58]
    """
    return next((width for width in WIDTHS if width >= atoms), atoms)
