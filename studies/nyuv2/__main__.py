"""Δm over epochs, the paper's figure: ``python -m studies.nyuv2 results/nyuv2 docs`` draws images/nyuv2-delta.svg.

Δm of every evaluation on test data is against the ``stl`` runs in the same folder, of the same seed where there is one. The
table is that of ``moonopt report results/nyuv2``.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from moonopt.errors import UserError
from moonopt.runs.report.curves import metric_band
from moonopt.runs.report.delta import Reference, single_reference
from moonopt.runs.report.drawing import INK, Panel, Plot, files
from moonopt.runs.report.reading import Line, read_runs
from moonopt.runs.report.study import Outcome, Row, Study, studies
from moonopt.runs.report.styles import DASHES, Style
from studies.entries import variant
from studies.figures import draw_band, method_style, steps_per_epoch
from studies.page import folders

DELTA = "Δm"
RATES = ("optimizer.lr", "optimizer.vector_lr")


def main(arguments: Sequence[str] | None = None) -> None:
    folder, docs = folders("nyuv2", __doc__, arguments)
    (docs / "images").mkdir(exist_ok=True)
    (docs / "images" / "nyuv2-delta.svg").write_bytes(files(plot(rows(folder)))[".svg"])


def rows(folder: Path) -> list[Row]:
    """What was run but for ``stl``, with Δm in every evaluation."""
    exports = [path for path in sorted(folder.glob("*.json")) if not path.name.startswith("tuned-")]
    (study,) = studies(read_runs(exports))
    reference = _reference(study)
    return [
        replace(row, outcomes=[_with_delta(each, study, reference) for each in row.outcomes])
        for row in study.rows
        if not row.is_single
    ]


def plot(drawn: Sequence[Row]) -> Plot:
    legend = {variant(row.method, _changes(row)): _style(row) for row in drawn}
    return Plot("nyuv2-delta", "Δm on test data over epochs, lower is better", "", [Panel("", partial(_draw, drawn))], legend)


def _reference(study: Study) -> Reference:
    single = next((row for row in study.rows if row.is_single), None)
    by_seed = {} if single is None else {outcome.seed: outcome.metrics for outcome in single.outcomes}
    found = single_reference("stl", by_seed, study.benchmark.metrics)
    if found is None:
        raise UserError("Δm is against stl, of which the folder has no finished runs for all tasks.")
    return found


def _with_delta(outcome: Outcome, study: Study, reference: Reference) -> Outcome:
    metrics = study.benchmark.metrics
    lines: list[Line] = [
        {**line, "test": {DELTA: reference.delta(outcome.seed, line["test"], metrics)}}
        for line in outcome.evaluation
        if line.get("test")
    ]
    return replace(outcome, evaluation=lines)


def _style(row: Row) -> Style:
    """Dashed for a balancer with Muon, and for MOON with other settings than the paper's."""
    style = method_style(row.method)
    return replace(style, dash=DASHES[1]) if "+" in row.method or _changes(row) else style


def _changes(row: Row) -> dict[str, Any]:
    """What is not as in the main runs, but for rates."""
    overrides = row.outcomes[0].runs[0].config["overrides"]
    return {key: value for key, value in overrides.items() if key not in RATES}


def _draw(drawn: Sequence[Row], axes: Axes) -> None:
    """The height is that of the second half: the first epochs are far above."""
    late = []
    for row in reversed(drawn):  # the first on top
        if (band := metric_band(row, DELTA)) is not None:
            draw_band(band, _style(row), steps_per_epoch(row), float("-inf"), axes)
            late += band.mean[len(band.mean) // 2 :].tolist()
    axes.axhline(0, color=INK, linewidth=0.8, alpha=0.4)
    margin = 0.1 * (max(late) - min(late)) or 1.0
    axes.set(xlabel="epoch", ylabel=f"{DELTA} (%)", ylim=(min(late) - margin, max(late) + margin))


if __name__ == "__main__":
    main()
