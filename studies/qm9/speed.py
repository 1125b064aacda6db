"""How fast the padded form of the network is beside the PyG form."""

from collections.abc import Mapping
from typing import Any

from moonopt.speed.molecules import METHODS, REFERENCE
from studies.entries import NOT_MEASURED, markdown

GOAL_SECONDS, GOAL_RATIO = 3.0, 5.0
#: The form that the study trains.
FAST = "dense, captured, tf32"


def speed_target(speed: Mapping[str, Any] | None) -> str:
    """Both methods must reach it."""
    goal = f"Speed: an epoch of at most {GOAL_SECONDS:g} s on an H200, at least {GOAL_RATIO:g} times as fast as the PyG form."
    if speed is None:
        return f"{goal} {NOT_MEASURED.capitalize()}."
    (result,) = speed["results"]
    names = {method: f"{method}, {FAST}" for method in METHODS}
    found = {method: (result["epoch_seconds"][name], result["ratios"][name]) for method, name in names.items()}
    told = ", ".join(f"{method} {seconds:.2f} s and {ratio:.1f} times" for method, (seconds, ratio) in found.items())
    reached = all(seconds <= GOAL_SECONDS and ratio >= GOAL_RATIO for seconds, ratio in found.values())
    return f"{goal} Captured and in TensorFloat-32, as the study trains: {told}: **{'reached' if reached else 'not reached'}**."


def speed_table(speed: Mapping[str, Any] | None) -> str:
    if speed is None:
        return f"{NOT_MEASURED.capitalize()}."
    (result,) = speed["results"]
    lines = []
    for name, times in result["times"].items():
        milliseconds = f"{times['ms']:.2f} ({times['low_ms']:.2f} to {times['high_ms']:.2f})"
        lines.append([name, milliseconds, f"{result['epoch_seconds'][name]:.2f}", f"{result['ratios'][name]:.2f}"])
    where = f"{speed['environment']['device']}, torch {speed['environment']['torch']}, {result['batch']} molecules a batch."
    return f"{where}\n\n{markdown(['', 'ms a step (quartiles)', 's an epoch', f'times as fast as {REFERENCE}'], lines)}"
