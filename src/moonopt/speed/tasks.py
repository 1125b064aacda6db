"""What a task costs: ``python -m moonopt.speed.tasks [--json]``.

A whole MOON step (forward, backward, deltas, update) with 2 and with 40 tasks on the same trunk of transformer layers and one
Linear(d, 1) per task, for every way to the deltas, and Muon's step, which needs none, beside them: one interleaved run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.optim.moon import MOON
from moonopt.optim.muon import Muon
from moonopt.speed.measure import command_line, interleaved, show, timing

WIDTH, LAYERS, HEADS = 128, 3, 4
BATCH, TOKENS = 32, 32
MODES = ("loss_difference", "forward_mode", "double_backward", "per_task")


class Trunk(nn.Module):
    """Transformer layers as torch has them, and one linear head per task."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
        self.trunk = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(tasks))

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.trunk(x).mean(1)
        return torch.stack([(head(hidden)[:, 0] - y).square().mean() for head in self.heads])


def measure(tasks: Sequence[int] = (2, 40), rounds: int = 10, device: str = "cpu") -> dict[str, Any]:
    """Milliseconds of a step for every mode and number of tasks, and how many times as long many tasks take as few."""
    contestants = {f"{mode}, {count}": _stepper(count, device, mode) for mode in ("muon", *MODES) for count in tasks}
    times = interleaved(contestants, rounds, warmup=2)
    growth = {mode: times[f"{mode}, {max(tasks)}"]["ms"] / times[f"{mode}, {min(tasks)}"]["ms"] for mode in ("muon", *MODES)}
    return {"tasks": list(tasks), "rounds": rounds, "times": times, "growth": growth}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("tasks", __doc__, rounds=10)
    parser.add_argument("--tasks", nargs=2, type=int, default=[2, 40], metavar=("FEW", "MANY"), help="how many (default 2 40)")
    options = parser.parse_args(arguments)
    show(options, [measure(options.tasks, options.rounds, options.device)], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    few, many = min(result["tasks"]), max(result["tasks"])
    lines = [f"A step with {few} and with {many} tasks, median of {result['rounds']} rounds"]
    for mode, growth in result["growth"].items():
        times = [timing(result["times"][f"{mode}, {count}"]) for count in (few, many)]
        lines.append(f"  {mode:16} {times[0]}  {times[1]}  {growth:6.2f}x")
    return lines


def _stepper(tasks: int, device: str, mode: str) -> Callable[[], object]:
    torch.manual_seed(0)
    model = Trunk(tasks).to(device)
    x, y = torch.randn(BATCH, TOKENS, WIDTH, device=device), torch.randn(BATCH, device=device)
    optimizer = Muon(model, lr=1e-3) if mode == "muon" else MOON(model, tasks=tasks, lr=1e-3, delta=mode)
    return lambda: optimizer.minimize(model.losses, x, y)


if __name__ == "__main__":
    main()
