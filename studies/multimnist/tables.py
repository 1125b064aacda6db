"""Every table of the page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moonopt.bench.paper import MULTIMNIST, MULTIMNIST_BETA, MULTIMNIST_COMPONENTS, MULTIMNIST_GAMMA
from moonopt.runs.report.study import Row
from studies.multimnist.claims import claims, claims_table, tests_table
from studies.multimnist.curves import STEPS, cosines, left_weights, mean
from studies.multimnist.efficiency import NOT_MEASURED, by_steps, by_time, losses_by_epoch, target
from studies.multimnist.entries import NOT_RUN, difference, entry, markdown, minus, rate, seeds, variant
from studies.multimnist.results import (
    ADDED,
    ALONE,
    AVERAGE,
    BETA,
    BETAS,
    COMPONENTS,
    GAMMA,
    GAMMAS,
    METRICS,
    PAPERS,
    RATE,
    SEEDS,
    Changes,
    Results,
    Variant,
    setting,
)

NAIVE = ("mgda", "mgda+muon", "famo", "famo+muon", "muon", "moon")
WEIGHTED = ("moon", "muon", "famo", "famo+muon", "mgda", "mgda+muon", "ls")


def tables(results: Results) -> dict[str, str]:
    """As Markdown, by their names in the page."""
    stated = claims(results)
    components = {name: results.row("moon", changes) for name, changes in COMPONENTS.values()}
    return {
        "target": target(results),
        "missing": _missing(results),
        "main": _accuracies({name: results.row(name) for name in (*PAPERS, "moon", *ADDED)}, MULTIMNIST.rows),
        "naive": _accuracies({name: results.row(name) for name in NAIVE}, MULTIMNIST.rows),
        "equal": _with_muon(results),
        "against-muon": _against_muon(results),
        "claims": claims_table(results, stated),
        "tests": tests_table(results, stated),
        "tuning": "\n\n".join(_tuning(name, found) for name, found in results.tuning.items()) or NOT_RUN,
        "gamma": _ablation(results, GAMMA, GAMMAS, MULTIMNIST_GAMMA),
        "beta": _ablation(results, BETA, BETAS, MULTIMNIST_BETA),
        "components": _accuracies({"moon": results.row("moon"), **components}, MULTIMNIST_COMPONENTS.rows),
        "losses": losses_by_epoch(results),
        "efficiency": by_steps(results),
        "time": by_time(results),
        "weights": _weights(results),
        "beyond": _beyond(results),
    }


def _missing(results: Results) -> str:
    balancers = [*PAPERS, *ADDED]
    methods = ["moon", "muon", *balancers, *(f"{name}+muon" for name in balancers if name != "ls")]
    short = [f"{row.method} ({len(row.outcomes)})" for row in results.rows(methods) if len(row.outcomes) < SEEDS]
    found = {
        NOT_RUN: [name for name in methods if results.row(name) is None],
        f"fewer than {SEEDS} seeds": short,
        f"gamma, {NOT_RUN}": [f"{value:g}" for value in GAMMAS if results.moon_with(GAMMA, value) is None],
        f"beta, {NOT_RUN}": [f"{value:g}" for value in BETAS if results.moon_with(BETA, value) is None],
        f"components, {NOT_RUN}": [name for name, (_, changes) in COMPONENTS.items() if results.row("moon", changes) is None],
        f"times alone on the GPU, {NOT_MEASURED}": [how for name, how in ALONE.items() if name not in results.alone],
    }
    return "\n".join(f"- {what}: {', '.join(names)}" for what, names in found.items() if names) or "Nothing."


def _accuracies(rows: Mapping[str, Row | None], paper: Mapping[str, Mapping[str, float]]) -> str:
    """Ours and the paper's accuracies by name."""
    lines = []
    for name, row in rows.items():
        theirs = [f"{paper[name][metric]:.2f}" if name in paper else "" for metric in METRICS]
        ours = [entry(row, metric) for metric in METRICS]
        lines.append([name, rate(row), *ours, seeds(row), *theirs])
    return markdown(["", "rate", "left", "right", "average", "seeds", "paper: left", "right", "average"], lines)


