"""Learning-rate schedules by name.

"cosine" and "linear" fall to zero, "constant" stays, "step:100:0.5" multiplies by 0.5 every 100 epochs, and "plateau:0.7:5" by
0.7 after 5 evaluations without progress on validation data, down to a hundredth of the rate at the start.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, StepLR

from moonopt.errors import UserError, unknown_name

#: What share of its first rate a plateau leaves at least: 1e-5 of 1e-3 in the protocol of QM9.
LOWEST = 0.01


class Schedule:
    """A scheduler of torch, stepped when it wants to be: after every step, or on a plateau after every evaluation."""

    def __init__(self, optimizer: Optimizer, name: str, steps: int, steps_per_epoch: int, has_validation: bool) -> None:
        make, arguments = read_schedule(name)
        try:
            self._scheduler = make(optimizer, steps, steps_per_epoch, *arguments)
        except (ValueError, OverflowError) as error:
            raise UserError(f"train.schedule={name} is none: {error}") from error
        if isinstance(self._scheduler, ReduceLROnPlateau) and not has_validation:
            raise UserError("train.schedule=plateau needs validation data, and this benchmark has none.")

    def after_step(self) -> None:
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step()

    def after_evaluation(self, score: float | None) -> None:
        if isinstance(self._scheduler, ReduceLROnPlateau) and score is not None:
            self._scheduler.step(score)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)


def read_schedule(name: str) -> tuple[Callable[..., Any], list[float]]:
    """What makes the schedule of a name, and the numbers that it takes."""
    kind, *numbers = name.split(":")
    if kind not in _MAKERS:
        raise UserError(unknown_name(kind, tuple(_MAKERS), "train.schedule"))
    example, make = _MAKERS[kind]
    try:
        arguments = [float(number) for number in numbers]
        if len(arguments) != example.count(":"):
            raise ValueError
    except ValueError:
        raise UserError(f"train.schedule={kind} takes {example.count(':')} numbers, as in {example}; found {name!r}.") from None
    return make, arguments


def _steps(number: float) -> int:
    if not number >= 1:
        raise ValueError(f"it must be at least one step to the next, found {number:g}.")
    return int(number)


#: An example of each, which shows how many numbers it takes, and how it is made from the optimizer, the number of steps in all
#: and in an epoch, and those numbers.
_MAKERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "constant": ("constant", lambda optimizer, steps, per_epoch: LambdaLR(optimizer, lambda step: 1.0)),
    "cosine": ("cosine", lambda optimizer, steps, per_epoch: CosineAnnealingLR(optimizer, steps)),
    "linear": ("linear", lambda optimizer, steps, per_epoch: LinearLR(optimizer, 1.0, 0.0, steps)),
    "step": (
        "step:100:0.5",
        lambda optimizer, steps, per_epoch, every, factor: StepLR(optimizer, _steps(every * per_epoch), factor),
    ),
    "plateau": (
        "plateau:0.7:5",
        lambda optimizer, steps, per_epoch, factor, patience: ReduceLROnPlateau(
            optimizer,
            factor=factor,
            patience=int(patience),
            min_lr=[LOWEST * group["lr"] for group in optimizer.param_groups],
        ),
    ),
}
