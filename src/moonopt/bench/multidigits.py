"""Two handwritten digits on one canvas, which a small ViT reads: MultiMNIST in small, for a CPU and without a download.

The digits are scikit-learn's 1797 images of 8 x 8 pixels. The left one lies at the upper left of a canvas of 12 x 12, the right
one at the lower right, and where they overlap the brighter pixel wins. Digit images are split before they are paired, so that
no digit that is tested has been seen.
"""

import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from moonopt.bench.base import Splits, Tensors
from moonopt.bench.two_digits import TwoDigits, overlaid
from moonopt.errors import UserError
from moonopt.methods import by_optimizer

BRIGHTEST = 16  # of scikit-learn's digits

#: Of the digits and their labels as unsigned bytes, one after the other.
SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


class MultiDigits(TwoDigits):
    """Left and right digit of an image of two, read by a ViT."""

    name = "multidigits"
    title = "two overlapping 8 x 8 digits, read by a small ViT"
    defaults: ClassVar = {
        "data.seed": 0,
        "data.canvas": 12,
        "data.train_pairs": 4000,
        "data.valid_pairs": 2000,
        "data.test_pairs": 2000,
        "model.patch_size": 4,
        "model.width": 32,
        "model.depth": 2,
        "model.attention_heads": 2,
        "model.mlp_ratio": 2.0,
        "train.epochs": 16,
        "train.batch_size": 64,
        "train.select": "best",
    }
    tuned: ClassVar = {**by_optimizer({"optimizer.lr": 4e-3}, {"optimizer.lr": 5e-3}), "mgda": {"optimizer.lr": 8e-3}}
    tuning = (
        "Best mean validation accuracy over seeds 10 and 11, five trials each: optimizer.lr of 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2 "
        "for ls, famo, mgda and nash-mtl (Adam), of 0.0025, 0.005, 0.01, 0.02, 0.04 for muon and moon; every trial is in "
        "results/multidigits/tuned.json. The other balancers have the rate of ls, and with Muon that of muon."
    )
    data_note = "ships with scikit-learn (pip install scikit-learn): 1797 digits of 8 x 8 pixels"

    def load(self, folder: Path, seed: int) -> Splits:
        """The splits and pairs of ``data.seed``: the same for every seed of a run."""
        images, labels = digits()
        generator = torch.Generator().manual_seed(self.settings["data.seed"])
        order = torch.randperm(len(images), generator=generator)
        fifth = len(images) // 5
        parts = {"test": order[:fifth], "valid": order[fifth : 2 * fifth], "train": order[2 * fifth :]}
        canvas = self.settings["data.canvas"]
        splits = {}
        for split, part in parts.items():
            picked = torch.randint(len(part), (self.settings[f"data.{split}_pairs"], 2), generator=generator)
            left, right = part[picked].unbind(1)
            splits[split] = Tensors(overlaid(images[left], images[right], canvas), labels[left], labels[right])
        return Splits(**splits)

    def model(self) -> nn.Module:
        return self.vit(self.settings["data.canvas"])

    def missing(self, folder: Path) -> str | None:
        if importlib.util.find_spec("sklearn") is None:
            return "The digits come with scikit-learn, which is not installed: pip install 'moonopt[bench]'."
        return None

    def verify(self, folder: Path) -> None:
        super().verify(folder)
        if (found := checksum()) != SHA256:
            raise UserError(f"scikit-learn's digits have changed: their SHA-256 is {found}, expected {SHA256}.")


def digits() -> tuple[Tensor, Tensor]:
    """All digits, (1797, 8, 8) between 0 and 1, and their labels."""
    loaded = importlib.import_module("sklearn.datasets").load_digits()
    return torch.from_numpy(loaded.images).float() / BRIGHTEST, torch.from_numpy(loaded.target).long()


def checksum() -> str:
    """The SHA-256 of the digits and their labels as unsigned bytes."""
    images, labels = digits()
    content = torch.cat([(images * BRIGHTEST).flatten(), labels]).to(torch.uint8)
    return hashlib.sha256(bytes(content.tolist())).hexdigest()
