"""What a task costs: ``python -m moonopt.speed.tasks [--json]``.

A whole MOON step (forward, backward, deltas, update) with 2 and with 40 tasks on the same trunk of transformer layers and one
Linear(d, 1) per task, for every way to the deltas; Muon's step, which needs none; and TorchJD's, in every way it has to combine
the tasks of such a model, with the many tasks: one interleaved run. On a GPU our steps are CUDA graphs.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moonopt.optim.moon import MOON
from moonopt.optim.muon import Muon
from moonopt.speed.measure import command_line, interleaved, show, timing
from moonopt.tasks.capture import capture

MODES = ("loss_difference", "forward_mode", "double_backward", "per_task")
EXACT = ("forward_mode", "double_backward")

Step = Callable[[], object]


class Size(NamedTuple):
    """Of the trunk and of a batch."""

    width: int
    layers: int
    heads: int  # of attention
    batch: int
    tokens: int


#: One that a CPU gets through in a tenth of a second, and one that an accelerator has something to do with (ViT-S).
SIZES = {"small": Size(128, 3, 4, 32, 32), "vit-s": Size(384, 12, 6, 64, 64)}


class Trunk(nn.Module):
    """Transformer layers as torch has them, and one linear head per task."""

    def __init__(self, tasks: int, size: Size) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(size.width, size.heads, 4 * size.width, batch_first=True)
        self.trunk = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.heads = nn.ModuleList(nn.Linear(size.width, 1) for _ in range(tasks))

    def features(self, x: Tensor) -> Tensor:
        return self.trunk(x).mean(1)  # type: ignore[no-any-return]

    def losses_of(self, features: Tensor, y: Tensor) -> list[Tensor]:
        return [(head(features)[:, 0] - y).square().mean() for head in self.heads]

    def losses(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return self.losses_of(self.features(x), y)


def measure(
    tasks: Sequence[int] = (2, 40), rounds: int = 10, device: str = "cpu", trunk: str | None = None, torchjd: bool = True
) -> dict[str, Any]:
    """Milliseconds of a step, how many times as long many tasks take as few, and how many times faster than TorchJD's it is.

    ``trunk`` is one of ``SIZES``, by default the one for the device.
    """
    few, many = min(tasks), max(tasks)
    size = SIZES[trunk or ("small" if torch.device(device).type == "cpu" else "vit-s")]
    ours = ("muon", *MODES)
    contestants = {f"{mode}, {count}": _stepper(mode, *_problem(count, size, device)) for mode in ours for count in tasks}
    theirs, skipped = _torchjd_steppers(many, size, device) if torchjd else ({}, {})
    times = interleaved(contestants | theirs, rounds, warmup=2 if torch.device(device).type == "cpu" else 6)
    growth = {mode: times[f"{mode}, {many}"]["ms"] / times[f"{mode}, {few}"]["ms"] for mode in ours}
    speedups = {mode: {way: times[way]["ms"] / times[f"{mode}, {many}"]["ms"] for way in theirs} for mode in EXACT}
    return {
        "tasks": list(tasks),
        "trunk": size._asdict(),
        "rounds": rounds,
        "times": times,
        "growth": growth,
        "torchjd": version("torchjd") if theirs else None,
        "speedups": speedups,
        "skipped": skipped,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("tasks", __doc__, rounds=10)
    parser.add_argument("--tasks", nargs=2, type=int, default=[2, 40], metavar=("FEW", "MANY"), help="how many (default 2 40)")
    parser.add_argument("--trunk", choices=SIZES, help="its size (default small on a CPU, else vit-s)")
    parser.add_argument("--no-torchjd", dest="torchjd", action="store_false", help="leave TorchJD out")
    options = parser.parse_args(arguments)
    show(options, [measure(options.tasks, options.rounds, options.device, options.trunk, options.torchjd)], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    few, many = min(result["tasks"]), max(result["tasks"])
    lines = [f"A step with {few} and with {many} tasks, median of {result['rounds']} rounds"]
    for mode, growth in result["growth"].items():
        times = [timing(result["times"][f"{mode}, {count}"]) for count in (few, many)]
        lines.append(f"  {mode:16} {times[0]}  {times[1]}  {growth:6.2f}x")
    if result["torchjd"]:
        lines += ["", f"TorchJD {result['torchjd']} with {many} tasks, and how many times faster {' and '.join(EXACT)} are"]
    for way in result["speedups"][EXACT[0]]:
        ratios = "  ".join(f"{result['speedups'][mode][way]:6.2f}x" for mode in EXACT)
        lines.append(f"  {way:36} {timing(result['times'][way])}  {ratios}")
    return [*lines, *(f"Not measured: {way}. {why}" for way, why in result["skipped"].items())]


def _problem(tasks: int, size: Size, device: str) -> tuple[Trunk, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(size.batch, size.tokens, size.width), torch.randn(size.batch)
    return Trunk(tasks, size).to(device), x.to(device), y.to(device)


def _stepper(mode: str, model: Trunk, x: Tensor, y: Tensor) -> Step:
    tasks = len(model.heads)
    optimizer = Muon(model, lr=1e-3) if mode == "muon" else MOON(model, tasks=tasks, lr=1e-3, delta=mode)
    step = capture(optimizer, model.losses)  # on a GPU; elsewhere it is minimize
    return lambda: step(x, y)


# TorchJD's ways to train such a model, as its documentation has them: Jacobians of the trunk beside the gradients of the heads,
# rows in parallel (its default) or one by one (faster on a CPU), or the Gram matrix and one more backward pass.


def _torchjd_steppers(tasks: int, size: Size, device: str) -> tuple[dict[str, Step], dict[str, str]]:
    """By name; and what lacks something or does not fit, with what it says."""
    steppers: dict[str, Step] = {}
    skipped: dict[str, str] = {}
    for aggregator in ("UPGrad", "MGDA"):
        for way, build in WAYS.items():
            name = f"torchjd {way} {aggregator}"
            try:
                steppers[name] = build(aggregator, *_problem(tasks, size, device))
                steppers[name]()
            except (ImportError, RuntimeError) as error:
                steppers.pop(name, None)
                skipped[name] = str(error).splitlines()[0]
    return steppers, skipped


def _jacobian_stepper(aggregator: str, model: Trunk, x: Tensor, y: Tensor, rows: int | None) -> Step:
    autojac, aggregation = (importlib.import_module(f"torchjd.{name}") for name in ("autojac", "aggregation"))
    aggregate = getattr(aggregation, aggregator)()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        features = model.features(x)
        autojac.mtl_backward(model.losses_of(features, y), features=features, parallel_chunk_size=rows)
        autojac.jac_to_grad(model.trunk.parameters(), aggregate)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _gramian_stepper(aggregator: str, model: Trunk, x: Tensor, y: Tensor) -> Step:
    autogram, aggregation = (importlib.import_module(f"torchjd.{name}") for name in ("autogram", "aggregation"))
    weighting = getattr(aggregation, f"{aggregator}Weighting")()
    engine = autogram.Engine(model.trunk, batch_dim=None)  # with dropout inside, it takes no other
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        losses = torch.stack(model.losses(x, y))
        losses.backward(weighting(engine.compute_gramian(losses)))  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


WAYS: dict[str, Callable[..., Step]] = {
    "mtl_backward": functools.partial(_jacobian_stepper, rows=None),
    "mtl_backward one by one": functools.partial(_jacobian_stepper, rows=1),
    "autogram": _gramian_stepper,
}


if __name__ == "__main__":
    main()
