"""Whether modules train, and how precisely matrices are multiplied."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in the mode it was in: parts of a model may be kept in eval mode all the time."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def multiplying(tf32: bool) -> Iterator[None]:
    """Float32 matrices, and convolutions, in full precision, or in TensorFloat-32 (10 bits instead of 23) where a GPU has it.

    Left alone, torch multiplies matrices in full precision and convolves in TensorFloat-32.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
