"""MOON: Muon on a weighted sum of task losses, whose weights follow the nuclear-norm dual (Algorithm 1)."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.errors import unknown_name
from moonopt.optim.groups import Params, state_dtype
from moonopt.optim.masking import Finite, Rate
from moonopt.optim.muon import Muon
from moonopt.optim.parameters import Placing
from moonopt.tasks.directional import MODES, Deltas, Moved
from moonopt.tasks.losses import Losses, TaskLosses, in_half_precision, read_losses, task_names
from moonopt.tasks.pending import Combined
from moonopt.tasks.replay import Replay
from moonopt.tasks.verbs import Closure

DUALS = ("online",)
LOSSES = ("plain", "log")
#: With beta="auto", how fast the running mean of the deltas' size forgets, and how far one step moves the logits.
AUTO_DECAY = 0.98
AUTO_RATE = 0.01


class MOON(Muon):
    """Multi-Objective OrthoNormalized updates.

    With task weights z = softmax(xi), one z for all matrices, and D = scale * polar(M) where M is the momentum of
    sum_i z_i grad l_i: Theta <- Theta - lr * D, and xi <- xi - beta * (delta + gamma * xi), delta_i = <D, grad l_i>. The
    weights move towards the minimum of ||sum_i z_i grad l_i||_S1, where the slowest task falls as fast as it can.

    Args (those of ``Muon``, and):
        tasks: their names, or how many.
        beta: rate of the logits, in units of 1 / delta (that is, of the losses). "auto" centres delta over the tasks and
            divides it by its usual size, so that beta has no unit; "auto:0.03" for a rate other than 0.01.
        gamma: pull of the logits towards 0, that is, of the weights towards 1 / m.
        delta: "loss_difference" evaluates the closure again after the matrices have moved; "per_task" is exact, with one
            backward pass per task.
        loss: "plain", or "log" for tasks of any scale: deltas of log-losses, gradient weights z_i / l_i normalised.

    >>> theta = torch.nn.Parameter(torch.zeros(2, 2))
    >>> optimizer = MOON([{"params": [theta], "kind": "matrix"}], tasks=["up", "down"], lr=0.1, delta="per_task")
    >>> optimizer.minimize(lambda: {"up": (theta - 1).square().sum(), "down": (theta + 1).square().sum()})
    {'up': tensor(4.), 'down': tensor(4.)}
    >>> optimizer.task_weights
    tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        params: Params,
        *,
        tasks: int | Sequence[str],
        lr: Rate = 0.02,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        scale: str = "none",
        vector_lr: Rate = 1e-3,
        vector_betas: tuple[float, float] = (0.9, 0.999),
        vector_eps: float = 1e-8,
        vector_weight_decay: float = 0.0,
        beta: float | str = 1e-4,
        gamma: float = 1e-3,
        dual: str = "online",
        delta: str = "loss_difference",
        loss: str = "plain",
        schedule: str = "polar_express",
        steps: int = 5,
        polar_dtype: torch.dtype | None = None,
        rules: Mapping[str, Placing] | None = None,
        module: nn.Module | None = None,
        nonfinite: str = "raise",
    ) -> None:
        names = task_names(tasks)
        for value, known, what in ((dual, DUALS, "dual"), (delta, MODES, "delta"), (loss, LOSSES, "loss")):
            if value not in known:
                raise ValueError(unknown_name(str(value), tuple(known), what))
        _auto_rate(beta)
        if not gamma >= 0:
            raise ValueError(f"gamma must not be negative, found {gamma!r}.")
        self._delta, self._loss = delta, loss
        self._mode = MODES[delta]()
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            scale=scale,
            vector_lr=vector_lr,
            vector_betas=vector_betas,
            vector_eps=vector_eps,
            vector_weight_decay=vector_weight_decay,
            schedule=schedule,
            steps=steps,
            polar_dtype=polar_dtype,
            rules=rules,
            module=module,
            nonfinite=nonfinite,
        )
        matrices = self._matrices()
        if not matrices:
            raise ValueError(
                "MOON needs at least one matrix, and found none among the parameters. Print "
                "moonopt.route_parameters(model) to see why, and pass rules= to place them otherwise."
            )
        dtype = max((state_dtype(p) for p in matrices), key=lambda each: each.itemsize)
        zeros = torch.zeros(len(names), dtype=dtype, device=matrices[0].device)
        self.param_groups[0] |= {
            "tasks": list(names),
            "beta": beta,
            "gamma": gamma,
            "logits": zeros,
            "delta_size": zeros.sum(),  # running mean of |delta - mean|, for beta="auto"
        }

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks."""
        return tuple(self.param_groups[0]["tasks"])

    @property
    def logits(self) -> Tensor:
        """xi, centred: only differences between logits mean something."""
        logits: Tensor = self.param_groups[0]["logits"]
        return logits - logits.mean()

    @property
    def task_weights(self) -> Tensor:
        """z = softmax(xi), in the order of the tasks."""
        logits: Tensor = self.param_groups[0]["logits"]
        return logits.softmax(0)

    def diagnostics(self) -> dict[str, float]:
        """Muon's, and for every task its weight, centred logit, last delta and the rounding floor of that."""
        numbers = super().diagnostics()
        by_task = {"weight": self.task_weights, "logit": self.logits, **self._pending.by_task}
        for what, values in by_task.items():
            numbers |= {f"{what}/{name}": value for name, value in zip(self.tasks, values.tolist(), strict=True)}
        return numbers

    # What MOON adds to the verbs

    def _replay(self, closure: Closure, args: tuple[Any, ...]) -> Replay | None:
        if not self._mode.evaluates_again:
            return None
        if self._module is None:
            self._warn_once(
                "The second evaluation of the losses protects no buffers (BatchNorm statistics, for one), because the module "
                "is not known: pass the model as params, or module=model."
            )
        return Replay(closure, args, self._module, {p.device for p in self._matrices()})

    def _read(self, answer: Losses, replay: Replay | None) -> TaskLosses:
        losses = read_losses(answer, self.tasks)
        if self._mode.evaluates_again and losses.values.requires_grad:
            if replay is None:
                raise ValueError(
                    f'delta="{self._delta}" evaluates the losses again after the move: pass a closure, or losses with '
                    'again=function, or use delta="per_task".'
                )
            if in_half_precision(answer):
                self._warn_once(
                    'Some losses are in half precision: delta="loss_difference" compares them before and after a small step, '
                    "and the difference may be rounding (delta_floor in diagnostics()). Compute the losses in float32."
                )
        return losses

    def _gradient_weights(self, losses: TaskLosses) -> Tensor:
        if self._loss == "plain":
            return _those_present(self.task_weights, losses.present)
        logits = _those_present(self.param_groups[0]["logits"], losses.present).to(losses.values)
        return (logits - losses.values.detach().log()).softmax(0)  # z_i / l_i normalised, without their underflow

    def _combined(self, losses: TaskLosses, replay: Replay | None) -> Combined:
        compared = self._compared(losses)
        return Combined(compared, replay, self._mode.observe(compared, self._matrices()))

    # What MOON adds to the step

    def _follow(self, combined: Sequence[Combined], directions: Mapping[Tensor, Tensor], finite: Finite) -> None:
        if not combined:
            return
        _refuse_several_processes()
        largest = _largest([group["lr"] for group in self._of_kind("matrix")])
        if not isinstance(largest, Tensor) and largest == 0:
            return
        moved = Moved(largest, self._relative(directions, largest) if self._mode.uses_direction else {})
        found = [(each, self._mode.deltas(each, self._evaluate, moved)) for each in combined]
        delta, floor, present = _means(found, self.param_groups[0]["logits"])
        all_present = all(any(each.present[i] for each in combined) for i in range(len(self.tasks)))
        valid = _both(finite, largest > 0)
        delta, floor = (each if valid is True else torch.where(valid, each, 0.0) for each in (delta, floor))
        self._pending.by_task |= {"delta": delta, "delta_floor": floor}
        usable = delta.isfinite().all()
        self._pending.count("rejected_deltas", (~usable).to(torch.int64))
        self._move_logits(delta, present, all_present, usable if valid is True else usable & valid)

    def _move_logits(self, delta: Tensor, present: Tensor, all_present: bool, usable: Tensor) -> None:
        """xi <- xi - beta * (delta + gamma * xi) for the tasks that were there, if ``usable``."""
        group = self.param_groups[0]
        logits, size, beta = group["logits"], group["delta_size"], group["beta"]
        rate = _auto_rate(beta)
        if rate is not None or not all_present:  # so that a task that was not there keeps its place among the others
            delta = torch.where(present, delta - delta.sum() / present.sum(), 0.0)
        if rate is not None:
            now = delta.abs().sum() / present.sum()
            new_size = torch.where(size > 0, AUTO_DECAY * size + (1 - AUTO_DECAY) * now, now)
            delta = torch.where(new_size > 0, delta / new_size, 0.0)
            size.copy_(torch.where(usable, new_size, size))
        moved = logits - (beta if rate is None else rate) * (delta + group["gamma"] * logits)
        logits.copy_(torch.where(usable & present, moved, logits))

    def _relative(self, directions: Mapping[Tensor, Tensor], largest: Rate) -> dict[Tensor, Tensor]:
        """D_b = (lr_b / lr) * scale_b * W_b."""
        rates = {p: group["lr"] for group in self._of_kind("matrix") for p in group["params"]}
        return {p: direction * (rates[p] / largest) for p, direction in directions.items()}

    def _evaluate(self, combined: Combined) -> Tensor:
        """The losses of a micro-batch now, as they are compared."""
        if combined.replay is None:
            raise RuntimeError("These losses cannot be evaluated again: they were combined without a closure.")
        losses = read_losses(combined.replay.again(), self.tasks)
        if losses.names != combined.names:
            raise ValueError(
                f"Evaluated again, the closure returned the losses of {', '.join(losses.names)}, "
                f"expected those of {', '.join(combined.names)} as before."
            )
        return self._compared(losses).values

    def _compared(self, losses: TaskLosses) -> TaskLosses:
        return losses.log() if self._loss == "log" else losses

    def _matrices(self) -> list[Tensor]:
        return [p for group in self._of_kind("matrix") for p in group["params"]]

    @property
    def _bad_loss(self) -> str:  # type: ignore[override]
        return 'NaN, infinite or not positive, which loss="log" needs' if self._loss == "log" else Muon._bad_loss

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in ("_delta", "_loss", "_mode")}


