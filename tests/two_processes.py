"""A function in two processes with gloo, a batch for each of them, and a comparison of what they give."""

import datetime
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

NEEDS_GLOO = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="torch was built without gloo"
)
WORLD = 2
TASKS = ("left", "right", "up")
TIMEOUT = 60  # seconds


def both(function: Callable[[int], Any], folder: Path) -> list[Any]:
    """What ``function(rank)`` returns in each of two processes that can reduce their tensors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = multiprocessing.spawn(_run, (function, port, str(folder)), nprocs=WORLD, join=False)
    deadline = time.monotonic() + TIMEOUT
    try:
        while not processes.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, "the processes wait for each other"
    finally:
        for process in processes.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def _run(rank: int, function: Callable[[int], Any], port: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=TIMEOUT / 2),
    )
    torch.save(function(rank), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()
    os._exit(0)  # threads of gloo may outlast the interpreter, which torch now and then ends with an abort


def data(seed, rank):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    return x, (1 + rank) * torch.randn(16, len(TASKS), generator=generator, dtype=torch.float64)


def joined(seed):
    """The batches of both in one."""
    return tuple(torch.cat(each) for each in zip(*(data(seed, rank) for rank in range(WORLD)), strict=True))


def assert_identical(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
