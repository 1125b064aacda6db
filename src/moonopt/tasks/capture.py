"""A whole training step as one CUDA graph: forward, backward, update, deltas and task weights, in one launch.

A small model's step is hundreds of kernels that take less time than their launches. A graph launches them all at once.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from moonopt.tasks.capturing import Twins
from moonopt.tasks.reduce import world_size
from moonopt.tasks.verbs import Closure, Parts, TaskOptimizer

#: How many kinds of arguments are counted on the way to a graph.
MOST_SEEN = 64
#: How many graphs are kept, one for each shape of the arguments; what comes after is computed without one.
MOST_GRAPHS = 8


def capture(optimizer: TaskOptimizer, closure: Closure, warmup: int = 3) -> "CapturedStep":
    """``optimizer.minimize`` as a CUDA graph: call the result with the closure's arguments, once per step.

    Every call is one step, that of ``optimizer.minimize(closure, *args)`` but for the rounding of a rate that is a tensor. The
    first ``warmup`` calls with arguments of a shape run as they always do; then the step is captured. Tensors among the
    arguments, on the host, too, are copied into the graph's; whatever else they hold is part of what makes a graph. Learning
    rates may change at every step; after a change of another setting (momentum, weight decay) it is captured anew. Without a
    GPU this is ``minimize``.

    The closure must not wait for the device (``.item()``, ``.cpu()``, ``print``), nor look at values in Python. What it does on
    the host besides, and hooks, happen when the step is captured, and not again.

    >>> theta = torch.nn.Parameter(torch.zeros(2, 2))
    >>> from moonopt import MOON
    >>> optimizer = MOON([{"params": [theta], "kind": "matrix"}], tasks=2, lr=0.1, module=torch.nn.Identity())
    >>> step = capture(optimizer, lambda target: [(theta - target).square().sum(), (theta + target).square().sum()])
    >>> step(torch.ones(2, 2))
    [tensor(4.), tensor(4.)]

    """
    return CapturedStep(optimizer, closure, warmup)


class CaptureError(RuntimeError):
    """A step cannot be captured. It has not been made, and nothing has changed."""


class CapturedStep:
    """A step that is captured once its shapes are known: see ``capture``."""

    def __init__(self, optimizer: TaskOptimizer, closure: Closure, warmup: int) -> None:
        obstacle = optimizer.obstacle_to_capture()
        if world_size() > 1:
            obstacle = "what several processes exchange in it is not part of a graph yet"
        if obstacle is not None:
            raise ValueError(f"This step cannot be captured: {obstacle}.")
        if warmup < 1:
            raise ValueError(f"warmup must be at least one step, found {warmup}.")
        self._optimizer, self._closure, self._warmup = optimizer, closure, warmup
        self._device = optimizer.param_groups[0]["params"][0].device
        self._seen: Counter[Any] = Counter()
        self._graphs: dict[Any, _Graph] = {}
        module = optimizer.known_module()
        self._modules = [] if module is None else list(module.modules())
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._rates = _Rates(optimizer)

    @property
    def graphs(self) -> int:
        """How many graphs there are so far."""
        return len(self._graphs)

    def __call__(self, *args: Any) -> Any:
        """One step; returns the losses before it, detached, in the structure in which the closure gives them."""
        if self._device.type != "cuda":
            return self._optimizer.minimize(self._closure, *args)
        kind = self._kind(args)
        if kind in self._graphs and not self._graphs[kind].refill():
            del self._graphs[kind]
        if kind not in self._graphs:
            self._optimizer.prepare_for_capture()
            if len(self._seen) > MOST_SEEN:
                self._seen.clear()
            self._seen[kind] += 1
            if kind is None or self._seen[kind] <= self._warmup or len(self._graphs) == MOST_GRAPHS:
                return self._without_graph(args)
            self._seen.clear()
            self._graphs[kind] = self._captured(args)
        self._rates.follow()
        return self._graphs[kind].replay(args)

    def _kind(self, args: tuple[Any, ...]) -> Any:
        """What a graph depends on; None where an argument is something that nobody can compare."""
        leaves, tree = tree_flatten(args)
        described: list[Any] = [str(tree)]
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not leaf.requires_grad:
                described.append((leaf.shape, leaf.dtype))
            elif leaf is None or isinstance(leaf, bool | int | float | str):
                described.append((type(leaf), leaf))
            else:
                return None
        device = self._device.type
        settings = [_settings(self._optimizer, group) for group in self._optimizer.param_groups]
        parameters = tuple((p.data_ptr(), p.requires_grad) for p in self._optimizer._trained())
        training = tuple(each.training for each in self._modules)
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return (*described, *settings, parameters, training, autocast)

    def _without_graph(self, args: tuple[Any, ...]) -> Any:
        """On the stream of the capture, because autograd remembers streams."""
        here = torch.cuda.current_stream(self._device)
        self._rates.follow()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream), self._rates.in_use():
            answer = self._optimizer.minimize(self._closure, *_on_device(args, self._device))
        here.wait_stream(self._stream)
        return answer

    def _captured(self, args: tuple[Any, ...]) -> "_Graph":
        self._optimizer._pending.watch.tell(wait=True)
        torch.cuda.synchronize(self._device)
        here = torch.cuda.current_stream(self._device)  # which torch would not come back to from a capture that fails
        with self._rates.in_use(), torch.cuda.stream(here):
            return _Graph(self._optimizer, self._closure, args, self._stream)


class _Graph:
    """One captured step, and the tensors that it reads and writes. It is several graphs where the host decides in between."""

    def __init__(self, optimizer: TaskOptimizer, closure: Closure, args: tuple[Any, ...], stream: torch.cuda.Stream) -> None:
        self._pending = pending = optimizer._pending
        self._stream = stream
        inputs = _on_device(args, stream.device, copy=True)
        self._inputs = _tensors(inputs)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._twins: list[Twins] = []
        self._decisions: list[Callable[[], None]] = []
        self._slots = _Slots(optimizer)
        try:
            answer = self._capture_all(optimizer.in_parts(closure, inputs))
        except RuntimeError as error:
            self._slots.put_back()
            raise CaptureError(
                "This step cannot be captured. The closure must not wait for the device (.item(), .cpu(), print), draw from "
                "generators of its own, or look at values in Python; optimizer.minimize(closure, *args) takes any. The cause: "
                f"{str(error.__context__ or error).splitlines()[0]}"
            ) from error
        finally:
            self._slots.undo_numbers()
            pending.batches.clear()
        self._answers, self._structure = tree_flatten(answer)
        self._report = pending.watch.captured
        self._shown = dict(pending.by_task), dict(pending.latest)
        self._gradients = [(p, p.grad) for p in optimizer._trained()]

    def _capture_all(self, parts: Parts) -> Any:
        """Each part as a graph of its own; what the step returns."""
        while True:
            graph = torch.cuda.CUDAGraph()
            twins = Twins(graph, self._stream.device)
            self._graphs.append(graph)
            self._twins.append(twins)
            # Of this thread alone: others may load data meanwhile.
            with twins.in_use(), torch.cuda.graph(graph, None, self._stream, capture_error_mode="thread_local"):
                try:
                    self._decisions.append(next(parts))
                except StopIteration as end:
                    self._slots.write_back()
                    return end.value

    def refill(self) -> bool:
        """Take over what has been put in place of the graph's tensors; False where that cannot be, and the graph is void."""
        return all(twins.are_usable for twins in self._twins) and self._slots.refill()

    @torch.no_grad()
    def replay(self, args: tuple[Any, ...]) -> Any:
        if self._inputs:
            torch._foreach_copy_(self._inputs, _tensors(args), non_blocking=True)
        self._pending.watch.tell()
        for graph, twins, decide in zip_longest(self._graphs, self._twins, self._decisions):
            with twins.synchronized():
                graph.replay()
            if decide is not None:
                decide()
        self._slots.count()
        for p, gradient in self._gradients:
            p.grad = gradient
        by_task, latest = self._shown
        self._pending.by_task |= by_task
        self._pending.latest |= latest
        if self._report is not None:
            self._pending.watch.send(self._report._replace(step=self._report.step + self._slots.counted - 1))
        return tree_unflatten(torch._foreach_add(self._answers, 0), self._structure)  # the next replay overwrites these


