"""What the curves of a run say, as metrics beside its accuracies: early and late losses, steps, seconds and memory."""

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean

import numpy as np

from moonopt.runs.report.reading import Line
from moonopt.runs.report.study import Outcome, number

TASKS = ("left", "right")
THRESHOLD = 0.15
EARLY_EPOCHS = 3
TIMES = (0.5, 1.0, 2.0, 3.0)

STEPS, MEMORY, STEP_TIME = f"steps to {THRESHOLD}", "peak memory", "milliseconds of a step"
#: With the first steps, which compile and capture, and by the time of all other steps. Both are speeds only if a run was alone.
SECONDS, STEADY_SECONDS = f"seconds to {THRESHOLD}", f"seconds to {THRESHOLD} without the first steps"


def early(task: str) -> str:
    return f"{task} training loss, epochs 1 to {EARLY_EPOCHS}"


def late(task: str) -> str:
    return f"{task} training loss, from epoch {EARLY_EPOCHS + 1} on"


def loss_after(seconds: float) -> str:
    """By the time of a step without the first ones; NaN where training was over by then."""
    return f"training loss after {seconds:g} s"


def with_curves(outcome: Outcome) -> Outcome:
    """The outcome with these metrics; NaN is what did not come about."""
    reached = next((line for line in outcome.train if mean_loss(line) <= THRESHOLD), {})
    step = number(reached.get("step"))
    found = {
        STEPS: step,
        SECONDS: number(reached.get("seconds")),
        STEADY_SECONDS: step * outcome.seconds_per_step,
        STEP_TIME: 1e3 * outcome.seconds_per_step,
        MEMORY: outcome.peak_memory_mb,
    }
    for task in TASKS:
        found[early(task)] = mean(number(line["loss"][task]) for line in outcome.train if line["epoch"] <= EARLY_EPOCHS)
        found[late(task)] = mean(number(line["loss"][task]) for line in outcome.train if line["epoch"] > EARLY_EPOCHS)
    clock = [line["step"] * outcome.seconds_per_step for line in outcome.train]
    losses = [mean_loss(line) for line in outcome.train]
    found |= {loss_after(time): float(np.interp(time, clock, losses, right=math.nan)) for time in TIMES}
    return replace(outcome, metrics={**outcome.metrics, **found})


def left_weights(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Steps and the weight of the left task."""
    lines = [line for line in outcome.train if line.get("weight")]
    return [float(line["step"]) for line in lines], [number(line["weight"]["left"]) for line in lines]


def cosines(outcome: Outcome) -> list[tuple[float, float]]:
    """Epochs, and the cosine between the gradients of the tasks where it is kept."""
    return [(float(line["epoch"]), number(line["conflict"][0][1])) for line in outcome.evaluation if line.get("conflict")]


def mean_loss(line: Line) -> float:
    """Of both tasks."""
    return fmean(number(line["loss"][task]) for task in TASKS)


def mean(values: Iterable[float]) -> float:
    """NaN of nothing."""
    found = list(values)
    return fmean(found) if found else math.nan
