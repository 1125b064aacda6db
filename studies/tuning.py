"""The rates that tuning tried, as tables: a line per method, and per value of what else was tried, with its score at each."""

from collections.abc import Callable, Mapping

from studies.entries import NOT_RUN, markdown, variant
from studies.results import RATE, Tuning

#: What the page shows by method and rate.
Scores = Mapping[str, Mapping[float, str]]


def scores(tuning: Tuning, shown: Callable[[float], str]) -> Scores:
    """Those of one file; the chosen one is bold."""
    found: dict[str, dict[float, str]] = {}
    for trial in tuning["trials"]:
        others = {key: value for key, value in trial["settings"].items() if key != RATE}
        text = told(trial["score"], shown)
        best = tuning["chosen"].get(trial["method"]) == trial["settings"]
        found.setdefault(variant(trial["method"], others), {})[trial["settings"][RATE]] = f"**{text}**" if best else text
    return found


def told(score: float | None, shown: Callable[[float], str]) -> str:
    """None is the score of a trial that failed."""
    return "failed" if score is None else shown(score)


def by_rate(found: Scores) -> str:
    rates = sorted({rate for each in found.values() for rate in each})
    lines = [[method, *(each.get(rate, "") for rate in rates)] for method, each in found.items()]
    return markdown(["rate", *(f"{rate:g}" for rate in rates)], lines)


def files(tuning: Mapping[str, Tuning], shown: Callable[[float], str]) -> str:
    """A table per file, with what there is to say of its choices."""
    tables = []
    for name, each in tuning.items():
        notes = "; ".join(each["notes"]) or "no choice is at an end of three values or more"
        tables.append(f"`tuned-{name}.json`: {notes}.\n\n{by_rate(scores(each, shown))}")
    return "\n\n".join(tables) or f"{NOT_RUN.capitalize()}."
