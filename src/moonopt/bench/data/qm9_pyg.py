"""QM9 as PyTorch Geometric keeps it after its own download: ``processed/data_v3.pt`` in the root of its ``QM9``.

PyTorch Geometric itself is not needed to read it. Its positions have four decimals, and its bonds, perceived by other software,
hold some pairs of strained rings that are bonded nowhere else (its issue 10560).
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonopt.bench.data.qm9_check import check
from moonopt.bench.data.qm9_molecules import TARGETS, Molecules
from moonopt.bench.models.mpnn_molecules import BOND_KINDS
from moonopt.errors import UserError

FILE = Path("processed") / "data_v3.pt"
#: Its target for each of ours; it keeps energies in eV.
COLUMNS = (0, 1, 2, 3, 5, 6, 12, 13, 14, 15, 11)
WIDTH = 19
AGAIN = "Remove the file and let PyTorch Geometric process its data again."
NEEDED = ("z", "pos", "edge_index", "edge_attr", "y", "idx")


def from_pyg(root: Path) -> Molecules:
    """The molecules of a root of ``torch_geometric.datasets.QM9``, in our order and units of targets."""
    path = root / FILE
    if not path.exists():
        raise UserError(f"Not in {root}: {FILE}, which the QM9 of PyTorch Geometric writes there.")
    data, slices = _load(path)
    if absent := [name for name in NEEDED if name not in data or name not in slices]:
        raise UserError(f"{path} lacks {', '.join(absent)}: expected what the QM9 of PyTorch Geometric writes.")
    y, kinds = data["y"], data["edge_attr"]
    if y.shape[1:] != (WIDTH,) or kinds.shape[1:] != (BOND_KINDS,) or not bool((kinds.sum(1) == 1).all()):
        raise UserError(
            f"{path} must have {WIDTH} targets and {BOND_KINDS} kinds of bonds, one-hot; found shapes {tuple(y.shape)} and "
            f"{tuple(kinds.shape)}. A root that was made with a pre_transform cannot be read."
        )
    edges = torch.cat([data["edge_index"].T, kinds.argmax(1, keepdim=True) + 1], 1)
    once = edges[:, 0] < edges[:, 1]
    if int(slices["edge_index"].max()) > len(once):
        raise UserError(f"{path} cannot be used: it has {len(once)} bonds, fewer than its molecules have. {AGAIN}")
    ends = torch.cat([once.new_zeros(1, dtype=torch.long), once.cumsum(0)])[slices["edge_index"]]
    molecules = Molecules(
        index=data["idx"] + 1,
        atoms=slices["z"].diff(),
        numbers=data["z"].clamp(0, 255).to(torch.uint8),
        positions=data["pos"],
        bond_counts=ends.diff(),
        bonds=edges[once].clamp(0, 255).to(torch.uint8),
        targets=y[:, COLUMNS] * torch.tensor([1000.0 if unit == "meV" else 1.0 for unit in TARGETS.values()]),
    )
    check(molecules, str(path), AGAIN)
    return molecules


class _Class:
    """Stands for the class that the file names beside the tensors."""


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with torch.serialization.safe_globals([(_Class, "torch_geometric.data.data.Data")]):
            data, slices, *_ = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError) as error:
        reason = (str(error).strip().splitlines() or ["without a word"])[0].rstrip(".")
        raise UserError(
            f"{path} cannot be read ({reason}). Expected what QM9 of a current PyTorch Geometric writes. {AGAIN}"
        ) from error
    return data, slices
