"""Whether modules train, and how precisely matrices are multiplied."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")


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

    Left alone, torch multiplies matrices in full precision and convolves in TensorFloat-32. It has older switches, for all
    kinds of products, which torch.compile reads, and which cannot be read where a newer one, for one kind, says something else.
    Both are put back to where they were.
    """
    backends: Any = torch.backends  # torch's type stubs lack much of it
    older = _said(torch.get_float32_matmul_precision, "highest"), _said(lambda: backends.cudnn.allow_tf32, True)
    kinds = backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn
    newer = [(products, products.fp32_precision) for products in kinds]
    _multiply("high" if tf32 else "highest", convolve_in_tf32=tf32)
    try:
        yield
    finally:
        _multiply(*older)
        for products, precision in newer:
            products.fp32_precision = precision


def _said(switch: Callable[[], T], default: T) -> T:
    try:
        return switch()
    except RuntimeError:  # torch's word for switches that do not agree
        return default


def _multiply(precision: str, convolve_in_tf32: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = convolve_in_tf32
