"""What training costs: seconds and peak memory of the steps alone, without evaluations, checkpoints and logging."""

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

MEGABYTE = 1e6


@dataclass
class Cost:
    """So far. The first steps of every process, which may compile or allocate, count in ``seconds``, not in ``timed_*``."""

    seconds: float = 0.0
    timed_seconds: float = 0.0
    timed_steps: int = 0
    peak_memory_mb: float = 0.0

    @property
    def seconds_per_step(self) -> float:
        return self.timed_seconds / self.timed_steps if self.timed_steps else self.seconds


class Meter:
    """Adds to a cost while it runs.

    Memory is that of all tensors on an accelerator; on a CPU it is what the process has grown by since it had ``before_mb``.
    The first ``untimed`` steps are not timed.
    """

    def __init__(self, cost: Cost, device: torch.device, before_mb: float, untimed: int = 1) -> None:
        self._cost, self._device, self._before = cost, device, before_mb
        self._untimed = untimed
        self.run()

    def run(self) -> None:
        """From now on; what happened before has no part in the peak."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _forget_peak()
        self._began, self._steps = time.perf_counter(), 0

    def step(self) -> None:
        """A step was taken."""
        self._steps += 1
        if self._untimed > 0:
            self.pause(timed=False)
            self._untimed -= 1
            self._began, self._steps = time.perf_counter(), 0

    def pause(self, timed: bool = True) -> None:
        """Until ``run`` is called."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds, cost = time.perf_counter() - self._began, self._cost
        cost.seconds += seconds
        if timed:
            cost.timed_seconds += seconds
            cost.timed_steps += self._steps
        cost.peak_memory_mb = max(cost.peak_memory_mb, self._peak())

    def _peak(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / MEGABYTE
        return max(0.0, _status("VmHWM:") - self._before)


def resident_mb() -> float:
    """The memory of this process now."""
    return _status("VmRSS:")


def _status(key: str) -> float:
    """A line of /proc/self/status in megabytes; without that file, the largest size that the process ever had."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024 / MEGABYTE
    except OSError:
        pass
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MEGABYTE


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
