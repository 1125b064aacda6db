"""How fast the padded form of the network is beside the PyG form."""

from moonopt.speed.molecules import METHODS, REFERENCE
from studies.entries import NOT_MEASURED, markdown
from studies.results import Speed

GOAL_SECONDS, GOAL_RATIO = 3.0, 5.0
#: The forms that are held against it, if they were measured.
FORMS = {
    "dense, captured, tf32": "Captured and in TensorFloat-32",
    "dense, half messages, captured, tf32": "with messages in float16, as the study trains",
    "dense, compiled, captured, tf32": "compiled",
}


def speed_target(speed: Speed | None) -> str:
    goal = f"Speed: an epoch of at most {GOAL_SECONDS:g} s on an H200, at least {GOAL_RATIO:g} times as fast as the PyG form."
    if speed is None:
        return f"{goal} {NOT_MEASURED.capitalize()}."
    measured = {form: words for form, words in FORMS.items() if f"{METHODS[0]}, {form}" in speed["times"]}
    return f"{goal} {'; '.join(f'{words}: {_reached(speed, form)}' for form, words in measured.items())}."


def _reached(speed: Speed, form: str) -> str:
    """Both methods must reach it."""
    names = {method: f"{method}, {form}" for method in METHODS}
    found = {method: (speed["epoch_seconds"][name], speed["ratios"][name]) for method, name in names.items()}
    told = ", ".join(f"{method} {seconds:.2f} s and {ratio:.1f} times" for method, (seconds, ratio) in found.items())
    reached = all(seconds <= GOAL_SECONDS and ratio >= GOAL_RATIO for seconds, ratio in found.values())
    return f"{told}: **{'reached' if reached else 'not reached'}**"


def speed_table(speed: Speed | None) -> str:
    if speed is None:
        return f"{NOT_MEASURED.capitalize()}."
    lines = []
    for name, times in speed["times"].items():
        milliseconds = f"{times['ms']:.2f} ({times['low_ms']:.2f} to {times['high_ms']:.2f})"
        lines.append([name, milliseconds, f"{speed['epoch_seconds'][name]:.2f}", f"{speed['ratios'][name]:.2f}"])
    where = f"{speed['environment']['device']}, torch {speed['environment']['torch']}, {speed['batch']} molecules a batch."
    return f"{where}\n\n{markdown(['', 'ms a step (quartiles)', 's an epoch', f'times as fast as {REFERENCE}'], lines)}"
