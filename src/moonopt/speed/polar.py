"""The matrix step against torch.optim.Muon: ``python -m moonopt.speed.polar [--json]``.

Both do five Newton-Schulz steps on the same matrices, with momentum, in one interleaved run: torch's in bfloat16, which
is all it can do, ours in its default precision and in bfloat16. On a GPU: ``--device cuda --sets qwen3-1.7b llama3-8b vit-s``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moonopt.optim.muon import Muon
from moonopt.speed.measure import command_line, interleaved, show, timing

#: Shapes of the matrices of each set.
SETS: dict[str, list[tuple[int, int]]] = {
    "vit-6x192": [(576, 192), (192, 192), (768, 192), (192, 768)] * 6,
    "small-40": [(32, 32), (64, 32)] * 20,
}
#: Sets for a GPU, whose parameters and gradients are bfloat16: all layers of the first two, eight of the third.
LARGE_SETS: dict[str, list[tuple[int, int]]] = {
    "vit-s": ([(384, 384)] * 4 + [(1536, 384), (384, 1536)]) * 12,
    "qwen3-1.7b": ([(2048, 2048), (1024, 2048), (6144, 2048)] * 2 + [(2048, 6144)]) * 28,
    "llama3-8b": ([(4096, 4096), (1024, 4096), (14336, 4096)] * 2 + [(4096, 14336)]) * 8,
}

#: In a round each contestant makes so many steps, so that a short one is not timed by its first, cold step alone.
STEPS_IN_A_ROW = 5


def measure(name: str, rounds: int = 20, device: str = "cpu") -> dict[str, Any]:
    """Milliseconds of a matrix step on one set, and how many times faster than torch.optim.Muon each of ours is."""
    contestants = {
        "torch.optim.Muon": _stepper(name, device, lambda p: torch.optim.Muon(p, lr=1e-3, weight_decay=0.0)),
        "moonopt": _stepper(name, device, lambda p: Muon([{"params": p, "kind": "matrix"}], lr=1e-3)),
        "moonopt bfloat16": _stepper(
            name, device, lambda p: Muon([{"params": p, "kind": "matrix"}], lr=1e-3, polar_dtype=torch.bfloat16)
        ),
    }
    times = interleaved(contestants, rounds, repeat=STEPS_IN_A_ROW)
    reference = times["torch.optim.Muon"]["ms"]
    return {
        "set": name,
        "matrices": len(_shapes(name)),
        "rounds": rounds,
        "steps_in_a_row": STEPS_IN_A_ROW,
        "times": times,
        "speedups": {who: reference / found["ms"] for who, found in times.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("polar", __doc__, rounds=20)
    parser.add_argument("--sets", nargs="+", choices=[*SETS, *LARGE_SETS], default=list(SETS), help="which sets of matrices")
    options = parser.parse_args(arguments)
    show(options, [measure(name, options.rounds, options.device) for name in options.sets], _lines)


def _shapes(name: str) -> list[tuple[int, int]]:
    return (SETS | LARGE_SETS)[name]


def _lines(result: dict[str, Any]) -> list[str]:
    title = f"{result['set']}, {result['matrices']} matrices, median of {result['rounds']} rounds of {STEPS_IN_A_ROW} steps"
    times, ratios = result["times"], result["speedups"]
    return [title, *(f"  {who:20} {timing(found)}  {ratios[who]:6.2f}x" for who, found in times.items())]


def _stepper(name: str, device: str, build: Callable[[list[nn.Parameter]], Optimizer]) -> Callable[[], object]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name in LARGE_SETS else torch.float32
    parameters = [nn.Parameter(0.02 * torch.randn(shape, device=device, dtype=dtype)) for shape in _shapes(name)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return build(parameters).step


if __name__ == "__main__":
    main()
