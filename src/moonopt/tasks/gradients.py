"""Task gradients: one backward pass per task over a graph that stays for the backward pass of the combined loss."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moonopt.linalg.polar import without_autocast

#: Losses are multiplied by this and gradients divided by it again, in float32: what a half-precision backward pass
#: would flush to zero survives, and as a power of two it changes nothing else. Much larger, it would overflow float16.
GRADIENT_SCALE = 2.0**8


def task_gradients(losses: Tensor, parameters: Sequence[Tensor]) -> list[list[Tensor | None]]:
    """For each loss its gradients in the parameters, in float32 or better; None where it does not depend on one.

    The graph must be one that several backward passes can go through: see ``graph_features``.
    """
    if not parameters:
        return [[] for _ in losses]
    rows: list[list[Tensor | None]] = []
    with without_autocast(losses.device.type):
        for loss in losses.unbind():
            row = torch.autograd.grad(loss * GRADIENT_SCALE, parameters, retain_graph=True, allow_unused=True)
            rows.append([None if each is None else _unscaled(each) for each in row])
    return rows


def graph_features(losses: Tensor) -> dict[str, str]:
    """What in a graph makes task gradients wrong or impossible, each with what else could be done about it."""
    nodes = {type(node).__name__ for node in _graph(losses)}
    features = {}
    if "CheckpointFunctionBackward" in nodes:  # parameters inside would silently get no gradient
        features["reentrant checkpointing"] = "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    if "CompiledFunctionBackward" in nodes:  # knows its gradient, and nothing more
        features["compiled models"] = "train the model without torch.compile"
    if "CompiledFunctionBackward" in nodes and torch._functorch.config.donated_buffer:  # freed by the first backward pass
        features["donated buffers"] = "set torch._functorch.config.donated_buffer = False before compiling"
    return features


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
