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
    synchronize: Callable[[], object] = torch.accelerator.synchronize if torch.accelerator.is_available() else bool
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


def environment() -> dict[str, Any]:
    """What a number depends on: versions, threads, hardware, and whether it multiplies bfloat16 natively."""
    on_accelerator = torch.accelerator.is_available()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_bfloat16": _cpu_multiplies_bfloat16(),
        "accelerator": torch.cuda.get_device_name() if on_accelerator and torch.cuda.is_available() else None,
    }


def _summary(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4)
    return {"ms": 1e3 * median, "low_ms": 1e3 * low, "high_ms": 1e3 * high}


def _cpu_multiplies_bfloat16() -> bool:
    """Whether oneDNN uses bfloat16 instructions here. ONEDNN_MAX_CPU_ISA=AVX512_CORE turns them off."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _bfloat16_is_faster()


def _bfloat16_is_faster() -> bool:
    single, half = torch.ones(512, 512), torch.ones(512, 512, dtype=torch.bfloat16)
    found = interleaved({"single": lambda: single @ single, "half": lambda: half @ half}, rounds=7)
    return found["half"]["ms"] < found["single"]["ms"]
