"""The exact dual: weights and direction of a step from the task gradients of the moment, without momentum."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moonopt.linalg.dual import Dual, inner_products, solve_dual
from moonopt.optim.groups import SCALES, Group, rate_of, state_dtype, with_rows
from moonopt.optim.parameters import blocks, joined
from moonopt.tasks.directional import SUPPORT
from moonopt.tasks.gradients import by_parameter, graph_features, task_gradients
from moonopt.tasks.losses import TaskLosses

#: For each task that was there its gradients by matrix.
Gradients = dict[str, dict[Tensor, Tensor]]


class MinimaxStep(NamedTuple):
    """The weights, and the direction along which the slowest task falls fastest."""

    dual: Dual
    weights: dict[str, float]
    deltas: dict[str, float]
    directions: dict[Tensor, Tensor]  # scale * W by parameter


class ObservedTasks(NamedTuple):
    """The task gradients of a micro-batch, and the step that they would make alone, where that was asked for."""

    gradients: Gradients
    step: MinimaxStep | None


def observe_tasks(losses: TaskLosses, matrices: Sequence[Tensor]) -> Gradients:
    """The gradients of the losses, one backward pass each."""
    for feature, remedy in graph_features(losses.values).items():
        if feature not in SUPPORT["per_task"]:
            raise RuntimeError(f'dual="exact" does not work with {feature}: use dual="online", or {remedy}.')
    matrices = [p for p in matrices if p.numel() > 0]
    rows = task_gradients(losses.separate, matrices)
    return {name: by_parameter(matrices, row) for name, row in zip(losses.names, rows, strict=True)}


def joint_step(groups: Sequence[Group], observed: Sequence[ObservedTasks]) -> MinimaxStep | None:
    """The step of all micro-batches together; None where a gradient is not finite."""
    if len(observed) == 1 and observed[0].step is not None:
        return observed[0].step
    return minimax_step(groups, _mean_gradients([each.gradients for each in observed]))


def _mean_gradients(observed: Sequence[Gradients]) -> Gradients:
    """For each task the mean over the micro-batches that have it."""
    means: Gradients = {}
    for name in dict.fromkeys(name for each in observed for name in each):
        rows = [each[name] for each in observed if name in each]
        touched = dict.fromkeys(p for row in rows for p in row)
        means[name] = {p: torch.stack([row[p] for row in rows if p in row]).sum(0) / len(rows) for p in touched}
    return means


def minimax_step(groups: Sequence[Group], gradients: Gradients) -> MinimaxStep | None:
    """Solve the dual over the matrices that a task touches; None where there is none, or a gradient is not finite.

    A block counts with its scale times its rate relative to the largest, as it does in the deltas. A task that touches no
    matrix has no say.
    """
    gradients = {name: row for name, row in gradients.items() if row}
    touched = {p for row in gradients.values() for p in row}
    largest = max(float(rate_of(group)) for group in groups)
    parameters: list[Tensor] = []
    rows: list[list[int] | None] = []
    stacks: list[Tensor] = []
    scales: list[float] = []
    shares: list[float] = []
    for group in groups:
        for p, of in with_rows(group):
            if p in touched:
                matrices = _by_block(p, of, gradients)
                parameters.append(p)
                rows.append(of)
                stacks += matrices
                scales += [SCALES[group["scale"]](*each.shape[1:]) for each in matrices]
                shares += [float(rate_of(group)) / largest if largest else 1.0] * len(matrices)
    if not stacks or not all(bool(each.isfinite().all()) for each in stacks):
        return None
    weighed = [scale * share for scale, share in zip(scales, shares, strict=True)]
    dual = solve_dual(stacks, weighed)
    deltas = inner_products([s * each.double() for s, each in zip(weighed, stacks, strict=True)], dual.direction)
    updates = joined([s * w for s, w in zip(scales, dual.direction, strict=True)], rows, parameters)
    return MinimaxStep(
        dual=dual,
        weights=dict(zip(gradients, dual.weights.tolist(), strict=True)),
        deltas=dict(zip(gradients, deltas.tolist(), strict=True)),
        directions={p: update.to(state_dtype(p)) for p, update in zip(parameters, updates, strict=True)},
    )


def _by_block(parameter: Tensor, rows: list[int] | None, gradients: Gradients) -> list[Tensor]:
    """(m, p, q) for every matrix that the parameter is made of; a task that does not touch it has zeros."""
    none = torch.zeros_like(parameter, dtype=state_dtype(parameter))
    by_task = [blocks(row.get(parameter, none), rows) for row in gradients.values()]
    return [torch.stack(matrices) for matrices in zip(*by_task, strict=True)]
