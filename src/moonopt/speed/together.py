"""How many runs to have at once: ``python -m moonopt.speed.together BENCH --data DIR [--jobs 1 4 16] [--json]``.

Processes that train side by side, as those of ``moonopt compare --jobs``, each on one batch that stays: the steps of all of
them in a second. On one GPU they take turns, unless NVIDIA's MPS lets them run at the same time; whether it is there is told.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, NamedTuple

import torch

from moonopt.bench import find
from moonopt.errors import UserError
from moonopt.speed.loading import stepper, training_options
from moonopt.speed.measure import command_line, show, waits_for_device

JOBS, SECONDS = (1, 2, 4), 5.0
WARMUP = 8
#: Where NVIDIA has MPS reached, if nothing else is said.
MPS = "/tmp/nvidia-mps"
#: Seconds in which all processes must be ready: compiling takes long.
PATIENCE = 600
GONE = "it ended without an answer, or the others were not ready in time."


class Training(NamedTuple):
    """What every process trains."""

    benchmark: str
    folder: Path
    device: str
    method: str
    products: str
    settings: Mapping[str, Any]
    compiled: bool = False
    engine: str | None = None


def measure(training: Training, jobs: Sequence[int] = JOBS, seconds: float = SECONDS) -> dict[str, Any]:
    """Steps in a second by number of processes, and how many times those of the first number."""
    rates = {count: _rate(training, count, seconds) for count in jobs}
    return {
        **{name: value for name, value in training._asdict().items() if name != "folder"},
        "mps": Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS), "control").exists(),
        "seconds": seconds,
        "steps_per_second": rates,
        "ratios": {count: rate / rates[jobs[0]] for count, rate in rates.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = training_options(command_line("together", __doc__))
    parser.add_argument("--jobs", nargs="+", type=int, default=list(JOBS), help="how many processes (default 1 2 4)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of training, for each number (default {SECONDS:g})")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--engine", help="of a gradient-based method, if not that which it has by itself")
    options = parser.parse_args(arguments)
    what = options.benchmark, options.data, options.device, options.method, options.products, options.settings
    show(options, [measure(Training(*what, options.compile, options.engine), options.jobs, options.seconds)], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    said = result["products"], "compiled" if result["compiled"] else "", result["engine"], "MPS" if result["mps"] else ""
    how = ", ".join(filter(None, said))
    lines = [f"{result['benchmark']} by {result['method']}, {how}: steps per second of all processes"]
    rates, ratios = result["steps_per_second"], result["ratios"]
    return lines + [f"  {count:3} at once {rate:10.1f}  {ratios[count]:6.2f}x" for count, rate in rates.items()]


def _rate(training: Training, count: int, seconds: float) -> float:
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(count)
    threads = max(1, torch.get_num_threads() // count)
    pipes, processes = [], []
    for _ in range(count):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_train, args=(training, seconds, threads, ready, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    rates = [_received(pipe) for pipe in pipes]
    for process in processes:
        process.join()
    failed = sorted((rate for rate in rates if isinstance(rate, str)), key=lambda text: text == GONE)  # the cause first
    if failed:
        raise UserError(f"Of {count} at once one failed: {failed[0]}")
    return sum(rate for rate in rates if not isinstance(rate, str))


def _received(pipe: Connection) -> float | str:
    """Steps in a second, or what went wrong."""
    try:
        found: float | str = pipe.recv()
    except EOFError:
        return GONE
    return found


def _train(training: Training, seconds: float, threads: int, ready: Barrier, answer: Connection) -> None:
    try:
        answer.send(_steps_per_second(training, seconds, threads, ready))
    except BrokenBarrierError:
        answer.send(GONE)
    except Exception as error:
        ready.abort()
        answer.send(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")


def _steps_per_second(training: Training, seconds: float, threads: int, ready: Barrier) -> float:
    torch.set_num_threads(threads)
    bench = find(training.benchmark)(training.settings)
    splits = bench.load(training.folder, 0).to(torch.device(training.device))
    indices = torch.arange(min(bench.settings["train.batch_size"], len(splits.train)))
    batch = splits.train.batch(indices, torch.Generator().manual_seed(0))
    step = stepper(bench, training.method, training.device, training.products, training.compiled, training.engine)
    synchronize = waits_for_device()
    for _ in range(WARMUP):
        step(batch)
    synchronize()
    ready.wait(PATIENCE)
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        step(batch)
        steps += 1
        synchronize()
    return steps / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
