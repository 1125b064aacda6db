"""The results of a study as a paper has them: mean and deviation over seeds, the best bold, Δm, published rows beside."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moonopt.bench import Metric, Published, delta_m
from moonopt.errors import UserError, unknown_name
from moonopt.runs.report.layout import DASH, PLUS_MINUS, Column, Entry, Table, TableRow, to_csv, to_latex, to_markdown
from moonopt.runs.report.study import STL, Row, Study

__all__ = ["Column", "Entry", "Table", "TableRow", "results_table", "to_csv", "to_latex", "to_markdown"]

REFERENCES = ("published", STL)

#: With more columns than this, summaries and Δm come first, where they are seen.
MANY_METRICS = 10

DELTA = Metric("Δm", higher=False, unit="%", digits=2)


def results_table(study: Study, reference: str | None = None) -> Table:
    """Mean ± standard deviation of every metric for every row, with a paper's own numbers below the row of their method.

    Args:
        study: of one benchmark.
        reference: what Δm refers to, "published" or "stl"; None takes ``stl`` if it was run, else what is published. Without
            either there is no Δm.

    """
    words, values = _reference(study, reference)
    metrics = [*study.benchmark.metrics, *([] if values is None else [DELTA])]
    if len(metrics) > MANY_METRICS:
        metrics.sort(key=lambda metric: metric.task is not None)
    rows = []
    for row in study.rows:
        entries = [_entry(_numbers(row, metric, study, values), metric, len(row.outcomes)) for metric in metrics]
        rows.append(TableRow(row.label, entries, len(row.outcomes)))
    rows = _with_best(rows, [index for index, row in enumerate(study.rows) if row.method != STL], metrics)
    if study.benchmark.published is not None:
        rows = _with_published(rows, [row.method for row in study.rows], study.benchmark.published, metrics)
    rows = [replace(row, entries=[*row.entries, _seeds(row)]) for row in rows]
    columns = [Column(metric.heading, metric.higher) for metric in metrics]
    return Table(study.name, "method", [*columns, Column("seeds")], rows, _notes(study, words, values is not None))


def mean_and_spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation (ddof = 1); of one value there is no deviation, of none no mean.

    >>> mean_and_spread([1.0, 3.0])
    (2.0, 1.4142135623730951)
    >>> mean_and_spread([1.0])
    (1.0, None)
    """
    if not values:
        return None, None
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(sum((value - mean) * (value - mean) for value in values) / (len(values) - 1))


def shown(mean: float | None, spread: float | None, digits: int) -> Entry:
    """A mean with its deviation, as a table has it."""
    if mean is None:
        return Entry(DASH)
    if not math.isfinite(mean):
        return Entry("NaN" if math.isnan(mean) else str(mean), mean)
    text = f"{mean:.{digits}f}"
    return Entry(text if spread is None else f"{text}{PLUS_MINUS}{spread:.{digits}f}", mean, spread)


def _reference(study: Study, name: str | None) -> tuple[str, Mapping[str, float] | None]:
    """What Δm refers to, in words, and its values; none if a number is missing, or so near zero that it is shown as zero."""
    if name not in (*REFERENCES, None):
        raise UserError(unknown_name(name, REFERENCES, "reference for Δm"))
    counted = [metric for metric in study.benchmark.metrics if metric.task is not None]
    found: dict[str, tuple[str, Mapping[str, float]]] = {}
    single = next((row for row in study.rows if row.method == STL), None)
    if single is not None:
        means = {metric.name: mean_and_spread(list(single.values(metric.name).values()))[0] or 0.0 for metric in counted}
        found[STL] = f"the mean of the {single.label} runs here", means
    published = study.benchmark.published
    if published is not None and published.reference is not None:
        found["published"] = f"{published.reference} in {published.source}", published.rows[published.reference]
    chosen = name or next((each for each in (STL, "published") if each in found), "")
    words, values = found.get(chosen, (chosen, {}))
    usable = counted and all(round(values.get(metric.name, 0.0), metric.digits) for metric in counted)
    return words, values if usable else None


