"""Every table of the page, and the places of its figures."""

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

from moonopt.bench.math_rl import MathRL
from moonopt.bench.text.rewards import REWARDS
from moonopt.runs.report.drawing import Plot
from moonopt.runs.report.study import Row, number
from studies.entries import NOT_MEASURED, NOT_RUN, average, markdown, variant
from studies.figures import steps_per_epoch
from studies.math_rl.figures import FIGURES, OBJECTIVES, sampled_row
from studies.math_rl.results import METHODS, MOON, OTHERS, Language
from studies.math_rl.speed import sampling_table, speed_table, speed_target
from studies.results import RATE, setting
from studies.tables import NOTHING, differences_table, figures, metrics_table, missing
from studies.verdicts import UNCLEAR

START = "the model as it was"
#: All but the share of responses below the running mean, which every run has of its own.
METRICS = tuple(metric for metric in MathRL.metrics if metric.name != "shorter")
COMPARED = tuple(metric for metric in METRICS if metric.name != "ended")
DIGITS = {metric.name: metric.digits for metric in METRICS}
REWARD = MathRL.headline

#: Accuracy has collapsed when less than this share of it is left.
LEFT = 0.5
#: What must have become of an objective from the first evaluation to the last; None where that cannot be told.
CLAIMS: Mapping[str, tuple[str, Callable[[float, float], bool | None]]] = {
    "clarity rises": ("clarity", lambda first, last: last > first),
    "length falls": ("length", lambda first, last: last < first),
    "accuracy does not collapse": ("accuracy", lambda first, last: last >= LEFT * first if first else None),
}
VERDICTS: Mapping[bool | None, str] = {True: "yes", False: "no", None: UNCLEAR}
#: Lines at the end of training of which the samples are told.
LATE = 10


def tables(results: Language, drawn: Iterable[Plot]) -> dict[str, str]:
    """As Markdown, by their names in the page."""
    main = {method: results.row(method) for method in METHODS}
    return {
        "target": f"{_claims(results)}\n\n{speed_target(results.speed)}",
        "settings": _settings(results),
        "change": _change(results),
        "test": metrics_table({START: results.start, **main}, METRICS),
        "order": _order(results),
        "differences": differences_table(results, [(MOON, other) for other in OTHERS], COMPARED),
        "sampled": _sampled(results),
        "others": _others(results),
        "speed": speed_table(results.speed),
        "sampling": sampling_table(results.sampling),
        "missing": _missing(results),
        **figures(FIGURES, drawn),
    }


def _claims(results: Language) -> str:
    """With which methods each holds, by the mean over seeds."""
    rows = results.rows(METHODS)
    lines = []
    for says, (metric, holds) in CLAIMS.items():
        seen = {row.method: holds(*_ends(row, metric)) for row in rows}
        by_verdict = {wanted: [method for method, found in seen.items() if found is wanted] for wanted in VERDICTS}
        words = {True: "with", False: "not with", None: f"it {UNCLEAR}, since it was 0 at first, of"}
        found = "; ".join(f"{words[wanted]} {', '.join(names)}" for wanted, names in by_verdict.items() if names)
        lines.append(f"- {says.capitalize()}: {found or NOT_RUN}.")
    return "\n".join(lines)


def _ends(row: Row, metric: str) -> tuple[float, float]:
    """The first and the last evaluation on validation data, each a mean over seeds."""
    ends = [[number(outcome.evaluation[end]["valid"][metric]) for outcome in row.outcomes] for end in (0, -1)]
    return fmean(ends[0]), fmean(ends[1])


def _settings(results: Language) -> str:
    rows = results.rows(METHODS)
    if not rows:
        return NOTHING
    keys = ("model.folder", "data.set", "data.length", "data.samples", "train.batch_size", "train.select")
    told = [f"`{key}={', '.join(sorted({str(setting(row, key)) for row in rows}))}`" for key in keys]
    updates = sorted({int((outcome.runs[0].result or {})["steps"]) for row in rows for outcome in row.outcomes})
    first = sorted({int(outcome.evaluation[0]["step"]) for row in rows for outcome in row.outcomes})
    return f"{_either(updates)} updates; the first evaluation is after {_either(first)}. {', '.join(told)}."


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def _change(results: Language) -> str:
    """First and last evaluation, and after how many updates the selected one was, by seed."""
    lines = []
    for row in results.rows(METHODS):
        ends = {metric: _ends(row, metric) for metric in (*OBJECTIVES, REWARD)}
        told = [_arrow(*found, DIGITS[metric]) for metric, found in ends.items()]
        verdicts = [VERDICTS[holds(*ends[metric])] for metric, holds in CLAIMS.values()]
        epochs = [int((outcome.runs[0].result or {})["epoch"]) for outcome in row.outcomes]
        selected = ", ".join(f"{epoch * steps_per_epoch(row):.0f}" for epoch in epochs)
        lines.append([row.method, *told, *verdicts, selected])
    return markdown(["", *OBJECTIVES.values(), REWARD, *CLAIMS, "selected after"], lines) if lines else NOTHING


def _arrow(first: float, last: float, digits: int) -> str:
    return f"{first:.{digits}f} → {last:.{digits}f}"


def _order(results: Language) -> str:
    """The methods by reward."""
    found = {row.method: average(row, REWARD) for row in results.rows(METHODS)}
    told = [f"{name} {found[name]:.4f}" for name in sorted(found, key=lambda name: -found[name])]
    return f"In the order of reward on test data: {', '.join(told)}." if told else NOTHING


def _sampled(results: Language) -> str:
    """What was measured of samples at first and at last, and how often a reward was silent."""
    lines = []
    for row in results.rows(METHODS):
        found = [[line["valid"] for line in outcome.evaluation] for outcome in sampled_row(row).outcomes]
        if not all(found):
            continue
        first = {name: fmean(each[0][name] for each in found) for name in OBJECTIVES}
        last = {name: fmean(line[name] for each in found for line in each[-LATE:]) for name in OBJECTIVES}
        silent = [f"{fmean(line[f'silent {name}'] for each in found for line in each):.2f}" for name in REWARDS]
        lines.append([row.method, *(_arrow(first[name], last[name], DIGITS[name]) for name in OBJECTIVES), *silent])
    heading = ["", *OBJECTIVES.values(), *(f"silent: {name}" for name in REWARDS)]
    return markdown(heading, lines) if lines else NOTHING


def _others(results: Language) -> str:
    """Runs at other rates, and with other settings."""
    rows = {variant(row.method, changes): row for row in results.study.rows if (changes := results.changes(row))}
    return metrics_table(rows, METRICS) if rows else NOTHING


def _missing(results: Language) -> str:
    rows = {method: results.row(method) for method in METHODS}
    rates = {row.method for row in results.study.rows if RATE in results.changes(row)}
    found = {
        NOT_RUN: [*([START] if results.start is None else []), *(method for method, row in rows.items() if row is None)],
        f"another rate, {NOT_RUN}": [method for method in METHODS if method not in rates],
        "one seed": [method for method, row in rows.items() if row is not None and len(row.outcomes) == 1],
        f"speed, {NOT_MEASURED}": [
            *([] if results.speed else ["a step with 1.7 billion parameters"]),
            *([] if results.sampling else ["sampling"]),
        ],
    }
    return missing(found)
