"""Task gradients: one backward pass per task over a graph that stays for the backward pass of the combined loss."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: Losses are multiplied by this and gradients divided by it again, in float32: what a half-precision backward pass
#: would flush to zero survives, and as a power of two it changes nothing else.
GRADIENT_SCALE = 2.0**12


def task_gradients(losses: Tensor, parameters: Sequence[Tensor]) -> list[list[Tensor | None]]:
    """For each loss its gradients in the parameters, in float32 or better; None where it does not depend on one."""
    refuse_partial_graphs(losses)
    rows: list[list[Tensor | None]] = []
    for loss in losses.unbind():
        row = torch.autograd.grad(loss * GRADIENT_SCALE, parameters, retain_graph=True, allow_unused=True)
        rows.append([None if each is None else _unscaled(each) for each in row])
    return rows


def refuse_partial_graphs(losses: Tensor) -> None:
    """Refuse graphs over which several backward passes give wrong gradients or none, with the mode that works."""
    nodes = {type(node).__name__ for node in _graph(losses)}
    if "CheckpointFunctionBackward" in nodes:
        raise RuntimeError(
            "Task gradients are not defined through reentrant activation checkpointing: they would be zero. Call "
            'torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or use delta="loss_difference".'
        )
    if "CompiledFunctionBackward" in nodes and torch._functorch.config.donated_buffer:
        raise RuntimeError(
            "The compiled model frees its buffers in the first backward pass, and task gradients need several. Set "
            'torch._functorch.config.donated_buffer = False before compiling, or use delta="loss_difference".'
        )


def _unscaled(gradient: Tensor) -> Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / GRADIENT_SCALE


def _graph(output: Tensor) -> Iterator[torch.autograd.graph.Node]:
    """Every node of the backward graph."""
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(parent for parent, _ in node.next_functions)