class _Rates:
    """The learning rates as tensors on the device, one per group; the groups keep what they have."""

    def __init__(self, optimizer: TaskOptimizer) -> None:
        self._optimizer = optimizer
        self._tensors: list[Tensor] = []
        self._numbers: list[float | None] = []

    def follow(self) -> None:
        """Bring the tensors up to date, without waiting."""
        for group in self._optimizer.param_groups[len(self._tensors) :]:
            parameter = group["params"][0]
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._tensors.append(torch.zeros((), dtype=dtype, device=parameter.device))
            self._numbers.append(None)
        for index, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self._tensors[index].copy_(rate)
                self._numbers[index] = None
            elif rate != self._numbers[index]:
                self._tensors[index].fill_(rate)
                self._numbers[index] = rate

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        groups = list(self._optimizer.param_groups)
        before = [group["lr"] for group in groups]
        try:
            for group, tensor in zip(groups, self._tensors, strict=True):
                group["lr"] = tensor
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate


class _Slots:
    """Where an optimizer keeps its state: tensors that a graph reads and writes, and numbers that it counts on the host.

    An optimizer may replace a tensor, in a step or when a checkpoint is loaded. The graph knows the one that was there when it
    was captured: what replaces it is copied into it.
    """

    def __init__(self, optimizer: TaskOptimizer) -> None:
        self._optimizer = optimizer
        self._tensors = {place: value for place, value in self._places() if isinstance(value, Tensor)}
        self._numbers = {place: value for place, value in self._places() if _is_number(value)}
        self._steps: dict[tuple[Any, str], int] = {}

    def write_back(self) -> None:
        """In the capture, after the step."""
        for place, value in list(self._places()):
            before = self._tensors.get(place)
            if before is not None and isinstance(value, Tensor) and value is not before:
                before.copy_(value)
                self._put(place, before)

    def undo_numbers(self) -> None:
        """After the capture, in which nothing has happened: by how much the step counts on is remembered."""
        for place, value in list(self._places()):
            if place in self._numbers and _is_number(value) and value != self._numbers[place]:
                self._steps[place] = value - self._numbers[place]
                self._put(place, self._numbers[place])

    def put_back(self) -> None:
        """After a capture that has failed."""
        for place, tensor in self._tensors.items():
            self._put(place, tensor)

    def refill(self) -> bool:
        """Before a replay: take over what has been put in place of the graph's tensors, if it can be."""
        for place, tensor in self._tensors.items():
            value = self._get(place)
            if value is tensor:
                continue
            if not isinstance(value, Tensor) or value.shape != tensor.shape:
                return False
            tensor.copy_(value)
            self._put(place, tensor)
        return True

    def count(self) -> None:
        """After a replay."""
        for place, step in self._steps.items():
            self._put(place, self._get(place) + step)

    @property
    def counted(self) -> int:
        """How many steps there were since the capture, with a graph or without."""
        return next((self._get(place) - self._numbers[place] for place in self._steps), 1)

    def _places(self) -> Iterator[tuple[tuple[Any, str], Any]]:
        for index, group in enumerate(self._optimizer.param_groups):
            yield from (((index, name), value) for name, value in group.items() if name != "lr")
        for p, state in self._optimizer.state.items():
            yield from (((p, name), value) for name, value in state.items())

    def _get(self, place: tuple[Any, str]) -> Any:
        return self._owner(place).get(place[1])

    def _put(self, place: tuple[Any, str], value: Any) -> None:
        self._owner(place)[place[1]] = value

    def _owner(self, place: tuple[Any, str]) -> dict[str, Any]:
        where, owners = place[0], self._optimizer.param_groups
        owner: dict[str, Any] = self._optimizer.state[where] if isinstance(where, Tensor) else owners[where]
        return owner


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _settings(optimizer: TaskOptimizer, group: dict[str, Any]) -> tuple[Any, ...]:
    """What a graph takes as given."""
    own = ((name, value) for name, value in group.items() if optimizer.is_setting(name))
    return tuple((name, repr(value)) for name, value in own if not isinstance(value, Tensor))


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]


def _on_device(args: tuple[Any, ...], device: torch.device, copy: bool = False) -> tuple[Any, ...]:
    moved: tuple[Any, ...] = tree_map(
        lambda leaf: leaf.to(device, non_blocking=True, copy=copy) if isinstance(leaf, Tensor) else leaf, args
    )
    return moved
