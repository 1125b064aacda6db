"""What several pages have: the metrics of rows, paired differences between variants, places of figures, what is missing."""

import math
from collections.abc import Iterable, Mapping, Sequence

from moonopt.bench import Metric
from moonopt.runs.report.drawing import Plot
from moonopt.runs.report.study import Row
from studies.entries import NOT_RUN, average, difference, entry, markdown, minus, rate, seeds
from studies.results import Results, Variant
from studies.verdicts import Gap

NOTHING = f"{NOT_RUN.capitalize()}."


def metrics_table(rows: Mapping[str, Row | None], metrics: Sequence[Metric]) -> str:
    """Rate, seeds and metrics by name; the best mean of several is bold, and one model per task does not compete."""
    competing = [name for name, row in rows.items() if row is not None and not row.is_single]
    best = {metric: best_of([average(rows[name], metric.name) for name in competing], metric.higher) for metric in metrics}
    lines = []
    for name, row in rows.items():
        found = [NOT_RUN, *[""] * (len(metrics) - 1)] if row is None else []
        for metric in metrics if row is not None else ():
            text = entry(row, metric.name, metric.digits, absent="no number")
            found.append(f"**{text}**" if name in competing and average(row, metric.name) == best[metric] else text)
        lines.append([name, rate(row), seeds(row), *found])
    return markdown(["", "rate", "seeds", *(metric.heading for metric in metrics)], lines)


def differences_table(results: Results, pairs: Iterable[tuple[Variant, Variant]], metrics: Sequence[Metric]) -> str:
    """A line for every metric of every pair of which both were run; the first is better if the whole interval says so."""
    lines = []
    for first, other in pairs:
        for metric in metrics:
            gap = Gap(first, other, metric.name, (0, math.inf) if metric.higher else (-math.inf, 0))
            if (found := results.compare(first, other, metric.name)) is not None:
                lines.append([minus(first, other), metric.heading, *difference(found, metric.digits), gap.verdict(found)])
    heading = ["difference of", "in", "mean", "95 % interval", "p", "seeds", "the first is better"]
    return markdown(heading, lines) if lines else NOTHING


def figures(names: Iterable[str], drawn: Iterable[Plot]) -> dict[str, str]:
    """The places of figures, of which some may not have been drawn."""
    titles = {plot.name: plot.title for plot in drawn}
    return {name: f"![{titles[name]}](images/{name}.svg)" if name in titles else NOTHING for name in names}


def missing(found: Mapping[str, Sequence[str]]) -> str:
    """A line for everything of which something is missing."""
    return "\n".join(f"- {what}: {', '.join(names)}" for what, names in found.items() if names) or "Nothing."


def best_of(values: Iterable[float], higher: bool) -> float | None:
    """Of several; one alone is no best."""
    found = [value for value in values if math.isfinite(value)]
    return (max if higher else min)(found) if len(found) > 1 else None
