"""Losses and metrics of scenes: classes, depths and normals of pixels. Nothing is kept but sums, on the device of the data.

Depths and normals are known where the sum over their channels is not 0. Published tables have errors of depths and normals that
are means over batches, the median angle among them; ``CONVENTIONS`` has theirs ("protocol") and that over all pixels ("whole").
mIoU and pixel accuracy are over all pixels in both.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moonopt.bench.data.scenes import IGNORED

#: Degrees within which the share of normals is reported.
WITHIN = (11.25, 22.5, 30.0)
#: Bins of the histogram that a median over all pixels comes from: each is 0.001 degrees wide.
BINS = 180_000


def segmentation_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of classes (batch, classes, height, width), the mean over all labelled pixels; 0 where there is none."""
    own = torch.where(_one_hot(label, logits.shape[1]), logits, 0).sum(1)
    return _mean(torch.logsumexp(logits, 1) - own, label != IGNORED)


def depth_loss(predicted: Tensor, depth: Tensor) -> Tensor:
    """The mean absolute error over known pixels."""
    return _mean((predicted - depth).abs().squeeze(1), known(depth))


def normal_loss(predicted: Tensor, normal: Tensor) -> Tensor:
    """1 minus the mean cosine over known pixels; predictions are of length 1."""
    return _mean(1 - (predicted * normal).sum(1), known(normal))


def known(target: Tensor) -> Tensor:
    """Where a target (batch, channels, height, width) says something."""
    return target.sum(1) != 0


def angles(predicted: Tensor, normal: Tensor) -> Tensor:
    """Between two fields of vectors of any length, in degrees."""
    across = torch.linalg.vector_norm(torch.linalg.cross(predicted, normal, dim=1), dim=1)
    return torch.rad2deg(torch.atan2(across, (predicted * normal).sum(1)))


def unit_angles(predicted: Tensor, normal: Tensor) -> Tensor:
    """The same as public codes have it, for whom all are of length 1: normals that are shorter seem to be further off."""
    cosine = (predicted * normal).sum(1, dtype=torch.float64)  # in float32 it would be off by 0.02 degrees where they agree
    return torch.rad2deg(torch.acos(cosine.clamp(-1, 1))).to(predicted.dtype)


