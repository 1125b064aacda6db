"""The training loop: one for all benchmarks and methods, from the first step to the result."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonopt.bench import Splits, find
from moonopt.errors import UserError
from moonopt.runs import checkpoint
from moonopt.runs.cell import FORMAT, Cell
from moonopt.runs.evaluate import cosines_of, metrics_of, to_device
from moonopt.runs.events import EventFiles
from moonopt.runs.interrupt import Stop
from moonopt.runs.meter import Cost, Meter, resident_mb
from moonopt.runs.provenance import commit, hardware, versions
from moonopt.runs.reproducible import epoch_order, generator_of, random_state, restore_random_state
from moonopt.runs.schedules import Schedule
from moonopt.runs.select import Selection
from moonopt.runs.settings import make_method
from moonopt.runs.single import check_task, task_of
from moonopt.runs.store import METRICS, RESULT, MetricsLog, RunFolder, write_json
from moonopt.tasks.capture import CapturedStep, CaptureError, capture
from moonopt.tasks.losses import Losses, read_losses
from moonopt.tasks.presence import selection, spread

#: How many steps run before one is captured as a CUDA graph.
WARMUP = 3
#: Who watches a run gets what goes into metrics.jsonl, and notes, as dicts that can travel between processes.
Tell = Callable[[Mapping[str, Any]], None]


class InterruptedRun(Exception):  # noqa: N818 - a signal is no error
    """A signal has stopped the run after a step; its checkpoint is written."""


@dataclass
class Progress:
    """How far a run is, beside the states of model, method and schedule."""

    losses: Tensor  # sums since the last line of metrics.jsonl
    counts: Tensor  # how many losses each sum has
    epoch: int = 0  # finished ones
    batch: int = 0  # of the epoch, finished ones
    step: int = 0
    cost: Cost = field(default_factory=Cost)
    commits: list[str] = field(default_factory=list)  # of the code that has worked on it
    evaluations: list[dict[str, Any]] = field(default_factory=list)


class Training:
    """A cell made ready: what it trains, and how."""

    def __init__(self, cell: Cell, data_folder: Path) -> None:
        self.cell, settings = cell, cell.settings
        self.device = find_device(cell.machine.device)
        self.bench = find(cell.benchmark)(settings)
        self.bench.check(cell.method)
        check_task(cell.method, settings, self.bench.tasks)
        missing = self.bench.missing(data_folder)
        if missing is not None:
            raise UserError(missing)
        self.splits: Splits = self.bench.load(data_folder, cell.seed).to(self.device)
        self.made_up = self.bench.is_made_up(data_folder)
        _check_not_empty(self.splits)
        self.before_mb = resident_mb()
        self.task = task_of(cell.method, settings)
        model = self.bench.model() if self.task is None else self.bench.model_of_task(self.task)
        self.model = model.to(self.device)
        if cell.machine.compile:
            torch._functorch.config.donated_buffer = False  # gradient-based methods go through a graph several times
            # What can be captured has few shapes. One code for several of them, as dynamo would have it, rounds otherwise.
            self.model.compile(dynamic=False if self.bench.capturable else None)
        self.method = make_method(cell.method, self.model, self.bench.tasks, settings)
        self._captured: CapturedStep | None = None
        if self.device.type == "cuda" and self.bench.capturable and self.method.obstacle_to_capture() is None:
            self._captured = capture(self.method, self.task_losses, WARMUP)
        has_validation = self.splits.valid is not None
        self.select = Selection.read(settings["train.select"], has_validation)
        if self.bench.tests_at_end and self.select.count > 1:
            raise UserError(
                f"{self.bench.name} tests once, at the end: train.select must be best or last, not a mean of several."
            )
        self.steps_per_epoch = len(self._order(0))
        self.steps = settings["train.epochs"] * self.steps_per_epoch
        self.schedule = Schedule(self.method, settings["train.schedule"], self.steps, self.steps_per_epoch, has_validation)
        zeros = torch.zeros(len(self.bench.tasks), dtype=torch.float64, device=self.device)
        self.progress = Progress(zeros, zeros.clone())

    def run(
        self, folder: RunFolder, state: Mapping[str, Any] | None, stop: Stop, tell: Tell, checkpoint_seconds: float
    ) -> dict[str, Any]:
        """Train to the end, or to a signal, from the state of a checkpoint if there is one."""
        if state is not None:
            self.load_state(state)
        settings, progress = self.cell.settings, self.progress
        code = commit()
        if code is not None and code not in progress.commits:
            progress.commits.append(code)
        log = MetricsLog(folder.path / METRICS, 0 if state is None else state["metrics_length"])
        events = EventFiles(folder.path, progress.step)
        begun = {"step": progress.step, "steps": self.steps, "epochs": settings["train.epochs"], "made_up": self.made_up}
        tell({"kind": "start", **begun})

        def write(record: dict[str, Any]) -> None:
            log.write(record)
            events.write(record)
            tell(record)

        def save() -> None:
            events.flush()
            checkpoint.save(folder.path, self.state() | {"metrics_length": log.saved()})

        untimed = 1 if self._captured is None else WARMUP + 1
        saved, meter = time.perf_counter(), Meter(progress.cost, self.device, self.before_mb, untimed)
        with contextlib.closing(log), contextlib.closing(events):
            while progress.epoch < settings["train.epochs"]:
                order = self._order(progress.epoch)
                while progress.batch < len(order):
                    rate = float(self.method.param_groups[0]["lr"])
                    batch = self.batch(order, progress.epoch, progress.batch)
                    losses = self._step(batch, tell)
                    self.schedule.after_step()
                    meter.step()
                    self._remember(losses)
                    if progress.step % settings["train.log_every"] == 0 or progress.step == self.steps:
                        meter.pause()
                        write(self._line(rate))
                        meter.run()
                    asked = stop.requested  # once: a signal may come at any moment
                    due = time.perf_counter() - saved >= checkpoint_seconds and progress.batch < len(order)
                    if asked or due:
                        meter.pause()
                        save()
                        saved = time.perf_counter()
                        meter.run()
                    if asked:
                        raise InterruptedRun
                progress.epoch, progress.batch = progress.epoch + 1, 0
                meter.pause()
                if progress.epoch % settings["train.evaluate_every"] == 0 or progress.epoch == settings["train.epochs"]:
                    write(self._evaluate(folder))
                save()
                saved = time.perf_counter()
                meter.run()
        result = self._result(folder)
        write_json(folder.path / RESULT, result)
        return result

    def _step(self, batch: Any, tell: Tell) -> Any:
        """One step; as a CUDA graph where that is possible."""
        if self._captured is not None:
            try:
                return self._captured(batch)
            except CaptureError as error:
                tell({"kind": "note", "text": f"Training goes on without a CUDA graph. {error}"})
                self._captured = None
        return self.method.minimize(self.task_losses, batch)

    def task_losses(self, batch: Any) -> Losses:
        """The closure that methods call, perhaps twice."""
        with self._autocast():
            return self.bench.losses(self.model, batch)

    def batch(self, order: list[Tensor], epoch: int, number: int) -> Any:
        """A batch of an epoch. It depends on the seed, the epoch and its number alone, so that a resumed run has the same."""
        generator = generator_of(self.cell.seed, epoch, number, "batch")
        batch = to_device(self.splits.train.batch(order[number], generator), self.device)
        with self._autocast():
            return self.bench.prepare(self.model, batch, generator)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cell.machine.amp)

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint holds."""
        return {
            "config": self.cell.config,
            "model": self.model.state_dict(),
            "method": self.method.state_dict(),
            "schedule": self.schedule.state_dict(),
            "bench": self.bench.state_dict(),
            "progress": asdict(self.progress),
            "random": random_state(),
            "threads": torch.get_num_threads(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(f"The checkpoint is of another model; --overwrite begins anew. {error}") from error
        self.method.load_state_dict(state["method"])
        self.schedule.load_state_dict(state["schedule"])
        self.bench.load_state_dict(state.get("bench", {}))
        restore_random_state(state["random"])
        saved = dict(state["progress"])
        saved |= {name: saved[name].to(self.device) for name in ("losses", "counts")}
        self.progress = Progress(**saved | {"cost": Cost(**saved["cost"])})

    def _order(self, epoch: int) -> list[Tensor]:
        settings = self.cell.settings
        size, count = settings["train.batch_size"], settings["train.steps_per_epoch"]
        return epoch_order(len(self.splits.train), size, count, self.cell.seed, epoch)

    def _remember(self, losses: Losses) -> None:
        found = read_losses(losses, self.bench.tasks)
        self.progress.losses += spread(found.values.to(self.progress.losses), found.present)
        self.progress.counts += selection(found.present, self.progress.counts)
        self.progress.batch += 1
        self.progress.step += 1

    def _line(self, rate: float) -> dict[str, Any]:
        """A line for metrics.jsonl, of steps whose last had this learning rate. This waits for the device."""
        progress, tasks = self.progress, self.bench.tasks
        means = (progress.losses / progress.counts).tolist()
        progress.losses.zero_()
        progress.counts.zero_()
        weights = getattr(self.method, "task_weights", None)
        return {
            "kind": "train",
            "step": progress.step,
            "epoch": round(progress.epoch + progress.batch / self.steps_per_epoch, 6),
            "loss": {name: _number(mean) for name, mean in zip(tasks, means, strict=True)},
            "weight": None if weights is None else _numbers(dict(zip(tasks, weights.tolist(), strict=True))),
            "lr": rate,
            "seconds": progress.cost.seconds,
            "memory_mb": progress.cost.peak_memory_mb,
            **({"measured": _numbers(measured)} if (measured := self.bench.measured()) else {}),
        }

    def _evaluate(self, folder: RunFolder) -> dict[str, Any]:
        bench, splits, progress = self.bench, self.splits, self.progress
        before = random_state()
        valid = None if splits.valid is None else metrics_of(bench, self.model, splits.valid, self.device)
        test = {} if bench.tests_at_end else self._tested()
        conflict = None
        if self.cell.settings["train.conflict"]:
            learned = bench.state_dict()
            conflict = cosines_of(bench, self.model, self.batch(self._order(0), epoch=0, number=0))
            bench.load_state_dict(learned)
        restore_random_state(before)
        score = None if valid is None else self._score(valid)
        self.schedule.after_evaluation(score)
        progress.evaluations.append({"epoch": progress.epoch, "valid": valid, "test": test})
        if self.select.kind == "best" and self.select.reported(progress.evaluations, self._score)["epoch"] == progress.epoch:
            checkpoint.save_best(folder.path, {"model": self.model.state_dict(), "epoch": progress.epoch})
        return {
            "kind": "evaluation",
            "step": progress.step,
            "epoch": progress.epoch,
            "valid": valid and _numbers(valid),
            "test": _numbers(test),
            "conflict": conflict and [[_number(cosine) for cosine in row] for row in conflict],
            "seconds": progress.cost.seconds,
            **({"examples": examples} if (examples := bench.examples()) else {}),
        }

    def _tested(self) -> dict[str, float]:
        splits = self.splits
        return metrics_of(self.bench, self.model, splits.train if splits.test is None else splits.test, self.device)

    def _result(self, folder: RunFolder) -> dict[str, Any]:
        progress = self.progress
        reported = self.select.reported(progress.evaluations, self._score)
        if self.bench.tests_at_end:
            if self.select.kind == "best":
                best = torch.load(folder.path / checkpoint.BEST, map_location=self.device, weights_only=True)
                self.model.load_state_dict(best["model"])
            reported["metrics"] = self._tested()
        return {
            "format": FORMAT,
            "tasks": list(self.bench.tasks),
            **reported,
            "metrics": _numbers(reported["metrics"]),
            "valid": reported["valid"] and _numbers(reported["valid"]),
            "steps": progress.step,
            "epochs": progress.epoch,
            "seconds": progress.cost.seconds,
            "seconds_per_step": progress.cost.seconds_per_step,
            "peak_memory_mb": progress.cost.peak_memory_mb,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "versions": versions(),
            "hardware": hardware(self.device),
            "command": f"OMP_NUM_THREADS={torch.get_num_threads()} {self.cell.command}",
            "commit": ", ".join(progress.commits) or None,
            **({"made_up_data": True} if self.made_up else {}),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _score(self, metrics: Mapping[str, float]) -> float:
        return self.bench.score(metrics) if self.task is None else self.bench.score_of_task(metrics, self.task)


def _check_not_empty(splits: Splits) -> None:
    for name in ("train", "valid", "test"):
        data = getattr(splits, name)
        if data is not None and len(data) == 0:
            raise UserError(f"The {name} data have no examples.")


def find_device(name: str) -> torch.device:
    """The device of a name; ``UserError`` where there is none."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"Device {name!r} is not there: expected cpu, cuda, or cuda:1 for the second GPU. {str(error).splitlines()[0]}"
        ) from error
    return device


def _numbers(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in metrics.items()}


def _number(value: float) -> float | None:
    """As strict JSON has it: NaN and infinity are null."""
    return value if math.isfinite(value) else None
