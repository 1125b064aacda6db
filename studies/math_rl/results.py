"""What was run: every method from the same weights, the weights as they were, and a step of a larger model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from moonopt.bench.math_rl import MathRL
from moonopt.runs.report.reading import Line, Run
from moonopt.runs.report.study import Outcome, Row
from studies.results import RATE, Changes, Results, Speed, Variant, read_exports, read_speed, read_tuning, setting, study_of

MOON: Variant = ("moon", {})
OTHERS: tuple[Variant, ...] = tuple((name, {}) for name in ("muon", "ls", "famo", "mgda", "nash-mtl", "gradnorm"))
METHODS = tuple(method for method, _ in (MOON, *OTHERS))


@dataclass(frozen=True)
class Language(Results):
    """The study. ``start`` are runs at a rate of zero, of which the first evaluation of all others on the same problems is."""

    start: Row | None
    speed: Sequence[Speed]
    sampling: Sequence[Speed]

    given: ClassVar = ("model.folder",)

    def chosen(self, method: str, changes: Changes, default: float) -> float:
        """Where nothing was tuned the benchmark's own rate, if that was run."""
        usual = MathRL.tuned.get(method, {}).get(RATE, default)
        run = {setting(row, RATE) for row in self.study.rows if row.method == method}
        return super().chosen(method, changes, usual if usual in run else min(run, default=default))


def read(folder: Path) -> Language:
    """The runs of a folder, which need not be there, and the files of speed beside it."""
    runs = read_exports(folder)
    begun = study_of([run for run in runs if not run.config["settings"][RATE]], MathRL)
    study = study_of([run for run in runs if run.config["settings"][RATE]], MathRL)
    starts = [outcome for row in begun.rows for outcome in row.outcomes]
    rows = [replace(row, outcomes=[_from_start(each, starts) for each in row.outcomes]) for row in study.rows]
    speed = {name: read_speed(folder.parent / "speed", f"{name}-h200.json") for name in ("language", "sampling")}
    results = Language(replace(study, rows=rows), read_tuning(folder), None, speed["language"], speed["sampling"])
    main = [outcome.runs[0] for row in results.rows(METHODS) for outcome in row.outcomes]
    start = next((row for row in begun.rows if not main or _same_problems(row.outcomes[0].runs[0], main[0])), None)
    return replace(results, start=start)


def _from_start(outcome: Outcome, starts: Sequence[Outcome]) -> Outcome:
    """Evaluations that begin with that of the model before any update, where there is one."""
    found = [each for each in starts if each.seed == outcome.seed and _same_problems(each.runs[0], outcome.runs[0])]
    before: list[Line] = [{**line, "step": 0, "epoch": 0} for each in found[:1] for line in each.evaluation[-1:]]
    return replace(outcome, evaluation=[*before, *outcome.evaluation])


def _same_problems(run: Run, other: Run) -> bool:
    """Whether two runs have one model and one set of problems, and sample alike."""
    settings = [each.config["settings"] for each in (run, other)]
    return all(settings[0][key] == settings[1].get(key) for key in settings[0] if key.startswith(("data.", "model.")))
