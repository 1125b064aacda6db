"""The tables on NYU-v2's own scenes."""

from collections.abc import Iterable

from moonopt.bench.nyuv2 import NYUv2Small
from moonopt.runs.report.delta import DELTA
from moonopt.runs.report.drawing import Plot
from studies.entries import NOT_RUN, average, seeds, variant
from studies.results import Variant
from studies.scenes.figures import FIGURE
from studies.scenes.results import MOON, ROBUST, Rooms
from studies.tables import NOTHING, differences_table, figures, metrics_table, missing
from studies.tuning import files

WITH_MUON: tuple[Variant, ...] = (("muon", {}), ("famo+muon", {}))
WITH_ADAM: tuple[Variant, ...] = tuple((name, {}) for name in ("famo", "ls", "nash-mtl", "mgda", "cagrad", "uw"))
#: The methods that are to have more than one seed.
TWICE = 5


def rooms_tables(rooms: Rooms, drawn: Iterable[Plot]) -> dict[str, str]:
    """As Markdown, by their names in the page."""
    everything = [MOON, ROBUST, *WITH_MUON, *WITH_ADAM]
    metrics = [metric for metric in NYUv2Small.metrics if metric.task is not None]
    metrics = metrics if rooms.reference is None else [DELTA, *metrics]
    pairs = [(MOON, other) for other in everything[1:]] + [(ROBUST, other) for other in everything[2:]]
    return {
        "nyuv2-target": _target(rooms),
        "nyuv2-tuning": files(rooms.tuning, lambda score: f"{score:.4f}"),
        "nyuv2-main": metrics_table({variant(*each): rooms.row(*each) for each in [*everything, ("stl", {})]}, metrics),
        "nyuv2-differences": NOTHING if rooms.reference is None else differences_table(rooms, pairs, [DELTA]),
        "nyuv2-missing": _missing(rooms),
        **figures([FIGURE], drawn),
    }


def _target(rooms: Rooms) -> str:
    """Judged by means, MOON as the paper has it."""
    goal, moon = "The target is a Δm of MOON below that of every method with Adam.", rooms.row(*MOON)
    if moon is None or rooms.reference is None:
        return f"{goal} {NOTHING}"
    found = {variant(*each): average(rooms.row(*each), DELTA.name) for each in WITH_ADAM if rooms.row(*each) is not None}
    own, absent = average(moon, DELTA.name), [variant(*each) for each in WITH_ADAM if rooms.row(*each) is None]
    others = [f"{name} {value:.2f}" for name, value in found.items() if not own < value]
    verdict = "not reached" if others else "not yet told" if absent else "reached"
    told = [
        f"moon has {own:.2f} (seeds: {seeds(moon)}), by the means **{verdict}**",
        *([f"not above it: {', '.join(others)}"] if others else []),
    ]
    told += [f"{NOT_RUN}: {', '.join(absent)}"] if absent else []
    return f"{goal} {'; '.join(told)}.\n\n{_order(rooms)}"


def _order(rooms: Rooms) -> str:
    """Those with Muon by Δm."""
    rows = {variant(*each): rooms.row(*each) for each in (MOON, ROBUST, *WITH_MUON)}
    found = {name: average(row, DELTA.name) for name, row in rows.items() if row is not None}
    told = [f"{name} {found[name]:.2f}" for name in sorted(found, key=lambda name: found[name])]
    return f"Those with Muon in the order of Δm: {', '.join(told)}."


def _missing(rooms: Rooms) -> str:
    everything = [*WITH_MUON, *WITH_ADAM, ("stl", {})]
    rows = {variant(*each): rooms.row(*each) for each in [MOON, ROBUST, *everything]}
    twice = {variant(*each): rooms.row(*each) for each in [MOON, *everything][:TWICE]}
    tuned = {method for each in rooms.tuning.values() for method in each["chosen"]}
    found = {
        "not tuned yet": [method for method in ("moon", *(method for method, _ in everything)) if method not in tuned],
        NOT_RUN: [name for name, row in rows.items() if row is None],
        "fewer than 2 seeds": [
            f"{name} ({seeds(row)})" for name, row in twice.items() if row is not None and len(row.outcomes) < 2
        ],
        "without a number": list(rooms.study.left_out),
    }
    return missing(found)
