"""Which evaluation a run reports: the last, the best on validation data, or the mean of the last few."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonopt.errors import UserError

Score = Callable[[Mapping[str, float]], float]  # lower is better


@dataclass(frozen=True)
class Selection:
    """``train.select``: "last", "best", or "last:10" for the mean of the last ten evaluations."""

    kind: str
    count: int

    @classmethod
    def read(cls, name: str, has_validation: bool) -> "Selection":
        kind, _, number = name.partition(":")
        if kind not in ("last", "best") or (number and (kind == "best" or not number.isdigit() or int(number) == 0)):
            raise UserError(f"train.select must be last, best or last:10 (any number), found {name!r}.")
        if kind == "best" and not has_validation:
            raise UserError("train.select=best needs validation data, and this benchmark has none: use last.")
        return cls(kind, int(number or 1))

    def reported(self, evaluations: Sequence[Mapping[str, Any]], score: Score) -> dict[str, Any]:
        """Metrics, validation metrics, and how they were chosen, in words."""
        if self.kind == "best":
            chosen = [min(evaluations, key=lambda each: comparable(score(each["valid"])))]
            how = f"epoch {chosen[0]['epoch']} of {evaluations[-1]['epoch']}, the best on validation data"
        else:
            chosen = list(evaluations[-self.count :])
            how = f"epoch {chosen[-1]['epoch']}, the last" if self.count == 1 else f"mean of the last {len(chosen)} evaluations"
        return {
            "metrics": _mean([each["test"] for each in chosen]),
            "valid": None if chosen[0]["valid"] is None else _mean([each["valid"] for each in chosen]),
            "selection": how,
            "epoch": chosen[-1]["epoch"],
        }


def comparable(score: float) -> float:
    """NaN is worse than anything."""
    return math.inf if math.isnan(score) else score


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
