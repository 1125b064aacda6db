"""Memory and time of a step with 1.7 billion parameters."""

from collections.abc import Sequence

from moonopt.speed.language import REFERENCE
from studies.entries import NOT_MEASURED, markdown
from studies.results import Speed

GIB, GB = 2**30, 1e9
#: Gigabytes of a GPU that MOON is to fit into, and how many times Muon's its highest use of memory may be.
ROOM, GOAL = 80, 1.02


def speed_target(speed: Sequence[Speed]) -> str:
    goal = f"- A step of MOON with 1.7 billion parameters fits in {ROOM} GB, and its peak is at most {GOAL} times Muon's:"
    told = []
    for found in speed:
        peak, ratio = found["peaks_gib"]["moon"] * GIB / GB, found["peaks_gib"]["moon"] / found["peaks_gib"]["muon"]
        verdict = "reached" if peak <= ROOM and ratio <= GOAL else "not reached"
        told.append(f"{peak:.1f} GB, {ratio:.3f} times: **{verdict}**")
    return f"{goal} {'; '.join(told) or NOT_MEASURED}."


def speed_table(speed: Sequence[Speed]) -> str:
    return "\n\n".join(map(_table, speed)) or f"{NOT_MEASURED.capitalize()}."


def _table(found: Speed) -> str:
    lines = []
    for name, times in found["times"].items():
        milliseconds = f"{times['ms']:.0f} ({times['low_ms']:.0f} to {times['high_ms']:.0f})"
        peak, muon = (found["peaks_gib"][each] for each in (name, "muon"))
        memory = [f"{peak * GIB / GB:.2f}", f"{peak / muon:.3f}", f"{found['states_gib'][name] * GIB / GB:.2f}"]
        lines.append([name, milliseconds, f"{found['ratios'][name]:.2f}", *memory])
    environment, tokens = found["environment"], f"{found['batch']} x {found['length']} tokens"
    where = f"{environment['device']}, torch {environment['torch']}, {found['parameters']:,} parameters, {tokens}."
    heading = ["", "ms a step (quartiles)", f"times {REFERENCE}", "peak (GB)", "times muon's peak", "optimizer's state (GB)"]
    return f"{where}\n\n{markdown(heading, lines)}"
