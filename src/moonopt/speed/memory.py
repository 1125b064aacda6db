"""Peak memory of a step: ``python -m moonopt.speed.memory [--json]``, on an accelerator.

A training step with 40 tasks on a convolutional net of the size of CelebA's: ``ls``, a backward pass over a graph that is kept,
and MGDA with every engine; Muon on the mean loss, and MOON with every way to the deltas.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.balance import LS, MGDA, Balanced, Balancer
from moonopt.optim.moon import MOON
from moonopt.optim.muon import Muon
from moonopt.speed.measure import command_line, show
from moonopt.speed.tasks import MODES

TASKS, BATCH = 40, 256
ENGINES = ("columns", "blocked:4", "stored")


class Net(nn.Module):
    """Seven convolutions and two linear layers with batch norm, 5.2 million parameters, and a linear head per task."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, width in ((3, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)):
            layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            if inputs in (3, width) and width < 512:
                layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        for _ in range(2):
            layers += [nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(512, 1) for _ in range(TASKS))

    def losses(self, x: Tensor, y: Tensor) -> list[Tensor]:
        hidden = self.trunk(x)
        return [nn.functional.binary_cross_entropy_with_logits(h(hidden)[:, 0], y[:, i]) for i, h in enumerate(self.heads)]


def measure(device: str = "cuda") -> dict[str, Any]:
    """MiB above what there is before a step, at its highest point, and of one gradient; for MOON and Muon all that there is."""
    torch.manual_seed(0)
    model = Net().to(device)
    x = torch.randn(BATCH, 3, 64, 64, device=device)
    y = torch.rand(BATCH, TASKS, device=device).round()
    peaks = {"ls": _peak(_stepper(model, LS(TASKS), x, y)), "kept graph": _peak(lambda: _kept_graph(model, x, y))}
    peaks |= {f"mgda, {engine}": _peak(_stepper(model, MGDA(TASKS), x, y, engine)) for engine in ENGINES}
    gradient = sum(p.numel() * p.element_size() for p in model.parameters())
    whole = {name: _peak(_minimizer(model, name, x, y), above=False) for name in ("muon", *(f"moon, {mode}" for mode in MODES))}
    return {
        "tasks": TASKS,
        "batch": BATCH,
        "gradient": gradient / 2**20,
        "peaks": peaks,
        "whole": whole,
        "ratios": {name: peak / whole["muon"] for name, peak in whole.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("memory", __doc__, rounds=2)
    parser.set_defaults(device="cuda")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("memory is measured on a GPU, and there is none")
    show(options, [measure(options.device)], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    title = f"{result['tasks']} tasks, batch {result['batch']}, one gradient {result['gradient']:.1f} MiB"
    lines = [title, *(f"  {who:24} {size:9.1f} MiB above what there was" for who, size in result["peaks"].items())]
    return lines + [f"  {who:24} {size:9.1f} MiB  {result['ratios'][who]:6.3f}x" for who, size in result["whole"].items()]


def _stepper(model: Net, balancer: Balancer, x: Tensor, y: Tensor, engine: str = "stored") -> Callable[[], object]:
    optimizer = Balanced(balancer, torch.optim.SGD(model.parameters(), lr=1e-3), module=model, engine=engine)

    def step() -> None:
        optimizer.minimize(model.losses, x, y)
        optimizer.zero_grad()

    return step


def _minimizer(model: Net, name: str, x: Tensor, y: Tensor) -> Callable[[], object]:
    mode = name.removeprefix("moon, ")
    optimizer = Muon(model, lr=1e-3) if name == "muon" else MOON(model, tasks=TASKS, lr=1e-3, delta=mode)
    return lambda: optimizer.minimize(model.losses, x, y)


def _kept_graph(model: Net, x: Tensor, y: Tensor) -> None:
    """A pass that does not free activations on the way, because others are to follow."""
    loss = torch.stack(model.losses(x, y)).sum()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


def _peak(step: Callable[[], object], above: bool = True) -> float:
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
