"""Small models and problems that several tests train on."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from two_heads import TwoHeads

collect_ignore = [] if "STAND_IN_GPU" in os.environ else ["stand_in_gpu"]  # for a process of its own

torch.set_num_threads(1)  # the problems are small, and other processes may want the other cores


@pytest.fixture
def two_heads():
    """Builds equal models however often it is called."""

    def build(tasks: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> TwoHeads:
        torch.manual_seed(seed)
        return TwoHeads(tasks).to(dtype)

    return build


@pytest.fixture
def batch():
    """Builds inputs and targets, the same for the same seed."""

    def build(size: int = 32, tasks: int = 2, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(size, tasks, generator=generator, dtype=torch.float64)
        return x.to(dtype), y.to(dtype)

    return build


@pytest.fixture(scope="session")
def example():
    """Loads one of the examples as a module."""
    pytest.importorskip("matplotlib")

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "examples" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
