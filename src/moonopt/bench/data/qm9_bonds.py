"""Bonds of a molecule of H, C, N, O and F from where its atoms are.

Relaxed molecules need no more. Heavy atoms that are close are bonded, unless one has too many neighbours: then its longest
bonds are none. A hydrogen has one bond, to the nearest heavy atom. Valences that single bonds leave open are closed by second
and third bonds between neighbours. Where that can be done in several ways (the two forms of a benzene ring) the shortest bonds
become the multiple ones; where it cannot, some atoms are charged, nitrogen with one bond more and others with one less.

Of QM9's 130,831 molecules, 130,609 (99.83 %) have the bonds of their SMILES, as rdkit's canonical SMILES of both say; 220 of
the others have the same neighbours and differ in where a zwitterion's charges are, and 2 have other rings than their SMILES.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from moonopt.errors import UserError

HYDROGEN = 1
#: Covalent radii in Angstrom, by atomic number (Cordero and others, 2008).
RADII = {1: 0.31, 6: 0.76, 7: 0.71, 8: 0.66, 9: 0.57}
VALENCES = {1: 1, 6: 4, 7: 3, 8: 2, 9: 1}
NEIGHBOURS = VALENCES | {7: 4}  # at most
#: Heavy atoms closer than this, in Angstrom, are bonded. The longest bond that a SMILES of QM9 names has 1.79.
LONGEST = 1.82
#: Atoms that may be charged: with one bond more, and with one less and what that costs, in Angstrom of bonds that do not fit.
MORE = (7,)
LESS = {8: 0.0, 7: 0.1, 6: 0.2}
CHARGES = 2  # of each sign, at most
TRIPLE = 3

Bond = tuple[int, int, int]
Orders = dict[tuple[int, int], int]


def perceive(numbers: Sequence[int], positions: Sequence[Sequence[float]]) -> list[Bond]:
    """Bonds as (atom, later atom, order), sorted; the order is 1, 2 or 3.

    >>> perceive([6, 8, 1, 1], [(0, 0, 0), (1.2, 0, 0), (-0.6, 0.9, 0), (-0.6, -0.9, 0)])
    [(0, 1, 2), (0, 2, 1), (0, 3, 1)]
    """
    heavy = [atom for atom, number in enumerate(numbers) if number != HYDROGEN]
    to_hydrogen = [_nearest(atom, heavy, positions) for atom, number in enumerate(numbers) if number == HYDROGEN]
    lengths = _lengths(heavy, positions)
    degrees = Counter(itertools.chain(*lengths, *to_hydrogen))
    for pair in sorted(lengths, key=lengths.__getitem__, reverse=True):
        if any(degrees[atom] > NEIGHBOURS[numbers[atom]] for atom in pair):
            degrees.subtract(pair)
            del lengths[pair]
    open_valences = [VALENCES[number] - degrees[atom] for atom, number in enumerate(numbers)]
    # How much longer a bond is than two radii: the less, the better it takes a second or third.
    excess = {(a, b): length - RADII[numbers[a]] - RADII[numbers[b]] for (a, b), length in lengths.items()}
    orders = _orders(numbers, open_valences, excess)
    return sorted([*((*pair, 1) for pair in to_hydrogen), *((*pair, order) for pair, order in orders.items())])


def _lengths(heavy: Sequence[int], positions: Sequence[Sequence[float]]) -> dict[tuple[int, int], float]:
    """The distance of every two heavy atoms that are close."""
    pairs = {(a, b): math.dist(positions[a], positions[b]) for a, b in itertools.combinations(heavy, 2)}
    return {pair: length for pair, length in pairs.items() if length < LONGEST}


def _nearest(atom: int, heavy: Sequence[int], positions: Sequence[Sequence[float]]) -> tuple[int, int]:
    if not heavy:
        raise UserError("a molecule of hydrogen alone has no bonds that could be told from its geometry")
    other = min(heavy, key=lambda each: math.dist(positions[atom], positions[each]))
    return min(atom, other), max(atom, other)


def _orders(numbers: Sequence[int], open_valences: Sequence[int], excess: dict[tuple[int, int], float]) -> Orders:
    """The order of every bond between heavy atoms, with as few charges as the valences allow."""
    for charges in range(CHARGES + 1):
        found = [
            (cost + sum(excess[bond] * (order - 1) for bond, order in orders.items()), sorted(orders.items()))
            for cost, charged in _charged(numbers, open_valences, charges)
            for orders in _closed(charged, dict.fromkeys(excess, 1))
        ]
        if found:
            return dict(min(found)[1])
    raise UserError("no bond orders fit the valences of its atoms")


def _charged(numbers: Sequence[int], open_valences: Sequence[int], charges: int) -> Iterator[tuple[float, list[int]]]:
    """Every way to give so many atoms one valence more and as many one less, and what it costs."""
    more = [atom for atom, number in enumerate(numbers) if number in MORE]
    less = [atom for atom, number in enumerate(numbers) if number in LESS]
    for positive, negative in itertools.product(*(itertools.combinations(atoms, charges) for atoms in (more, less))):
        charged = list(open_valences)
        for atom in positive:
            charged[atom] += 1
        for atom in negative:
            charged[atom] -= 1
        if min(charged) >= 0:
            yield sum(LESS[numbers[atom]] for atom in negative), charged


def _closed(open_valences: list[int], orders: Orders) -> Iterator[Orders]:
    """Every way to close all valences by raising the orders of bonds."""
    atom = next((each for each, count in enumerate(open_valences) if count), None)
    if atom is None:
        yield orders
        return
    for bond in orders:
        other = bond[0] + bond[1] - atom
        if atom in bond and open_valences[other] and orders[bond] < TRIPLE:
            less = [count - (each in bond) for each, count in enumerate(open_valences)]
            yield from _closed(less, orders | {bond: orders[bond] + 1})
