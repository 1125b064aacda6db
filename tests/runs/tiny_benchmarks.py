"""Benchmarks of a user that train in a fraction of a second, each made to be hard in one way."""

import os
import signal
import time
import warnings
from typing import ClassVar

import torch
from torch import nn

from moonopt.bench import Benchmark, Metric, Splits, Tensors
from moonopt.errors import UserError


class Noisy(Tensors):
    """Rows with an augmentation that draws from the generator of the batch."""

    def batch(self, indices, generator):
        x, y = super().batch(indices, generator)
        return x + 0.1 * torch.randn(x.shape, generator=generator), y


class Net(nn.Module):
    """BatchNorm has buffers, dropout draws numbers, and a part of the model is kept in eval mode all the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.second, self.frozen = nn.Linear(width, width), nn.Dropout(0.5).eval()
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(3))

    def forward(self, x):
        hidden = self.frozen(self.second(self.drop(self.norm(self.first(x)).tanh())).tanh())
        return [head(hidden)[:, 0] for head in self.heads]


class Tiny(Benchmark):
    """Three regressions with validation data; the best epoch is reported."""

    name = "tiny"
    metrics = (
        *(Metric(name, higher=False, task=name) for name in ("a", "b", "c")),
        Metric("mean", higher=False),
    )
    headline = "mean"
    tasks = ("a", "b", "c")
    defaults: ClassVar = {
        "model.width": 8,
        "data.limit": None,
        "train.epochs": 4,
        "train.batch_size": 8,
        "train.log_every": 2,
        "train.select": "best",
    }
    tuned: ClassVar = {"*": {"optimizer.lr": 0.02}}

    def load(self, folder, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(112, 5, generator=generator)
        y = torch.sin(x @ torch.randn(5, 3, generator=generator)) * torch.tensor([1.0, 2.0, 0.5])
        return Splits(Noisy(x[:48], y[:48]), Tensors(x[48:80], y[48:80]), Tensors(x[80:], y[80:]))

    def model(self):
        return Net(self.settings["model.width"])

    def losses(self, model, batch):
        x, y = batch
        return {task: (out - y[:, i]).square().mean() for i, (task, out) in enumerate(zip(self.tasks, model(x), strict=True))}

    def evaluate(self, model, batches):
        errors = torch.cat([(torch.stack(model(x), 1) - y).square() for x, y in batches]).mean(0)
        return {**dict(zip(self.tasks, errors.tolist(), strict=True)), "mean": errors.mean().item()}


class Slow(Tiny):
    """Takes 20 ms per step, so that signals find it at work."""

    name = "slow"
    defaults: ClassVar = {**Tiny.defaults, "train.epochs": 100, "train.log_every": 1}

    def losses(self, model, batch):
        time.sleep(0.02)
        return super().losses(model, batch)


class Chancy(Tiny):
    """Evaluation draws random numbers."""

    name = "chancy"

    def evaluate(self, model, batches):
        torch.rand(7)
        return super().evaluate(model, batches)


class Sampling(Tiny):
    """Targets are the model's own outputs with noise, drawn once per batch, and a running mean of them that is learned."""

    name = "sampling"

    def __init__(self, settings=None):
        super().__init__(settings)
        self.mean, self.prepared = torch.zeros(3), 0

    def prepare(self, model, batch, generator):
        x, _ = batch
        with torch.no_grad():
            drawn = torch.stack(model(x), 1) + torch.randn(len(x), 3, generator=generator)
        self.prepared += 1
        self.mean = 0.9 * self.mean + 0.1 * drawn.mean(0)
        return x, drawn - self.mean

    def state_dict(self):
        return {"mean": self.mean.clone(), "prepared": self.prepared}

    def load_state_dict(self, state):
        self.mean, self.prepared = state["mean"].clone(), state["prepared"]


class Warning(Tiny):  # noqa: A001 - a name that Python has, too
    """Warns."""

    name = "warning"
    defaults: ClassVar = {**Tiny.defaults, "train.epochs": 1}

    def model(self):
        warnings.warn("tiny is not worth training", stacklevel=1)
        return super().model()


class Vanishing(Tiny):
    """Is killed by the system, as it is when memory runs out; or raises; or has a loss that is no number."""

    name = "vanishing"
    defaults: ClassVar = {**Tiny.defaults, "train.epochs": 2, "model.end": ""}
    tuned: ClassVar = {"famo": {"model.end": "kill"}, "uw": {"model.end": "raise"}, "dwa": {"model.end": "nan"}}

    def losses(self, model, batch):
        if self.settings["model.end"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.settings["model.end"] == "raise":
            raise KeyError("left")
        losses = super().losses(model, batch)
        return {**losses, "b": losses["b"] * float("nan")} if self.settings["model.end"] == "nan" else losses


class Disagreeing(Tiny):
    """The wider the model, the better it says it is on validation data, and the worse on test data."""

    name = "disagreeing"
    defaults: ClassVar = {**Tiny.defaults, "train.epochs": 1, "train.conflict": False}

    def evaluate(self, model, batches):
        width = self.settings["model.width"]
        rows = sum(len(x) for x, _ in batches)
        value = 1 / width if rows == 32 else float(width)
        return {**dict.fromkeys(("a", "b", "mean"), value), "c": 1 / value}  # c, too, says the opposite

    def load(self, folder, seed):
        splits = super().load(folder, seed)
        x, y = splits.test.tensors
        return Splits(splits.train, splits.valid, Tensors(x[:20], y[:20]))


class TestOnly(Tiny):
    """Has test data, and nothing to tune on."""

    __test__ = False
    name = "testonly"
    defaults: ClassVar = {**Tiny.defaults, "train.select": "last"}

    def load(self, folder, seed):
        splits = super().load(folder, seed)
        return Splits(splits.train, test=splits.test)


class Diverging(Tiny):
    """Its metrics are not numbers."""

    name = "diverging"
    defaults: ClassVar = {**Tiny.defaults, "train.epochs": 2, "train.select": "last"}

    def evaluate(self, model, batches):
        list(batches)
        return {"a": float("nan"), "b": float("inf"), "c": 1.0, "mean": float("nan")}


class Absent(Tiny):
    """Its data are not there."""

    name = "absent"

    def missing(self, folder):
        return f"The data of absent are not in {folder}: put absent.csv there."


class Broken(Tiny):
    """Cannot be loaded."""

    name = "broken"

    def load(self, folder, seed):
        raise OSError("the reader is broken")


class Unreadable(Tiny):
    """Reads a file that is a folder."""

    name = "unreadable"

    def load(self, folder, seed):
        folder.read_bytes()


class Full(Tiny):
    """Finds the disk full as it writes."""

    name = "full"

    def load(self, folder, seed):
        with open("/dev/full", "wb") as file:
            file.write(b"molecules")


class Refusing(Tiny):
    """Refuses its settings with a sentence of its own."""

    name = "refusing"

    def model(self):
        raise UserError("model.width must be even.")


class Nameless(Benchmark):
    """Lacks nearly everything."""


class Headless(Tiny):
    """Its headline is no metric."""

    headline = "meen"


def sgd(model, tasks, lr: float = 0.1, momentum: float = 0.0):
    """A user's method."""
    from moonopt.balance import LS, Balanced

    return Balanced(LS(tasks), torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), module=model)


def defaultless(model, tasks, lr):
    """Has an argument that must be given."""


def unspeakable(model, tasks, kernel=torch.relu):
    """Has a default that no JSON can hold."""


NUMBER = 3
