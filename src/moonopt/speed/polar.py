"""The matrix step against torch.optim.Muon: ``python -m moonopt.speed.polar [--json]``.

Both do five Newton-Schulz steps on the same matrices, with momentum, in one interleaved run: torch's in bfloat16, which
is all it can do, ours in its default precision and in bfloat16.
"""

import argparse
import json
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from moonopt.optim.muon import Muon
from moonopt.speed.measure import environment, interleaved

#: Shapes of the matrices of each set.
SETS: dict[str, list[tuple[int, int]]] = {
    "vit-6x192": [(576, 192), (192, 192), (768, 192), (192, 768)] * 6,
    "small-40": [(32, 32), (64, 32)] * 20,
}

#: In a round each contestant makes so many steps, so that a short one is not timed by its first, cold step alone.
STEPS_IN_A_ROW = 5


def measure(name: str, rounds: int = 20, device: str = "cpu") -> dict[str, object]:
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
        "matrices": len(SETS[name]),
        "rounds": rounds,
        "steps_in_a_row": STEPS_IN_A_ROW,
        "times": times,
        "speedups": {who: reference / found["ms"] for who, found in times.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="moonopt.speed.polar", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds for each set (default 20)")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="which sets of matrices")
    parser.add_argument("--device", default="cpu", help="where the matrices are (default cpu)")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, found {options.rounds}")
    results = [measure(name, options.rounds, options.device) for name in options.sets]
    where = environment(torch.device(options.device))
    if options.json:
        print(json.dumps({"environment": where, "results": results}, indent=2))
        return
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    for result in results:
        print(
            f"\n{result['set']}, {result['matrices']} matrices, median of {result['rounds']} rounds of {STEPS_IN_A_ROW} steps"
        )
        for who, found in result["times"].items():  # type: ignore[attr-defined]
            ratio = result["speedups"][who]  # type: ignore[index]
            print(f"  {who:20} {found['ms']:9.2f} ms  ({found['low_ms']:.2f} to {found['high_ms']:.2f})  {ratio:6.2f}x")


def _stepper(name: str, device: str, build: Callable[[list[nn.Parameter]], Optimizer]) -> Callable[[], object]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in SETS[name]]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return build(parameters).step


if __name__ == "__main__":
    main()
