"""The rates that tuning tried, as tables: a line per method with its score at each of them."""

from collections.abc import Callable, Mapping

from studies.entries import markdown
from studies.results import RATE, Tuning

#: What the page shows by method and rate.
Scores = Mapping[str, Mapping[float, str]]


def scores(tuning: Tuning, shown: Callable[[float], str]) -> Scores:
    """Those of one file; the chosen one is bold."""
    found: dict[str, dict[float, str]] = {}
    for trial in tuning["trials"]:
        rate, score = trial["settings"][RATE], trial["score"]
        text = "failed" if score is None else shown(score)
        best = tuning["chosen"].get(trial["method"], {}).get(RATE) == rate
        found.setdefault(trial["method"], {})[rate] = f"**{text}**" if best else text
    return found


def by_rate(found: Scores) -> str:
    rates = sorted({rate for each in found.values() for rate in each})
    lines = [[method, *(each.get(rate, "") for rate in rates)] for method, each in found.items()]
    return markdown(["rate", *(f"{rate:g}" for rate in rates)], lines)
