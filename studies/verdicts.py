"""A claim, and when it holds: by where the interval of a difference lies, or by what was seen without a test."""

from collections.abc import Sequence
from dataclasses import dataclass

from moonopt.runs.report.statistics import Comparison
from studies.entries import NOT_RUN
from studies.results import Variant

Interval = tuple[float, float]

HOLDS, FAILS, UNCLEAR = "holds", "does not hold", "cannot be told"


@dataclass(frozen=True)
class Gap:
    """A claim about the difference ``first`` minus ``other`` in a metric: it lies in ``region``."""

    first: Variant
    other: Variant
    metric: str
    region: Interval
    paper: float | None = None

    def verdict(self, found: Comparison | None) -> str:
        """It holds if the 95% interval lies inside the region, and does not if it lies outside."""
        if found is None:
            return NOT_RUN
        if found.p is None or found.low is None or found.high is None:
            return UNCLEAR
        low, high = self.region
        if low < found.low and found.high < high:
            return HOLDS
        return FAILS if found.high <= low or high <= found.low else UNCLEAR

    def agrees(self, found: Comparison | None) -> bool:
        """Whether the mean difference alone is as claimed."""
        return found is not None and found.difference is not None and self.region[0] < found.difference < self.region[1]

    def excludes_paper(self, found: Comparison | None) -> bool:
        """Whether the interval has no room for the paper's difference."""
        if self.paper is None or found is None or found.low is None or found.high is None:
            return False
        return found.p is not None and not found.low <= self.paper <= found.high


@dataclass(frozen=True)
class Claim:
    """What the paper says. It holds if all its gaps do; ``verdict`` is for what is not judged by a test."""

    says: str
    gaps: Sequence[Gap] = ()
    ours: str = NOT_RUN
    verdict: str = NOT_RUN


def unanimous(seen: Sequence[bool]) -> str:
    """A verdict without a test: what was seen must always be as claimed, or never."""
    if all(seen):
        return HOLDS
    return UNCLEAR if any(seen) else FAILS
