"""Folders of runs as training writes them, with made-up numbers, and a user's benchmark with a paper's table."""

import json
import math
import random
from functools import partial

import pytest

BENCHMARK = '''
"""A user's benchmark: two tasks with three metrics, a summary, and a paper's table."""

from moonopt.bench import Benchmark, Metric, Published


class Scenes(Benchmark):
    name = "scenes"
    title = "street scenes, a user's own"
    metrics = (
        Metric("mIoU", higher=True, task="segment", digits=2, unit="%"),
        Metric("pixel accuracy", higher=True, task="segment", digits=2, unit="%"),
        Metric("depth error", higher=False, task="depth", digits=4),
        Metric("mean score", higher=True, digits=3),
    )
    headline = "mean score"
    tasks = ("segment", "depth")
    published = Published(
        source="Doe et al. (2025), Table 3",
        rows={
            "stl": {"mIoU": 74.0, "pixel accuracy": 93.2, "depth error": 0.0125},
            "moon": {"mIoU": 75.9, "pixel accuracy": 93.6, "depth error": 0.0121},
            "sdmgrad": {"mIoU": 74.5, "pixel accuracy": 93.4, "depth error": 0.0137},
        },
        delta_m={"moon": -1.77, "sdmgrad": 3.1},
        reference="stl",
    )
    load = model = losses = evaluate = None


class Thirty(Scenes):
    name = "thirty"
    title = "thirty tasks"
    metrics = (*(Metric(f"t{i}", higher=False, task=f"t{i}", digits=3) for i in range(30)), Metric("mean", higher=False))
    headline = "mean"
    tasks = tuple(f"t{i}" for i in range(30))
    published = None
'''


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """The name of the user's benchmark, which can be imported."""
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "report_bench.py").write_text(BENCHMARK)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "report_bench:Scenes"


@pytest.fixture
def make_run(tmp_path):
    """Writes the folder of a run, and returns it."""
    return partial(write_run, tmp_path / "runs")


@pytest.fixture
def toy_metrics():
    """Metrics of the toy case that differ by method and seed."""
    return made_up_metrics


@pytest.fixture(scope="session")
def many_runs(scenes, tmp_path_factory):
    """A root with three benchmarks: the toy case with odd labels and failures, the user's with stl, and thirty tasks."""
    root = tmp_path_factory.mktemp("many") / "runs"
    for seed in range(3):
        for method in ("moon", "ls", "famo"):
            write_run(root, method, seed, made_up_metrics(method, seed))
        write_run(root, "moon", seed, made_up_metrics("moon 2", seed), overrides={"optimizer.lr": 0.01})
    write_run(root, "<script>alert('x')</script> $a_b$ -->", 0, made_up_metrics("x", 0) | {"first": math.nan})
    write_run(root, "uw", 0, {}, state="failed")
    write_run(root, "uw", 1, {}, state="unfinished")
    tasks = ("segment", "depth")
    for seed in range(2):
        for method in ("moon", "famo"):
            write_run(root, method, seed, made_up_scene(method, seed), scenes, tasks)
        for task in tasks:
            write_run(root, "stl", seed, made_up_scene(task, seed), scenes, tasks, overrides={"balancer.task": task})
    tasks = tuple(f"t{i}" for i in range(30))
    for method in ("moon", "rlw"):
        write_run(root, method, 0, dict.fromkeys(tasks, 0.3) | {"mean": 0.3}, "report_bench:Thirty", tasks)
    return root


def made_up_metrics(method, seed):
    chance = random.Random(f"{method} {seed}")
    first, second = (0.2 + 0.1 * chance.random() + 0.03 * len(method) for _ in range(2))
    return {"first": first, "second": second, "average loss": (first + second) / 2, "above the lowest": 40 * first}


def made_up_scene(method, seed):
    chance = random.Random(f"{method} {seed}")
    miou, pixels, error = 74 + chance.gauss(0, 1), 93 + chance.gauss(0, 0.2), 0.0125 + 0.0003 * chance.random()
    return {"mIoU": miou, "pixel accuracy": pixels, "depth error": error, "mean score": miou / 100}


def write_run(
    root, method, seed, metrics, name="toy", tasks=("first", "second"), *, state="finished", overrides=(), steps=60, **result
):
    """Write a run in one of three states: finished, unfinished, failed."""
    overrides = dict(overrides)
    label = ",".join([method, *(f"{key}={value}" for key, value in sorted(overrides.items()))])
    folder = root / name / label.replace("/", "%2F") / f"seed{seed}"
    folder.mkdir(parents=True)
    settings = {"train.epochs": 3, "optimizer.lr": 0.02 if method == "moon" else 1e-3, **overrides}
    config = {"format": 1, "benchmark": name, "method": method, "seed": seed, "overrides": overrides}
    config |= {"settings": settings, "device": "cpu", "amp": False, "compile": False}
    (folder / "config.json").write_text(json.dumps(config))
    lines = _lines(random.Random(f"{method}{seed}"), method, tasks, metrics, steps)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if state == "failed":
        (folder / "error.txt").write_text("Traceback (most recent call last):\n  ...\nFloatingPointError: loss is NaN\n")
    if state == "finished":
        (folder / "result.json").write_text(json.dumps(_result(method, seed, metrics, name, tasks, steps) | result))
    return folder


def _result(method, seed, metrics, name, tasks, steps):
    return {
        "format": 1,
        "tasks": list(tasks),
        "metrics": metrics,
        "selection": f"epoch {seed + 1} of 3, the best on validation data",
        "valid": None,
        "steps": steps,
        "epochs": 3,
        "seconds": 1.5,
        "seconds_per_step": 0.004 * len(method) + 1e-4 * seed,
        "peak_memory_mb": 300.0 + 10 * len(method),
        "parameters": 65432,
        "versions": {"moonopt": "0.1.0", "torch": "2.13.0", "python": "3.11.5"},
        "hardware": {"device": "cpu", "cpu": "AVX512", "threads": 2},
        "command": f"moonopt run {name} --method {method} --seed {seed}",
        "commit": "abc1234",
        "finished": f"2026-11-15T13:0{seed % 10}:00+00:00",
    }


def _lines(chance, method, tasks, metrics, steps):
    count = len(tasks)
    pull = [chance.gauss(0, 0.6) for _ in tasks]
    speed = 6 + 4 * len(method) + 3 * chance.random()
    for step in range(1, steps + 1):
        losses = {task: 0.3 + 2 * math.exp(-step / speed) + 0.05 * chance.random() + 0.02 * i for i, task in enumerate(tasks)}
        raw = [math.exp(each * step / steps) for each in pull]
        shares = [1 / count if method == "ls" else each / sum(raw) for each in raw]
        weight = None if method == "stl" else dict(zip(tasks, shares, strict=True))
        yield {"kind": "train", "step": step, "epoch": step / 20, "loss": losses, "weight": weight, "lr": 0.02,
               "seconds": 0.01 * step, "memory_mb": 345.6}  # fmt: skip
        if step % 20 == 0:
            cosine = [[1.0 if i == j else -0.5 / (1 + abs(i - j)) + 0.01 * (i + j) for j in range(count)] for i in range(count)]
            test = {key: value and value * (1 + 1 / step) for key, value in metrics.items()}
            yield {"kind": "evaluation", "step": step, "epoch": step // 20, "valid": None, "test": test,
                   "conflict": None if method == "stl" else cosine, "seconds": 0.01 * step}  # fmt: skip
