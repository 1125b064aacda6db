"""QM9 out of the wheel of ``qm9pack``, which its first author publishes (MIT): three tables with a row per molecule.

The package is not imported, only its tables are read. Energies are in hartree there and of whole molecules; those of the single
atoms (same level of theory) are subtracted. Bonds are not there and come from the geometry.
"""

import csv
import hashlib
import io
import itertools
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from moonopt.bench.data.progress import tracked
from moonopt.bench.data.qm9_bonds import Bond, perceive
from moonopt.bench.data.qm9_check import LAST, check
from moonopt.bench.data.qm9_molecules import TARGETS, Molecules
from moonopt.bench.data.wheel import Wheel
from moonopt.errors import UserError

WHEEL = "qm9pack-1.0.3-py3-none-any.whl"
SOURCE = Wheel("qm9pack==1.0.3", WHEEL, "104 MB", "qm9")
#: The tables, with the SHA-256 of each.
SHA256 = {
    "qm9pack/data/qm9_part1.csv": "19f0a5d595462d52cd82eef3370f3e9eb55a1f52cb14985657200349568deff3",
    "qm9pack/data/qm9_part2.csv": "2bca113fdc0b28a13563c80ed9b240e934f3da6c64c64fe74ddb4f0f36036e61",
    "qm9pack/data/qm9_part3.csv": "9c5efb5733d2af149db8d95d36ff198b4ffed12d9f7b344220a1e5877d5c6a43",
}
MOLECULES = 130_831
AGAIN = SOURCE.again

MEV = 27211.386246  # in a hartree
SYMBOLS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
#: The column of each target, and what a number there is times its unit.
COLUMNS = {
    "mu": ("Dipole_debye", 1.0),
    "alpha": ("Polarizability_bohr3", 1.0),
    "homo": ("HOMO_au", MEV),
    "lumo": ("LUMO_au", MEV),
    "r2": ("R2_bohr2", 1.0),
    "zpve": ("ZPVE_au", MEV),
    "U0": ("InternalEnergy_0K_au", MEV),
    "U": ("InternalEnergy_298K_au", MEV),
    "H": ("Enthalphy_298K_au", MEV),
    "G": ("GibbsFreeEnergy_298K_au", MEV),
    "cv": ("Heatcapacity_Cv_cal_mol_K", 1.0),
}
#: Energies of single atoms in hartree, by target and atomic number (QM9's own ``atomref.txt``).
ATOMS = {
    "U0": {1: -0.500273, 6: -37.846772, 7: -54.583861, 8: -75.064579, 9: -99.718730},
    "U": {1: -0.498857, 6: -37.845355, 7: -54.582445, 8: -75.063163, 9: -99.717314},
    "H": {1: -0.497912, 6: -37.844411, 7: -54.581501, 8: -75.062219, 9: -99.716370},
    "G": {1: -0.510927, 6: -37.861317, 7: -54.598897, 8: -75.079532, 9: -99.733544},
}
NEEDED = ("Index", "N_atoms", "Elements", "XYZ_Ang", *(column for column, _ in COLUMNS.values()))

Row = Mapping[str, str]


@dataclass(frozen=True)
class Molecule:
    """What a row says."""

    index: int
    numbers: list[int]
    positions: list[list[float]]
    bonds: list[Bond]
    targets: list[float]


def download(folder: Path) -> Path:
    """The wheel, which pip puts into a folder whole or not at all."""
    return SOURCE.download(folder)


def checksums(wheel: Path) -> dict[str, str]:
    """The SHA-256 of each table of a wheel."""
    return {table: hashlib.sha256(SOURCE.content(wheel, table)).hexdigest() for table in SHA256}


