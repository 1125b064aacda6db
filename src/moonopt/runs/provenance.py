"""What a number depends on beside its config: versions, hardware, the commit."""

import importlib.metadata
import os
import platform
import subprocess
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
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    return found | ({"cuda": torch.version.cuda} if device.type == "cuda" else {})


def commit() -> str | None:
    """The commit of this source tree, with a + if files of the package differ from it; None outside one."""
    here = ["git", "-C", str(Path(__file__).parents[1])]
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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
