"""What benchmarks of two digits on one canvas share: tasks, metrics, losses, and how digits are laid over each other."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moonopt.bench.base import Benchmark
from moonopt.bench.metrics import Metric
from moonopt.bench.models.vit import ViT
from moonopt.bench.paper import MULTIMNIST_METRICS

CLASSES = 10


class TwoDigits(Benchmark):
    """The left and the right digit of an image of two; a batch has images, left labels and right labels."""

    metrics = (*MULTIMNIST_METRICS, Metric("average loss", higher=False))
    headline = "average accuracy"
    tasks = ("left", "right")

    def vit(self, image_size: int) -> ViT:
        """A ViT with the settings ``model.*``."""
        return ViT(dict.fromkeys(self.tasks, CLASSES), image_size=image_size, **self.section("model"))

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        images, *labels = batch
        logits: Mapping[str, Tensor] = model(images)
        return {task: functional.cross_entropy(logits[task], label) for task, label in zip(self.tasks, labels, strict=True)}

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        total, right, loss = 0, [], []  # of the latter two a tensor per batch, so that nobody waits for the device
        for images, *labels in batches:
            logits: Mapping[str, Tensor] = model(images)
            total += len(images)
            pairs = [(logits[task], label) for task, label in zip(self.tasks, labels, strict=True)]
            right.append(torch.stack([(found.argmax(1) == label).sum() for found, label in pairs]))
            loss.append(torch.stack([functional.cross_entropy(found, label, reduction="sum") for found, label in pairs]))
        counts = torch.stack(right).sum(0).tolist()
        accuracy = {f"{task} accuracy": 100 * count / total for task, count in zip(self.tasks, counts, strict=True)}
        return {
            **accuracy,
            "average accuracy": sum(accuracy.values()) / len(accuracy),
            "average loss": torch.stack(loss).double().sum().item() / (len(self.tasks) * total),
        }


def overlaid(left: Tensor, right: Tensor, canvas: int) -> Tensor:
    """Images (n, 1, canvas, canvas) with the left digits at the upper left and the right ones at the lower right.

    Where they overlap, the brighter pixel wins.
    """
    margin = canvas - left.shape[-1]
    upper = functional.pad(left, (0, margin, 0, margin))
    lower = functional.pad(right, (margin, 0, margin, 0))
    return torch.maximum(upper, lower).unsqueeze(1)
