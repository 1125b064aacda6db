"""Timing several ways of doing one thing side by side: interleaved rounds, medians with their spread, ratios."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Contestants = Mapping[str, Callable[[], object]]

#: What matrices are multiplied in.
PRODUCTS = ("tf32", "float32", "bfloat16")


def interleaved(contestants: Contestants, rounds: int, repeat: int = 1, warmup: int = 3) -> dict[str, dict[str, float]]:
    """Time every contestant in every round, so that whatever else slows the machine down slows all of them.

    In a round each runs ``repeat`` times in a row. Returns for each the median and quartiles of one run in milliseconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    synchronize = waits_for_device()
    for number in range(warmup + rounds):
        for name, run in contestants.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(repeat):
                run()
            synchronize()
            if number >= warmup:
                seconds[name].append((time.perf_counter() - start) / repeat)
    return {name: _summary(times) for name, times in seconds.items()}


def waits_for_device() -> Callable[[], object]:
    """What to call before a look at the clock."""
    return torch.accelerator.synchronize if torch.accelerator.is_available() else _nothing


def autocast(products: str, device: torch.device | str) -> torch.autocast:
    """For the losses alone, as runs have it: updates are computed outside."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=products == "bfloat16")


def environment(device: torch.device) -> dict[str, Any]:
    """What a number depends on: versions, threads, hardware, and whether the CPU is faster in bfloat16."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_faster_in_bfloat16": _cpu_faster_in_bfloat16(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def command_line(name: str, description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """The options that all measurements have, and ``--rounds`` where there are rounds."""
    parser = argparse.ArgumentParser(
        prog=f"moonopt.speed.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    if rounds is not None:
        parser.add_argument("--rounds", type=_several, default=rounds, help=f"timed rounds (default {rounds})")
    parser.add_argument("--device", type=_device, default="cpu", help="where to measure (default cpu)")
    return parser


def small_or_gpu(parser: argparse.ArgumentParser, what: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with ``--small`` beside them, without which a CPU is not asked for ``what``."""
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the measurement out")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.small:
        parser.error(f"{what} are measured on a GPU: add --device cuda, or --small")
    return options


def show(options: argparse.Namespace, results: Sequence[Mapping[str, Any]], lines: Callable[[Any], Sequence[str]]) -> None:
    """Print the environment and the results, as JSON or each in its lines."""
    where = environment(torch.device(options.device))
    if options.json:
        print(json.dumps({"environment": where, "results": results}, indent=2))
        return
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    for result in results:
        print("\n" + "\n".join(lines(result)))


def timing(found: Mapping[str, float]) -> str:
    """A median with its quartiles."""
    return f"{found['ms']:9.2f} ms  ({found['low_ms']:.2f} to {found['high_ms']:.2f})"


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # the latter of a torch that was built without it
        raise argparse.ArgumentTypeError(f"{text} is not there: {str(error).splitlines()[0]}") from error
    return text


def _several(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be a number of at least 2, found {text}")
    return int(text)


def _summary(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4)
    return {"ms": 1e3 * median, "low_ms": 1e3 * low, "high_ms": 1e3 * high}


def _cpu_faster_in_bfloat16() -> bool:
    """Measured on one product: oneDNN multiplies bfloat16 natively or not. ONEDNN_MAX_CPU_ISA=AVX512_CORE turns it off."""
    single, half = torch.ones(512, 512), torch.ones(512, 512, dtype=torch.bfloat16)
    found = interleaved({"single": lambda: single @ single, "half": lambda: half @ half}, rounds=7)
    return found["half"]["ms"] < found["single"]["ms"]


def _nothing() -> None:
    """A CPU needs no waiting for."""
