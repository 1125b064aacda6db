"""Whether training waits for its data: ``python -m moonopt.speed.loading BENCH --data DIR [--json]``.

A training step of a benchmark on one batch that stays where it is; the same with a new batch every time, as runs have it,
fetched from the memory of the device (augmentation included) and from that of the host; and the fetching alone. One interleaved
run. Where loading costs nothing, steps with new batches take as long as those with one.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonopt.bench import Benchmark, Data, find
from moonopt.methods import build
from moonopt.speed.measure import PRODUCTS, autocast, command_line, interleaved, show, timing
from moonopt.tasks.capture import capture
from moonopt.tasks.losses import Losses
from moonopt.tasks.modes import multiplying

#: One batch for all steps, against which the others are set.
STAYS = "one batch that stays"
REPEAT = 10  # steps in a row

Step = Callable[[], object]


def measure(
    benchmark: str,
    folder: Path,
    rounds: int = 10,
    device: str = "cpu",
    method: str = "moon",
    products: str = "tf32",
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Milliseconds of each way, examples per second, and how many times as long as without loading that is."""
    bench = find(benchmark)(settings)
    splits = bench.load(folder, 0)
    size = min(bench.settings["train.batch_size"], len(splits.train))
    there = splits.to(torch.device(device)).train
    fetch, fetch_here = _fetcher(there, size), _fetcher(splits.train, size)
    step, stays = stepper(bench, method, device, products), fetch()
    contestants: dict[str, Step] = {
        STAYS: lambda: step(stays),
        "new batches from the device": lambda: step(fetch()),
        "new batches from the host": lambda: step(fetch_here()),
        "fetching alone": fetch,
    }
    times = interleaved(contestants, rounds, REPEAT)
    return {
        "benchmark": benchmark,
        "method": method,
        "products": products,
        "batch": size,
        "rounds": rounds,
        "times": times,
        "examples_per_second": {name: 1e3 * size / found["ms"] for name, found in times.items()},
        "ratios": {name: found["ms"] / times[STAYS]["ms"] for name, found in times.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = training_options(command_line("loading", __doc__, rounds=10))
    options = parser.parse_args(arguments)
    how = options.rounds, options.device, options.method, options.products, options.settings
    show(options, [measure(options.benchmark, options.data, *how)], _lines)


def training_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """With what trains, and on what."""
    parser.add_argument("benchmark", metavar="BENCH", help="a benchmark, or your own as module:Class")
    parser.add_argument("--data", type=Path, required=True, help="where data lie")
    parser.add_argument("--method", default="moon", help="what trains (default moon)")
    parser.add_argument("--products", choices=PRODUCTS, default=PRODUCTS[0], help="what matrices are multiplied in")
    parser.add_argument("--settings", type=json.loads, default={}, help='of the benchmark, as JSON: {"model.width": 32}')
    return parser


def stepper(
    bench: Benchmark, method: str, device: str, products: str, compiled: bool = False, engine: str | None = None
) -> Callable[[Any], object]:
    """A training step of a batch, on a GPU as a CUDA graph."""
    torch.manual_seed(0)
    model = bench.model().to(device)
    if compiled:
        model.compile(dynamic=False)

    def losses(batch: Any) -> Losses:
        with autocast(products, device):
            return bench.losses(model, batch)

    options: dict[str, Any] = {} if engine is None else {"engine": engine}
    step = capture(build(method, model, bench.tasks, optimizer={"lr": 1e-3}, **options), losses)

    def run(batch: Any) -> object:
        with multiplying(tf32=products != "float32"):
            return step(batch)

    return run


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [f"{result['benchmark']} by {result['method']}, batch {result['batch']}, {result['products']}"]
    for name, found in result["times"].items():
        rate, ratio = result["examples_per_second"][name], result["ratios"][name]
        lines.append(f"  {name:28} {timing(found)}  {rate:9.0f} examples/s  {ratio:6.2f}x")
    return lines


def _fetcher(data: Data, size: int) -> Callable[[], Any]:
    """Batches of a shuffled epoch, over and over."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    batches: list[Tensor] = [each for each in torch.split(order, size) if len(each) == size]
    number = 0

    def fetch() -> Any:
        nonlocal number
        number += 1
        return data.batch(batches[number % len(batches)], torch.Generator().manual_seed(number))

    return fetch


if __name__ == "__main__":
    main()
