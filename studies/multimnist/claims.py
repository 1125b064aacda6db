"""Every claim of the paper about MultiMNIST, and the tables that say what became of them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from scipy import stats  # type: ignore[import-untyped]

from moonopt.bench.paper import MULTIMNIST, MULTIMNIST_BETA, MULTIMNIST_COMPONENTS, MULTIMNIST_GAMMA
from moonopt.runs.report.statistics import Comparison
from moonopt.runs.report.tables import mean_and_spread
from studies.entries import NOT_RUN, difference, markdown, minus
from studies.multimnist.curves import TASKS, early, late
from studies.multimnist.efficiency import at_equal_times, memory, sooner
from studies.multimnist.results import AVERAGE, COMPONENTS, LEFT, METRICS, PAPERS, RIGHT, MultiMNIST
from studies.results import BETA, GAMMA, SEEDS
from studies.verdicts import FAILS, HOLDS, UNCLEAR, Claim, Gap, Interval

#: Of MOON's accuracies, by metric.
SPREADS = (0.07, 0.10, 0.07)


def claims(results: MultiMNIST) -> list[Claim]:
    """The claims in the paper's order."""
    figure = ("famo", "mgda", "ls")
    return [
        Claim("MOON's training losses of both tasks fall faster early on", _lower(figure, early)),
        Claim("and stay lower throughout training", _lower(figure, late)),
        Claim("MOON has the best left accuracy of all: 95.99, next FAMO with 95.89", _best(PAPERS, LEFT)),
        Claim("the best right accuracy: 95.31, next FAMO with 94.88", _best(PAPERS, RIGHT)),
        Claim("the best average: 95.65, next FAMO with 95.39", _best(PAPERS, AVERAGE)),
        _spread(results),
        Claim(
            "Muon on the mean loss is competitive: 95.11, no more than 0.28 below FAMO, the best of the others",
            [_accuracy("muon", "famo", (-0.28, math.inf))],
        ),
        Claim("but falls short of MOON, by 0.54", [_accuracy("moon", "muon")]),
        Claim("Muon in place of Adam makes MGDA worse, by 0.71", [_accuracy("mgda", "mgda+muon")]),
        Claim("and FAMO, by 0.42", [_accuracy("famo", "famo+muon")]),
        Claim("MOON is better than MGDA+Muon, by 1.52, and FAMO+Muon, by 0.68", _best(("mgda+muon", "famo+muon"), AVERAGE)),
        Claim("MOON is not sensitive to gamma: means from 95.14 to 95.65", _stable(GAMMA, MULTIMNIST_GAMMA)),
        Claim("nor to beta: means from 94.93 to 95.65", _stable(BETA, MULTIMNIST_BETA)),
        Claim("The orthonormal update matters: without it 0.85 less", [_without("euclidean")]),
        Claim("So does momentum: without it 1.95 less", [_without("no-momentum")]),
        at_equal_times(results),
        sooner(results),
        memory(results),
    ]


def _lower(others: Iterable[str], metric: Callable[[str], str]) -> list[Gap]:
    return [Gap(("moon", {}), (other, {}), metric(task), (-math.inf, 0)) for task in TASKS for other in others]


def _best(others: Iterable[str], metric: str) -> list[Gap]:
    return [_accuracy("moon", other, metric=metric) for other in others]


def _accuracy(first: str, other: str, region: Interval = (0, math.inf), metric: str = AVERAGE) -> Gap:
    paper = MULTIMNIST.rows[first][metric] - MULTIMNIST.rows[other][metric]
    return Gap((first, {}), (other, {}), metric, region, paper)


def _stable(key: str, paper: Mapping[float, float]) -> list[Gap]:
    """Another value changes the average by less than the paper's own range."""
    best = max(paper, key=lambda value: paper[value])
    margin = paper[best] - min(paper.values())
    return [
        Gap(("moon", {key: value}), ("moon", {}), AVERAGE, (-margin, margin), accuracy - paper[best])
        for value, accuracy in sorted(paper.items())
        if value != best
    ]


