"""MOON: Muon on a weighted sum of task losses, whose weights follow the nuclear-norm dual (Algorithm 1)."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.errors import unknown_name
from moonopt.optim.exact import MinimaxStep, ObservedTasks, joint_step, minimax_step, observe_tasks
from moonopt.optim.groups import Params, check_number, rate_of, state_dtype
from moonopt.optim.logits import auto_rate, next_logits
from moonopt.optim.masking import Finite
from moonopt.optim.muon import Active, Muon
from moonopt.optim.parameters import Placing
from moonopt.tasks.directional import MODES, Deltas, DoubleBackward, Move, Rate
from moonopt.tasks.kernels import plain_kernels
from moonopt.tasks.losses import Losses, TaskLosses, detached, in_half_precision, read_losses, task_names
from moonopt.tasks.pending import MicroBatch
from moonopt.tasks.presence import mean_by_task, pick
from moonopt.tasks.reduce import means_by_task_over_ranks, refuse_several_ranks, world_size
from moonopt.tasks.replay import Replay
from moonopt.tasks.verbs import Closure
from moonopt.tasks.watch import any_not_finite

DUALS = ("online", "exact")
LOSSES = ("plain", "log")
NO_GRAPH = "No loss depends on anything that requires a gradient."
TINY = 1e-30  # a weight of 0, for its logarithm


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
        dual: "online" as above; "exact" solves for the weights and the minimax direction in every step, from one backward
            pass per task (``moonopt.solve_dual``), without momentum, beta, gamma and delta. It stops where no direction
            helps all tasks.
        delta: "loss_difference" evaluates the closure again after the matrices have moved. The others are exact:
            "forward_mode" (a Jacobian-vector product) and "double_backward" (which ``minimize`` gets from its own backward
            pass, without evaluating anything again, but keeping its graph) cost the same for any number of tasks, "auto"
            takes the cheaper one of them that works, and "per_task" takes one backward pass per task.
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
        capturable: bool = False,
    ) -> None:
        names = task_names(tasks)
        for value, known, what in ((dual, DUALS, "dual"), (delta, MODES, "delta"), (loss, LOSSES, "loss")):
            if value not in known:
                raise ValueError(unknown_name(str(value), tuple(known), what))
        auto_rate(beta)
        check_number("gamma", gamma)
        self._dual, self._delta, self._loss = dual, delta, loss
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
            capturable=capturable,
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
        """Muon's, and for every task its weight and centred logit, and of the last step loss, delta and rounding floor.

        What a task that was not there would have had is NaN.
        """
        numbers = super().diagnostics()
        if self._solves:
            del numbers["nuclear_norm"]  # of the momentum, which it has none of
        by_task = {"weight": self.task_weights, "logit": self.logits, **self._pending.by_task}
        for what, values in by_task.items():
            numbers |= {f"{what}/{name}": value for name, value in zip(self.tasks, values.tolist(), strict=True)}
        return numbers

    def obstacle_to_capture(self) -> str | None:
        if self._solves:
            return 'dual="exact" solves for its weights on the host: use dual="online"'
        if self._delta == "auto":
            return 'delta="auto" takes times: name the mode, "forward_mode" or "double_backward"'
        return super().obstacle_to_capture()

    # What MOON adds to minimize and combine

    def _differentiate(self, closure: Closure, args: tuple[Any, ...]) -> Any:
        """With double_backward, by a backward pass whose graph stays for the deltas: nothing is evaluated again.

        Not with several processes: what sums up their gradients wants a backward pass of torch's.
        """
        if self._solves or not isinstance(self._mode, DoubleBackward) or world_size() > 1:
            return super()._differentiate(closure, args)
        self._pending.watch.tell()
        with plain_kernels():  # in the backward pass, too: checkpointing evaluates there
            answer = closure(*args)
            losses = read_losses(answer, self.tasks)
            if not losses.values.requires_grad:
                raise RuntimeError(NO_GRAPH)
            self._warn_of_constants(losses)
            batch = self._micro_batch(losses, None)
            weights, slopes = self._gradient_weights(losses), self._slopes(losses)
            batch.observed = self._mode.backward(losses.values, weights, slopes, self._matrices())
        batch.backward_has_run = True
        self._pending.batches.append(batch)
        return detached(answer)

    def _replay(self, closure: Closure, args: tuple[Any, ...]) -> Replay | None:
        if not self._evaluates_again:
            return None
        advice = "pass the model as params, or module=model"
        return self._repeatable(closure, args, self._module, self._mode.exact, advice)

    def _read(self, answer: Losses, replay: Replay | None) -> TaskLosses:
        losses = read_losses(answer, self.tasks)
        if self._evaluates_again and losses.values.requires_grad:
            if replay is None:
                raise ValueError(
                    f'delta="{self._delta}" evaluates the losses again: pass a closure, or losses with again=function, or use '
                    'delta="per_task".'
                )
            if not self._mode.exact and in_half_precision(answer):
                self._warn_once(
                    'Some losses are in half precision: delta="loss_difference" compares them before and after a small step, '
                    "and the difference may be rounding (delta_floor in diagnostics()). Compute the losses in float32."
                )
        return losses

    def _gradient_weights(self, losses: TaskLosses) -> Tensor:
        if self._loss == "plain":
            return pick(self.task_weights, losses.present)
        logits = pick(self.param_groups[0]["logits"], losses.present).to(losses.values)
        weights = (logits - losses.values.detach().log()).softmax(0)  # z_i / l_i normalised, without their underflow
        return weights if all(losses.present) else weights * pick(self.task_weights, losses.present).sum()

    def _micro_batch(self, losses: TaskLosses, replay: Replay | None) -> MicroBatch:
        if self._solves:
            refuse_several_ranks('dual="exact" does not reduce task gradients over processes: use dual="online"')
        elif self._delta == "auto":
            refuse_several_ranks('delta="auto" takes times, which differ from process to process: name the mode')
        compared = self._compared(losses)
        trained = [p for p in self._matrices() if p.requires_grad]
        if not self._solves:
            return MicroBatch(compared, replay, self._mode.observe(compared, trained))
        gradients = observe_tasks(compared, trained)
        if self._pending.batches:  # weights stay fixed among micro-batches
            return MicroBatch(compared, replay, ObservedTasks(gradients, None))
        step = minimax_step(self._of_kind("matrix"), gradients)
        self._take_weights(step)
        return MicroBatch(compared, replay, ObservedTasks(gradients, step))

    # What MOON adds to step

    def _directions(self, active: Sequence[Active], batches: Sequence[MicroBatch], finite: Finite) -> dict[Tensor, Tensor]:
        """With the exact dual the minimax direction; else the momentum's."""
        if not self._solves or not batches:
            return super()._directions(active, batches, finite)
        step = joint_step(self._of_kind("matrix"), [batch.observed for batch in batches])
        self._pending.count("rejected_duals", int(step is None))
        if step is None:
            return {}
        self._take_weights(step)
        if step.dual.value == 0:
            idle = [name for name, weight in step.weights.items() if weight > 0]
            self._warn_once(f"No direction helps all tasks: the gradient of {', '.join(idle)} is zero in every matrix.")
        self._pending.by_task |= {"delta": self._by_task(step.deltas, math.nan)}
        self._pending.latest |= {
            "dual/value": step.dual.value,
            "dual/relative_gap": step.dual.relative_gap,
            "dual/stationary": step.dual.stationary,
            "dual/converged": step.dual.converged,
            "dual/iterations": step.dual.iterations,
        }
        return step.directions

    def _advance(
        self,
        batches: Sequence[MicroBatch],
        directions: Mapping[Tensor, Tensor],
        finite: Finite,
        move_matrices: Callable[[], None],
    ) -> None:
        """Move the matrices, and let the logits follow the deltas of the move."""
        self._note_losses(batches)
        rate = _largest([rate_of(each) for each in self._of_kind("matrix")])
        at_rest = not isinstance(rate, Tensor) and rate == 0
        if not batches or at_rest or self._solves:
            move_matrices()
            return
        move = Move(rate, self._relative(directions, rate) if self._mode.exact else {}, self._trained())
        if self._mode.exact:
            try:
                found = [self._mode.deltas(batch, self._evaluate, move) for batch in batches]
            finally:
                move_matrices()
        else:
            move_matrices()
            found = [self._mode.deltas(batch, self._evaluate, move) for batch in batches]
        self._follow(batches, found, _both(finite, rate > 0))

    def _note_losses(self, batches: Sequence[MicroBatch]) -> None:
        if not batches:
            self._warn_once("step() without combine() and its backward(): matrices have moved, task weights were left alone.")
            return
        presences = [batch.present for batch in batches]
        losses = mean_by_task([batch.before for batch in batches], presences, self.param_groups[0]["logits"])
        self._pending.by_task |= {self._loss_name: losses}

    def _follow(self, batches: Sequence[MicroBatch], found: Sequence[Deltas], good: Finite) -> None:
        """Let the logits follow the deltas."""
        group = self.param_groups[0]
        presences = [batch.present for batch in batches]
        quantities = [*zip(*found, strict=True), [batch.before for batch in batches]]
        (delta, floor, losses), here = means_by_task_over_ranks(quantities, presences, group["logits"])
        if good is not True:
            delta, floor = torch.where(good, delta, 0.0), torch.where(good, floor, 0.0)
        self._pending.by_task |= {self._loss_name: losses, "delta": delta, "delta_floor": floor}

        rejected = any_not_finite(delta if here is None else torch.where(here > 0, delta, 0.0))
        self._pending.count("rejected_deltas", rejected.to(torch.int64))
        usable = ~rejected if good is True else ~rejected & good
        logits, size = next_logits(group["logits"], group["delta_size"], delta, here, beta=group["beta"], gamma=group["gamma"])
        group["logits"].copy_(torch.where(usable, logits, group["logits"]))
        group["delta_size"].copy_(torch.where(usable, size, group["delta_size"]))

    def _take_weights(self, step: MinimaxStep | None) -> None:
        """The logits of exact weights. A task that was not there keeps its weight, and the others share the rest."""
        if step is not None:
            before = self.task_weights
            absent = torch.tensor([name not in step.weights for name in self.tasks], device=before.device)
            shares = (1 - before[absent].sum()) * self._by_task(step.weights, 0.0)
            self.param_groups[0]["logits"].copy_(torch.where(absent, before, shares).clamp_min(TINY).log())

    def _by_task(self, numbers: Mapping[str, float], missing: float) -> Tensor:
        logits: Tensor = self.param_groups[0]["logits"]
        return logits.new_tensor([numbers.get(name, missing) for name in self.tasks])

    def _relative(self, directions: Mapping[Tensor, Tensor], rate: Rate) -> dict[Tensor, Tensor]:
        """D_b = (lr_b / lr) * scale_b * W_b."""
        rates = {p: rate_of(group) for group in self._of_kind("matrix") for p in group["params"]}
        return {p: direction.to(state_dtype(p)) * (rates[p] / rate) for p, direction in directions.items()}

    @contextlib.contextmanager
    def _evaluate(self, batch: MicroBatch) -> Iterator[Tensor]:
        """The losses of a micro-batch now, as they are compared."""
        if batch.replay is None:
            raise RuntimeError("These losses cannot be evaluated again: they were combined without a closure.")
        with batch.replay.again() as answer:
            yield self._compared(batch.evaluated_again(read_losses(answer, self.tasks))).values

    @property
    def _solves(self) -> bool:
        """Whether every step solves for its weights; else they follow the deltas of the steps."""
        return self._dual == "exact"

    @property
    def _evaluates_again(self) -> bool:
        return not self._solves and self._mode.evaluates_again

    @property
    def _loss_name(self) -> str:
        return "loss" if self._loss == "plain" else "log_loss"

    def _compared(self, losses: TaskLosses) -> TaskLosses:
        return losses.log() if self._loss == "log" else losses

    def _slopes(self, losses: TaskLosses) -> Tensor:
        """Of the losses as they are compared, in the losses."""
        values = losses.values.detach()
        return values.reciprocal() if self._loss == "log" else torch.ones_like(values)

    def _matrices(self) -> list[Tensor]:
        return [p for group in self._of_kind("matrix") for p in group["params"]]

    @property
    def _bad_loss(self) -> str:  # type: ignore[override]
        return 'NaN, infinite or not positive, which loss="log" needs' if self._loss == "log" else Muon._bad_loss

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in ("_dual", "_delta", "_loss", "_mode")}


def _largest(rates: Sequence[Rate]) -> Rate:
    """The largest rate, without waiting for those that are tensors."""
    if len(rates) == 1 or not any(isinstance(rate, Tensor) for rate in rates):
        return max(rates)
    tensors = [rate if isinstance(rate, Tensor) else torch.tensor(rate, device="cpu") for rate in rates]
    return functools.reduce(torch.maximum, tensors)


def _both(finite: Finite, moving: bool | Tensor) -> Finite:
    """Whether the step is good and has a length; a rate that is no tensor was looked at before."""
    if not isinstance(moving, Tensor):
        return finite
    return moving if finite is True else finite & moving.to(finite.device)
