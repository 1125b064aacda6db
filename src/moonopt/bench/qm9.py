"""QM9: eleven properties of small organic molecules, predicted by one message-passing network, in the protocol of Nash-MTL.

Targets are scaled by mean and standard deviation, errors are reported in their own units. The public codes take both from all
molecules, those of the test included; ours from the training split, unless ``data.protocol`` is "famo".
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from moonopt.bench.base import Benchmark, Splits, Tensors
from moonopt.bench.data import qm9
from moonopt.bench.data.qm9_molecules import TARGETS, Padded, node_features
from moonopt.bench.data.qm9_pairs import pairs
from moonopt.bench.metrics import Metric, delta_m
from moonopt.bench.models.heads import SQUARED, mean_losses, of_first
from moonopt.bench.models.mpnn import MPNN
from moonopt.bench.models.mpnn_molecules import dense_batch
from moonopt.bench.models.mpnn_pyg import PyGNet
from moonopt.bench.paper import QM9 as PAPER, QM9_METRICS, QM9_STL
from moonopt.errors import UserError, unknown_name
from moonopt.methods import by_optimizer

#: The network, by ``model.form``.
FORMS: dict[str, type[MPNN]] = {"dense": MPNN, "pyg": PyGNet}
PROTOCOLS = ("paper", "famo")
#: How many molecules are made up if nobody says.
MADE_UP = 600


class QM9(Benchmark):
    """Eleven properties of a molecule, each a regression task.

    A batch has the features of atoms, positions, bonds, what is in which molecule, targets and their scale.
    """

    name = "qm9"
    title = "eleven properties of 130,831 small molecules, predicted by a message-passing network"
    metrics = (*QM9_METRICS, Metric("relative MAE", higher=False))  # to the published STL: 1 where Δm is 0, 2 where it is 100 %
    headline = "relative MAE"
    tasks = tuple(TARGETS)
    defaults: ClassVar = {
        "data.valid_molecules": 10_000,
        "data.test_molecules": 10_000,
        "data.protocol": "paper",
        "model.form": "dense",
        "model.width": 64,
        "model.edge_width": 128,
        "model.rounds": 3,
        "model.readout_steps": 3,
        "model.half_messages": False,
        "train.epochs": 300,
        "train.batch_size": 120,
        "train.schedule": "plateau:0.7:5",
        "train.select": "best",
        "train.log_every": 50,
    }
    tuned: ClassVar = by_optimizer(
        {"optimizer.lr": 1e-3}, {"optimizer.lr": 5e-3, "optimizer.scale": "rms", "optimizer.vector_lr": 1e-3}
    )
    tuning = (
        "The protocol's 1e-3 with Adam; 5e-3 by the RMS rule with Muon and MOON, and 1e-3 for the vectors. In 60 epochs "
        "4e-3 is better for LS and FAMO, in 12 epochs 1.25e-3 for Muon and plain MOON: give --tuned results/qm9/tuned-ls.json "
        "and the like."
    )
    published = replace(PAPER, rows={**PAPER.rows, "stl": QM9_STL})
    data_note = "QM9, 104 MB through pip, kept as 33 MB: moonopt data fetch qm9"

    def load(self, folder: Path, seed: int) -> Splits:
        """Another split for every seed: tested molecules first, then those for validation, the rest to train on."""
        molecules = qm9.read(folder)
        held_out = [self._count("test"), self._count("valid")]
        if sum(held_out) >= len(molecules):
            raise UserError(
                f"Of {len(molecules)} molecules, {sum(held_out)} cannot be held out for test and validation: give fewer, as in "
                "--set data.test_molecules=100 --set data.valid_molecules=100."
            )
        order = torch.randperm(len(molecules), generator=torch.Generator().manual_seed(seed))
        test, valid, train = torch.split(order, [*held_out, len(molecules) - sum(held_out)])
        targets = molecules.targets
        known = targets if self._protocol() == "famo" else targets[train]
        mean, std = known.mean(0), known.std(0)
        scaled = (targets - mean) / std
        padded = molecules.padded()
        parts = {
            name: Properties(Padded(*(each[chosen] for each in padded)), scaled[chosen], std)
            for name, chosen in (("train", train), ("valid", valid), ("test", test))
        }
        return Splits(**parts)

    def model(self) -> nn.Module:
        sizes = self.section("model")
        form = sizes.pop("form")
        if form not in FORMS:
            raise UserError(unknown_name(form, tuple(FORMS), "model.form"))
        return FORMS[form](self.tasks, **sizes)

    def losses(self, model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        *given, wanted, _ = batch
        return mean_losses(self._predicted(model, given, len(wanted)), wanted, SQUARED)

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        total, errors = 0, []
        for *given, wanted, scale in batches:
            predicted = torch.stack(list(self._predicted(model, given, len(wanted)).values()), 1)
            errors.append(((predicted - wanted).abs() * scale).double().sum(0))
            total += len(wanted)
        means = (torch.stack(errors).sum(0) / total).tolist()
        found = dict(zip(self.tasks, means, strict=True))
        return found | {self.headline: 1 + delta_m(found, QM9_STL, QM9_METRICS) / 100}

    def missing(self, folder: Path) -> str | None:
        return qm9.missing(folder)

    def verify(self, folder: Path) -> None:
        qm9.verify(folder)

    def fetch(self, folder: Path) -> None:
        qm9.fetch(folder)

    def make(self, folder: Path, count: int | None = None, seed: int = 0) -> None:
        qm9.make(folder, MADE_UP if count is None else count, seed)

    def is_made_up(self, folder: Path) -> bool:
        return qm9.is_made_up(folder)

    def _predicted(self, model: nn.Module, given: list[Tensor], count: int) -> dict[str, Tensor]:
        """Of the molecules that are there: one too many if their number is odd."""
        outputs: Mapping[str, Tensor] = model(dense_batch(*given))
        return of_first({task: outputs[task] for task in self.tasks}, count)

    def _count(self, split: str) -> int:
        count: int = self.settings[f"data.{split}_molecules"]
        if count < 1:
            raise UserError(f"data.{split}_molecules must be at least 1, found {count}.")
        return count

    def _protocol(self) -> str:
        protocol: str = self.settings["data.protocol"]
        if protocol not in PROTOCOLS:
            raise UserError(unknown_name(protocol, PROTOCOLS, "data.protocol"))
        return protocol


class Properties(Tensors):
    """Padded molecules with the features of their atoms, targets, and the scale of these, which every batch has.

    A batch has two molecules in a row, and no more padding than its largest pair asks for, in few widths.
    """

    def __init__(self, molecules: Padded, targets: Tensor, scale: Tensor) -> None:
        numbers, positions, bonds = molecules
        super().__init__(node_features(numbers, bonds), positions, bonds, targets)
        self.scale = scale
        self.sizes = (numbers > 0).sum(1)  # stays on the host

    def batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        atoms, positions, bonds, targets = self.tensors
        order, molecule, atom, members = pairs(self.sizes[indices])
        places = torch.stack([indices[molecule], atom]), indices[order], members
        (row, column), chosen, members = (each.to(atoms.device, non_blocking=True) for each in places)
        edges = bonds[row.unsqueeze(2), column.unsqueeze(2), column.unsqueeze(1)]
        return atoms[row, column], positions[row, column], edges, members, targets[chosen], self.scale

    def to(self, device: torch.device) -> Self:
        moved = super().to(device)
        moved.scale = self.scale.to(device)
        return moved
