"""Being asked to stop: SIGINT and SIGTERM set a flag, and the run ends after the step it is in."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stop:
    """Whether a signal has asked to stop, and which."""

    def __init__(self, patient: bool = False) -> None:
        self.signal: int | None = None
        self._patient = patient

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended."""
        return 128 + (self.signal or 0)

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """The first signal asks; the same signal once more ends the process as it always does, unless it is patient."""
        self.signal = number
        if not self._patient:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def stopping(*signals: int, patient: bool = False) -> Iterator[Stop]:
    """Listen to signals, SIGINT and SIGTERM by default; afterwards the handlers are as they were.

    A patient process may get one signal twice, from its parent and from who stops all processes of a group.
    """
    stop = Stop(patient)
    before = {number: signal.signal(number, stop.ask) for number in signals or (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started here never get SIGINT; nor does this one, meanwhile."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
