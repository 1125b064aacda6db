"""Peak memory of a step: ``python -m moonopt.speed.memory [--json]``, on an accelerator.

A training step with 40 tasks on the convolutional network of CelebA: ``ls``, a backward pass over a graph that is kept, and
MGDA with every engine; Muon on the mean loss, and MOON with every way to the deltas.
"""

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.balance import LS, MGDA, Balanced, Balancer
from moonopt.bench.celeba import CelebaCNN
from moonopt.optim.moon import MOON
from moonopt.optim.muon import Muon
from moonopt.speed.measure import command_line, show
from moonopt.speed.tasks import MODES

BATCH = 256
ENGINES = ("columns", "blocked:4", "stored:anew", "stored", "stored:batched")

Step = Callable[[], object]
TaskLosses = Callable[[], dict[str, Tensor]]


def measure(device: str = "cuda") -> dict[str, Any]:
    """MiB above what there is before a step, at its highest point, and of one gradient; for MOON and Muon all that there is."""
    torch.manual_seed(0)
    bench = CelebaCNN()
    model, tasks = bench.model().to(device), bench.tasks
    batch = torch.rand(BATCH, 3, 64, 64, device=device), torch.rand(BATCH, len(tasks), device=device) > 0.5

    def losses() -> dict[str, Tensor]:
        return bench.losses(model, batch)

    peaks = {"ls": _peak(_stepper(model, LS(tasks), losses)), "kept graph": _peak(lambda: _kept_graph(model, losses))}
    peaks |= {f"mgda, {engine}": _peak(_stepper(model, MGDA(tasks), losses, engine)) for engine in ENGINES}
    gradient = sum(p.numel() * p.element_size() for p in model.parameters())
    makers: dict[str, Callable[[], Muon]] = {"muon": functools.partial(Muon, model, lr=1e-3)}
    makers |= {f"moon, {mode}": functools.partial(MOON, model, tasks=tasks, lr=1e-3, delta=mode) for mode in MODES}
    whole = {name: _peak(_minimizer(make(), losses), above=False) for name, make in makers.items()}
    return {
        "tasks": len(tasks),
        "batch": BATCH,
        "gradient": gradient / 2**20,
        "peaks": peaks,
        "whole": whole,
        "ratios": {name: peak / whole["muon"] for name, peak in whole.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("memory", __doc__)
    parser.set_defaults(device="cuda")
    options = parser.parse_args(arguments)
    show(options, [measure(options.device)], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    title = f"{result['tasks']} tasks, batch {result['batch']}, one gradient {result['gradient']:.1f} MiB"
    lines = [title, *(f"  {who:24} {size:9.1f} MiB above what there was" for who, size in result["peaks"].items())]
    return lines + [f"  {who:24} {size:9.1f} MiB  {result['ratios'][who]:6.3f}x" for who, size in result["whole"].items()]


def _stepper(model: nn.Module, balancer: Balancer, losses: TaskLosses, engine: str = "stored") -> Step:
    optimizer = Balanced(balancer, torch.optim.SGD(model.parameters(), lr=1e-3), module=model, engine=engine)

    def step() -> None:
        optimizer.minimize(losses)
        optimizer.zero_grad()

    return step


def _minimizer(optimizer: Muon, losses: TaskLosses) -> Step:
    return lambda: optimizer.minimize(losses)


def _kept_graph(model: nn.Module, losses: TaskLosses) -> None:
    """A pass that does not free activations on the way, because others are to follow."""
    loss = torch.stack(list(losses().values())).sum()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


def _peak(step: Step, above: bool = True) -> float:
    """Of a second step, in MiB."""
    step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if above else 0
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


if __name__ == "__main__":
    main()
