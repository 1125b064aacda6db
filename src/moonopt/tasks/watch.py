"""Non-finite losses and gradients: noticed on the device, told on the host as soon as that costs no waiting."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moonopt.tasks.capturing import is_capturing
from moonopt.tasks.reduce import on_any_rank

#: What may be done about a non-finite loss or gradient.
NONFINITE = ("raise", "skip")

LEFT = "Parameters and optimizer state were left as they were."
TAKEN = "The step was taken before this was known: go back to a checkpoint."


class Report(NamedTuple):
    """The flags of one step."""

    step: int
    names: tuple[str, ...]  # of the losses; after their flags come the gradients' and, if it was asked, another process's
    ailment: str
    consequence: str
    bad: Tensor  # on the host, once ready
    ready: torch.Event | None


class Watch:
    """A queue of reports on their way to the host."""

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self.captured: Report | None = None  # of the step that is being captured

    def note(self, step: int, names: Sequence[str], bad: Tensor, ailment: str, consequence: str = LEFT) -> None:
        """``bad`` has one flag per name, one for the gradients, and may have one for what is bad on another process alone.

        ``ailment`` says what a bad loss is.
        """
        report = Report(step, tuple(names), ailment, consequence, bad, None)
        if is_capturing(bad.device):
            self.captured = report
        else:
            self.send(report)

    def send(self, report: Report) -> None:
        """On its way, with the flags as they are now."""
        if report.bad.device.type != "cpu":
            ready = torch.Event(report.bad.device)
            report = report._replace(bad=report.bad.to("cpu", non_blocking=True), ready=ready)
            ready.record()
        self._reports.append(report)

    def tell(self, wait: bool = False) -> None:
        """Raise for the first report that has arrived and is bad; with ``wait``, let them all arrive."""
        while self._reports:
            report = self._reports[0]
            if report.ready is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return  # nobody may ask for an event meanwhile
            if report.ready is not None and not report.ready.query():
                if not wait:
                    return
                report.ready.synchronize()
            self._reports.pop(0)
            flags = report.bad.tolist()
            if any(flags):
                self._reports.clear()
                raise FloatingPointError(_text(report, flags))

    def clear(self) -> None:
        self._reports.clear()


def not_finite(*numbers: Tensor) -> Tensor:
    """Where some are NaN or infinite: zero times those is not zero. On a GPU ``isfinite`` is four kernels."""
    return functools.reduce(torch.add, [0 * each for each in numbers]) != 0


def any_not_finite(numbers: Tensor) -> Tensor:
    """Whether some are, as one flag."""
    return (0 * numbers).sum() != 0


def entries_not_finite(tensors: list[Tensor]) -> Tensor:
    """Whether some entry is NaN or infinite, as a flag on the device.

    On a CPU, torch takes ten times as long for the largest entry as for the norm, which may overflow where no entry does.
    """
    tensors = [each for each in tensors if each.numel() > 0] or [torch.zeros(1, device=tensors[0].device)]
    if tensors[0].device.type == "cpu":
        bad = any_not_finite(torch.stack(torch._foreach_norm(tensors)))
        if not bad:
            return bad
    return any_not_finite(torch.stack(torch._foreach_norm(tensors, math.inf)))


def bad_gradient(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """A flag (1): whether some gradient that is there is not finite, on any rank."""
    there = [each for each in gradients if each is not None and not each.is_sparse]
    if not there:
        return like.new_zeros(1)
    return on_any_rank(entries_not_finite(there).reshape(1).to(like.device))


def _text(report: Report, flags: list[bool]) -> str:
    tasks = list(dict.fromkeys(repr(name) for name, flag in zip(report.names, flags, strict=False) if flag))
    if tasks:
        what = f"the loss of {'tasks' if len(tasks) > 1 else 'task'} {', '.join(tasks)} is {report.ailment}"
    elif any(flags[len(report.names) + 1 :]):
        what = "a loss or gradient of another process is not finite, though all are finite here"
    else:
        what = "a gradient is NaN or infinite, though all losses are finite"
    return f'At step {report.step}, {what}. {report.consequence} Pass nonfinite="skip" to leave out such steps and count them.'
