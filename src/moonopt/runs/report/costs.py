"""What a step costs in time and memory, against that of ``ls``."""

import math

from moonopt.runs.report.layout import DASH, Column, Entry, Table, TableRow
from moonopt.runs.report.study import Row, Study, number
from moonopt.runs.report.tables import mean_and_spread, shown


def cost_table(study: Study) -> Table:
    """Milliseconds and memory of a step, and their ratio to those of ``ls`` (of the first row where there is no ``ls``)."""
    base = base_row(study)
    name = "" if base is None else base.label
    columns = [Column("time per step (ms)", False), Column(f"time / {name}", False)]
    columns += [Column("peak memory (MB)", False), Column(f"memory / {name}", False), Column("parameters"), Column("steps")]
    rows = []
    for row in study.rows:
        entries = []
        for key, factor in (("seconds_per_step", 1e3), ("peak_memory_mb", 1.0)):
            mean, spread = mean_and_spread([factor * getattr(outcome, key) for outcome in row.outcomes])
            ratio = cost_ratio(row, base, key)
            measured = None if mean is None or math.isnan(mean) else mean
            entries += [
                shown(measured, spread, 3 if factor > 1 else 1),
                Entry(DASH if ratio is None else f"{ratio:.2f}", ratio),
            ]
        for key in ("parameters", "steps"):
            found = [sum(number((run.result or {}).get(key)) for run in outcome.runs) for outcome in row.outcomes]
            entries.append(shown(mean_and_spread(found)[0], None, 0))
        rows.append(TableRow(row.label, entries, len(row.outcomes)))
    notes = [
        "Mean ± sample standard deviation over seeds; memory is what training took at its peak: on a GPU that of all tensors, "
        "on a CPU what the process grew by after its start."
    ]
    if base is not None and base.method != "ls":
        notes.append(f"There is no run of ls here: the ratios are to {name}, the first row.")
    if single := [row.label for row in study.rows if row.is_single]:
        names, verb = " and ".join(single), "train" if len(single) > 1 else "trains"
        notes.append(f"{names} {verb} one model per task: time, parameters and steps are sums, memory is the largest.")
    if len(_hardware(study)) > 1:
        notes.append("Not all runs were made on the same hardware: compare with care.")
    return Table("Cost of a step", "method", columns, rows, notes)


def base_row(study: Study) -> Row | None:
    """What costs are compared with: ``ls``, plain if there is such a row, or the first row."""
    plain = sorted(study.rows, key=lambda row: (row.method != "ls", row.label != "ls"))  # stable
    return plain[0] if plain else None


def cost_ratio(row: Row, base: Row | None, key: str) -> float | None:
    """The mean cost of a row over that of another; None where one was not measured."""
    if base is None:
        return None
    own, other = (mean_and_spread([getattr(outcome, key) for outcome in each.outcomes])[0] for each in (row, base))
    return own / other if own is not None and other and math.isfinite(own / other) else None


def _hardware(study: Study) -> set[str]:
    """Every different description of where a run was made."""
    return {str((run.result or {}).get("hardware")) for row in study.rows for each in row.outcomes for run in each.runs}