def _with_muon(results: Results) -> str:
    """Every balancer with Adam and with Muon."""
    lines = []
    for name in (*PAPERS, *ADDED):
        other = "muon" if name == "ls" else f"{name}+muon"
        found = results.compare((other, {}), (name, {}), AVERAGE)
        lines.append([name, entry(results.row(name), AVERAGE), entry(results.row(other), AVERAGE), *difference(found)])
    return markdown(["balancer", "with Adam", "with Muon", "difference", "95 % interval", "p", "seeds"], lines)


def _against_muon(results: Results) -> str:
    """What task weights add to Muon; MOON's also at the rate of either, where that was run."""
    muon: Variant = ("muon", {})
    pairs: list[tuple[Variant, Variant]] = [(("moon", {}), muon)]
    pairs += [(("moon", {}), ("muon", {RATE: setting(row, RATE)})) for row in results.rows(["moon"])]
    pairs += [(("moon", {RATE: setting(row, RATE)}), muon) for row in results.rows(["muon"])]
    pairs += [((f"{name}+muon", {}), muon) for name in (*PAPERS, *ADDED)]
    tested = [(minus(*pair), results.compare(*pair, AVERAGE)) for pair in pairs]
    lines = [[name, *difference(found)] for name, found in tested if found is not None]
    return markdown(["difference of", "average accuracy", "95 % interval", "p", "seeds"], lines)


def _tuning(name: str, tuning: Mapping[str, Any]) -> str:
    """A line per method with the validation accuracy at each rate; the chosen one is bold."""
    rates = sorted({trial["settings"][RATE] for trial in tuning["trials"]})
    scores: dict[str, dict[float, str]] = {}
    for trial in tuning["trials"]:
        found, score = trial["settings"][RATE], trial["score"]
        text = "failed" if score is None else f"{-score:.2f}"
        best = tuning["chosen"].get(trial["method"], {}).get(RATE) == found
        scores.setdefault(trial["method"], {})[found] = f"**{text}**" if best else text
    lines = [[method, *(by_rate.get(each, "") for each in rates)] for method, by_rate in scores.items()]
    notes = " ".join(tuning["notes"]) or "No choice is at the edge of its grid."
    return f"`tuned-{name}.json`. {notes}\n\n" + markdown(["rate", *(f"{each:g}" for each in rates)], lines)


def _ablation(results: Results, key: str, values: Sequence[float], paper: Mapping[float, float]) -> str:
    rows = [results.moon_with(key, value) for value in values]
    theirs = [f"{paper[value]:.2f}" if value in paper else "" for value in values]
    return markdown(
        [key.rpartition(".")[2], *(f"{value:g}" for value in values)],
        [["ours", *(entry(row, AVERAGE) for row in rows)], ["seeds", *map(seeds, rows)], ["paper", *theirs]],
    )


def _weights(results: Results) -> str:
    """How far the weight of the left task goes, and the cosine between the gradients of the tasks."""
    lines = []
    for row in results.rows(WEIGHTED):
        weights = [left_weights(outcome)[1] or [0.5] for outcome in row.outcomes]  # muon logs none
        every = [value for each in weights for value in each]
        last = ", ".join(f"{each[-1]:.3f}" for each in weights)
        conflict = [[cosine for _, cosine in cosines(outcome)] for outcome in row.outcomes]
        extremes = [f"{end((cosine for each in conflict for cosine in each), default=math.nan):+.2f}" for end in (min, max)]
        means = ", ".join(f"{mean(each):+.3f}" for each in conflict)
        lines.append([row.method, f"{min(every):.3f}", f"{max(every):.3f}", last, *extremes, means])
    weight, cosine = ["smallest", "largest", "at the end, by seed"], ["cosine: smallest", "largest", "mean, by seed"]
    return markdown(["", *weight, *cosine], lines)


def _beyond(results: Results) -> str:
    """Every variant that no other table has."""
    elsewhere: list[Changes] = [{}, *({GAMMA: value} for value in GAMMAS), *({BETA: value} for value in BETAS)]
    elsewhere += [changes for _, changes in COMPONENTS.values()]
    lines = []
    for row in results.study.rows:
        if (changes := results.changes(row)) not in elsewhere:
            accuracies = [entry(row, metric) for metric in METRICS]
            same_loss = not any(key.startswith("data.") for key in changes)  # not times 10, nor of noisy labels
            steps = entry(row, STEPS, 0) if same_loss else ""
            lines.append([variant(row.method, changes), *accuracies, steps, seeds(row)])
    return markdown(["", "left", "right", "average", STEPS, "seeds"], lines) if lines else f"{NOT_RUN.capitalize()}."
