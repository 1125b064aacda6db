"""The results of a study as a paper has them: mean and deviation over seeds, the best bold, Δm, published rows beside."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from moonopt.bench import Benchmark, Metric, Published
from moonopt.errors import UserError, unknown_name
from moonopt.runs.report.delta import (
    DELTA,
    PUBLISHED,
    REFERENCES,
    Reference,
    published_reference,
    single_reference,
    why_unusable,
)
from moonopt.runs.report.layout import DASH, PLUS_MINUS, Column, Entry, Table, TableRow, to_csv, to_latex, to_markdown
from moonopt.runs.report.repeat import made_differently
from moonopt.runs.report.study import Row, Study
from moonopt.runs.single import STL, has_task_metrics, is_single

__all__ = ["Column", "Entry", "Table", "TableRow", "check_reference", "results_table", "to_csv", "to_latex", "to_markdown"]

#: With more columns than this, summaries and Δm come first, where they are seen.
MANY_METRICS = 10
#: How the best of a column are marked, where there is bold.
BEST = "The best mean is bold"


def check_reference(name: str | None, bench: type[Benchmark], methods: Sequence[str]) -> None:
    """Raises ``UserError`` if runs of these methods cannot be compared with what Δm shall refer to."""
    _check_name(name)
    if name == PUBLISHED and published_reference(bench.published) is None:
        raise UserError(f"Δm cannot refer to what is published: moonopt has no published reference for {bench.name}.")
    if name == STL and not any(map(is_single, methods)):
        raise UserError(f"Δm against {STL} needs {STL} among the methods, found {', '.join(methods) or 'none'}.")


def results_table(study: Study, reference: str | None = None) -> Table:
    """Mean ± standard deviation of every metric for every row, with a paper's own numbers below the row of their method.

    Args:
        study: of one benchmark.
        reference: what Δm refers to, "published" or "stl"; None takes ``stl`` if it was run, else what is published, unless
            the data are made up. Without either there is no Δm.

    """
    against, about_delta = _reference(study, reference)
    metrics = [*study.benchmark.metrics, *([] if against is None else [DELTA])]
    if len(metrics) > MANY_METRICS:
        metrics.sort(key=lambda metric: metric.task is not None)
    rows = []
    for row in study.rows:
        entries = [_entry(_numbers(row, metric, study, against), metric, len(row.outcomes)) for metric in metrics]
        rows.append(TableRow(row.label, entries, len(row.outcomes)))
    rows = _with_best(rows, [index for index, row in enumerate(study.rows) if not row.is_single], metrics)
    notes = _notes(study, about_delta, any(entry.best for row in rows for entry in row.entries))
    if study.benchmark.published is not None and not study.on_made_up_data:
        rows = _with_published(rows, [row.method for row in study.rows], study.benchmark.published, metrics)
    rows = [replace(row, entries=[*row.entries, _seeds(row)]) for row in rows]
    columns = [Column(metric.heading, metric.higher) for metric in metrics]
    return Table(study.name, "method", [*columns, Column("seeds")], rows, notes)


def _check_name(name: str | None) -> None:
    if name not in (*REFERENCES, None):
        raise UserError(unknown_name(name, REFERENCES, "reference for Δm"))


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
    text = f"{mean:z.{digits}f}"  # z: no -0.00
    return Entry(text if spread is None else f"{text}{PLUS_MINUS}{spread:.{digits}f}", mean, spread)


def _reference(study: Study, name: str | None) -> tuple[Reference | None, list[str]]:
    """What Δm refers to, None where there is no Δm, and what a note says about it, if anything."""
    _check_name(name)
    single = _single_reference(study)
    published = None if study.on_made_up_data else published_reference(study.benchmark.published)
    if name is None and single is None and published is None:
        return None, []
    reference = published if name == PUBLISHED or (name is None and single is None) else single
    why = _why_absent(study, name) if reference is None else why_unusable(reference, study.benchmark)
    if reference is None or why is not None:
        return None, [f"No Δm: {why}."]
    seeds = {outcome.seed for row in study.rows if not row.is_single for outcome in row.outcomes}
    return reference, [f"Δm is the mean relative loss in percent, over the metrics of tasks, against {reference.told(seeds)}."]


def _single_reference(study: Study) -> Reference | None:
    """That of ``stl``, plain if there is such a row, before that of ``stl`` over another optimizer."""
    rows = sorted((row for row in study.rows if row.is_single), key=lambda row: (row.method != STL, row.label != row.method))
    if not rows:
        return None
    by_seed = {outcome.seed: outcome.metrics for outcome in rows[0].outcomes}
    return single_reference(rows[0].label, by_seed, study.benchmark.metrics)


def _why_absent(study: Study, name: str | None) -> str:
    """Why there is no such reference at all, as the end of a sentence."""
    if not has_task_metrics(study.benchmark):
        return f"{study.benchmark.name} has no metric that belongs to a task"
    if name == PUBLISHED and study.on_made_up_data:
        return "made-up data cannot be set beside what is published"
    if name == PUBLISHED:
        return f"nothing is published for {study.benchmark.name} that it could refer to"
    return (
        f"no {STL} run here gave all its numbers" if any(row.is_single for row in study.rows) else f"there is no {STL} run here"
    )


def _numbers(row: Row, metric: Metric, study: Study, reference: Reference | None) -> list[float]:
    """A metric of every seed; Δm of a single-task method, which others are compared with, is none."""
    if metric is not DELTA or reference is None:
        return list(row.values(metric.name).values())
    if row.is_single:
        return []
    return [reference.delta(outcome.seed, outcome.metrics, study.benchmark.metrics) for outcome in row.outcomes]


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


def _notes(study: Study, about_delta: Sequence[str], has_best: bool) -> list[str]:
    left_out = [f"Not in the table: {'; '.join(study.left_out)}."] if study.left_out else []
    if not study.rows:
        return ["No run is finished.", *left_out]
    runs = study.runs
    rules = sorted({_rule(str((run.result or {}).get("selection", ""))) for run in runs} - {""})
    several = any(len(row.outcomes) > 1 for row in study.rows)
    notes = ["Mean ± sample standard deviation (ddof = 1) over seeds." if several else "One seed: no standard deviation."]
    single = [row.label for row in study.rows if row.is_single]
    apart = (
        f" ({' and '.join(single)}, one model per task, {'do' if len(single) > 1 else 'does'} not compete)" if single else ""
    )
    notes[0] += f" {BEST}{apart}." if has_best else ""
    notes += [f"All with {', '.join(study.shared)}."] if study.shared else []
    notes += [f"Which evaluation counts: {'; '.join(rules)}."] if rules else []
    notes += about_delta
    notes += made_differently(runs)
    published = study.benchmark.published
    if study.on_made_up_data:
        notes.append("The data were made up by `moonopt data make`: no number here can be set beside a published one.")
    elif published is not None:
        notes.append(f"Rows marked as the paper's are copied from {published.source}, its Δm with its own reference.")
    return notes + left_out


def _rule(selection: str) -> str:
    """A selection without the epoch that it led to: "epoch 7 of 8, the best on validation data"."""
    return re.sub(r"^epochs? [^,]*, ", "", selection).rstrip(".")
