"""The matrix step against torch.optim.Muon: ``python -m moonopt.speed.polar [--json]``.

Both do five Newton-Schulz steps on the same matrices, with momentum, in one interleaved run: torch's in bfloat16, which
is all it can do, ours in its default precision and in bfloat16, on a GPU also as a CUDA graph. There:
``--device cuda --sets qwen3-1.7b llama3-8b vit-s``.
``--sizes`` goes through squares and 1:3 rectangles of one shape each, with a plain loop over the matrices as a third.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.linalg.polar import polar_dtype
from moonopt.linalg.schedules import schedule
from moonopt.optim.muon import Muon
from moonopt.speed.measure import command_line, interleaved, show, timing

Shape = tuple[int, int]
Step = Callable[[], object]

#: Shapes of the matrices of each set.
SETS: dict[str, list[Shape]] = {
    "vit-6x192": [(576, 192), (192, 192), (768, 192), (192, 768)] * 6,
    "small-40": [(32, 32), (64, 32)] * 20,
}
#: Sets for a GPU, whose parameters and gradients are bfloat16: all layers of the first two, eight of the third.
LARGE_SETS: dict[str, list[Shape]] = {
    "vit-s": ([(384, 384)] * 4 + [(1536, 384), (384, 1536)]) * 12,
    "qwen3-1.7b": ([(2048, 2048), (1024, 2048), (6144, 2048)] * 2 + [(2048, 6144)]) * 28,
    "llama3-8b": ([(4096, 4096), (1024, 4096), (14336, 4096)] * 2 + [(4096, 14336)]) * 8,
}
#: Short sides, and how many matrices of each: fewer large ones, so that a round stays short.
SIZES = {16: 24, 32: 24, 64: 24, 128: 24, 192: 24, 256: 12, 512: 8, 1024: 4, 2048: 2}
#: The longest side of a rectangle.
LONGEST = 3072

#: In a round each contestant makes so many steps, so that a short one is not timed by its first, cold step alone.
STEPS_IN_A_ROW = 5


def measure(name: str, rounds: int = 20, device: str = "cpu") -> dict[str, Any]:
    """Milliseconds of a matrix step on one set, and how many times faster than torch.optim.Muon each of ours is."""
    shapes, dtype = (SETS | LARGE_SETS)[name], torch.bfloat16 if name in LARGE_SETS else torch.float32
    builders = {"torch.optim.Muon": _torchs, "moonopt": _ours, "moonopt bfloat16": _ours_in_bfloat16}
    if torch.device(device).type == "cuda":
        builders["moonopt captured"] = _ours_captured
    contestants = {who: build(_parameters(shapes, device, dtype)) for who, build in builders.items()}
    times = interleaved(contestants, rounds, repeat=STEPS_IN_A_ROW)
    reference = times["torch.optim.Muon"]["ms"]
    return {
        "set": name,
        "matrices": len(shapes),
        "rounds": rounds,
        "steps_in_a_row": STEPS_IN_A_ROW,
        "times": times,
        "speedups": {who: reference / found["ms"] for who, found in times.items()},
    }


def measure_shape(shape: Shape, count: int, rounds: int = 20, device: str = "cpu") -> dict[str, Any]:
    """Milliseconds of a step on ``count`` matrices of one shape, and how many times faster than each of the others ours is."""
    builders = {"torch.optim.Muon": _torchs, "plain loop": _plain_loop, "moonopt": _ours}
    contestants = {who: build(_parameters([shape] * count, device, torch.float32)) for who, build in builders.items()}
    times = interleaved(contestants, rounds, repeat=STEPS_IN_A_ROW if min(shape) < 512 else 1)
    return {
        "shape": shape,
        "matrices": count,
        "dtype": str(polar_dtype(torch.empty(shape, device=device))).removeprefix("torch."),
        "rounds": rounds,
        "times": times,
        "speedups": {who: found["ms"] / times["moonopt"]["ms"] for who, found in times.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("polar", __doc__, rounds=20)
    parser.add_argument("--sets", nargs="+", choices=[*SETS, *LARGE_SETS], default=list(SETS), help="which sets of matrices")
    parser.add_argument("--sizes", nargs="*", type=int, choices=list(SIZES), help="short sides, in place of sets (default all)")
    parser.add_argument("--matrices", type=int, help="how many of each size (default 24 small to 2 large ones)")
    options = parser.parse_args(arguments)
    if options.sizes is None:
        show(options, [measure(name, options.rounds, options.device) for name in options.sets], _lines)
        return
    cases = [(shape, options.matrices or SIZES[side]) for side in options.sizes or SIZES for shape in _shapes(side)]
    show(options, [measure_shape(*case, options.rounds, options.device) for case in cases], _shape_lines)


def _shapes(side: int) -> list[Shape]:
    return [(side, side)] + [(side, 3 * side)] * (3 * side <= LONGEST)


def _lines(result: dict[str, Any]) -> list[str]:
    title = f"{result['set']}, {result['matrices']} matrices, median of {result['rounds']} rounds of {STEPS_IN_A_ROW} steps"
    return [title, *_rows(result)]


def _shape_lines(result: dict[str, Any]) -> list[str]:
    rows, columns = result["shape"]
    title = f"{result['matrices']} of {rows} x {columns}, ours in {result['dtype']}: times, and ours how many times faster"
    return [title, *_rows(result)]


def _rows(result: dict[str, Any]) -> list[str]:
    return [f"  {who:20} {timing(found)}  {result['speedups'][who]:6.2f}x" for who, found in result["times"].items()]


def _parameters(shapes: Sequence[Shape], device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(0.02 * torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def _torchs(parameters: list[nn.Parameter]) -> Step:
    return torch.optim.Muon(parameters, lr=1e-3, weight_decay=0.0).step


def _ours(parameters: list[nn.Parameter], dtype: torch.dtype | None = None) -> Step:
    return Muon([{"params": parameters, "kind": "matrix"}], lr=1e-3, polar_dtype=dtype).step


def _ours_in_bfloat16(parameters: list[nn.Parameter]) -> Step:
    return _ours(parameters, torch.bfloat16)


def _ours_captured(parameters: list[nn.Parameter]) -> Step:
    """The step as a CUDA graph."""
    optimizer = Muon([{"params": parameters, "kind": "matrix"}], lr=1e-3, capturable=True)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    return graph.replay


def _plain_loop(parameters: list[nn.Parameter]) -> Step:
    """What one would write first: one matrix after the other, in the same precision as ours, and no checks."""
    momenta = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step() -> None:
        for parameter, momentum in zip(parameters, momenta, strict=True):
            if parameter.grad is not None:
                momentum.lerp_(parameter.grad, 0.05)
                parameter.add_(_plain_polar(momentum), alpha=-1e-3)

    return step


def _plain_polar(matrix: Tensor) -> Tensor:
    """Five steps of Polar Express on a wide matrix."""
    steps = schedule("polar_express", 5)
    x = matrix.to(polar_dtype(matrix))
    x = x / (x.norm() * steps.safety)
    for a, b, c in steps.coefficients:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


if __name__ == "__main__":
    main()
