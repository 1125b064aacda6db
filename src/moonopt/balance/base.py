"""What a balancer is: a way to make one loss of the losses of several tasks.

Most choose weights (``Balancer``), from the losses or from the gradients of the tasks; some choose a direction coordinate by
coordinate (``Aggregator``). What they remember between steps lives in a ``Memory``, which a checkpoint takes along.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from moonopt.tasks.at_once import Joint, gradients_at_once
from moonopt.tasks.capturing import is_capturing
from moonopt.tasks.gradients import (
    Rows,
    by_parameter,
    gradient_scale,
    gram_by_blocks,
    gram_matrix,
    leaves_of,
    shared_by,
    task_gradients,
)
from moonopt.tasks.losses import TaskLosses, task_names
from moonopt.tasks.reduce import gradients_over_ranks, mean_over_ranks, world_size

STORED, BATCHED, ANEW, COLUMNS, BLOCKED = "stored", "stored:batched", "stored:anew", "columns", "blocked"

Heads = Literal["weighted", "plain"]


class Memory(MutableMapping[str, Any]):
    """What a balancer remembers: entries of the optimizer's first group, so that checkpoints have them."""

    PREFIX: ClassVar[str] = "balancer_"

    def __init__(self, group: Callable[[], dict[str, Any]]) -> None:
        self._group = group

    def __getitem__(self, name: str) -> Any:
        return self._group()[self.PREFIX + name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._group()[self.PREFIX + name] = value

    def __delitem__(self, name: str) -> None:
        del self._group()[self.PREFIX + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.PREFIX) for name in self._group() if name.startswith(self.PREFIX))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Engine(NamedTuple):
    """How the inner products of the task gradients are had: a kind, and the size of "blocked:SIZE"."""

    text: str
    size: int = 0

    @classmethod
    def read(cls, text: str) -> "Engine":
        kind, _, size = text.partition(":")
        if text in (STORED, BATCHED, ANEW, COLUMNS):
            return cls(text)
        if kind == BLOCKED and size.isdecimal() and int(size) > 0:
            return cls(text, int(size))
        raise ValueError(
            f'engine must be "{STORED}", "{BATCHED}", "{ANEW}", "{COLUMNS}" or "{BLOCKED}:SIZE" such as "{BLOCKED}:4", '
            f"found {text!r}."
        )

    @property
    def keeps_all(self) -> bool:
        """Whether all gradients are kept, of the evaluation that counts."""
        return self.text in (STORED, BATCHED)

    @property
    def evaluates_again(self) -> bool:
        """Whether the losses are evaluated for it, task by task."""
        return self.text in (ANEW, COLUMNS)


class NonFiniteGradientError(Exception):
    """The gradients of some tasks have NaN or infinite entries."""

    def __init__(self, bad: Tensor) -> None:
        super().__init__("The gradient of a task has NaN or infinite entries.")
        self.bad = bad  # one flag per task that is there


