"""What a benchmark is: data, a model, the losses of its tasks, metrics, and settings, in one class."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from moonopt.bench.metrics import Metric, lower_is_better
from moonopt.errors import UserError
from moonopt.tasks.losses import Losses

#: Settings of the training loop, by key, which every benchmark has; it may set its own values.
TRAINING: Mapping[str, Any] = {
    "train.epochs": 10,
    "train.batch_size": 64,
    "train.steps_per_epoch": None,  # None: every batch of the data once
    "train.schedule": "cosine",
    "train.select": "last",
    "train.log_every": 10,  # steps
    "train.evaluate_every": 1,  # epochs
    "train.conflict": True,  # measure the cosines between task gradients with every evaluation
    "train.deterministic": True,
}


class Data(Protocol):
    """Examples that can be fetched by number.

    Randomness (augmentation) must come from the generator alone: it is seeded with the number of the batch, so that a resumed
    run, or another process, has the same.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, generator: torch.Generator) -> Any:
        """These examples as one batch: tensors, or anything with ``to(device)``, in tuples, lists or dicts."""


class Tensors:
    """Examples that are rows of tensors, all in memory.

    >>> Tensors(torch.arange(4.0), torch.arange(4)).batch(torch.tensor([0, 3]), torch.Generator())
    (tensor([0., 3.]), tensor([0, 3]))
    """

    def __init__(self, *tensors: Tensor) -> None:
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise ValueError(f"The tensors must have one number of rows, found {sorted(lengths)}.")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        there = indices.to(self.tensors[0].device, non_blocking=True)
        return tuple(tensor[there] for tensor in self.tensors)

    def to(self, device: torch.device) -> Self:
        """The same examples in the memory of a device."""
        moved = copy(self)
        moved.tensors = tuple(tensor.to(device) for tensor in self.tensors)
        return moved


