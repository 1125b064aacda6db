"""Every table of the page."""

import math
from collections.abc import Mapping, Sequence

from moonopt.bench.paper import MULTIMNIST, MULTIMNIST_BETA, MULTIMNIST_COMPONENTS, MULTIMNIST_GAMMA
from moonopt.runs.cell import word
from moonopt.runs.report.study import Row
from studies.entries import NOT_MEASURED, NOT_RUN, difference, entry, markdown, minus, rate, seeds, variant
from studies.multimnist.claims import claims, claims_table, tests_table
from studies.multimnist.curves import STEP_TIME, STEPS, cosines, left_weights, mean, mean_loss
from studies.multimnist.efficiency import by_steps, by_time, losses_by_epoch, target
from studies.multimnist.results import ADDED, AVERAGE, BETAS, COMPONENTS, DRAWN, GAMMAS, METRICS, OWN, PAPERS, MultiMNIST
from studies.results import BETA, GAMMA, RATE, SEEDS, Changes, Variant, setting
from studies.tables import missing
from studies.tuning import files, told

NAIVE = ("mgda", "mgda+muon", "famo", "famo+muon", "muon", "moon")
WEIGHTED = ("moon", "muon", "famo", "famo+muon", "mgda", "mgda+muon", "ls")


def tables(results: MultiMNIST) -> dict[str, str]:
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
        "tuning": files({name: found for name, found in results.tuning.items() if name not in OWN}, _accuracy),
        "own": _own(results),
        "gamma": _ablation(results, GAMMA, GAMMAS, MULTIMNIST_GAMMA),
        "beta": _ablation(results, BETA, BETAS, MULTIMNIST_BETA),
        "components": _accuracies({"moon": results.row("moon"), **components}, MULTIMNIST_COMPONENTS.rows),
        "losses": losses_by_epoch(results),
        "efficiency": by_steps(results),
        "time": by_time(results),
        "weights": _weights(results),
        "imbalance": _imbalance(results),
        "beyond": _beyond(results),
        "exact": _exact(results),
    }


def _missing(results: MultiMNIST) -> str:
    balancers = [*PAPERS, *ADDED]
    methods = ["moon", "muon", *balancers, *(f"{name}+muon" for name in balancers if name != "ls")]
    short = [f"{row.method} ({len(row.outcomes)})" for row in results.rows(methods) if len(row.outcomes) < SEEDS]
    found = {
        NOT_RUN: [name for name in methods if results.row(name) is None],
        f"fewer than {SEEDS} seeds": short,
        f"gamma, {NOT_RUN}": [f"{value:g}" for value in GAMMAS if results.moon_with(GAMMA, value) is None],
        f"beta, {NOT_RUN}": [f"{value:g}" for value in BETAS if results.moon_with(BETA, value) is None],
        f"components, {NOT_RUN}": [name for name, (_, changes) in COMPONENTS.items() if results.row("moon", changes) is None],
        f"times alone on the GPU, {NOT_MEASURED}": [name for name in DRAWN if name not in results.alone],
        f"the exact dual, {NOT_RUN}": [] if results.exact else ["moon"],
        f"own parameters, {NOT_RUN}": [whose for name, whose in OWN.items() if name not in results.tuning],
    }
    return missing(found)


def _accuracies(rows: Mapping[str, Row | None], paper: Mapping[str, Mapping[str, float]]) -> str:
    """Ours and the paper's accuracies by name."""
    lines = []
    for name, row in rows.items():
        theirs = [f"{paper[name][metric]:.2f}" if name in paper else "" for metric in METRICS]
        ours = [entry(row, metric) for metric in METRICS]
        lines.append([name, rate(row), *ours, seeds(row), *theirs])
    return markdown(["", "rate", "left", "right", "average", "seeds", "paper: left", "right", "average"], lines)


def _with_muon(results: MultiMNIST) -> str:
    """Every balancer with Adam and with Muon."""
    lines = []
    for name in (*PAPERS, *ADDED):
        other = "muon" if name == "ls" else f"{name}+muon"
        found = results.compare((other, {}), (name, {}), AVERAGE)
        lines.append([name, entry(results.row(name), AVERAGE), entry(results.row(other), AVERAGE), *difference(found)])
    return markdown(["balancer", "with Adam", "with Muon", "difference", "95 % interval", "p", "seeds"], lines)


def _against_muon(results: MultiMNIST) -> str:
    """What task weights add to Muon; MOON's also at the rate of either, where that was run."""
    muon: Variant = ("muon", {})
    pairs: list[tuple[Variant, Variant]] = [(("moon", {}), muon)]
    pairs += [(("moon", {}), ("muon", {RATE: setting(row, RATE)})) for row in results.rows(["moon"])]
    pairs += [(("moon", {RATE: setting(row, RATE)}), muon) for row in results.rows(["muon"])]
    pairs += [((f"{name}+muon", {}), muon) for name in (*PAPERS, *ADDED)]
    tested = [(minus(*pair), results.compare(*pair, AVERAGE)) for pair in pairs]
    lines = [[name, *difference(found)] for name, found in tested if found is not None]
    return markdown(["difference of", "average accuracy", "95 % interval", "p", "seeds"], lines)