def parse(wheel: Path) -> Molecules:
    """All molecules of a wheel, with a progress bar in a terminal."""
    index, atoms, bond_counts = [], [], []
    numbers, bonds, positions, targets = bytearray(), bytearray(), array("f"), array("f")
    for row in tracked((row for table in SHA256 for row in _rows(wheel, table)), "QM9", MOLECULES):
        molecule = _parsed(row, wheel)
        index.append(molecule.index)
        atoms.append(len(molecule.numbers))
        bond_counts.append(len(molecule.bonds))
        numbers.extend(molecule.numbers)
        positions.extend(itertools.chain(*molecule.positions))
        bonds.extend(itertools.chain(*molecule.bonds))
        targets.extend(molecule.targets)
    if not index:
        raise UserError(f"{wheel} has no molecules. {AGAIN}")
    molecules = Molecules(
        index=torch.tensor(index),
        atoms=torch.tensor(atoms),
        numbers=torch.frombuffer(numbers, dtype=torch.uint8),
        positions=torch.frombuffer(positions, dtype=torch.float32).view(-1, 3),
        bond_counts=torch.tensor(bond_counts),
        bonds=torch.frombuffer(bonds, dtype=torch.uint8).view(-1, 3),
        targets=torch.frombuffer(targets, dtype=torch.float32).view(-1, len(TARGETS)),
    )
    check(molecules, str(wheel), AGAIN)
    return molecules


def _rows(wheel: Path, table: str) -> Iterator[Row]:
    """The rows of a table, each with all columns."""
    reader = csv.DictReader(io.TextIOWrapper(io.BytesIO(SOURCE.content(wheel, table)), "ascii", "replace", newline=""))
    if absent := [column for column in NEEDED if column not in (reader.fieldnames or ())]:
        columns = "columns" if len(absent) > 1 else "column"
        raise UserError(f"{table} in {wheel} lacks the {columns} {', '.join(absent)}. {AGAIN}")
    try:
        for number, row in enumerate(reader, 1):
            if None in row.values() or None in row:
                trouble = "ends too early" if None in row.values() else "has more fields than there are columns"
                raise UserError(f"Row {number} of {table} in {wheel} {trouble}. {AGAIN}")
            yield row
    except csv.Error as error:
        raise UserError(f"{table} in {wheel} is no table ({error}). {AGAIN}") from error


def _parsed(row: Row, wheel: Path) -> Molecule:
    try:
        numbers = _elements(row["Elements"])
        values = [_number(text, "XYZ_Ang") for text in row["XYZ_Ang"].replace("[", "").replace("]", "").split(",")]
        if not _number(row["N_atoms"], "N_atoms") == len(numbers) == len(values) / 3:
            raise UserError(
                f"found {row['N_atoms']} as the number of atoms, but {len(numbers)} elements and {len(values)} coordinates"
            )
        positions = [values[begin : begin + 3] for begin in range(0, len(values), 3)]
        targets = [_target(row, name, numbers) for name in TARGETS]
        index = _number(row["Index"], "Index")
        if not 1 <= index <= LAST:
            raise UserError(f"found {row['Index']!r} in the column Index, expected a number from 1 to {LAST}")
        return Molecule(int(index), numbers, positions, perceive(numbers, positions), targets)
    except ValueError as error:  # UserError is one
        raise UserError(f"Molecule {row['Index']} in {wheel} cannot be read: {error}. {AGAIN}") from error


def _elements(text: str) -> list[int]:
    symbols = text.strip("[]").replace("'", "").split(",")
    if unknown := [symbol for symbol in symbols if symbol not in SYMBOLS]:
        raise UserError(f"found {unknown[0]!r} as an element, expected one of {', '.join(SYMBOLS)}")
    return [SYMBOLS[symbol] for symbol in symbols]


def _target(row: Row, name: str, numbers: list[int]) -> float:
    column, unit = COLUMNS[name]
    value = _number(row[column], column)
    if name in ATOMS:
        value -= math.fsum(ATOMS[name][number] for number in numbers)
    return value * unit


def _number(text: str, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"found {text!r} in the column {column}, expected a finite number")
    return value
