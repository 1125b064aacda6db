"""Methods against each other: every method with every seed, whatever is done skipped, whatever fails told at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from moonopt.bench import find
from moonopt.errors import UserError
from moonopt.runs.cell import CPU, Cell, Machine, make_cell
from moonopt.runs.engines import Engine, Job, Outcome, local
from moonopt.runs.interrupt import Stop
from moonopt.runs.run import CHECKPOINT_SECONDS
from moonopt.runs.settings import Layer
from moonopt.runs.single import TASK, check_single, is_single
from moonopt.runs.store import RunFolder, State


class Screen(Protocol):
    """Who shows a comparison."""

    def begin(self, cells: Sequence[Cell]) -> None: ...

    def record(self, number: int, record: Mapping[str, Any]) -> None: ...

    def end(self, number: int, outcome: Outcome) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How cells are run."""

    root: Path
    data_folder: Path
    engine: Engine = local
    jobs: int = 1
    overwrite: bool = False
    checkpoint_seconds: float = CHECKPOINT_SECONDS


@dataclass
class Comparison:
    """How the cells ended."""

    cells: Sequence[Cell]
    skipped: list[Cell] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status in ("failed", "killed")]

    @property
    def finished(self) -> list[Cell]:
        """Those that a signal has not stopped."""
        return [*self.skipped, *(outcome.cell for outcome in self.outcomes if outcome.status != "stopped")]


def make_cells(
    benchmark: str,
    methods: Sequence[str],
    seeds: Sequence[int],
    layers: Mapping[str, Sequence[Layer]],
    machine: Machine = CPU,
) -> list[Cell]:
    """All cells, the first seed of every method first; ``stl`` is one cell per task. ``layers`` has the settings by method."""
    for what, found in (("method", list(methods)), ("seed", list(seeds))):
        if not found:
            raise UserError(f"A comparison needs at least one {what}.")
        if len(set(found)) < len(found):
            raise UserError(f"Every {what} can be in a comparison once, found {', '.join(map(str, found))}.")
    check_single(methods, find(benchmark))
    cells = []
    for seed in seeds:
        for method in methods:
            alone = [make_cell(benchmark, method, seed, layers.get(method, ()), machine)]
            cells += _per_task(alone[0], layers.get(method, ()), machine) if is_single(method) else alone
    return cells


def compare(cells: Sequence[Cell], plan: Plan, stop: Stop, screen: Screen) -> Comparison:
    """Run what is not done; go on with what is unfinished. Nothing is begun if a folder holds a run with other settings."""
    folders = [RunFolder(cell.folder(plan.root)) for cell in cells]
    states = [State.NEW if plan.overwrite else folder.state(cell) for folder, cell in zip(folders, cells, strict=True)]
    for cell, folder, state in zip(cells, folders, states, strict=True):
        if state is State.OTHER:
            raise folder.other_settings(cell)
    comparison = Comparison(cells, [cell for cell, state in zip(cells, states, strict=True) if state is State.DONE])
    remaining = [number for number, state in enumerate(states) if state is not State.DONE]
    jobs = [Job(cells[number], plan.root, plan.data_folder, plan.overwrite, plan.checkpoint_seconds) for number in remaining]
    if jobs and (missing := find(cells[0].benchmark)(cells[0].settings).missing(plan.data_folder)) is not None:
        raise UserError(missing)
    screen.begin(cells)
    for number, cell in enumerate(cells):
        if number not in remaining:
            screen.end(number, Outcome(cell, "done", folders[number].result()))
    for number, outcome in plan.engine(jobs, plan.jobs, stop, lambda job, record: screen.record(remaining[job], record)):
        comparison.outcomes.append(outcome)
        screen.end(remaining[number], outcome)
    return comparison


def _per_task(cell: Cell, layers: Sequence[Layer], machine: Machine) -> list[Cell]:
    if cell.settings[TASK] is not None:
        return [cell]
    tasks = find(cell.benchmark)(cell.settings).tasks
    each = [[*layers, (cell.method, {TASK: task})] for task in tasks]
    return [make_cell(cell.benchmark, cell.method, cell.seed, settings, machine) for settings in each]
