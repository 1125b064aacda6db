"""What the hardware can do, and may: whether our Triton kernels run on this GPU, and what GPUs and CPUs multiply in."""

import functools
import importlib.util
import os

import torch
from torch import Tensor

#: From so many entries on, a launch for every tensor costs less than another pass over memory.
LARGE = 2**20
#: The dtypes of tensors that kernels of our own go over.
STREAMED = (torch.float32, torch.bfloat16, torch.float16)
#: Values of ONEDNN_MAX_CPU_ISA under which oneDNN emulates products in bfloat16.
WITHOUT_BFLOAT16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}


@functools.cache
def has_kernels(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and importlib.util.find_spec("triton") is not None
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@functools.cache
def has_wide_tiles(device: torch.device) -> bool:
    """Whether the tiles of the symmetric products fit, and are loaded without the help of threads: from Hopper on."""
    if not has_kernels(device):
        return False
    properties = torch.cuda.get_device_properties(device)
    shared: int = getattr(properties, "shared_memory_per_block_optin", 0)  # in bytes; torch's type stubs lack it
    return properties.major >= 9 and shared >= 2**18 - 2**15


def multiplies_in_tf32() -> bool:
    """Whether float32 matrices may be multiplied in TensorFloat-32 on GPUs, by whichever of torch's switches that was said.

    ``torch.get_float32_matmul_precision`` raises where one of the others was used.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def can_stream(*tensors: Tensor) -> bool:
    """Whether tensors are alike in shape, whole, in a dtype that the kernels know, and where they are."""
    first = tensors[0]
    return has_kernels(first.device) and all(
        each.shape == first.shape
        and each.device == first.device
        and each.dtype in STREAMED
        and each.is_contiguous()
        and each.data_ptr() % 16 == 0
        for each in tensors
    )


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether products in bfloat16 use instructions of their own (AVX-512 BF16 or AMX), about twice as fast as float32."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    if most in WITHOUT_BFLOAT16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return any(check is not None and check() for check in checks)
