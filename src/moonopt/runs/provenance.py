"""What a number depends on beside its config: versions, hardware, the commit."""

import importlib.metadata
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("moonopt", "torch", "numpy", "scikit-learn")


def versions() -> dict[str, str]:
    """Of Python and of the packages that there are."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # not installed, or run from a source tree
            continue
    return found | {"torch": torch.__version__}


def hardware(device: torch.device) -> dict[str, Any]:
    """The device, the processor, and how many threads torch uses."""
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    return found | ({"cuda": torch.version.cuda} if device.type == "cuda" else {})


def commit() -> str | None:
    """The commit of this source tree, with a + if files differ from it; None outside one."""
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        name = subprocess.run(
            [*here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        ours = ["ls-files", "--error-unmatch", __file__]  # an environment inside somebody else's repository is not ours
        subprocess.run([*here, *ours], capture_output=True, check=True)
        changed = subprocess.run([*here, "status", "--porcelain", "--", "."], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+" if changed else "")


def peak_memory_mb(device: torch.device) -> float:
    """The most that was in use so far: tensors on an accelerator, the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts in bytes, Linux in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
