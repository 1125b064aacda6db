"""Runs of tiny cells, in this process or in one that may be killed, and what came out of them, to be compared bit for bit."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch._inductor  # torch imports it when it makes an optimizer, which takes long: before any fork
import torch.utils.tensorboard  # likewise

from moonopt.runs.cell import make_cell
from moonopt.runs.interrupt import Stop
from moonopt.runs.run import run_cell

HERE = Path(__file__).parent
TINY = "tiny_benchmarks:Tiny"
FORK = multiprocessing.get_context("fork")  # torch is imported already


def cell(method="moon", seed=0, name=TINY, **settings):
    """A cell; settings are written ``train__epochs=3``."""
    layer = {key.replace("__", "."): value for key, value in settings.items()}
    return make_cell(name, method, seed, [("the test", layer)])


def run(chosen, root, *, stop=None, tell=None, **how):
    """Run a cell here; gives its folder."""
    run_cell(chosen, root, root, stop=stop or Stop(), tell=tell or (lambda record: None), **how)
    return chosen.folder(root)


class StopAfter(Stop):
    """Asks to stop after some steps."""

    def __init__(self, steps):
        super().__init__()
        self._left = steps

    @property
    def requested(self):
        self._left -= 1
        return self._left <= 0


def start(chosen, root, prepare=None, **how):
    """Run a cell in a process of its own, from its checkpoint if there is one."""

    def work():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if prepare is not None:
            prepare()
        try:
            run(chosen, root, go_on=True, **how)
        except BaseException as error:  # a traceback would go to whoever captures this
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)

    process = FORK.Process(target=work)
    process.start()
    return process


def kill_after(process, seconds):
    """kill -9 after some time; whether it was still at work."""
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def lines(folder):
    """What is in metrics.jsonl, without what depends on time."""
    found = [json.loads(text, parse_constant=_refuse) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "memory_mb")} for line in found]


def outcome(folder):
    """Parameters, states, metrics and results of a finished run, such that == is equality of every bit."""
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    result = json.loads((folder / "result.json").read_text())
    found = {key: saved[key] for key in ("model", "method", "schedule", "random")}
    found["evaluations"] = saved["progress"]["evaluations"]
    found["lines"] = lines(folder)
    found["result"] = {key: result[key] for key in ("metrics", "valid", "selection", "epoch", "steps", "epochs")}
    found["best"] = torch.load(folder / "best.pt", weights_only=True) if (folder / "best.pt").exists() else None
    return bits(found)


def bits(value):
    """Tensors as their bytes, floats as they are written, containers as lists."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes()]
    if isinstance(value, dict):
        return {str(key): bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return float.hex(value) if isinstance(value, float) else value


def moonopt(*words, cwd, wait=True, **how):
    """The command line in a process of its own, and group."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE)]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    process = subprocess.Popen(
        [sys.executable, "-m", "moonopt", *map(str, words)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **how,
    )
    if not wait:
        return process
    process.output, process.errors = process.communicate(timeout=120)
    return process


def until(condition, seconds=30.0):
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def _refuse(constant):
    raise AssertionError(f"{constant} is no JSON")
