"""Is the first method better than the others? A paired t-test over the seeds that both have, adjusted by Holm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moonopt.runs.report.layout import DASH, Column, Entry, Table, TableRow
from moonopt.runs.report.study import Row, Study

FEWEST_SEEDS = 2
CONFIDENCE = 0.95

#: Differences that vary by no more than this, relative to the values that they are of, are equal but for rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Comparison:
    """The first row against another: the mean difference with its 95% interval, and p, before and after Holm."""

    first: str
    other: str
    seeds: Sequence[int]
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    adjusted_p: float | None = None
    note: str = ""


def compare_rows(study: Study, metric: str | None = None) -> list[Comparison]:
    """The first row against each other one in a metric, by default the headline."""
    if not study.rows:
        return []
    first, *others = study.rows
    found = [_compare(first, other, metric or study.headline.name) for other in others]
    tested = [each.p for each in found if each.p is not None]
    adjusted = iter(holm(tested))
    return [each if each.p is None else replace(each, adjusted_p=next(adjusted)) for each in found]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment: the k-th smallest of n is multiplied by n - k + 1, and none may be below the one before.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def comparison_table(study: Study) -> Table:
    """The comparisons of a study."""
    metric, found = study.headline, compare_rows(study)
    columns = [
        Column("mean difference"),
        Column("95% interval"),
        Column("p", False),
        Column("p (Holm)", False),
        Column("seeds"),
        Column("note", numeric=False),
    ]
    rows = [TableRow(f"{each.first} vs {each.other}", _entries(each), len(each.seeds)) for each in found]
    better = "above" if metric.higher else "below"
    notes = [
        f"Differences of {metric.name}, first minus second, between runs of one seed; {better} zero, the first is better. "
        "Two-sided paired t test; p is adjusted by Holm over the comparisons here, and bold below 0.05."
    ]
    return Table("Paired test over seeds", "comparison", columns, rows, notes)


def _compare(first: Row, other: Row, metric: str) -> Comparison:
    ours, theirs = first.values(metric), other.values(metric)
    common = sorted(ours.keys() & theirs.keys())
    seeds = [seed for seed in common if math.isfinite(ours[seed]) and math.isfinite(theirs[seed])]
    dropped = f"without seeds {', '.join(str(seed) for seed in common if seed not in seeds)}: not finite"
    note = dropped if len(seeds) < len(common) else ""
    comparison = Comparison(first.label, other.label, seeds, note=note)
    if not seeds:
        missing = next((row.label for row, found in ((first, ours), (other, theirs)) if not found), None)
        return replace(comparison, note=note or ("no common seeds" if missing is None else f"{missing} has no {metric}"))
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    comparison = replace(comparison, difference=sum(differences) / len(differences))
    if len(seeds) < FEWEST_SEEDS:
        return _noted(comparison, f"too few seeds: a test needs {FEWEST_SEEDS} that both have")
    largest = max(abs(found[seed]) for found in (ours, theirs) for seed in seeds)
    if max(differences) - min(differences) <= ROUNDING * largest:
        same = comparison.difference
        return _noted(replace(comparison, low=same, high=same), "equal differences with every seed: no test")
    from scipy import stats  # type: ignore[import-untyped]  # slow to import, and only needed here

    test = stats.ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(CONFIDENCE)
    return replace(comparison, low=float(interval.low), high=float(interval.high), p=float(test.pvalue))


def _noted(comparison: Comparison, note: str) -> Comparison:
    return replace(comparison, note="; ".join(filter(None, [comparison.note, note])))


def _entries(comparison: Comparison) -> list[Entry]:
    c = comparison
    significant = c.adjusted_p is not None and c.adjusted_p < 1 - CONFIDENCE
    interval = DASH if c.low is None else f"{c.low:+.3g} to {c.high:+.3g}"
    return [
        Entry(DASH if c.difference is None else f"{c.difference:+.3g}", c.difference),
        Entry(interval, c.low),
        Entry(DASH if c.p is None else f"{c.p:.2g}", c.p),
        Entry(DASH if c.adjusted_p is None else f"{c.adjusted_p:.2g}", c.adjusted_p, best=significant),
        Entry(str(len(c.seeds)), len(c.seeds)),
        Entry(c.note or DASH),
    ]
