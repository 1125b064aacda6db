"""QM9's network in two forms: ``python -m moonopt.speed.molecules [--json]``.

A whole training step on 120 made-up molecules with as many atoms as QM9's have, eleven tasks, by LS with Adam and by MOON: of
torch_geometric's parts, on graphs that are prepared beforehand, and in plain torch on padded molecules; on a GPU that also as a
CUDA graph, in TensorFloat-32, compiled, with messages kept in float16, and under bfloat16 autocast. One interleaved run, in
which the steps go through twenty batches, padded as those of the benchmark; an epoch of QM9 is 923 such steps.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.balance import LS, Balanced
from moonopt.bench.data.qm9_made_up import made_up
from moonopt.bench.data.qm9_molecules import TARGETS
from moonopt.bench.models.heads import SQUARED, mean_losses, of_first
from moonopt.bench.models.mpnn import MPNN
from moonopt.bench.models.mpnn_molecules import dense_batch
from moonopt.bench.models.mpnn_pyg import Graphs, PyGNet, graphs
from moonopt.bench.qm9 import Properties
from moonopt.optim.moon import MOON
from moonopt.speed.measure import PRODUCTS, autocast, command_line, interleaved, show, timing
from moonopt.tasks.capture import capture
from moonopt.tasks.modes import multiplying
from moonopt.tasks.verbs import TaskOptimizer

BATCH = 120
STEPS_PER_EPOCH = 110_831 // BATCH
#: How many batches of each width the steps go through: 55, 35 and 10 %, nearly QM9's 57, 32 and 11 %.
BATCHES = {37: 11, 38: 7, 40: 2}
METHODS = ("ls", "moon")
REFERENCE = "pyg"

Step = Callable[[], object]
Given = tuple[Tensor, ...]  # features of atoms, positions, bonds, members, targets


def measure(rounds: int = 10, device: str = "cpu", batch: int = BATCH) -> dict[str, Any]:
    """Milliseconds of a step of every form with every method, seconds of an epoch, and ratios to the PyG form."""
    on_gpu = torch.device(device).type == "cuda"
    given = [tuple(each.to(device) for each in found) for found in typical_batches(batch)]
    contestants: dict[str, Step] = {}
    for method in METHODS:
        contestants[f"{method}, {REFERENCE}"] = _stepper(method, PyGNet, given)
        contestants[f"{method}, dense"] = _stepper(method, MPNN, given)
        if on_gpu:
            for products in PRODUCTS:
                contestants[f"{method}, dense, captured, {products}"] = _captured(method, given, products)
            contestants[f"{method}, dense, compiled, captured, tf32"] = _captured(method, given, "tf32", compiled=True)
            half = _captured(method, given, "tf32", half_messages=True)
            contestants[f"{method}, dense, half messages, captured, tf32"] = half
    repeat, warmup = (len(given), 6) if on_gpu else (1, 3)  # until every width is captured
    times = interleaved(contestants, rounds, repeat, warmup)
    against = {name: times[f"{name.partition(',')[0]}, {REFERENCE}"]["ms"] for name in times}
    return {
        "batch": batch,
        "rounds": rounds,
        "times": times,
        "epoch_seconds": {name: STEPS_PER_EPOCH * found["ms"] / 1e3 for name, found in times.items()},
        "ratios": {name: against[name] / times[name]["ms"] for name in times},
    }


def molecules(count: int, seed: int = 0) -> Given:
    """A batch of made-up ones, two in a row, with targets."""
    found = made_up(count, seed)
    targets = torch.randn(found.targets.shape, generator=torch.Generator().manual_seed(seed))
    *batch, _ = Properties(found.padded(), targets, torch.ones(len(TARGETS))).batch(torch.arange(count), torch.Generator())
    return tuple(batch)


def typical_batches(count: int = BATCH) -> list[Given]:
    """Batches of so many molecules in a mixed order, of the widths that batches of QM9 have; of fewer, any."""
    found: list[Given] = []
    left, seeds = Counter(BATCHES), itertools.count()
    while len(found) < sum(BATCHES.values()):
        drawn = molecules(count, next(seeds))
        if count != BATCH or left[drawn[0].shape[1]]:
            left[drawn[0].shape[1]] -= 1
            found.append(drawn)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("molecules", __doc__, rounds=10)
    parser.add_argument("--batch", type=int, default=BATCH, help=f"molecules in a batch (default {BATCH})")
    options = parser.parse_args(arguments)
    show(options, [measure(options.rounds, options.device, options.batch)], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [f"QM9's network, {result['batch']} molecules, median of {result['rounds']} rounds; times as fast as {REFERENCE}"]
    for who, found in result["times"].items():
        lines.append(
            f"  {who:42} {timing(found)}  {result['ratios'][who]:6.2f}x  {result['epoch_seconds'][who]:7.2f} s per epoch"
        )
    return lines


def _stepper(method: str, form: type[MPNN], given: Sequence[Given]) -> Step:
    """One step after another, each with the next batch."""
    torch.manual_seed(0)
    model = form(TARGETS).to(given[0][0].device)
    optimizer = _optimizer(method, model)
    if isinstance(model, PyGNet):
        prepared = itertools.cycle([(graphs(dense_batch(*batch)), targets) for *batch, targets in given])
        return lambda: optimizer.minimize(
            lambda molecules, wanted: _losses(_of_graphs(model, molecules), wanted), *next(prepared)
        )
    batches = itertools.cycle(given)
    return lambda: optimizer.minimize(lambda *batch: _losses(model(dense_batch(*batch[:-1])), batch[-1]), *next(batches))


def _captured(
    method: str, given: Sequence[Given], products: str, *, compiled: bool = False, half_messages: bool = False
) -> Step:
    torch.manual_seed(0)
    model = MPNN(TARGETS, half_messages=half_messages).to(given[0][0].device)
    if compiled:
        model.compile(dynamic=False)

    def losses(*batch: Tensor) -> list[Tensor]:
        *molecules, wanted = batch
        with autocast(products, wanted.device):
            return _losses(model(dense_batch(*molecules)), wanted)

    step, batches = capture(_optimizer(method, model), losses), itertools.cycle(given)

    def run() -> None:
        with multiplying(tf32=products == "tf32"):
            step(*next(batches))

    return run


def _optimizer(method: str, model: nn.Module) -> TaskOptimizer:
    if method == "ls":
        return Balanced(LS(list(TARGETS)), torch.optim.Adam(model.parameters(), lr=1e-3, fused=True), module=model)
    return MOON(model, tasks=list(TARGETS), lr=0.01, scale="rms")


def _of_graphs(model: PyGNet, prepared: Graphs) -> dict[str, Tensor]:
    return model.predictions(model.readout_of_graphs(prepared))


def _losses(predicted: dict[str, Tensor], wanted: Tensor) -> list[Tensor]:
    return list(mean_losses(of_first(predicted, len(wanted)), wanted, SQUARED).values())


if __name__ == "__main__":
    main()
