"""Adam for the learnable part of a balancer: a handful of numbers that live in its memory."""

import math
from typing import Any

import torch
from torch import Tensor

from moonopt.balance.base import Memory

BETAS = (0.9, 0.999)
EPS = 1e-8


def initial(name: str, start: Tensor) -> dict[str, Any]:
    """What to remember of a parameter."""
    zeros = start.new_zeros(start.shape)
    return {name: start, f"{name}_average": zeros, f"{name}_square": zeros.clone(), f"{name}_steps": zeros.clone()}


def step(memory: Memory, name: str, gradient: Tensor, here: Tensor, lr: float, weight_decay: float = 0.0) -> None:
    """torch.optim.Adam's, with its weight decay (added to the gradient), for the entries where ``here`` is 1."""
    parameter: Tensor = memory[name]
    gradient = (gradient + weight_decay * parameter) * here
    average = memory[f"{name}_average"].lerp(gradient, (1 - BETAS[0]) * here)
    square = memory[f"{name}_square"].lerp(gradient.square(), (1 - BETAS[1]) * here)
    steps = memory[f"{name}_steps"] + here
    size = (square / _correction(BETAS[1], steps)).sqrt() + EPS
    change = lr * average / _correction(BETAS[0], steps) / size * here
    memory.update({name: parameter - change, f"{name}_average": average, f"{name}_square": square, f"{name}_steps": steps})


def _correction(beta: float, steps: Tensor) -> Tensor:
    """1 - beta^steps, to all digits: float32 has few of them for 0.999. Not 0 where there was no step."""
    return -torch.expm1(math.log(beta) * steps).clamp_max(-1e-30)