def _numbers(row: Row, metric: Metric, study: Study, reference: Mapping[str, float] | None) -> list[float]:
    """A metric of every seed; Δm of stl, which others are compared with, is none."""
    if metric is not DELTA or reference is None:
        return list(row.values(metric.name).values())
    metrics = study.benchmark.metrics
    complete = [{each.name: outcome.metrics.get(each.name, math.nan) for each in metrics} for outcome in row.outcomes]
    return [] if row.method == STL else [delta_m(values, reference, metrics) for values in complete]


def _seeds(row: TableRow) -> Entry:
    return Entry(DASH) if row.published else Entry(str(row.seeds), row.seeds)


def _entry(values: Sequence[float], metric: Metric, seeds: int) -> Entry:
    """The mean of the values; how many there are is said where it is not the number of seeds."""
    found = shown(*mean_and_spread(values), metric.digits)
    return Entry(f"{found.text} (n={len(values)})", found.value, found.spread) if 0 < len(values) < seeds else found


def _with_best(rows: Sequence[TableRow], eligible: Sequence[int], metrics: Sequence[Metric]) -> list[TableRow]:
    """The rows with the best finite mean of each column marked, and what is shown as equal to it, if there are several."""
    best: set[tuple[int, int]] = set()
    for column, metric in enumerate(metrics):
        values = {index: rows[index].entries[column].value for index in eligible}
        finite = {index: value for index, value in values.items() if value is not None and math.isfinite(value)}
        if len(finite) > 1:
            top = round((max if metric.higher else min)(finite.values()), metric.digits)
            best |= {(index, column) for index, value in finite.items() if round(value, metric.digits) == top}
    return [
        replace(row, entries=[replace(each, best=(index, column) in best) for column, each in enumerate(row.entries)])
        for index, row in enumerate(rows)
    ]


def _with_published(
    rows: Sequence[TableRow], methods: Sequence[str], published: Published, metrics: Sequence[Metric]
) -> list[TableRow]:
    """A paper's rows: each below the last of its method, those of methods that were not run at the end."""
    theirs = {}
    for name in dict.fromkeys([*published.rows, *(published.delta_m if DELTA in metrics else ())]):
        numbers = {**published.rows.get(name, {}), DELTA.name: published.delta_m.get(name)}
        entries = [shown(numbers.get(metric.name), None, metric.digits) for metric in metrics]
        theirs[name.casefold()] = TableRow(name, entries, published=True)
    result: list[TableRow] = []
    for index, row in enumerate(rows):
        result.append(row)
        if methods[index] not in methods[index + 1 :] and methods[index].casefold() in theirs:
            result.append(theirs.pop(methods[index].casefold()))
    return [*result, *theirs.values()]


def _notes(study: Study, reference: str, has_delta: bool) -> list[str]:
    left_out = [f"Not in the table: {'; '.join(study.left_out)}."] if study.left_out else []
    if not study.rows:
        return ["No run is finished.", *left_out]
    outcomes = [outcome for row in study.rows for outcome in row.outcomes]
    rules = sorted({_rule(str((run.result or {}).get("selection", ""))) for each in outcomes for run in each.runs} - {""})
    several = any(len(row.outcomes) > 1 for row in study.rows)
    notes = ["Mean ± sample standard deviation (ddof = 1) over seeds." if several else "One seed: no standard deviation."]
    single = any(row.method == STL for row in study.rows)
    notes[0] += " The best mean is bold" + (" (stl, one model per task, does not compete)." if single else ".")
    notes += [f"Which evaluation counts: {'; '.join(rules)}."] if rules else []
    if has_delta:
        notes.append(f"Δm is the mean relative loss against {reference}, in percent over the metrics of tasks.")
    elif reference:
        notes.append(f"No Δm: in its reference, {reference}, a metric is missing or rounds to zero.")
    published = study.benchmark.published
    if published is not None:
        notes.append(f"Rows marked as the paper's are copied from {published.source}, its Δm with its own reference.")
    return notes + left_out


def _rule(selection: str) -> str:
    """A selection without the epoch that it led to: "epoch 7 of 8, the best on validation data"."""
    return re.sub(r"^epochs? [^,]*, ", "", selection).rstrip(".")
