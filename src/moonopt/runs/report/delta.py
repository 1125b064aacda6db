"""Δm of a run, and what it refers to: the ``stl`` runs beside it, or a paper's row.

A run is compared with ``stl`` of its own seed, which saw the same data; with a seed that ``stl`` lacks, with its mean over the
seeds that it has.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonopt.bench import Benchmark, Metric, Published, delta_m
from moonopt.runs.single import STL, has_task_metrics

PUBLISHED = "published"
REFERENCES = (PUBLISHED, STL)

DELTA = Metric("Δm", higher=False, unit="%", digits=2)


@dataclass(frozen=True)
class Reference:
    """Values by metric: of the seeds that have their own, and what counts for every other seed. ``words`` say whose."""

    words: str
    usual: Mapping[str, float]
    by_seed: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def delta(self, seed: int, values: Mapping[str, Any], metrics: Sequence[Metric]) -> float:
        """Δm of what a run with this seed gave; NaN where it lacks a number."""
        return delta_m(_numbers(values, metrics), self.by_seed.get(seed, self.usual), metrics)

    def told(self, seeds: Iterable[int]) -> str:
        """What runs with these seeds are compared with."""
        if not self.by_seed:
            return self.words
        lacking = sorted(set(seeds) - self.by_seed.keys())
        plural = "s" if len(lacking) > 1 else ""
        mean = f", and with seed{plural} {', '.join(map(str, lacking))}, which {self.words} lacks, against its mean"
        return f"{self.words} with the same seed{mean if lacking else ''}"


def single_reference(label: str, by_seed: Mapping[int, Mapping[str, Any]], metrics: Sequence[Metric]) -> Reference | None:
    """That of single-task runs; a seed with which one of them gave no number counts as one that is not there."""
    numbers = {seed: _numbers(values, metrics) for seed, values in by_seed.items()}
    whole = {seed: values for seed, values in numbers.items() if all(map(math.isfinite, values.values()))}
    if not whole:
        return None
    means = {name: sum(values[name] for values in whole.values()) / len(whole) for name in next(iter(whole.values()))}
    return Reference(label, means, whole)


def published_reference(published: Published | None) -> Reference | None:
    """That of a paper, if it names one."""
    if published is None or published.reference is None:
        return None
    return Reference(f"{published.reference} in {published.source}", published.rows[published.reference])


def why_unusable(reference: Reference, bench: type[Benchmark]) -> str | None:
    """Why there is no Δm against a reference, as the end of a sentence; None if there is."""
    if not has_task_metrics(bench):
        return f"{bench.name} has no metric that belongs to a task"
    for values in (reference.usual, *reference.by_seed.values()):
        for metric in bench.metrics:
            if metric.task is None:
                continue
            if metric.name not in values:
                return f"its reference, {reference.words}, has no {metric.name}"
            if not round(values[metric.name], metric.digits):
                return f"in its reference, {reference.words}, {metric.name} is zero"
    return None


def _numbers(values: Mapping[str, Any], metrics: Sequence[Metric]) -> dict[str, float]:
    """The metrics of tasks; NaN for one that is missing or null."""
    found = {metric.name: values.get(metric.name) for metric in metrics if metric.task is not None}
    return {name: math.nan if value is None else float(value) for name, value in found.items()}