def _without(component: str) -> Gap:
    name, changes = COMPONENTS[component]
    paper = MULTIMNIST_COMPONENTS.rows["moon"][AVERAGE] - MULTIMNIST_COMPONENTS.rows[name][AVERAGE]
    return Gap(("moon", {}), ("moon", changes), AVERAGE, (0, math.inf), paper)


def _spread(results: MultiMNIST) -> Claim:
    """It does not hold where one deviation differs by an F test at 5 %; that deviations are equal, no test can tell."""
    says = "MOON's deviations over three seeds are 0.07 (left), 0.10 (right), 0.07 (average)"
    row = results.row("moon")
    if row is None or len(row.outcomes) < 2:
        return Claim(says)
    found = [mean_and_spread(list(row.values(metric).values()))[1] or 0.0 for metric in METRICS]
    other = any(_differ(ours, len(row.outcomes), theirs, SEEDS) for ours, theirs in zip(found, SPREADS, strict=True))
    return Claim(says, ours=", ".join(f"{each:.2f}" for each in found), verdict=FAILS if other else UNCLEAR)


def _differ(first: float, count: int, other: float, other_count: int) -> bool:
    """Whether two standard deviations do, by a two-sided F test at 5 %."""
    below = stats.f.cdf((first / other) ** 2, count - 1, other_count - 1)
    return bool(min(below, 1 - below) < 0.025)


def claims_table(results: MultiMNIST, stated: Sequence[Claim]) -> str:
    """What the paper says, what we found, and the verdict."""
    lines = []
    for place, claim in enumerate(stated, start=1):
        found = [(gap, results.compare(gap.first, gap.other, gap.metric)) for gap in claim.gaps]
        ours, verdict = (_ours(found), _verdict(found)) if found else (claim.ours, claim.verdict)
        lines.append([str(place), claim.says, ours, f"**{verdict}**"])
    return markdown(["", "the paper says", "ours", "verdict"], lines)


def tests_table(results: MultiMNIST, stated: Sequence[Claim]) -> str:
    """The differences behind the verdicts."""
    lines = []
    for place, claim in enumerate(stated, start=1):
        for gap in claim.gaps:
            found = results.compare(gap.first, gap.other, gap.metric)
            digits = 3 if "loss" in gap.metric else 2
            paper = "" if gap.paper is None else f"{gap.paper:+.2f}"
            name = minus(gap.first, gap.other)
            lines.append([str(place), name, gap.metric, *difference(found, digits), paper, gap.verdict(found)])
    return markdown(["claim", "difference of", "in", "mean", "95 % interval", "p", "seeds", "paper", ""], lines)


def _verdict(found: Sequence[tuple[Gap, Comparison | None]]) -> str:
    verdicts = [gap.verdict(each) for gap, each in found]
    return next((each for each in (FAILS, NOT_RUN, UNCLEAR) if each in verdicts), HOLDS)


def _ours(found: Sequence[tuple[Gap, Comparison | None]]) -> str:
    if all(each is None for _, each in found):
        return NOT_RUN
    excluded = sum(gap.excludes_paper(each) for gap, each in found)
    if len(found) > 1:
        agree = sum(gap.agrees(each) for gap, each in found)
        held = sum(gap.verdict(each) == HOLDS for gap, each in found)
        text = f"means as claimed in {agree} of {len(found)} comparisons, by the test in {held}"
        return f"{text}; the paper's difference is outside the interval in {excluded}" if excluded else text
    gap, each = found[0]
    mean, interval, _, seeds = difference(each)
    text = f"{minus(gap.first, gap.other)} {mean} ({interval or 'no interval'}; {seeds} seeds)"
    return f"{text}; the paper's {gap.paper:+.2f} is outside" if excluded else text
