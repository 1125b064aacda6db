"""Showing runs while they go on: a live table or a progress bar in a terminal, plain lines elsewhere or without rich."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from moonopt.bench import Benchmark, find
from moonopt.errors import first_sentence
from moonopt.runs.cell import Cell, in_all
from moonopt.runs.compare import Screen
from moonopt.runs.engines import Outcome
from moonopt.runs.report.delta import Reference, published_reference, single_reference, why_unusable
from moonopt.runs.single import STL, is_single, task_of, without_task

#: More task losses than this are shown as their mean.
SHOWN_LOSSES = 3
#: In a narrower terminal, losses are left out of the live table.
WIDE = 110


@contextlib.contextmanager
def screen_for(stream: TextIO) -> Iterator[Screen]:
    """A live table where the stream is a terminal and rich is there; plain lines otherwise."""
    try:
        from rich.console import Console
    except ImportError:
        yield PlainScreen(stream)
        return
    console = Console(file=stream, emoji=False)
    if not console.is_terminal:
        yield PlainScreen(stream)
        return
    screen = LiveScreen(console)
    with screen:
        yield screen


@dataclass
class Progress:
    """How far a cell is."""

    cell: Cell
    status: str = "waiting"
    step: int = 0
    steps: int = 0
    epoch: float = 0
    epochs: int = 0
    losses: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    began: tuple[float, int] | None = None  # when, and at which step
    made_up: bool = False  # whether its data are

    def take(self, record: Mapping[str, Any]) -> None:
        """What a record says."""
        kind = record["kind"]
        if kind == "start":
            self.status, self.began = "running", (time.monotonic(), record["step"])
            self.step, self.steps, self.epochs = record["step"], record["steps"], record["epochs"]
            self.made_up = record.get("made_up", False)
        elif kind == "train":
            self.step, self.epoch, self.losses = record["step"], record["epoch"], record["loss"]
        elif kind == "evaluation":
            self.step, self.epoch, self.metrics = record["step"], record["epoch"], record["test"] or record["valid"]

    def finish(self, outcome: Outcome) -> None:
        self.status = outcome.status
        if outcome.result is not None:
            self.metrics, self.step = outcome.result["metrics"], outcome.result["steps"]
            self.steps = self.step
            self.epoch = self.epochs = outcome.result["epochs"]
            self.made_up = outcome.result.get("made_up_data", False)

    @property
    def seconds_left(self) -> float | None:
        if self.began is None or self.step <= self.began[1] or self.status != "running":
            return None
        return (self.steps - self.step) * (time.monotonic() - self.began[0]) / (self.step - self.began[1])

    def shown_losses(self) -> str:
        numbers = [value for value in self.losses.values() if value is not None]
        if len(self.losses) <= SHOWN_LOSSES:
            return "  ".join(f"{name} {_short(value)}" for name, value in self.losses.items())
        return f"mean of {len(numbers)}: {_short(sum(numbers) / len(numbers))}" if numbers else ""


class _Board:
    """The cells of a comparison with their progress, and Δm against what is known."""

    bench: type[Benchmark]

    def __init__(self) -> None:
        self.rows: list[Progress] = []
        self.shared: list[str] = []  # overrides of all cells

    def begin(self, cells: Sequence[Cell]) -> None:
        self.rows = [Progress(cell) for cell in cells]
        self.shared = in_all([cell.words for cell in cells])
        self.bench = find(cells[0].benchmark)

    def shown_metrics(self, row: Progress) -> str:
        """The headline metric of the last evaluation, or that of its single task, and Δm where there is a reference."""
        task = task_of(row.cell.method, row.cell.settings)
        own = [] if task is None else self.bench.metrics_of_task(task)
        name = own[0].name if own else self.bench.headline
        texts = [f"{name} {_short(row.metrics[name])}"] if name in row.metrics else []
        drop = self._delta(row)
        return "  ".join([*texts, *([] if drop is None else [f"Δm {drop:+.2f} %"])])

    def _delta(self, row: Progress) -> float | None:
        """Δm as the report will have it; none while its reference may still change."""
        if is_single(row.cell.method) or (reference := self._reference(row.cell.seed)) is None:
            return None
        if why_unusable(reference, self.bench) is not None:
            return None
        drop = reference.delta(row.cell.seed, row.metrics, self.bench.metrics)
        return drop if math.isfinite(drop) else None

    def _reference(self, seed: int) -> Reference | None:
        single = [row for row in self.rows if is_single(row.cell.method)]
        published = None if any(row.made_up for row in self.rows) else published_reference(self.bench.published)
        if not single:
            return published
        first = min(single, key=lambda row: row.cell.method != STL).cell  # the first of equals
        chosen = [row for row in single if _group(row.cell) == _group(first)]
        by_seed: dict[int, dict[str, float | None]] = {}
        for row in chosen:
            task = task_of(row.cell.method, row.cell.settings)
            own = [metric.name for metric in self.bench.metrics if metric.task == task and row.status == "done"]
            by_seed.setdefault(row.cell.seed, {}).update({name: row.metrics.get(name) for name in own})
        reference = single_reference(first.method, by_seed, self.bench.metrics)
        if reference is not None and seed in reference.by_seed:
            return reference
        if any(row.status in ("waiting", "running") for row in chosen):
            return None
        return reference or published


def _group(cell: Cell) -> tuple[str, dict[str, Any]]:
    """What the cells of one row have in common."""
    return cell.method, without_task(cell.method, cell.overrides)


class PlainScreen(_Board):
    """A line when a cell begins, at evaluations a quarter of the way apart, and when it ends."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._told: dict[int, float] = {}

    def record(self, number: int, record: Mapping[str, Any]) -> None:
        row = self.rows[number]
        row.take(record)
        if record["kind"] == "note":
            self._say(record["text"])
        elif record["kind"] == "start":
            self._say(
                f"{row.cell.name}: " + (f"goes on at step {row.step} of {row.steps}" if row.step else f"{row.steps} steps")
            )
        elif record["kind"] == "evaluation" and row.step - self._told.get(number, 0) >= row.steps / 4:
            self._told[number] = row.step
            left = "" if row.seconds_left is None else f"  {_duration(row.seconds_left)} left"
            self._say(f"{row.cell.name}: epoch {row.epoch} of {row.epochs}  {self.shown_metrics(row)}{left}")

    def end(self, number: int, outcome: Outcome) -> None:
        row = self.rows[number]
        began = row.status != "waiting"
        row.finish(outcome)
        text = first_sentence(outcome.text) or ("done" if began else "was done already")
        self._say(f"{row.cell.name}: {text}  {self.shown_metrics(row)}".rstrip())

    def _say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveScreen(_Board):
    """One table that is drawn again and again; notes go above it."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live

        super().__init__()
        self._console = console
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=4)

    def __enter__(self) -> "LiveScreen":
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def begin(self, cells: Sequence[Cell]) -> None:
        super().begin(cells)
        self._live.start(refresh=True)

    def record(self, number: int, record: Mapping[str, Any]) -> None:
        self.rows[number].take(record)
        if record["kind"] == "note":
            self._console.print(record["text"], style="yellow", markup=False)

    def end(self, number: int, outcome: Outcome) -> None:
        self.rows[number].finish(outcome)
        if outcome.text:
            self._console.print(f"{outcome.cell.name}: {first_sentence(outcome.text)}", style="red", markup=False)

    def _table(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        def cells(row: Progress) -> dict[str, Any]:
            left, drop, metric = row.seconds_left, self._delta(row), self.bench.headline
            completed = row.steps if row.status == "done" else row.step
            return {
                "method": Text(",".join([row.cell.method, *(each for each in row.cell.words if each not in self.shared)])),
                "seed": str(row.cell.seed),
                "": ProgressBar(total=max(row.steps, 1), completed=completed, width=12),
                "epoch": f"{row.epoch:.1f}/{row.epochs}" if row.epochs else "",
                "losses": row.shown_losses() if self._console.width >= WIDE else "",
                metric: _short(row.metrics[metric]) if metric in row.metrics and not is_single(row.cell.method) else "",
                "Δm (%)": "" if drop is None else f"{drop:+.2f}",
                "time left": _duration(left) if left is not None else Text(row.status, style=_STYLES.get(row.status, "")),
            }

        shown = [cells(row) for row in _most_telling(self.rows, max(3, self._console.height - 4))]
        empty = {heading for heading in ("losses", "Δm (%)") if not any(each[heading] for each in shown)}
        headings = [heading for heading in (shown[0] if shown else ()) if heading not in empty]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for heading in headings:
            table.add_column(heading, no_wrap=True, min_width=None if heading in ("method", "losses") else len(heading))
        for each in shown:
            table.add_row(*(each[heading] for heading in headings))
        done, alike = sum(row.status == "done" for row in self.rows), ", ".join(self.shared)
        table.caption = f"{done} of {len(self.rows)} runs done" + (f"; all with {alike}" if alike else "")
        return table


_STYLES = {"done": "green", "failed": "red", "killed": "red", "stopped": "yellow", "waiting": "dim"}


def _most_telling(rows: Sequence[Progress], height: int) -> list[Progress]:
    """As many as fit: running ones first, then those that failed, are waiting, are done; in their own order."""
    order = ["running", "failed", "killed", "stopped", "waiting", "done"]
    kept = sorted(range(len(rows)), key=lambda index: (order.index(rows[index].status), index))[:height]
    return [rows[index] for index in sorted(kept)]


def _short(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
