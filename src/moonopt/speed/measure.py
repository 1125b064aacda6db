"""Timing several ways of doing one thing side by side: interleaved rounds, medians with their spread, ratios."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Contestants = Mapping[str, Callable[[], object]]


def interleaved(contestants: Contestants, rounds: int, repeat: int = 1, warmup: int = 3) -> dict[str, dict[str, float]]:
    """Time every contestant in every round, so that whatever else slows the machine down slows all of them.

    In a round each runs ``repeat`` times in a row. Returns for each the median and quartiles of one run in milliseconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    synchronize: Callable[[], object] = torch.accelerator.synchronize if torch.accelerator.is_available() else _nothing
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
