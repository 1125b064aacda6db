"""Made-up molecules with as many atoms as QM9's: elements and places at random, in a chain of single bonds.

Their targets follow from elements and places, roughly as large as the real ones, so that there is something to learn.
"""

import torch
from torch import Tensor

from moonopt.bench.data.qm9_molecules import ELEMENTS, TARGETS, Molecules

#: How many molecules of QM9 have 0, 1, 2, ... atoms.
ATOMS = (
    *(0, 0, 0, 2, 4, 5, 12, 20, 65, 172, 483, 1053, 2189, 4027, 6758),
    *(10216, 13824, 16969, 17442, 18146, 12403, 13166, 4428, 6362, 712, 1923, 59, 356, 0, 35),
)
#: What an atom of each element adds to a target of the whole molecule, in the target's unit.
OF_ATOMS = {
    "alpha": (2.0, 7.0, 5.5, 4.0, 3.0),
    "zpve": (270.0, 140.0, 150.0, 110.0, 90.0),
    "U0": (-2500.0, -6500.0, -4500.0, -4000.0, -3000.0),
    "U": (-2520.0, -6530.0, -4530.0, -4030.0, -3030.0),
    "H": (-2540.0, -6560.0, -4560.0, -4060.0, -3060.0),
    "G": (-2300.0, -6100.0, -4150.0, -3650.0, -2700.0),
    "cv": (0.8, 2.5, 2.2, 2.0, 2.1),
}
#: What is added to a target for the mean charge, which lies between those of the elements, and where it is without.
OF_CHARGE = {"homo": (-6500.0, 1500.0), "lumo": (300.0, 3000.0)}
CHARGES = (0.3, 0.1, -0.2, -0.3, -0.3)


def made_up(count: int, seed: int = 0) -> Molecules:
    """So many, of 3 to 29 atoms."""
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.multinomial(torch.tensor(ATOMS, dtype=torch.float32), count, replacement=True, generator=generator)
    total = int(atoms.sum())
    kinds = torch.randint(len(ELEMENTS), (total,), generator=generator)
    positions = 2 * torch.randn(total, 3, generator=generator)
    place = torch.cat([torch.arange(each) for each in atoms.tolist()]).byte()
    later = place[place > 0]
    return Molecules(
        index=torch.arange(1, count + 1),
        atoms=atoms,
        numbers=torch.tensor(ELEMENTS, dtype=torch.uint8)[kinds],
        positions=positions,
        bond_counts=atoms - 1,
        bonds=torch.stack([later - 1, later, torch.ones_like(later)], 1),
        targets=_targets(atoms, kinds, positions),
    )


def _targets(atoms: Tensor, kinds: Tensor, positions: Tensor) -> Tensor:
    molecule = torch.repeat_interleave(torch.arange(len(atoms)), atoms)

    def total(values: Tensor) -> Tensor:
        """Over the atoms of each molecule."""
        return torch.zeros(len(atoms), *values.shape[1:]).index_add_(0, molecule, values)

    charges = torch.tensor(CHARGES)[kinds]
    from_centre = positions - (total(positions) / atoms.unsqueeze(1))[molecule]
    found = {name: total(torch.tensor(each)[kinds]) for name, each in OF_ATOMS.items()}
    found |= {name: base + slope * total(charges) / atoms for name, (base, slope) in OF_CHARGE.items()}
    found["mu"] = total(charges.unsqueeze(1) * from_centre).norm(dim=1)
    found["r2"] = 5 * total(from_centre.square().sum(1))
    return torch.stack([found[name] for name in TARGETS], 1)
