"""Every table of the page, once for each problem."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from moonopt.bench import Metric
from moonopt.bench.synthetic import Synthetic30
from moonopt.runs.report.drawing import Plot
from studies.entries import NOT_RUN, average, entry, markdown, seeds, variant
from studies.synthetic30.figures import FIGURE
from studies.synthetic30.results import EQUAL, MAIN, MOON, ROBUST, SPREAD, Problem
from studies.tables import differences_table, figures, metrics_table, missing
from studies.tuning import files

BETAS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, "auto")
#: What the paper shows, and what does not hang on the scales of the tasks: the mean over tasks, and the worst.
AVERAGE, RELATIVE, WORST = (
    next(metric for metric in Synthetic30.metrics if metric.name == name)
    for name in ("average loss", "relative loss", "worst relative loss")
)
METRICS: Mapping[str, Sequence[Metric]] = {EQUAL: (AVERAGE, WORST), SPREAD: (AVERAGE, RELATIVE, WORST)}
#: How much lower the paper has MOON's average loss than these, in percent.
PAPER = {"famo": 20, "mgda": 15}


def tables(problems: Mapping[str, Problem], drawn: Iterable[Plot]) -> dict[str, str]:
    """As Markdown, by their names in the page."""
    made = figures([FIGURE], drawn)
    for name, problem in problems.items():
        rows = {variant(*each): problem.row(*each) for each in MAIN}
        metrics = METRICS[name]
        pairs = [(MOON, other) for other in MAIN[1:]] + [(ROBUST, other) for other in MAIN[2:]]
        made |= {
            f"{name}-main": metrics_table(rows, metrics),
            f"{name}-differences": differences_table(problem, pairs, metrics[-2:]),
            f"{name}-tuning": files(problem.tuning, lambda score: f"{score:.4f}"),
            f"{name}-missing": missing({NOT_RUN: [label for label, row in rows.items() if row is None]}),
        }
    return made | {"paper": _paper(problems[EQUAL]), "beta": _betas(problems[SPREAD])}


def _paper(problem: Problem) -> str:
    """How much lower MOON's average loss is, by the means."""
    moon, told = average(problem.row(*MOON), AVERAGE.name), []
    for method, theirs in PAPER.items():
        other = problem.row(method)
        ours = NOT_RUN if other is None else f"{100 * (1 - moon / average(other, AVERAGE.name)):.0f} %"
        told.append(f"{method}: {ours} (paper: about {theirs} %)")
    return f"MOON's average loss is lower than that of {', of '.join(told)}."


def _betas(problem: Problem) -> str:
    metrics, lines = METRICS[SPREAD], []
    rows = {(loss, beta): problem.moon_with(beta, loss) for loss in ("plain", "log") for beta in BETAS}
    common = set.intersection(*({each.seed for each in row.outcomes} for row in rows.values() if row is not None))
    for (loss, beta), row in rows.items():
        found = [NOT_RUN, *[""] * (len(metrics) - 1)]
        if row is not None:
            row = replace(row, outcomes=[each for each in row.outcomes if each.seed in common])
            found = [entry(row, metric.name, metric.digits, absent="no number") for metric in metrics]
        lines.append([loss, str(beta) if isinstance(beta, str) else f"{beta:g}", seeds(row), *found])
    return markdown(["loss", "beta", "seeds", *(metric.heading for metric in metrics)], lines)
