"""Whether kernels of our own can be used: Triton is there, and the GPU is one that they were written for."""

import functools
import importlib.util

import torch
from torch import Tensor

#: From so many entries on, a kernel of its own for every tensor costs less than another pass over memory.
LARGE = 2**18


@functools.cache
def has_kernels(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and importlib.util.find_spec("triton") is not None
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def can_stream(*tensors: Tensor) -> bool:
    """Whether tensors are large, alike in shape, whole, and where kernels are."""
    first = tensors[0]
    alike = all(each.shape == first.shape and each.device == first.device and each.is_contiguous() for each in tensors)
    return first.numel() >= LARGE and alike and has_kernels(first.device)
