"""A whole training step of a small ViT: ``python -m moonopt.speed.step [--json]``.

A ViT of 140 k parameters on a batch like MultiMNIST's (256 images of 28 x 28, two tasks of ten classes, bfloat16 autocast on a
GPU), trained by LS with Adam, by Muon and by MOON, one interleaved run. On a GPU each step also as a CUDA graph
(``moonopt.capture``), and as a graph of a compiled model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moonopt.balance import LS, Balanced
from moonopt.bench.models.vit import ViT
from moonopt.optim.moon import MOON
from moonopt.optim.muon import Muon
from moonopt.speed.measure import command_line, interleaved, show, timing
from moonopt.tasks.capture import capture
from moonopt.tasks.verbs import TaskOptimizer

TASKS = ("left", "right")
BATCH, SIZE, CLASSES = 256, 28, 10
REFERENCE = "ls+adam"
STEPS_IN_A_ROW = 20


def _build(method: str, model: nn.Module) -> TaskOptimizer:
    if method == REFERENCE:
        return Balanced(LS(TASKS), torch.optim.Adam(model.parameters(), lr=1e-3), module=model)
    if method == "muon":
        return Muon(model, lr=0.01)
    return MOON(model, tasks=TASKS, lr=0.01, delta=method.removeprefix("moon, "))


#: What is timed, and whether a compiled model will do: exact deltas need derivatives that it does not have.
METHODS = {
    REFERENCE: True,
    "muon": True,
    "moon, loss_difference": True,
    "moon, forward_mode": False,
    "moon, double_backward": False,
    "moon, per_task": False,
}


class Digits(nn.Module):
    """The ViT, and the losses of the tasks on a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = ViT(dict.fromkeys(TASKS, CLASSES), image_size=SIZE, patch_size=4)

    def forward(self, images: Tensor, *labels: Tensor) -> dict[str, Tensor]:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            logits = self.vit(images)
            return {task: functional.cross_entropy(logits[task], of) for task, of in zip(TASKS, labels, strict=True)}


def measure(rounds: int = 10, device: str = "cpu") -> dict[str, Any]:
    """Milliseconds of a step of every method in every way, and how many times as long as LS with Adam in that way."""
    on_gpu = torch.device(device).type == "cuda"
    contestants = {}
    for method, can_compile in METHODS.items():
        contestants[method] = _stepper(method, device)
        if on_gpu:
            contestants[f"{method}, captured"] = _stepper(method, device, captured=True)
        if on_gpu and can_compile:
            contestants[f"{method}, captured, compiled"] = _stepper(method, device, captured=True, compiled=True)
    times = interleaved(contestants, rounds, repeat=STEPS_IN_A_ROW if on_gpu else 1)
    against = {name: times[REFERENCE + "".join(name.partition(", captured")[1:])]["ms"] for name in times}
    return {
        "parameters": sum(p.numel() for p in Digits().parameters()),
        "batch": BATCH,
        "rounds": rounds,
        "times": times,
        "ratios": {name: times[name]["ms"] / reference for name, reference in against.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line("step", __doc__, rounds=10).parse_args(arguments)
    show(options, [measure(options.rounds, options.device)], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    title = f"A ViT of {result['parameters']} parameters, batch {result['batch']}, median of {result['rounds']} rounds"
    lines = [f"{title}; and how many times as long as {REFERENCE} in the same way"]
    for who, found in result["times"].items():
        lines.append(f"  {who:42} {timing(found)}  {result['ratios'][who]:6.2f}x")
    return lines


def _stepper(method: str, device: str, captured: bool = False, compiled: bool = False) -> Callable[[], object]:
    torch.manual_seed(0)
    model = Digits().to(device)
    if compiled:
        model.compile()
    optimizer = _build(method, model)
    images = torch.randn(BATCH, 1, SIZE, SIZE, device=device)
    labels = [torch.randint(CLASSES, (BATCH,), device=device) for _ in TASKS]
    if captured:
        step = capture(optimizer, model)
        return lambda: step(images, *labels)
    return lambda: optimizer.minimize(model, images, *labels)


if __name__ == "__main__":
    main()
