"""Memory and time of a step with 1.7 billion parameters, and the time of sampling."""

from collections.abc import Mapping, Sequence

from moonopt.speed import sampling
from moonopt.speed.language import DTYPES, REFERENCE
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
        told.append(f"{peak:.1f} GB, {ratio:.3f} times: **{verdict}** ({_weights(found)})")
    return f"{goal} {'; '.join(told) or NOT_MEASURED}."


def speed_table(speed: Sequence[Speed]) -> str:
    return "\n\n".join(map(_table, speed)) or f"{NOT_MEASURED.capitalize()}."


def sampling_table(speed: Sequence[Speed]) -> str:
    return "\n\n".join(map(_sampling_table, speed)) or f"{NOT_MEASURED.capitalize()}."


def _sampling_table(found: Speed) -> str:
    lines = []
    for name, times in found["times"].items():
        rate = f"{found['tokens_per_second'][name]:,.0f}"
        lines.append([name, _milliseconds(times), rate, f"{found['ratios'][name]:.2f}"])
    tokens = f"{found['prompts']} prompts of {found['prompt']} tokens, responses of {found['response']}"
    where = f"{_where(found)}, {found['parameters']:,} parameters, {tokens}."
    heading = ["", "ms (quartiles)", "tokens a second", f"times as fast as {sampling.REFERENCE}"]
    return f"{where}\n\n{markdown(heading, lines)}"


def _table(found: Speed) -> str:
    lines = []
    for name, times in found["times"].items():
        peak, muon = (found["peaks_gib"][each] for each in (name, "muon"))
        memory = [f"{peak * GIB / GB:.2f}", f"{peak / muon:.3f}", f"{found['states_gib'][name] * GIB / GB:.2f}"]
        lines.append([name, _milliseconds(times), f"{found['ratios'][name]:.2f}", *memory])
    sizes = f"{found['parameters']:,} {_weights(found)}, {found['batch']} x {found['length']} tokens"
    where = f"{_where(found)}, {sizes}."
    heading = ["", "ms a step (quartiles)", f"times {REFERENCE}", "peak (GB)", "times muon's peak", "optimizer's state (GB)"]
    return f"{where}\n\n{markdown(heading, lines)}"


def _weights(found: Speed) -> str:
    return f"parameters in {found.get('dtype', DTYPES[0])}"


def _milliseconds(times: Mapping[str, float]) -> str:
    return f"{times['ms']:.0f} ({times['low_ms']:.0f} to {times['high_ms']:.0f})"


def _where(found: Speed) -> str:
    return f"{found['environment']['device']}, torch {found['environment']['torch']}"
