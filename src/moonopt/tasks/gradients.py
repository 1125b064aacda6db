"""Task gradients: one backward pass per task over a graph that stays for the backward pass of the combined loss.

Their inner products, the Gram matrix, can be had in five ways: with all gradients kept, from one graph, in one backward pass
or several, or each from a graph of its own; with a few of them kept and more backward passes; or with one kept and a
forward-mode pass along each, which gives a column at once.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from moonopt.errors import noted
from moonopt.linalg.polar import without_autocast
from moonopt.tasks.losses import TaskLosses
from moonopt.tasks.tangents import carried, tangent_of

Rows = list[list[Tensor | None]]

#: What an error may come from where the columns of a Gram matrix are made.
NOT_FORWARDS = (
    'If the cause is a part of the model that cannot be differentiated forwards, as engine="columns" does: '
    'engine="stored" does not.'
)
#: Losses are multiplied by this and gradients divided by it again, in float32, where a graph has or may have float16: what
#: would be flushed to zero there survives. As a power of two it changes nothing else, but what hooks on hidden tensors see.
#: Much larger, it would overflow float16.
GRADIENT_SCALE = 2.0**8


def task_gradients(
    losses: Sequence[Tensor],
    parameters: Sequence[Tensor],
    retain_graph: bool = True,
    scale: float | None = None,
    sparse: bool = False,
) -> Rows:
    """For each loss its gradients in the parameters, in float32 or better; None where it does not depend on one.

    The graph must be one that several backward passes can go through: see ``graph_features``. Without ``retain_graph``, for a
    single loss, it is gone afterwards. ``scale`` is their ``gradient_scale``, where that is known. With ``sparse`` there may be
    sparse ones, which cannot be compared.
    """
    if not parameters:
        return [[] for _ in losses]
    rows: Rows = []
    scale = gradient_scale(losses) if scale is None else scale
    with torch.enable_grad(), without_autocast(losses[0].device.type), without_hooks(parameters):
        for loss in losses:
            row: Sequence[Tensor | None] = [None] * len(parameters)
            if loss.requires_grad:
                scaled = loss if scale == 1 else loss * scale
                row = torch.autograd.grad(scaled, parameters, retain_graph=retain_graph, allow_unused=True)
            rows.append(unscaled(row, scale, sparse))
    return rows


def gradient_scale(losses: Iterable[Tensor]) -> float:
    """What losses are multiplied by before their backward passes: 1 unless float16 is in their graph, or may be.

    What a compiled model or a torch.autograd.Function computes in does not show.
    """
    return GRADIENT_SCALE if any(map(_may_flush, nodes_of(losses))) else 1.0


def _may_flush(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction) or any(
        each.dtype == torch.float16 for each in node._input_metadata
    )


def by_parameter(parameters: Sequence[Tensor], row: Sequence[Tensor | None]) -> dict[Tensor, Tensor]:
    """The gradients of one loss by parameter, without those that it does not depend on."""
    return {p: gradient for p, gradient in zip(parameters, row, strict=True) if gradient is not None}


#: DistributedDataParallel takes the first backward pass for that of the step where its graph is promised to stay the same.
STATIC_GRAPH = "DistributedDataParallel(static_graph=True)"

#: How many numbers are converted to float64 at a time for inner products.
CHUNK = 2**20


def gram_matrix(rows: Sequence[Sequence[Tensor | None]]) -> Tensor:
    """The inner products of gradients, accumulated in float64; None counts as zero."""
    total: Tensor | None = None
    for columns in _groups([column for column in zip(*rows, strict=True) if any(each is not None for each in column)], CHUNK):
        whole = [_filled(column) for column in columns]
        for part in _in_float64([_together(row) for row in zip(*whole, strict=True)]):
            products = part @ part.mT
            total = products if total is None else total.to(products.device) + products
    return torch.zeros(len(rows), len(rows), dtype=torch.float64, device="cpu") if total is None else total


def _groups(columns: Iterable[Sequence[Tensor | None]], most: int) -> Iterator[list[Sequence[Tensor | None]]]:
    """Columns of one device with no more than so many numbers, or one that has more: few large products instead of many."""
    group: list[Sequence[Tensor | None]] = []
    numbers, device = 0, None
    for column in columns:
        like = next(each for each in column if each is not None)
        size = len(column) * like.numel()
        if group and (numbers + size > most or like.device != device):
            yield group
            group, numbers = [], 0
        group.append(column)
        numbers, device = numbers + size, like.device
    if group:
        yield group


def _filled(column: Sequence[Tensor | None]) -> list[Tensor]:
    like = next(each for each in column if each is not None)
    zeros = like.new_zeros(()).expand(like.numel())  # which take no memory
    return [zeros if each is None else each.flatten() for each in column]


def _together(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _in_float64(vectors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The vectors as rows of matrices, a few columns at a time: all of them at once would take three times their memory."""
    size = max(1, CHUNK // len(vectors))
    for start in range(0, vectors[0].numel(), size):
        yield torch.stack([vector[start : start + size] for vector in vectors]).double()


#: Evaluates the losses again, in a context: see ``moonopt.tasks.replay``.
Evaluate = Callable[[], contextlib.AbstractContextManager[TaskLosses]]


def gradients_anew(
    evaluate: Evaluate, parameters: Sequence[Tensor], shared: Sequence[Tensor] | None
) -> Iterator[tuple[Sequence[Tensor], list[Tensor | None]]]:
    """For each task the shared parameters and its gradient in them, of an evaluation of its own.

    Every evaluation is over before the next one begins, so that no graph is kept beside another, and a backward pass frees its
    graph on the way. Without ``shared``, it is the parameters that more than one loss depends on.
    """
    done, count = 0, 1
    while done < count:
        with torch.enable_grad(), evaluate() as losses:
            count = len(losses.separate)
            shared = shared_by(losses.separate, parameters) if shared is None else shared
            (row,) = task_gradients([losses.separate[done]], shared, retain_graph=False)
        del losses
        done += 1
        yield shared, row


def gram_anew(evaluate: Evaluate, parameters: Sequence[Tensor], shared: Sequence[Tensor] | None) -> Tensor:
    """All gradients kept, and no graph."""
    return gram_matrix([row for _, row in gradients_anew(evaluate, parameters, shared)])


def gram_by_columns(evaluate: Evaluate, parameters: Sequence[Tensor], shared: Sequence[Tensor] | None) -> Tensor:
    """One gradient at a time: the derivatives of all losses along it are its column."""
    columns: list[Tensor] = []
    for found, row in gradients_anew(evaluate, parameters, shared):
        with noted(NOT_FORWARDS), carried(by_parameter(found, row), parameters), evaluate() as again:
            columns.append(tangent_of(again.values).detach().double())
        del again
    gram = torch.stack(columns, 1)
    return (gram + gram.mT) / 2


def shared_by(losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters that more than one of the losses depends on; all of them, if there is only one loss."""
    if len(losses) == 1:
        return list(parameters)
    users = zip(*depends_on(losses, parameters), strict=True)
    return [p for p, used in zip(parameters, users, strict=True) if sum(used) > 1]


def gram_by_blocks(losses: Sequence[Tensor], parameters: Sequence[Tensor], size: int) -> Tensor:
    """At most ``size`` gradients at a time, and one more: later ones are computed once for every block before them."""
    count = len(losses)
    gram, scale = torch.zeros(count, count, dtype=torch.float64, device=losses[0].device), gradient_scale(losses)
    for start in range(0, count, size):
        end = min(start + size, count)
        rows = task_gradients(losses[start:end], parameters, scale=scale)
        gram[start:end, start:end] = gram_matrix(rows)
        for later in range(end, count):
            pairs = gram_matrix([*rows, *task_gradients([losses[later]], parameters, scale=scale)])
            gram[start:end, later] = gram[later, start:end] = pairs[-1, :-1]
    return gram


def depends_on(losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[list[bool]]:
    """For each loss which parameters its graph reaches."""
    found = []
    for loss in losses:
        reached = {id(node.variable) for node in nodes_of([loss]) if hasattr(node, "variable")}
        found.append([id(p) in reached for p in parameters])
    return found


def leaves_of(losses: Tensor) -> list[Tensor]:
    """Every tensor that a backward pass leaves a gradient in."""
    return [node.variable for node in nodes_of([losses]) if hasattr(node, "variable")]


def graph_features(losses: Tensor) -> dict[str, str]:
    """What in a graph makes task gradients wrong or impossible, each with what else could be done about it."""
    found = list(nodes_of([losses]))
    nodes, features = {type(node).__name__ for node in found}, {}
    if "CheckpointFunctionBackward" in nodes:  # parameters inside would silently get no gradient
        features["reentrant checkpointing"] = "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    if "CompiledFunctionBackward" in nodes:  # knows its gradient, and nothing more
        features["compiled models"] = "train the model without torch.compile"
    if "CompiledFunctionBackward" in nodes and torch._functorch.config.donated_buffer:  # freed by the first backward pass
        features["donated buffers"] = "set torch._functorch.config.donated_buffer = False before compiling"
    if "_DDPSinkBackward" in nodes and any(map(_is_of_static_graph, found)):
        features[STATIC_GRAPH] = "leave static_graph out"
    return features


def _is_of_static_graph(node: Any) -> bool:
    """Whether it is one of DistributedDataParallel, of a model that has one."""
    parallel = getattr(node, "ddp_weakref", lambda: None)()
    return parallel is not None and bool(parallel.static_graph)


@contextlib.contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """A hook on a parameter is for the gradient that the optimizer gets, and would act on it a second time."""
    hooks = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, kept in hooks:
            registered.update(kept)


def unscaled(row: Sequence[Tensor | None], scale: float, sparse: bool = False) -> list[Tensor | None]:
    """Gradients of losses that were multiplied by ``scale``, divided by it again, in float32 or better."""
    if not sparse and any(each is not None and each.is_sparse for each in row):
        raise RuntimeError("Sparse gradients are not supported among task gradients: build the embedding with sparse=False.")
    found = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in row if each is not None]
    divided = iter(each_divided(found, scale))
    return [None if each is None else next(divided) for each in row]


def each_divided(gradients: list[Tensor], scale: float) -> Sequence[Tensor]:
    """All at once; where there is nothing to divide by, they themselves."""
    return torch._foreach_div(gradients, scale) if gradients and scale != 1 else gradients


def nodes_of(outputs: Iterable[Tensor]) -> Iterator[torch.autograd.graph.Node]:
    """Every node of the backward graph.

    A torch.autograd.Function of several outputs that depend on some of its tensors alone may say on which: its ``ctx.reaches``
    takes the number of an output and gives the numbers of tensors among its arguments. It must hold no output: none would be
    freed.
    """
    waiting: list[tuple[Any, int]] = [get_gradient_edge(output)[:2] for output in outputs if output.requires_grad]
    seen, told = set(), set()
    while waiting:
        node, number = waiting.pop()
        reaches = getattr(node, "reaches", None)
        place = node, number if reaches else None
        if node is None or place in seen:
            continue
        seen.add(place)
        if node not in told:
            told.add(node)
            yield node
        parents = node.next_functions
        waiting.extend(parents if reaches is None else (parents[each] for each in reaches(number)))
