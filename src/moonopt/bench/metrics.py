"""Metrics with their direction, and Δm, which makes one number of several: how much worse than a reference, in percent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonopt.errors import UserError


@dataclass(frozen=True)
class Metric:
    """A column of a benchmark's table.

    Args:
        name: its key in what ``evaluate`` returns, and its heading.
        higher: whether higher is better.
        task: whose it is; None for a summary of several tasks, which does not enter Δm.
        digits: how many to print after the point.
        unit: printed in the heading.

    """

    name: str
    higher: bool
    task: str | None = None
    digits: int = 4
    unit: str = ""

    @property
    def heading(self) -> str:
        """Name, unit and an arrow in the good direction.

        >>> Metric("accuracy", higher=True, unit="%").heading
        'accuracy (%) ↑'
        """
        return f"{self.name}{f' ({self.unit})' if self.unit else ''} {'↑' if self.higher else '↓'}"


def lower_is_better(values: Mapping[str, float], metrics: Sequence[Metric]) -> float:
    """The mean of some metrics, those that should be high negated."""
    return sum(-values[metric.name] if metric.higher else values[metric.name] for metric in metrics) / len(metrics)


def delta_m(values: Mapping[str, float], reference: Mapping[str, float], metrics: Sequence[Metric]) -> float:
    """The mean relative loss against a reference in percent: (100 / K) sum_i (-1)^s_i (M_i - R_i) / R_i.

    s_i is 1 where higher is better, so that lower is better in Δm, as in the tables of the paper (its text has the sign the
    other way round). Summaries of several tasks are left out. A negative R_i divides as |R_i|, so that better stays better.

    >>> metrics = [Metric("error", higher=False, task="a"), Metric("accuracy", higher=True, task="b")]
    >>> round(delta_m({"error": 1.1, "accuracy": 0.7}, {"error": 1.0, "accuracy": 1.0}, metrics), 6)
    20.0
    """
    counted = [metric for metric in metrics if metric.task is not None]
    if not counted:
        raise ValueError("Δm needs metrics that belong to a task: found none.")
    drops = [(-1 if metric.higher else 1) * _relative(metric.name, values, reference) for metric in counted]
    return 100 * sum(drops) / len(drops)


def _relative(name: str, values: Mapping[str, float], reference: Mapping[str, float]) -> float:
    for numbers, what in ((values, "values"), (reference, "references")):
        if name not in numbers:
            raise UserError(f"Δm needs {name!r}, which the {what} lack: found {', '.join(numbers) or 'none'}.")
    if reference[name] == 0:
        raise UserError(f"Δm is relative to the reference, and {name!r} is 0 there: take another reference, or leave it out.")
    return (values[name] - reference[name]) / abs(reference[name])