class Tasks:
    """What a balancer may ask of the tasks in one micro-batch; gradients are computed when they are asked for."""

    def __init__(
        self,
        losses: TaskLosses,
        trained: Sequence[Tensor],
        shared: Sequence[Tensor] | None,
        engine: Engine,
        gram: Tensor | None = None,
    ) -> None:
        self.losses, self.trained = losses, list(trained)  # frozen ones, too, so that places in it last
        self.parameters = [p for p in trained if p.requires_grad]
        self._shared, self._engine, self._gram = shared, engine, gram
        self._joint: Joint | None = None  # of the gradients, where they are known and lie in one matrix

    @property
    def chosen(self) -> Sequence[Tensor] | None:
        """The shared parameters, where they are not to be found from the graph."""
        return self._shared

    @property
    def count(self) -> int:
        """K, the tasks that are there."""
        return len(self.losses.separate)

    @functools.cached_property
    def values(self) -> Tensor:
        """The losses as numbers, the same on all ranks."""
        return mean_over_ranks(self.losses.values.detach())

    @functools.cached_property
    def are_finite(self) -> bool:
        """Whether all losses are; this waits for the device, once."""
        return bool(self.values.isfinite().all())

    @functools.cached_property
    def gradients(self) -> Rows:
        """For each task its gradient in every parameter, None where the loss does not depend on it."""
        if self._engine.text != BATCHED:
            return self.gradients_in(self.parameters)
        rows, joint = gradients_at_once(self.losses.separate, self.parameters)
        if world_size() == 1:
            self._joint = joint
        return gradients_over_ranks(rows, self.parameters)

    def gradients_in(self, parameters: Sequence[Tensor]) -> Rows:
        """For each task its gradient in some parameters, the mean over all processes, by backward passes of their own."""
        rows = task_gradients(self.losses.separate, parameters, scale=self._scale)
        return gradients_over_ranks(rows, parameters)

    @functools.cached_property
    def _scale(self) -> float:
        return gradient_scale(self.losses.separate)

    def gradients_one_by_one(self, parameters: Sequence[Tensor] | None = None) -> Iterator[list[Tensor | None]]:
        """The same, in all parameters or in some, kept by nobody."""
        chosen = self.parameters if parameters is None else parameters
        for loss in self.losses.separate:
            row = task_gradients([loss], chosen, scale=self._scale)
            yield gradients_over_ranks(row, chosen)[0]

    @functools.cached_property
    def shared(self) -> list[Tensor]:
        """The parameters that tasks have in common: those chosen, or those that more than one loss depends on."""
        if self._shared is not None:
            chosen = set(self._shared)
            return [p for p in self.parameters if p in chosen]
        if "gradients" not in vars(self) or self.count == 1:
            return shared_by(self.losses.separate, self.parameters)
        users = ([gradient is not None for gradient in column] for column in zip(*self.gradients, strict=True))
        return [p for p, used in zip(self.parameters, users, strict=True) if sum(used) > 1]  # without a look at the graph

    @functools.cached_property
    def heads(self) -> list[Tensor]:
        """The other parameters."""
        shared = set(self.shared)
        return [p for p in self.parameters if p not in shared]

    @functools.cached_property
    def strangers(self) -> list[Tensor]:
        """What a backward pass leaves gradients in as well, and others train."""
        own = set(self.parameters)
        return [p for p in leaves_of(self.losses.values) if p not in own]

    def seen(self) -> "Tasks":
        """The same with gradients and their inner products, and without the graph that they are from."""
        losses = self.losses._replace(
            values=self.losses.values.detach(), separate=tuple(each.detach() for each in self.losses.separate)
        )
        found = Tasks(losses, self.trained, self._shared, self._engine)
        for name in ("gradients", "shared", "gram_on_device", "_culprits"):
            vars(found)[name] = getattr(self, name)
        found._joint = self._joint
        return found

    @property
    def rows(self) -> Rows:
        """For each task its gradient in the shared parameters."""
        gradients, shared = self.gradients, set(self.shared)
        chosen = [index for index, p in enumerate(self.parameters) if p in shared]
        return [[row[index] for index in chosen] for row in gradients]

    def weighted_gradient(self, weights: Tensor) -> dict[Tensor, Tensor]:
        """sum_i w_i g_i in what tasks share, and the plain gradient of its own task in every other parameter.

        That is so for strangers, too, which are shared where several losses depend on them. With several processes it is that
        of this one: the backward pass that it is delivered to averages them.
        """
        common = shared_by(self.losses.separate, self.strangers) if self.strangers else []
        alone = [p for p in self.strangers if p not in set(common)]
        if "gradients" in vars(self) and world_size() == 1:
            own = self.weighted_sum(self.shared, weights) | self.weighted_sum(self.heads, torch.ones_like(weights))
            return own | self._gradient_of_sum(common, weights) | self.plain_gradient(alone)
        return self._gradient_of_sum([*self.shared, *common], weights) | self.plain_gradient([*self.heads, *alone])

    def weighted_sum(self, parameters: Sequence[Tensor], weights: Tensor) -> dict[Tensor, Tensor]:
        """sum_i w_i g_i in some parameters."""
        chosen = set(parameters)
        if self._joint is not None and chosen == set(self._joint.parameters):
            return self._joint.weighted_sum(weights)
        total: dict[Tensor, Tensor] = {}
        for weight, row in zip(weights.unbind(), self.gradients, strict=True):
            here = {p: gradient for p, gradient in by_parameter(self.parameters, row).items() if p in chosen}
            if not here:
                continue
            scaled = torch._foreach_mul(list(here.values()), weight.to(next(iter(here.values()))))
            weighted = dict(zip(here, scaled, strict=True))
            again = [p for p in weighted if p in total]
            if again:
                torch._foreach_add_([total[p] for p in again], [weighted[p] for p in again])
            total = weighted | total
        return total

    def plain_gradient(self, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """That of the sum of the losses."""
        return self._gradient_of_sum(parameters, torch.ones_like(self.losses.values))

    def _gradient_of_sum(self, parameters: Sequence[Tensor], weights: Tensor) -> dict[Tensor, Tensor]:
        """That of the weighted sum of the losses, of a backward pass of its own."""
        if not parameters:
            return {}
        total = (weights.to(self.losses.values) * self.losses.values).sum()
        (row,) = task_gradients([total], parameters, scale=self._scale, sparse=True)
        return by_parameter(parameters, row)

    @functools.cached_property
    def gram_on_device(self) -> Tensor:
        """The inner products of the task gradients in the shared parameters, in float64."""
        if self._gram is not None:
            return self._gram
        if self._engine.size:
            return gram_by_blocks(self.losses.separate, self.shared, self._engine.size)
        rows = self.rows
        if self._joint is not None and set(self.shared) == set(self._joint.parameters):
            return self._joint.gram()
        return gram_matrix(rows)

    def gram(self) -> Tensor:
        """Their inner products, in float64 on the CPU: the one thing that waits for the device."""
        gram = self.gram_on_device.cpu()
        bad = ~gram.diagonal().isfinite()
        if bad.any():
            raise NonFiniteGradientError(bad if self._culprits is None else self._culprits)
        return gram

    @functools.cached_property
    def _culprits(self) -> Tensor | None:
        """Whose gradients are not finite, where one pass for all made the others' ill, too; None where the graph tells no more.

        A captured step cannot look.
        """
        losses = self.losses
        if self._engine.text != BATCHED or not losses.values.requires_grad or is_capturing(losses.values.device):
            return None
        if self.gram_on_device.diagonal().isfinite().all():
            return None
        found = ~gram_matrix(self.gradients_in(self.shared)).diagonal().cpu().isfinite()
        return found if found.any() else None


class Learned(NamedTuple):
    """What a step has shown: the mean losses of the tasks before it, on all ranks, and after it where that was asked for.

    And what the balancer has noted of its micro-batches: of each task once, of the first that has it.
    """

    present: tuple[bool, ...]
    before: Tensor
    after: Tensor | None
    noted: list[Any]


class Balancer(ABC):
    """Weights for the losses of tasks.

    Args:
        tasks: their names, or how many.

    """

    name: ClassVar[str]
    needs_gradients: ClassVar[bool] = False
    #: Whether their inner products are all that it needs of them.
    uses_gram: bool = False
    evaluates_again: ClassVar[bool] = False
    #: Whether it computes on the device alone, so that a step can be a CUDA graph. One that uses the inner products of the
    #: gradients and nothing else of them need not: its step is two graphs, and between them the host solves its problem.
    capturable: bool = False
    #: Whether parameters of a single task see its weight, or the plain gradient of its loss.
    heads: Heads = "weighted"
    #: What the norm of the shared parameters' gradient is clipped to before the step.
    max_norm: float | None = None
    takes_logarithms: ClassVar[bool] = False
    #: Whether it wants to know of the tasks what ``note`` tells after the step.
    takes_notes: ClassVar[bool] = False

    def __init__(self, tasks: int | Sequence[str]) -> None:
        self.tasks = task_names(tasks)

    def initial(self, like: Tensor) -> dict[str, Any]:
        """What there is to remember at the start; ``like`` is a tensor with one number per task."""
        return {}

    @property
    def bad_loss(self) -> str:
        """What is wrong with a loss that leads to no weights."""
        more = ", or its gradient is" if self.needs_gradients else ""
        return "NaN or infinite" + (f", or not positive: {self.name} takes its logarithm" if self.takes_logarithms else more)

    @abstractmethod
    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        """One weight per task that is there."""

    def note(self, tasks: Tasks, memory: Memory) -> Any:
        """What ``learn`` is to know of them, if this batch leads to a step."""
        return None

    def value(self, losses: Tensor, weights: Tensor, memory: Memory) -> Tensor:
        """The number that the combined loss shows; its gradient is that of the weighted sum."""
        return (weights * losses).sum()

    def learn(self, learned: Learned, memory: Memory) -> None:  # noqa: B027
        """After a step: remember what it has shown."""

    def __repr__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if name not in ("tasks", "capturable") and name[0] != "_"}
        return f"{type(self).__name__}({', '.join([repr(list(self.tasks)), *(f'{k}={v!r}' for k, v in settings.items())])})"


class Aggregator(Balancer):
    """A direction for the shared parameters that is no weighted sum of the task gradients."""

    needs_gradients: ClassVar[bool] = True
    heads: Heads = "plain"

    def weights(self, tasks: Tasks, memory: Memory) -> Tensor:
        """None of its own: this is for the value that is shown."""
        return torch.full_like(tasks.values, 1 / tasks.count)

    @abstractmethod
    def direction(self, tasks: Tasks, memory: Memory) -> dict[Tensor, Tensor]:
        """What takes the place of the gradient, by parameter; the others get the plain gradient of the summed losses."""
