"""CelebA: 40 yes-or-no attributes of a face, read by a convolutional network or a ViT, in the protocol of FAMO.

Images are squeezed to 64 x 64, colours between 0 and 1, neither normalised nor augmented. The table has the F1 of every
attribute, from counts over the whole split at a threshold of one half, in the epoch with the best mean F1 on validation data.
Δm is over the 40 F1, against those of single-task learning (FAMO's repository, issue 2).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from moonopt.bench.base import Benchmark, Splits, Tensors
from moonopt.bench.data import celeba, faces
from moonopt.bench.data.made_up import is_marked, mark
from moonopt.bench.metrics import Metric
from moonopt.bench.models.celeba_cnn import FaceCNN
from moonopt.bench.models.heads import LOGISTIC, mean_losses
from moonopt.bench.models.vit import ViT
from moonopt.bench.paper import CELEBA, CELEBA_METRICS, CELEBA_VIT
from moonopt.errors import UserError
from moonopt.methods import by_optimizer

#: What is added to every denominator of the protocol's F1.
EPSILON = 1e-8
#: Smaller images have no pixel left after the pools of the network.
SMALLEST = 8

_DEFAULTS: Mapping[str, Any] = {
    "data.image_size": 64,
    "train.epochs": 15,
    "train.batch_size": 256,
    "train.schedule": "constant",
    "train.select": "best",
    "train.log_every": 50,
}


class CelebA(Benchmark):
    """Forty attributes, each a binary classification task. A batch has images and attributes."""

    metrics = (*CELEBA_METRICS, Metric("mean F1", higher=True), Metric("mean accuracy", higher=True, digits=2, unit="%"))
    headline = "mean F1"
    tasks = celeba.ATTRIBUTES
    tuned: ClassVar = by_optimizer({"optimizer.lr": 3e-4}, {"optimizer.lr": 1e-2, "optimizer.vector_lr": 1e-3})
    tuning = "Not tuned yet: with Adam the protocol's 3e-4, with Muon and MOON 1e-2 for the matrices and 1e-3 for the vectors."
    data_note = "CelebA, 1.4 GB, from its authors by hand; made-up faces: moonopt data make celeba"

    def load(self, folder: Path, seed: int) -> Splits:
        """CelebA's own splits: the same for every seed."""
        size = self.settings["data.image_size"]
        if size < SMALLEST:
            raise UserError(f"data.image_size must be at least {SMALLEST}, found {size}.")
        parts = celeba.read(folder, size)
        return Splits(**{split: Portraits(part.images, part.attributes) for split, part in parts.items()})

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, attributes = batch
        logits = model(images)
        return mean_losses({task: logits[task] for task in self.tasks}, 2 * attributes.to(images.dtype) - 1, LOGISTIC)

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        counts = []
        for images, attributes in batches:
            logits: Mapping[str, Tensor] = model(images)
            counts.append(count(torch.cat([logits[task] for task in self.tasks], 1) > 0, attributes))
        total = Counts(*(torch.stack(parts).sum(0) for parts in zip(*counts, strict=True)))
        scores, accuracies = f1(total), accuracy(total)
        return {
            **dict(zip(self.tasks, scores.tolist(), strict=True)),
            "mean F1": scores.mean().item(),
            "mean accuracy": 100 * accuracies.mean().item(),
        }

    def missing(self, folder: Path) -> str | None:
        return celeba.missing(folder)

    def verify(self, folder: Path) -> None:
        celeba.verify(folder)

    def make(self, folder: Path, count: int | None = None, seed: int = 0) -> None:
        faces.make_faces(folder / celeba.FOLDER, faces.COUNT if count is None else count, seed)
        mark(folder / celeba.FOLDER)

    def is_made_up(self, folder: Path) -> bool:
        return is_marked(folder / celeba.FOLDER)


class CelebaCNN(CelebA):
    """The attributes of a face, read by a convolutional network."""

    name = "celeba-cnn"
    title = "40 attributes of 202,599 faces, read by a convolutional network"
    defaults: ClassVar = {**_DEFAULTS, "model.width": 64}
    published = CELEBA

    def model(self) -> nn.Module:
        return FaceCNN(self.tasks, **self.section("model"))


class CelebaViT(CelebA):
    """The attributes of a face, read by a ViT.

    The paper states neither the sizes of its ViT nor what its Δm refers to; ours has about as many parameters as the
    convolutional network: 4,815,144, of which 98.0 % are in matrices.
    """

    name = "celeba-vit"
    title = "40 attributes of 202,599 faces, read by a ViT"
    defaults: ClassVar = {
        **_DEFAULTS,
        "model.patch_size": 8,
        "model.width": 256,
        "model.depth": 6,
        "model.attention_heads": 8,
        "model.mlp_ratio": 4.0,
    }
    published = CELEBA_VIT

    def model(self) -> nn.Module:
        size, sizes = self.settings["data.image_size"], self.section("model")
        return ViT(dict.fromkeys(self.tasks, 1), image_size=size, channels=3, **sizes)


class Portraits(Tensors):
    """Images and attributes as bytes, of which a batch has colours between 0 and 1, and yes or no."""

    def batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        images, attributes = super().batch(indices, generator)
        return images.float() / 255, attributes.bool()


class Counts(NamedTuple):
    """How often each attribute was rightly said to be there, wrongly said to be, wrongly not, and rightly not."""

    true_positive: Tensor
    false_positive: Tensor
    false_negative: Tensor
    true_negative: Tensor


def count(found: Tensor, wanted: Tensor) -> Counts:
    """Of attributes (n, attributes) as yes or no, the counts of each."""
    return Counts((found & wanted).sum(0), (found & ~wanted).sum(0), (~found & wanted).sum(0), (~found & ~wanted).sum(0))


def f1(counts: Counts) -> Tensor:
    """The harmonic mean of precision and recall of each attribute, in the protocol's form; 0 for one that no face has.

    >>> f1(count(torch.tensor([[True], [True], [False]]), torch.tensor([[True], [False], [False]])))
    tensor([0.6667], dtype=torch.float64)
    """
    right = counts.true_positive.double()
    precision = right / (right + counts.false_positive + EPSILON)
    recall = right / (right + counts.false_negative + EPSILON)
    return 2 * precision * recall / (precision + recall + EPSILON)


def accuracy(counts: Counts) -> Tensor:
    """The share of the faces for which each attribute is rightly said to be there or not."""
    return (counts.true_positive + counts.true_negative).double() / torch.stack(counts).sum(0)
