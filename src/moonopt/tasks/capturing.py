"""What is different while a CUDA graph is captured: nothing may be waited for, and random numbers are those of the replay."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch

#: By device, while it is captured: its generator, and the one that gives the same numbers a second time.
_TWINS: dict[torch.device, tuple[torch.Generator, torch.Generator]] = {}
#: By device, how many captures have failed.
_FAILURES: Counter[torch.device] = Counter()


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Twins:
    """The generator of a device and a twin, both registered with a graph that is about to be captured.

    In the graph, the first evaluation draws from the generator, the second one from the twin.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._device, self._failures = device, _FAILURES[device]
        self._default = torch.cuda.default_generators[device.index]
        self._own, self._twin = self._default.graphsafe_get_state(), self._default.clone_state()
        graph.register_generator_state(self._twin)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While the graph is captured. If that fails, the generator goes on as if nothing had been tried."""
        untouched = self._default.clone_state()  # torch would leave the other one in the state of a capture
        _TWINS[self._device] = (self._own, self._twin)
        try:
            yield
        except BaseException:
            _FAILURES[self._device] += 1
            self._default.graphsafe_set_state(untouched)
            raise
        else:
            self._default.graphsafe_set_state(self._own)
        finally:
            del _TWINS[self._device]

    @property
    def are_usable(self) -> bool:
        """Whether no later capture has failed, which leaves the generator of all earlier graphs in the state of a capture."""
        return self._failures == _FAILURES[self._device]

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Around a replay: both begin where the device's generator is, which then goes on where the first one ends."""
        seed, offset = self._default.initial_seed(), self._default.get_offset()
        for each in (self._own, self._twin):
            each.manual_seed(seed)
            each.set_offset(offset)
        yield
        self._default.set_offset(self._own.get_offset())


def draw_again(device: torch.device, again: bool) -> None:
    """In a capture: from now on, draw what was drawn before, or go on where that was left."""
    if device not in _TWINS:
        raise RuntimeError("A step that evaluates its losses twice draws random numbers twice: capture it by moonopt.capture.")
    torch.cuda.default_generators[device.index].graphsafe_set_state(_TWINS[device][1 if again else 0])
