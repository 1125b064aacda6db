"""Looking at a model without changing anything: metrics over a split, and the cosines between task gradients."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.bench import Benchmark, Data
from moonopt.errors import UserError
from moonopt.runs.reproducible import generator_of
from moonopt.tasks.gradients import gram_matrix, shared_by, task_gradients
from moonopt.tasks.kernels import plain_kernels
from moonopt.tasks.losses import read_losses
from moonopt.tasks.modes import eval_mode


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a batch on a device, in the same structure."""
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch.to(device, non_blocking=True) if hasattr(batch, "to") else batch


@torch.no_grad()
def metrics_of(bench: Benchmark, model: nn.Module, data: Data, device: torch.device) -> dict[str, float]:
    """Every metric over all examples."""
    with eval_mode(model):
        found = bench.evaluate(model, _all_batches(data, bench.evaluation_batch, device))
    absent = [metric.name for metric in bench.metrics if metric.name not in found]
    if absent:
        raise UserError(
            f"evaluate of {bench.name} must return all its metrics: {', '.join(absent)} missing, found {', '.join(found)}."
        )
    return {metric.name: float(found[metric.name]) for metric in bench.metrics}


def cosines_of(bench: Benchmark, model: nn.Module, batch: Any) -> list[list[float]]:
    """The cosines between the gradients that the tasks have in the parameters they share, in the order of the tasks.

    They are 0 where a gradient is, and NaN for a task that the batch does not have.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    eager = torch.compiler.set_stance("force_eager")  # several backward passes over one graph
    with eval_mode(model), torch.enable_grad(), plain_kernels(), eager:
        losses = read_losses(bench.losses(model, batch), bench.tasks)
        gram = gram_matrix(task_gradients(losses.separate, shared_by(losses.separate, parameters)))
    norms = gram.diagonal().sqrt()
    cosines: Tensor = torch.where(gram == 0, 0.0, gram / (norms[:, None] * norms)).clamp(-1, 1)
    here = [index for index, present in enumerate(losses.present) if present]
    every = torch.full((len(bench.tasks), len(bench.tasks)), math.nan)
    every[torch.tensor(here)[:, None], torch.tensor(here)] = cosines.cpu().to(every)
    return every.tolist()


def _all_batches(data: Data, size: int, device: torch.device) -> Iterator[Any]:
    for number, indices in enumerate(torch.split(torch.arange(len(data)), size)):
        yield to_device(data.batch(indices, generator_of("evaluation", number)), device)
