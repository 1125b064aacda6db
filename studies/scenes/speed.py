"""What forty tasks cost, and whether training waits for its data."""

from collections.abc import Sequence

from moonopt.speed.faces import REFERENCE
from moonopt.speed.loading import STAYS
from studies.entries import NOT_MEASURED, markdown
from studies.results import Speed

#: A step of MOON may take so many times as long as one of Muon, and one with new batches as one without loading.
GOAL, LOADING_GOAL = 1.3, 1.1
NEW = "new batches from the device"


def speed_tables(steps: Sequence[Speed], loading: Sequence[Speed]) -> dict[str, str]:
    """As Markdown, by their names in the page."""
    return {
        "faces-target": _target(steps),
        "faces-steps": "\n\n".join(map(_steps, steps)) or f"{NOT_MEASURED.capitalize()}.",
        "loading": _loading(loading),
    }


def _target(steps: Sequence[Speed]) -> str:
    """It counts for all numbers of tasks of all measurements."""
    goal = f"The target is a step of MOON of at most {GOAL} times one of Muon on the mean loss, whatever the number of tasks."
    told = []
    for found in steps:
        ratios = {count: each["moon"] for count, each in found["ratios"].items()}
        verdict = "reached" if max(ratios.values()) <= GOAL else "not reached"
        by_count = ", ".join(f"{ratio:.2f} with {count} tasks" for count, ratio in ratios.items())
        told.append(f"{_title(found)}: {by_count}: **{verdict}**")
    return f"{goal} {'; '.join(told) or NOT_MEASURED.capitalize()}."


def _title(found: Speed) -> str:
    return f"{found['network']} in {found['products']}"


def _steps(found: Speed) -> str:
    """Milliseconds by number of tasks, and how many times Muon's that is."""
    counts, lines = list(found["times"]), []
    for method in found["times"][counts[0]]:
        times = [f"{found['times'][count][method]['ms']:.2f}" for count in counts]
        ratios = [f"{found['ratios'][count][method]:.2f}" for count in counts]
        lines.append([method, *times, *ratios])
    heading = ["", *(f"ms, {count} tasks" for count in counts), *(f"times {REFERENCE}, {count}" for count in counts)]
    where = f"{found['environment']['device']}, torch {found['environment']['torch']}, batches of {found['batch']}"
    return f"{_title(found)} ({where}):\n\n{markdown(heading, lines)}"


def _loading(loading: Sequence[Speed]) -> str:
    """Examples per second, and whether new batches cost more than they may."""
    if not loading:
        return f"{NOT_MEASURED.capitalize()}."
    ways = list(loading[0]["times"])
    lines = []
    for found in loading:
        rates = [f"{found['examples_per_second'][way]:.0f}" for way in ways]
        verdict = "the GPU" if found["ratios"][NEW] <= LOADING_GOAL else "loading"
        lines.append([found["benchmark"], found["method"], found["products"], *rates, f"{found['ratios'][NEW]:.2f}", verdict])
    heading = ["", "method", "products", *ways, f"step: {NEW} / {STAYS}", "bound by"]
    devices = ", ".join(sorted({found["environment"]["device"] for found in loading}))
    return f"{devices}, examples per second:\n\n{markdown(heading, lines)}"
