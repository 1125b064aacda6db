"""A seed fixes everything: random states, deterministic algorithms, and the order of the data."""

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def deterministic(seed: int, algorithms: bool = True, threads: int | None = None) -> Iterator[None]:
    """Seed every generator and ask torch for deterministic algorithms; afterwards states and flags are as they were.

    Sums over another number of threads round differently: what a run was begun with is to be given when it goes on.
    """
    before = random_state(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with a workspace of its own
    torch.use_deterministic_algorithms(algorithms)
    memory.fill_uninitialized_memory = False  # nobody reads such memory, and filling it is a kernel more each time
    torch.backends.cudnn.benchmark = False
    random.seed(seed)
    torch.manual_seed(seed)
    _numpy_seed(seed)
    try:
        yield
    finally:
        restore_random_state(before[0])
        torch.use_deterministic_algorithms(before[1])
        torch.backends.cudnn.benchmark = before[2]
        memory.fill_uninitialized_memory = filled
        torch.set_num_threads(threads_before)


def random_state() -> dict[str, Any]:
    """Of every generator, in a form that ``torch.load(weights_only=True)`` reads."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": list(random.getstate())}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    with contextlib.suppress(ImportError):
        import numpy as np

        name, keys, *rest = np.random.get_state(legacy=True)
        state["numpy"] = [name, [int(key) for key in keys], *rest]
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(tuple(state["numpy"]))


def generator_of(*numbers: int | str) -> torch.Generator:
    """A generator that is seeded with several numbers: the seed of the run, the epoch, the batch."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def epoch_order(length: int, batch_size: int, batches: int | None, seed: int, epoch: int) -> list[Tensor]:
    """The examples of every batch of an epoch: permutations, one after the other if more batches are asked for than one has.

    Every batch is full, unless there are fewer examples than that.

    >>> [batch.numel() for batch in epoch_order(10, 4, None, seed=0, epoch=0)]
    [4, 4]
    """
    size = min(batch_size, length)
    per_pass = length // size
    order: list[Tensor] = []
    for number in range(-(-(batches or per_pass) // per_pass)):
        shuffled = torch.randperm(length, generator=generator_of(seed, epoch, number))
        order.extend(shuffled[start * size : (start + 1) * size] for start in range(per_pass))
    return order[: batches or per_pass]


def _numpy_seed(seed: int) -> None:
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed % 2**32)
