"""Every table of the page, and the places of its figures."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from moonopt.bench.metrics import delta_m
from moonopt.bench.paper import QM9, QM9_METRICS, QM9_STL
from moonopt.runs.report.drawing import Plot
from moonopt.runs.report.study import Row
from moonopt.runs.report.tables import mean_and_spread, shown
from studies.entries import NOT_MEASURED, NOT_RUN, average, difference, entry, markdown, minus, rate, seeds, variant
from studies.qm9.figures import FIGURES
from studies.qm9.results import BESIDE, BETAS, DELTA, IN_PROTOCOL, LOSSES, OTHERS, PLAIN, ROBUST, SCHEDULE, TUNED, Stage, Stages
from studies.qm9.speed import speed_table, speed_target
from studies.results import SEEDS, Tuning, Variant, setting
from studies.tables import NOTHING, best_of, figures, missing
from studies.tuning import by_rate, scores
from studies.verdicts import FAILS, HOLDS, UNCLEAR, Gap

#: Δm that MOON is to reach in the protocol: the paper's own.
GOAL = QM9.delta_m["moon"]
#: The rows of the main table.
MAIN = (PLAIN, ROBUST, *OTHERS)
#: That the first has the lower Δm, by whether it holds.
BETTER = {HOLDS: "the first", FAILS: "the other", UNCLEAR: UNCLEAR}
DIGITS = {DELTA: 1, **{metric.name: metric.digits for metric in QM9_METRICS}}


def tables(stages: Stages, drawn: Iterable[Plot]) -> dict[str, str]:
    """As Markdown, by their names in the page."""
    return {
        "summary": _summary(stages.budget),
        "target": f"{_target(stages.protocol)}\n\n{speed_target(stages.speed)}",
        "tuning": _tuning(stages.tuning),
        "earlier": _earlier(stages.earlier),
        "budget": _budget(stages.budget),
        "main": _errors(stages.budget, MAIN),
        "profile": _profile(stages.budget),
        "relative": _relative(stages.budget),
        "differences": _differences(stages.budget),
        "protocol": _errors(stages.protocol, IN_PROTOCOL),
        "order": _order(stages.protocol),
        "beta": _sweep(stages.sweep),
        "speed": speed_table(stages.speed),
        "missing": _missing(stages),
        **figures(FIGURES, drawn),
    }


def _target(protocol: Stage) -> str:
    told = []
    for which in (PLAIN, ROBUST):
        row = protocol.row(*which)
        verdict = "reached" if average(row, DELTA) <= GOAL else "not reached"
        count = "one seed" if seeds(row) == "1" else f"{seeds(row)} seeds"
        found = NOT_RUN if row is None else f"{entry(row, DELTA, 1)} ({count}): **{verdict}**"
        told.append(f"{variant(*which)} {found}")
    goal = f"The target is a Δm of at most {GOAL} for MOON in the protocol of {protocol.epochs} epochs."
    return f"{goal} {'; '.join(told)}."


def _tuning(tuning: Mapping[str, Tuning]) -> str:
    """A table per length of trials and grid: those of Adam and of Muon differ."""
    tables: dict[tuple[str, *tuple[float, ...]], dict[str, Mapping[float, str]]] = {}
    for name, each in tuning.items():
        for method, by_score in scores(each, lambda score: f"{100 * (score - 1):.1f}").items():
            apart = Stage.tuned_apart.get(name)
            label = method if apart is None else variant("moon", apart)
            tables.setdefault((_length(each), *sorted(by_score)), {})[label] = by_score
    notes = [f"`tuned-{name}.json`: {note}." for name, each in tuning.items() for note in each["notes"]]
    told = " ".join(notes) or "No choice is at the edge of its grid."
    return "\n\n".join([*(f"{key[0]}{by_rate(found)}" for key, found in tables.items()), told]) if tables else NOTHING


def _length(tuning: Tuning) -> str:
    """What stands above a table of trials: their epochs, if the command that made them tells."""
    found = re.search(r"train\.epochs=(\d+)", tuning.get("command", ""))
    return f"{found[1]} epochs:\n\n" if found else ""


def _earlier(rounds: Mapping[str, Stage]) -> str:
    """Their trials, and what came of their choices."""
    told = []
    for name, stage in rounds.items():
        labelled = [(variant(row.method, stage.changes(row)), row) for row in stage.study.rows]
        rows = [[label, rate(row), seeds(row), entry(row, DELTA, 1)] for label, row in labelled]
        told.append(f"`{name}`:")
        if stage.tuning:
            told.append(_tuning(stage.tuning))
        if rows:
            told.append(f"{_budget(stage)}\n\n{markdown(['', 'rate', 'seeds', 'Δm (%)'], rows)}")
    return "\n\n".join(told) or NOTHING


def _budget(budget: Stage) -> str:
    if not budget.study.rows:
        return f"{budget.epochs} epochs: {NOT_RUN}."
    schedules = sorted({setting(row, SCHEDULE) for row in budget.study.rows})
    return f"{budget.epochs} epochs, `train.schedule={', '.join(schedules)}`."


def _errors(stage: Stage, variants: Sequence[Variant]) -> str:
    """Those that were run, the best of a column bold, and below each the paper's as printed."""
    rows = [(each, row) for each in variants if (row := stage.row(*each)) is not None]
    if not rows:
        return NOTHING
    best = {metric: best_of([average(row, metric) for _, row in rows], higher=False) for metric in DIGITS}
    lines = []
    for (method, changes), row in rows:
        lines.append([variant(method, changes), rate(row), seeds(row), *_entries(row, best)])
        if method in QM9.rows and not changes:
            lines.append(["*paper*", "", "", *(str(number) for number in [QM9.delta_m[method], *QM9.rows[method].values()])])
    lines.append(["*STL, published*", "", "", "0", *map(str, QM9_STL.values())])
    units = [f"{metric.name} ({metric.unit})" for metric in QM9_METRICS]
    return markdown(["", "rate", "seeds", "Δm (%)", *units], lines)