class Items:
    """Examples of a map-style torch ``Dataset``, collated as ``DataLoader`` does by default."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batch(self, indices: Tensor, generator: torch.Generator) -> Any:
        return default_collate([self.dataset[index] for index in indices.tolist()])


@dataclass(frozen=True)
class Splits:
    """The data of a run. Without ``valid`` nothing can be selected or tuned; without ``test``, metrics are of ``train``."""

    train: Data
    valid: Data | None = None
    test: Data | None = None

    def to(self, device: torch.device) -> "Splits":
        """The same, with what can be (``Tensors``) in the memory of a device."""
        moved = {name: data.to(device) for name, data in vars(self).items() if isinstance(data, Tensors)}
        return replace(self, **moved)


class Example(TypedDict):
    """Words and numbers as text: what a model was given, and what it has made of that, each by its name."""

    given: dict[str, str]
    made: dict[str, str]


@dataclass(frozen=True)
class Published:
    """A table of a paper: for each method its numbers, by metric. ``reference`` names the row that Δm refers to."""

    source: str
    rows: Mapping[str, Mapping[str, float]]
    delta_m: Mapping[str, float] = field(default_factory=dict)
    reference: str | None = None


def section_of(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of one section, without its name.

    >>> section_of({"model.depth": 2, "train.epochs": 10}, "model")
    {'depth': 2}
    """
    return {key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")}


class Benchmark(ABC):
    """Subclass it: the class holds what is fixed, an instance the settings of a run.

    Class attributes:
        name: of the benchmark, for the command line and folders.
        title: one line that says what it is.
        metrics: the columns of its table.
        headline: the name of the metric that sums a run up.
        defaults: its settings ``model.*`` and ``data.*``, and those of ``TRAINING`` that differ.
        tuned: for a method, settings that were found for it: ``{"moon": {"optimizer.lr": 0.02}}``.
        tuning: how they were found, in a sentence.
        published: the paper's table.
        data_note: where its data come from, in a sentence.
        capturable: whether a step may become a CUDA graph; not where shapes differ from batch to batch.
        tests_at_end: whether test data are looked at once, with the parameters that were selected, and not while training.
        evaluation_batch: how many examples an evaluation fetches at a time; metrics must not depend on it but for rounding.
        made_up_size: height and width of made-up images, where ``make`` takes others as ``size``.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    metrics: ClassVar[Sequence[Metric]]
    headline: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}
    tuned: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    tuning: ClassVar[str] = ""
    published: ClassVar[Published | None] = None
    data_note: ClassVar[str] = "made on the fly"
    capturable: ClassVar[bool] = True
    tests_at_end: ClassVar[bool] = False
    evaluation_batch: ClassVar[int] = 512
    made_up_size: ClassVar[tuple[int, int] | None] = None

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self.settings = self.all_defaults() | dict(settings or {})

    @classmethod
    def all_defaults(cls) -> dict[str, Any]:
        """Every setting of the benchmark and of the training loop."""
        return {**TRAINING, **cls.defaults}

    @classmethod
    def headline_metric(cls) -> Metric:
        """The one that sums a run up."""
        return next(metric for metric in cls.metrics if metric.name == cls.headline)

    @classmethod
    def metrics_of_task(cls, task: str) -> list[Metric]:
        """Those that belong to it."""
        return [metric for metric in cls.metrics if metric.task == task]

    @property
    @abstractmethod
    def tasks(self) -> Sequence[str]:
        """The names of the tasks."""

    @abstractmethod
    def load(self, folder: Path, seed: int) -> Splits:
        """The data, from a folder if it needs one. A benchmark that makes its problem up may make another for every seed."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model; torch's generator is seeded already."""

    def model_of_task(self, task: str) -> nn.Module:
        """One to train a single task with: by default ``model()``, which will do unless tasks share more than weights.

        One without the other tasks needs ``losses`` that leave them out, and ``evaluate`` with NaN for their metrics.
        """
        return self.model()

    @abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> Losses:
        """The task losses of a batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Every metric over a split; the model is in eval mode, and no graph is built."""

    def prepare(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Any:
        """What the losses of a step are of: called once per batch, where ``losses`` may be called twice.

        For what depends on the model as it is, such as samples drawn from it. Randomness must come from the generator alone.
        """
        return batch

    def check(self, method: str) -> None:  # noqa: B027 - most take every method
        """Raise ``UserError`` where a method has no meaning with these settings; called before anything is loaded."""

    def measured(self) -> dict[str, float]:
        """What ``prepare`` has seen since it was asked last, for a line of ``metrics.jsonl``."""
        return {}

    def examples(self) -> list[Example]:
        """A few of what the last evaluation has looked at, for people."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What ``prepare`` has learned, for a checkpoint: tensors, numbers and words."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most have none
        """Go on from there."""

    def score(self, metrics: Mapping[str, float]) -> float:
        """What a selection on validation data minimises: by default the headline metric, in its direction."""
        return lower_is_better(metrics, [self.headline_metric()])

    def score_of_task(self, metrics: Mapping[str, float], task: str) -> float:
        """The same for a run that trains one task alone: by default the mean of its metrics, in their direction."""
        own = self.metrics_of_task(task)
        return lower_is_better(metrics, own) if own else self.score(metrics)

    def missing(self, folder: Path) -> str | None:
        """What of the data is not there, in a sentence; None if all is."""
        return None

    def verify(self, folder: Path) -> None:
        """Raises ``UserError`` where data are missing or, in benchmarks that know checksums, are other data than expected."""
        if (absent := self.missing(folder)) is not None:
            raise UserError(absent)

    def fetch(self, folder: Path) -> None:
        """Fetch the data into a folder, from where they are published."""
        raise UserError(f"There is nothing to fetch for {self.name}: its data are {self.data_note}.")

    def is_made_up(self, folder: Path) -> bool:
        """Whether the data in a folder are those of ``make``."""
        return False

    def make(self, folder: Path, count: int | None = None, seed: int = 0) -> None:
        """Write made-up data into a folder, in the format of the real ones: so many examples, or a few."""
        raise UserError(f"There is nothing to make up for {self.name}: its data are {self.data_note}.")

    def section(self, name: str) -> dict[str, Any]:
        """The settings of one section, without its name: ``section("model")`` has what begins with ``model.``."""
        return section_of(self.settings, name)
