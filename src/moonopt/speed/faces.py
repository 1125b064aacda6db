"""What 2, 10 and 40 attributes of a face cost: ``python -m moonopt.speed.faces [--json]``.

A whole training step of the benchmarks ``celeba-cnn`` and ``celeba-vit`` on random images, by MOON, by Muon on the mean loss,
and by methods of which some need one backward pass and some one per task. All methods of one number of tasks are one
interleaved run. On a GPU every step is a CUDA graph, or two where the host decides in between.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moonopt.bench.celeba import CelebA, CelebaCNN, CelebaViT
from moonopt.errors import UserError
from moonopt.methods import build
from moonopt.speed.measure import PRODUCTS, autocast, command_line, interleaved, show, timing
from moonopt.tasks.capture import capture
from moonopt.tasks.modes import multiplying

NETWORKS: dict[str, type[CelebA]] = {"cnn": CelebaCNN, "vit": CelebaViT}
REFERENCE = "muon"
METHODS = (REFERENCE, "moon", "ls", "famo", "mgda", "pcgrad", "cagrad", "imtl-g", "nash-mtl")
TASKS, BATCH = (2, 10, 40), 256

Step = Callable[[], object]


def measure(
    network: str,
    tasks: Sequence[int] = TASKS,
    rounds: int = 10,
    device: str = "cpu",
    batch: int = BATCH,
    products: str = "tf32",
    methods: Sequence[str] = METHODS,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Milliseconds of a step by number of tasks and method, and how many times Muon's that is; settings are the benchmark's."""
    most = len(CelebA.tasks)
    if not all(1 <= count <= most for count in tasks):
        raise UserError(f"CelebA has {most} attributes: --tasks must be from 1 to {most}, found {', '.join(map(str, tasks))}.")
    times = {}
    for count in tasks:
        steppers = {method: _stepper(network, method, count, device, batch, products, settings) for method in methods}
        times[count] = interleaved(steppers, rounds, warmup=2 if torch.device(device).type == "cpu" else 6)
        del steppers  # with what their graphs hold in memory
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    against = {count: found[REFERENCE]["ms"] for count, found in times.items()}
    ratios = {count: {name: each["ms"] / against[count] for name, each in found.items()} for count, found in times.items()}
    return {"network": network, "batch": batch, "products": products, "rounds": rounds, "times": times, "ratios": ratios}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("faces", __doc__, rounds=10)
    parser.add_argument("--network", choices=NETWORKS, action="append", help="may be repeated (default both)")
    parser.add_argument("--tasks", nargs="+", type=int, default=list(TASKS), help="how many, at most 40 (default 2 10 40)")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"images of a step (default {BATCH})")
    parser.add_argument("--products", choices=PRODUCTS, default=PRODUCTS[0], help="what matrices are multiplied in")
    options = parser.parse_args(arguments)
    how = options.tasks, options.rounds, options.device, options.batch, options.products
    show(options, [measure(network, *how) for network in options.network or NETWORKS], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [f"{result['network']}, batch {result['batch']}, {result['products']}: a step, and times as long as {REFERENCE}'s"]
    for count, times in result["times"].items():
        lines.append(f"  {count} tasks")
        lines += [f"    {name:10} {timing(found)}  {result['ratios'][count][name]:6.2f}x" for name, found in times.items()]
    return lines


def _stepper(
    network: str, method: str, count: int, device: str, batch: int, products: str, settings: Mapping[str, Any] | None
) -> Step:
    torch.manual_seed(0)
    bench = NETWORKS[network](settings)
    bench.tasks = bench.tasks[:count]
    model = bench.model().to(device)
    size = bench.settings["data.image_size"]
    images, attributes = torch.rand(batch, 3, size, size, device=device), torch.rand(batch, count, device=device) > 0.5

    def losses(images: Tensor, attributes: Tensor) -> dict[str, Tensor]:
        with autocast(products, device):
            return bench.losses(model, (images, attributes))

    step = capture(build(method, model, bench.tasks, optimizer={"lr": 1e-3}), losses)

    def run() -> None:
        with multiplying(tf32=products != "float32"):
            step(images, attributes)

    return run


if __name__ == "__main__":
    main()
