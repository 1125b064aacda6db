"""Running many cells, a few at a time, each in a process of its own: what kills one does not end the others.

An engine is a function from jobs to outcomes. ``local`` uses processes of this machine, and all of its
GPUs where a cell names none.
"""

import multiprocessing
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch

from moonopt.errors import UserError
from moonopt.runs.cell import Cell
from moonopt.runs.interrupt import Stop, stopping, without_interrupts
from moonopt.runs.run import CHECKPOINT_SECONDS, RunFailedError, run_cell
from moonopt.runs.train import InterruptedRun

#: What takes long to import, once and not in every process: torch, and what it imports itself when it makes an optimizer.
PRELOAD = [__name__, "torch._inductor", "torch.utils.tensorboard"]

#: Seconds between two records that a process sends of its training.
PACE = 0.2


@dataclass(frozen=True)
class Job:
    """A cell, with where it runs."""

    cell: Cell
    root: Path
    data_folder: Path
    overwrite: bool = False
    checkpoint_seconds: float = CHECKPOINT_SECONDS


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with its result, or with a sentence."""

    cell: Cell
    status: Literal["done", "failed", "killed", "stopped"]
    result: Mapping[str, Any] | None = None
    text: str = ""


#: Gets every record of every job: the number of the job, and the record.
Tell = Callable[[int, Mapping[str, Any]], None]


class Engine(Protocol):
    """Runs jobs, ``at_once`` at a time, and yields the number and the outcome of each as it ends."""

    def __call__(self, jobs: Sequence[Job], at_once: int, stop: Stop, tell: Tell) -> Iterator[tuple[int, Outcome]]: ...


def local(jobs: Sequence[Job], at_once: int, stop: Stop, tell: Tell) -> Iterator[tuple[int, Outcome]]:
    """Processes on this machine. Once asked to stop, it lets the running ones write their checkpoints and starts no more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with without_interrupts():  # which would hit the server while it imports torch
        forkserver.ensure_running()
    threads = max(1, torch.get_num_threads() // at_once)
    waiting = list(enumerate(jobs))[::-1]
    running: dict[Connection, _Worker] = {}
    gpus = visible_gpus()
    try:
        while running or (waiting and not stop.requested):
            while waiting and len(running) < at_once and not stop.requested:
                number, job = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                gpu = _idlest(gpus, running.values()) if job.cell.machine.device == "cuda" and len(gpus) > 1 else None
                process = context.Process(target=_work, args=(job, threads, theirs, gpu), daemon=False)
                process.start()
                theirs.close()
                running[ours] = _Worker(number, job, process, gpu)
            for connection in cast(list[Connection], wait(list(running), timeout=PACE)):
                worker = running[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):  # it has ended, perhaps in the middle of a message
                    connection.close()
                    del running[connection]
                    yield worker.number, worker.outcome()
                    continue
                if isinstance(message, Outcome):
                    worker.answer = message
                else:
                    tell(worker.number, message)
            if stop.requested:
                for worker in running.values():
                    worker.stop()
    finally:
        for worker in running.values():
            worker.process.terminate()


ENGINES: dict[str, Engine] = {"local": local}


def visible_gpus() -> list[str]:
    """The GPUs of this process, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(torch.cuda.device_count())] if named is None else [*filter(None, named.split(","))]


@dataclass
class _Worker:
    """A process with its job."""

    number: int
    job: Job
    process: BaseProcess
    gpu: str | None = None
    answer: Outcome | None = None
    asked: bool = False

    def stop(self) -> None:
        if not self.asked:
            self.process.terminate()
            self.asked = True

    def outcome(self) -> Outcome:
        """What the process said; what the system did to it, if it said nothing."""
        self.process.join()
        if self.answer is not None:
            return self.answer
        code = self.process.exitcode or 0
        if code == -signal.SIGTERM and self.asked:
            return Outcome(self.job.cell, "stopped", text="stopped before it began")
        if code == -signal.SIGKILL:
            text = "killed by the system (SIGKILL), which it does when memory runs out"
        elif code < 0:
            text = f"killed by {signal.Signals(-code).name}"
        else:
            text = f"ended with exit code {code} and without a word"
        return Outcome(self.job.cell, "killed", text=text)


def _idlest(gpus: Sequence[str], workers: Iterable[_Worker]) -> str:
    """The first of those with the fewest processes."""
    used = Counter(worker.gpu for worker in workers)
    return min(gpus, key=lambda gpu: used[gpu])


def _work(job: Job, threads: int, connection: Connection, gpu: str | None = None) -> None:
    """What a process does, which may see one GPU alone. SIGINT is left to the parent, which passes it on as SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    torch.set_num_threads(threads)
    cell = job.cell
    with stopping(signal.SIGTERM, patient=True) as stop:
        tell = _Sender(connection, stop)
        warnings.showwarning = lambda message, *rest, **more: tell({"kind": "note", "text": f"{cell.name}: {message}"})
        try:
            result = run_cell(
                cell,
                job.root,
                job.data_folder,
                stop=stop,
                tell=tell,
                go_on=True,
                overwrite=job.overwrite,
                checkpoint_seconds=job.checkpoint_seconds,
            )
            outcome = Outcome(cell, "done", result)
        except InterruptedRun:
            outcome = Outcome(cell, "stopped", text="stopped, with a checkpoint")
        except (UserError, RunFailedError) as error:
            outcome = Outcome(cell, "failed", text=str(error))
        tell.send(outcome)


class _Sender:
    """Sends records to the parent, not too many. If that is gone, the run is asked to stop."""

    def __init__(self, connection: Connection, stop: Stop) -> None:
        self._connection, self._stop = connection, stop
        self._last = 0.0

    def __call__(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "train":
            if time.monotonic() - self._last < PACE:
                return
            self._last = time.monotonic()
        self.send(dict(record))

    def send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, OSError):
            self._stop.signal = signal.SIGTERM