def _accuracy(score: float) -> str:
    """What is judged is minus the accuracy."""
    return f"{-score:.2f}"


def _own(results: MultiMNIST) -> str:
    """Validation accuracies by value, and the test accuracy of what was chosen beside that of the main table."""
    lines = []
    for tuning in (results.tuning[name] for name in OWN if name in results.tuning):
        for method, grid in tuning["grids"].items():
            key = next(key for key, values in grid.items() if len(values) > 1)  # the rate may be given beside it
            trials = [trial for trial in tuning["trials"] if trial["method"] == method]
            tried = ", ".join(f"{word(trial['settings'][key])}: {told(trial['score'], _accuracy)}" for trial in trials)
            best = tuning["chosen"][method]
            chosen = next((row for row in results.study.rows if row.method == method and _has(results, row, best)), None)
            found = [entry(row, AVERAGE) for row in (results.row(method), chosen)]
            lines.append([method, key.rpartition(".")[2], tried, word(best[key]), *found])
    heading = ["", "parameter", "validation accuracy by value", "chosen", "main table", "chosen"]
    return markdown(heading, lines) if lines else f"{NOT_RUN.capitalize()}."


def _has(results: MultiMNIST, row: Row, settings: Changes) -> bool:
    """Whether a row is that of the main table, but for these settings."""
    same = all(setting(row, key) == value for key, value in settings.items())
    return same and set(results.changes(row)) <= set(settings)


def _ablation(results: MultiMNIST, key: str, values: Sequence[float], paper: Mapping[float, float]) -> str:
    rows = [results.moon_with(key, value) for value in values]
    theirs = [f"{paper[value]:.2f}" if value in paper else "" for value in values]
    return markdown(
        [key.rpartition(".")[2], *(f"{value:g}" for value in values)],
        [["ours", *(entry(row, AVERAGE) for row in rows)], ["seeds", *map(seeds, rows)], ["paper", *theirs]],
    )


def _weights(results: MultiMNIST) -> str:
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


def _imbalance(results: MultiMNIST) -> str:
    """The accuracies of every method under every change of the data, and what it costs beside equal tasks."""
    rows = [row for row in results.study.rows if _of_data(results.changes(row))]
    lines = []
    for row in sorted(rows, key=lambda row: str(_of_data(results.changes(row)))):
        changes = results.changes(row)
        data = " ".join(variant("", _of_data(changes)).split())
        own = {key: value for key, value in changes.items() if key not in _of_data(changes)}
        accuracies = [entry(row, metric) for metric in METRICS]
        change, interval, *_ = difference(results.compare((row.method, changes), (row.method, own), AVERAGE))
        lines.append([data, variant(row.method, own), *accuracies, change, interval, seeds(row)])
    heading = ["data", "", "left", "right", "average", "minus equal tasks", "95 % interval", "seeds"]
    return markdown(heading, lines) if lines else f"{NOT_RUN.capitalize()}."


def _of_data(changes: Changes) -> Changes:
    return {key: value for key, value in changes.items() if key.startswith("data.")}


def _beyond(results: MultiMNIST) -> str:
    """Every variant on the same data that no other table has, beside the method as it is in the main table."""
    elsewhere: list[Changes] = [{}, *({GAMMA: value} for value in GAMMAS), *({BETA: value} for value in BETAS)]
    own: dict[str, Changes] = {}
    for name in OWN:
        own |= results.tuning[name]["chosen"] if name in results.tuning else {}
    lines = []
    for row in results.study.rows:
        changes = results.changes(row)
        without_component = any(changed.items() <= changes.items() for _, changed in COMPONENTS.values())
        is_own_choice = row.method in own and _has(results, row, own[row.method])
        if changes in elsewhere or without_component or is_own_choice or _of_data(changes):
            continue
        accuracies = [entry(row, metric) for metric in METRICS]
        change, interval, *_ = difference(results.compare((row.method, changes), (row.method, {}), AVERAGE))
        time = entry(results.alone.get(results.name(row)), STEP_TIME).replace(NOT_RUN, "")
        lines.append([results.name(row), *accuracies, change, interval, entry(row, STEPS, 0), time, seeds(row)])
    heading = ["", "left", "right", "average", "minus main table", "95 % interval", STEPS, "ms a step, alone", "seeds"]
    return markdown(heading, lines) if lines else f"{NOT_RUN.capitalize()}."


def _exact(results: MultiMNIST) -> str:
    """Loss and accuracy after one epoch, and how far the weight of the left task went."""
    lines = []
    for row in results.exact:
        weights = [value for outcome in row.outcomes for value in left_weights(outcome)[1] or [0.5]]
        loss = mean([mean_loss(outcome.train[-1]) for outcome in row.outcomes])
        spread = [f"{end(weights):.3f}" for end in (min, max)]
        lines.append([results.name(row), f"{loss:.3f}", entry(row, AVERAGE), *spread, seeds(row)])
    heading = ["", "training loss", "average accuracy", "weight: smallest", "largest", "seeds"]
    return markdown(heading, lines) if lines else f"{NOT_RUN.capitalize()}."
