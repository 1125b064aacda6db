"""Results as pages write them: means with deviations, differences with intervals, tables in Markdown."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from moonopt.runs.cell import word
from moonopt.runs.report.statistics import Comparison
from moonopt.runs.report.study import Row
from moonopt.runs.report.tables import mean_and_spread, shown
from studies.results import RATE, Changes, Variant, setting

NOT_RUN, NOT_MEASURED = "not run yet", "not measured yet"


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def entry(row: Row | None, metric: str, digits: int = 2, absent: str = "not reached") -> str:
    """Mean ± deviation over seeds; ``absent`` where that of a seed is NaN."""
    if row is None:
        return NOT_RUN
    values = list(row.values(metric).values())
    return absent if any(map(math.isnan, values)) else shown(*mean_and_spread(values), digits).text


def average(row: Row | None, metric: str) -> float:
    """NaN of what was not run, or did not come about with one of the seeds."""
    return math.nan if row is None else fmean(row.values(metric).values())


def seeds(row: Row | None) -> str:
    return "" if row is None else str(len(row.outcomes))


def rate(row: Row | None) -> str:
    return "" if row is None else f"{setting(row, RATE):g}"


def difference(found: Comparison | None, digits: int = 2) -> list[str]:
    """Mean difference, interval, p, and how many seeds."""
    if found is None or found.difference is None:
        return ["", "", "", ""]
    mean, count = f"{found.difference:+z.{digits}f}", str(len(found.seeds))
    if found.p is None:
        return [mean, "", "", count]
    return [mean, f"{found.low:+.{digits}f} to {found.high:+.{digits}f}", f"{found.p:.2g}", count]


def variant(method: str, changes: Changes) -> str:
    """Such as "moon beta=0.01"."""
    return " ".join([method, *(f"{key.rpartition('.')[2]}={word(value)}" for key, value in changes.items())])


def minus(first: Variant, other: Variant) -> str:
    return f"{variant(*first)} minus {variant(*other)}"
