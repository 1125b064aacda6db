"""QM9's network in two forms: ``python -m moonopt.speed.molecules [--json]``.

A whole training step on 120 made-up molecules with as many atoms as QM9's have, eleven tasks, by LS with Adam and by MOON: of
torch_geometric's parts, on graphs that are prepared beforehand, and in plain torch on padded molecules; on a GPU that also as a
CUDA graph, in TensorFloat-32, compiled, and under bfloat16 autocast. One interleaved run; an epoch of QM9 is 923 such steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.balance import LS, Balanced
from moonopt.bench.data.qm9_molecules import ELEMENTS, TARGETS, node_features
from moonopt.bench.models.heads import SQUARED, mean_losses
from moonopt.bench.models.mpnn import MPNN
from moonopt.bench.models.mpnn_molecules import dense_batch
from moonopt.bench.models.mpnn_pyg import Graphs, PyGNet, graphs
from moonopt.optim.moon import MOON
from moonopt.speed.measure import PRODUCTS, autocast, command_line, interleaved, show, timing
from moonopt.tasks.capture import capture
from moonopt.tasks.modes import multiplying
from moonopt.tasks.verbs import TaskOptimizer

BATCH = 120
STEPS_PER_EPOCH = 110_831 // BATCH
#: Of QM9: the most atoms, and mean and standard deviation.
MOST_ATOMS, ATOMS, SPREAD = 29, 18.0, 3.0
METHODS = ("ls", "moon")
REFERENCE = "pyg"

Step = Callable[[], object]
Given = tuple[Tensor, ...]  # numbers, positions, bonds


def measure(rounds: int = 10, device: str = "cpu", batch: int = BATCH) -> dict[str, Any]:
    """Milliseconds of a step of every form with every method, seconds of an epoch, and ratios to the PyG form."""
    on_gpu = torch.device(device).type == "cuda"
    given = tuple(each.to(device) for each in molecules(batch))
    targets = torch.randn(batch, len(TARGETS), generator=torch.Generator().manual_seed(1)).to(device)
    contestants: dict[str, Step] = {}
    for method in METHODS:
        contestants[f"{method}, {REFERENCE}"] = _stepper(method, PyGNet, given, targets)
        contestants[f"{method}, dense"] = _stepper(method, MPNN, given, targets)
        if on_gpu:
            for products in PRODUCTS:
                contestants[f"{method}, dense, captured, {products}"] = _captured(method, given, targets, products)
            contestants[f"{method}, dense, compiled, captured, tf32"] = _captured(method, given, targets, "tf32", compiled=True)
    times = interleaved(contestants, rounds, repeat=10 if on_gpu else 1)
    against = {name: times[f"{name.partition(',')[0]}, {REFERENCE}"]["ms"] for name in times}
    return {
        "batch": batch,
        "rounds": rounds,
        "times": times,
        "epoch_seconds": {name: STEPS_PER_EPOCH * found["ms"] / 1e3 for name, found in times.items()},
        "ratios": {name: against[name] / times[name]["ms"] for name in times},
    }


def molecules(count: int) -> Given:
    """Made-up ones: atoms anywhere, in a chain of single bonds."""
    generator = torch.Generator().manual_seed(0)
    atoms = (ATOMS + SPREAD * torch.randn(count, generator=generator)).round().clamp(3, MOST_ATOMS)
    there = torch.arange(MOST_ATOMS) < atoms.unsqueeze(1)
    numbers = torch.tensor(ELEMENTS)[torch.randint(len(ELEMENTS), there.shape, generator=generator)] * there
    positions = 2 * torch.randn(*there.shape, 3, generator=generator) * there.unsqueeze(2)
    chain = torch.diag_embed(there[:, 1:].byte(), 1)
    return numbers.byte(), positions, chain + chain.mT


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("molecules", __doc__, rounds=10)
    parser.add_argument("--batch", type=int, default=BATCH, help=f"molecules in a batch (default {BATCH})")
    options = parser.parse_args(arguments)
    show(options, [measure(options.rounds, options.device, options.batch)], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [f"QM9's network, {result['batch']} molecules, median of {result['rounds']} rounds; times as fast as {REFERENCE}"]
    for who, found in result["times"].items():
        lines.append(
            f"  {who:36} {timing(found)}  {result['ratios'][who]:6.2f}x  {result['epoch_seconds'][who]:7.2f} s per epoch"
        )
    return lines


def _stepper(method: str, form: type[MPNN], given: Given, targets: Tensor) -> Step:
    torch.manual_seed(0)
    model = form(TARGETS).to(targets.device)
    optimizer = _optimizer(method, model)
    if isinstance(model, PyGNet):
        prepared = graphs(_dense(*given))
        return lambda: optimizer.minimize(lambda: _losses(_of_graphs(model, prepared), targets))
    return lambda: optimizer.minimize(lambda: _losses(model(_dense(*given)), targets))


def _captured(method: str, given: Given, targets: Tensor, products: str, compiled: bool = False) -> Step:
    torch.manual_seed(0)
    model = MPNN(TARGETS).to(targets.device)
    if compiled:
        model.compile()

    def losses(numbers: Tensor, positions: Tensor, bonds: Tensor, wanted: Tensor) -> list[Tensor]:
        with autocast(products, wanted.device):
            return _losses(model(_dense(numbers, positions, bonds)), wanted)

    step = capture(_optimizer(method, model), losses)

    def run() -> None:
        with multiplying(tf32=products == "tf32"):
            step(*given, targets)

    return run


def _optimizer(method: str, model: nn.Module) -> TaskOptimizer:
    if method == "ls":
        return Balanced(LS(list(TARGETS)), torch.optim.Adam(model.parameters(), lr=1e-3, fused=True), module=model)
    return MOON(model, tasks=list(TARGETS), lr=0.01, scale="rms")


def _dense(numbers: Tensor, positions: Tensor, bonds: Tensor) -> Any:
    return dense_batch(numbers, node_features(numbers, bonds), positions, bonds)


def _of_graphs(model: PyGNet, prepared: Graphs) -> dict[str, Tensor]:
    return model.predictions(model.readout_of_graphs(prepared))


def _losses(predicted: dict[str, Tensor], wanted: Tensor) -> list[Tensor]:
    return list(mean_losses(predicted, wanted, SQUARED).values())


if __name__ == "__main__":
    main()
