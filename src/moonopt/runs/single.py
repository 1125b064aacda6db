"""Single-task methods, ``stl`` alone or over another optimizer (``stl+muon``): one run per task, which together make a row."""

from collections.abc import Mapping, Sequence
from typing import Any

from moonopt.bench import Benchmark
from moonopt.errors import UserError, unknown_name

STL = "stl"

#: The setting that says which task a run is of.
TASK = "balancer.task"
#: How many tasks are named in a sentence.
MOST_NAMED = 5


def is_single(method: str) -> bool:
    """Whether a method trains one model per task.

    >>> [method for method in ("stl", "ls", "stl+muon") if is_single(method)]
    ['stl', 'stl+muon']
    """
    return method.partition("+")[0] == STL


def task_of(method: str, settings: Mapping[str, Any]) -> str | None:
    """The task that a run is of; None if it is of all."""
    return settings.get(TASK) if is_single(method) else None


def check_task(method: str, settings: Mapping[str, Any], tasks: Sequence[str]) -> None:
    """Raises ``UserError`` for a run of a single-task method that does not say which, or names none of them."""
    if not is_single(method):
        return
    task = settings.get(TASK)
    if task is None:
        known = ", ".join(tasks) if len(tasks) <= MOST_NAMED else f"{', '.join(tasks[:MOST_NAMED])}, ..."
        raise UserError(
            f"{method} trains one task: say which of {known} by --set {TASK}={tasks[0]}, or have all of them with "
            f"`moonopt compare --methods {method}`."
        )
    if task not in tasks:
        raise UserError(unknown_name(str(task), tasks, "task"))


def without_task(method: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides that the runs of a row share, sorted."""
    return {key: value for key, value in sorted(overrides.items()) if not (key == TASK and is_single(method))}


def has_task_metrics(bench: type[Benchmark]) -> bool:
    """Whether a single task can be measured."""
    return any(metric.task is not None for metric in bench.metrics)


def check_single(methods: Sequence[str], bench: type[Benchmark]) -> None:
    """Raises ``UserError`` for a single-task method on a benchmark whose metrics all sum up several tasks."""
    found = [method for method in methods if is_single(method)]
    if found and not has_task_metrics(bench):
        raise UserError(
            f"{' and '.join(found)} would give no number on {bench.name}: a model per task is measured by the metrics of its "
            "task, and every metric here sums up all tasks. Leave it out."
        )