class Tally(Protocol):
    """What the metrics of a task are counted in, batch by batch."""

    def add(self, predicted: Tensor, target: Tensor, /) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Confusion:
    """How often pixels of every class were taken for every class."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._counts = torch.zeros((), dtype=torch.float64)

    def add(self, logits: Tensor, label: Tensor) -> None:
        truth = _one_hot(label, self.classes).flatten(2).float()
        guess = _one_hot(logits.argmax(1), self.classes).flatten(2).float()
        of_pictures = truth @ guess.transpose(1, 2)  # in float32 exact, for a picture has fewer pixels than 2**24
        self._counts = self._counts + of_pictures.double().sum(0)

    def metrics(self) -> dict[str, float]:
        """In percent. Classes that neither are there nor were seen do not count."""
        counts = self._counts
        hits, either = counts.diagonal(), counts.sum(0) + counts.sum(1) - counts.diagonal()
        return {
            "mIoU": 100 * (hits / either).nanmean().item(),
            "pixel accuracy": 100 * (hits.sum() / counts.sum()).item(),
        }


class DepthErrors:
    """Absolute and relative errors of depths."""

    def __init__(self, convention: str) -> None:
        self._averaged = CONVENTIONS[convention]
        self._sums: list[Tensor] = []

    def add(self, predicted: Tensor, depth: Tensor) -> None:
        """Of one batch of the protocol."""
        where, target = known(depth), depth.squeeze(1)
        error = torch.where(where, (predicted.squeeze(1) - target).abs(), 0)
        relative = error / torch.where(where, target.abs(), 1)
        self._sums.append(torch.stack([each.double().sum() for each in (where, error, relative)]))

    def metrics(self) -> dict[str, float]:
        return dict(zip(("absolute error", "relative error"), self._averaged(torch.stack(self._sums)).tolist(), strict=True))


class AngleErrors:
    """Angles between predicted and true normals: their mean, median, and how many are small."""

    def __init__(self, convention: str) -> None:
        self._averaged = CONVENTIONS[convention]
        self._angles, median = ANGLES[convention]
        self._median = median()
        self._sums: list[Tensor] = []

    def add(self, predicted: Tensor, normal: Tensor) -> None:
        """Of one batch of the protocol."""
        where, error = known(normal), self._angles(predicted, normal)
        small = [where & (error < limit) for limit in WITHIN]
        self._sums.append(torch.stack([each.double().sum() for each in (where, torch.where(where, error, 0), *small)]))
        self._median.add(error, where)

    def metrics(self) -> dict[str, float]:
        """In degrees and percent."""
        mean, *shares = self._averaged(torch.stack(self._sums)).tolist()
        small = {f"within {limit:g}°": 100 * share for limit, share in zip(WITHIN, shares, strict=True)}
        return {"mean angle": mean, "median angle": self._median.value(), **small}


class Median(Protocol):
    """A median of angles, which come batch by batch."""

    def add(self, error: Tensor, where: Tensor) -> None: ...

    def value(self) -> float: ...


class MeanOfMedians:
    """The mean over batches of their medians."""

    def __init__(self) -> None:
        self._medians: list[Tensor] = []

    def add(self, error: Tensor, where: Tensor) -> None:
        ordered = error.masked_fill(~where, math.inf).flatten().sort().values
        count = where.sum()
        middle = torch.stack([(count - 1) // 2, count // 2]).clamp(min=0)
        median = torch.where(_spoiled(error, where), math.nan, ordered[middle].double().mean())
        self._medians.append(torch.stack([count, count * median]))

    def value(self) -> float:
        return _mean_of_means(torch.stack(self._medians)).item()


class HistogramMedian:
    """The median over all pixels, to half the width of a bin."""

    def __init__(self) -> None:
        self._counts = torch.zeros((), dtype=torch.long)
        self._spoiled = torch.zeros((), dtype=torch.bool)

    def add(self, error: Tensor, where: Tensor) -> None:
        bins = (error.nan_to_num() * (BINS / 180)).long().clamp(0, BINS - 1).masked_fill(~where, BINS)
        self._counts = self._counts + bins.flatten().bincount(minlength=BINS + 1)
        self._spoiled = _spoiled(error, where) | self._spoiled

    def value(self) -> float:
        if self._spoiled:
            return math.nan
        up_to = self._counts[:BINS].cumsum(0).cpu()
        count = int(up_to[-1])
        middle = torch.searchsorted(up_to, torch.tensor([(count - 1) // 2, count // 2]) + 1)
        return ((middle + 0.5) * (180 / BINS)).mean(dtype=torch.float64).item() if count else math.nan


def _mean_of_means(sums: Tensor) -> Tensor:
    """Of sums (batches, 1 + errors), where the first is the number of pixels, the means of batches that have any, averaged."""
    counts = sums[:, :1]
    return torch.where(counts > 0, sums[:, 1:] / counts, 0).sum(0) / (counts > 0).sum()


def _over_all(sums: Tensor) -> Tensor:
    return _mean_of_means(sums.sum(0, keepdim=True))


#: How errors of batches become those of a split.
CONVENTIONS: dict[str, Callable[[Tensor], Tensor]] = {"protocol": _mean_of_means, "whole": _over_all}
#: What an angle is, and the median of angles.
ANGLES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], Median]]] = {
    "protocol": (unit_angles, MeanOfMedians),
    "whole": (angles, HistogramMedian),
}


def _spoiled(error: Tensor, where: Tensor) -> Tensor:
    """Whether an error that counts is not a number."""
    return (error.isnan() & where).any()


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0).sum() / where.sum().clamp(min=1)


def _one_hot(label: Tensor, classes: int) -> Tensor:
    """Which class every pixel has, (batch, classes, height, width): none where it is ignored."""
    return label.unsqueeze(1) == torch.arange(classes, device=label.device)[:, None, None]
