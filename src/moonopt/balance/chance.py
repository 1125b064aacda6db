"""Random numbers that a checkpoint takes along: a seed and how often was drawn."""

from typing import Any

import torch

from moonopt.balance.base import Memory


def initial(seed: int) -> dict[str, Any]:
    """What to remember."""
    return {"seed": seed, "draws": 0}


def generator(memory: Memory, device: torch.device | str = "cpu") -> torch.Generator:
    """For the next draw; equal on all ranks and after a resume."""
    memory["draws"] += 1
    return torch.Generator(device).manual_seed((1_000_003 * memory["seed"] + memory["draws"]) % 2**63)