def _entries(row: Row, best: Mapping[str, float | None]) -> list[str]:
    found = {metric: entry(row, metric, digits, absent="no number") for metric, digits in DIGITS.items()}
    return [f"**{text}**" if average(row, metric) == best[metric] else text for metric, text in found.items()]


def _summary(stage: Stage) -> str:
    """Δm of all rows, the best first, and how much of the table that is."""
    found = _ranked(stage, MAIN)
    if not found:
        return NOTHING
    told = ", ".join(f"{name} {entry(row, DELTA, 1)}" for name, row in found.items())
    return f"Δm (%) after {stage.epochs} epochs, lower is better, {len(found)} of {len(MAIN)} rows: {told}."


def _profile(stage: Stage) -> str:
    """How much of Δm comes from the task that it is made of most, for MOON and in the paper's row."""
    if (row := stage.row(*PLAIN)) is None:
        return NOTHING
    ours = _points({metric.name: average(row, metric.name) for metric in QM9_METRICS})
    theirs = _points(QM9.rows["moon"])
    most = max(ours, key=lambda task: ours[task])
    whole, paper = sum(ours.values()), sum(theirs.values())
    return (
        f"Of the {whole:.1f} points of `moon` {most} alone gives {ours[most]:.1f}, of the {paper:.1f} that the errors of the "
        f"paper's row make it gives {theirs[most]:.1f}: without it {whole - ours[most]:.1f} are left here and "
        f"{paper - theirs[most]:.1f} there. A Δm near the paper's is no reproduction of its errors."
    )