def _auto_rate(beta: float | str) -> float | None:
    """How far "auto" or "auto:RATE" moves the logits; None where beta is a number."""
    if not isinstance(beta, str):
        if not beta >= 0:
            raise ValueError(f"beta must not be negative, found {beta!r}.")
        return None
    word, _, rate = beta.partition(":")
    try:
        if word == "auto":
            return float(rate) if rate else AUTO_RATE
    except ValueError:
        pass
    raise ValueError(f'beta must be a number, "auto" or "auto:RATE" such as "auto:0.03", found {beta!r}.')


def _largest(rates: Sequence[Rate]) -> Rate:
    """The largest rate, without waiting for those that are tensors."""
    if len(rates) == 1 or not any(isinstance(rate, Tensor) for rate in rates):
        return max(rates)
    return functools.reduce(torch.maximum, [torch.as_tensor(rate) for rate in rates])


def _both(finite: Finite, moving: bool | Tensor) -> Finite:
    """Whether the step is good and has a length; a rate that is no tensor was looked at before."""
    if not isinstance(moving, Tensor):
        return finite
    return moving if finite is True else finite & moving.to(finite.device)


def _those_present(numbers: Tensor, present: Sequence[bool]) -> Tensor:
    """The numbers of the tasks that are there, picked without an index that would travel to the device."""
    if all(present):
        return numbers
    return torch.stack([number for number, here in zip(numbers.unbind(), present, strict=True) if here])


def _means(found: Sequence[tuple[Combined, Deltas]], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each task the mean delta and floor over the micro-batches that have it, and whether any has."""
    totals = logits.new_zeros(3, len(logits))
    for combined, deltas in found:
        numbers = torch.stack([deltas.values, deltas.floor, torch.ones_like(deltas.values)]).to(logits)
        if not all(combined.present):
            columns, missing = iter(numbers.unbind(1)), logits.new_zeros(3)
            numbers = torch.stack([next(columns) if here else missing for here in combined.present], dim=1)
        totals += numbers
    delta, floor, count = totals
    return delta / count.clamp_min(1), floor / count.clamp_min(1), count > 0


def _refuse_several_processes() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            "MOON does not reduce its deltas over processes yet, so that the weights of its ranks would drift apart: "
            f"found a world of {distributed.get_world_size()} processes, expected one."
        )