def _relative(stage: Stage) -> str:
    """How far the errors are from Muon's with the same seed, as a mean over the tasks: no task counts more than another."""
    if (reference := stage.row("muon")) is None:
        return NOTHING
    by_seed, lines = {each.seed: each.metrics for each in reference.outcomes}, []
    for name, row in stage.named(each for each in MAIN if each[0] != "muon").items():
        paired = [(each.metrics, by_seed[each.seed]) for each in row.outcomes if each.seed in by_seed]
        means = [fmean(100 * (ours[task] / theirs[task] - 1) for task in QM9_STL) for ours, theirs in paired]
        if means:
            lines.append([name, str(len(means)), shown(*mean_and_spread(means), 1).text])
    return markdown(["", "seeds", "errors relative to Muon's (%)"], lines) if lines else NOTHING


def _points(errors: Mapping[str, float]) -> dict[str, float]:
    """What each task adds to Δm."""
    return {metric.name: delta_m(errors, QM9_STL, [metric]) / len(QM9_METRICS) for metric in QM9_METRICS}


def _differences(stage: Stage) -> str:
    lines = []
    for first, others in ((PLAIN, OTHERS), (ROBUST, [PLAIN, *OTHERS])):
        for other in others:
            paper = QM9.delta_m[first[0]] - QM9.delta_m[other[0]] if first is PLAIN and other[0] in QM9.delta_m else None
            gap = Gap(first, other, DELTA, (-math.inf, 0), paper)
            if (found := stage.compare(first, other, DELTA)) is not None:
                theirs = "" if paper is None else f"{paper:+.1f}"
                lines.append([minus(first, other), *difference(found, 1), theirs, BETTER[gap.verdict(found)]])
    heading = ["difference of", DELTA, "95 % interval", "p", "seeds", "paper", "who is better"]
    return markdown(heading, lines) if lines else NOTHING


def _order(stage: Stage) -> str:
    """The variants of the protocol by Δm."""
    told = ", ".join(f"{name} {average(row, DELTA):.1f}" for name, row in _ranked(stage, IN_PROTOCOL).items())
    return f"In the order of Δm: {told}." if told else NOTHING


def _ranked(stage: Stage, variants: Sequence[Variant]) -> dict[str, Row]:
    """Those that were run, the least Δm first."""
    return dict(sorted(stage.named(variants).items(), key=lambda item: average(item[1], DELTA)))


def _sweep(sweep: Stage) -> str:
    lines = [[f"loss={loss}", *(entry(sweep.moon(loss, beta), DELTA, 1) for beta in BETAS)] for loss in LOSSES]
    without = [f"{name} {entry(sweep.row(name), DELTA, 1)}" for name in BESIDE]
    return f"{markdown(['beta', *map(str, BETAS)], lines)}\n\nBeside it: {', '.join(without)}."


def _missing(stages: Stages) -> str:
    budget = stages.budget
    rows = {variant(*each): budget.row(*each) for each in MAIN}
    tuned = {name for found in stages.tuning.values() for name in found["chosen"]} - {"moon"}
    tuned |= {variant(*each) for each, file in ((PLAIN, "moon"), (ROBUST, "moon-log-auto")) if file in stages.tuning}
    sweep = [f"beta={beta} loss={loss}" for loss in LOSSES for beta in BETAS if stages.sweep.moon(loss, beta) is None]
    found = {
        "not tuned yet": [name for name in (variant(*PLAIN), variant(*ROBUST), *TUNED) if name not in tuned],
        f"{budget.epochs} epochs, {NOT_RUN}": [name for name, row in rows.items() if row is None],
        f"{budget.epochs} epochs, fewer than {SEEDS} seeds": [
            f"{name} ({seeds(row)})" for name, row in rows.items() if row is not None and len(row.outcomes) < SEEDS
        ],
        f"{stages.protocol.epochs} epochs, {NOT_RUN}": [
            variant(*each) for each in IN_PROTOCOL if stages.protocol.row(*each) is None
        ],
        f"sweep, {NOT_RUN}": sweep,
        f"speed, {NOT_MEASURED}": [] if stages.speed else ["the two forms of the network"],
    }
    return missing(found)
