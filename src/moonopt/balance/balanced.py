"""A balancer with an optimizer: together an optimizer of several losses."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moonopt.balance.base import (
    BATCHED,
    COLUMNS,
    STORED,
    Aggregator,
    Balancer,
    Engine,
    Learned,
    Memory,
    NonFiniteGradientError,
    Tasks,
)
from moonopt.balance.clipping import CLIPPED, note_shared, noted_shared
from moonopt.balance.delivery import as_of_backward, delivered
from moonopt.balance.kept import KeptWeights
from moonopt.balance.observed import Observed, are_noted, notes_of
from moonopt.balance.wrapper import Wrapper, check_usable
from moonopt.errors import unknown_name
from moonopt.tasks.capturing import is_capturing
from moonopt.tasks.gradients import gram_anew, gram_by_columns, graph_features, leaves_of
from moonopt.tasks.losses import Losses, TaskLosses, check_same_tasks, detached, read_losses
from moonopt.tasks.pending import MicroBatch, Pending
from moonopt.tasks.presence import mean_by_task, spread
from moonopt.tasks.reduce import mean_over_ranks, on_any_rank, refuse_different_tasks, refuse_several_ranks, world_size
from moonopt.tasks.replay import Replay
from moonopt.tasks.verbs import NO_GRADIENT, Closure, Parts, TaskOptimizer, run_backward
from moonopt.tasks.watch import LEFT, NONFINITE, TAKEN, bad_gradient, not_finite

COUNTED = ("unsolved", "rejected")  # what balancers count in their memory


class Balanced(Wrapper):
    """A balancer says how losses or task gradients are combined, an optimizer how the combined gradient becomes an update.

    It shares the groups and the state of the optimizer, so that schedulers, scalers and checkpoints work with it as with
    any other; what the balancer remembers lives in the first group.

    Args:
        balancer: for example ``NashMTL(3)``.
        optimizer: any of torch's, or ``moonopt.Muon``.
        module: the model, whose buffers and training flags another evaluation restores (FAMO, "stored:anew", "columns").
        shared: the parameters that tasks have in common, where those that several losses depend on are not meant.
        engine: how a gradient-based balancer has the inner products of the task gradients. "stored" keeps all of them;
            "stored:batched" makes them in one backward pass, "stored:anew" evaluates the closure for each and keeps no graph.
            "blocked:4" keeps four at a time and takes more backward passes; "columns" keeps one, and evaluates the closure
            again for it and in forward mode along it.
        every: compute the weights anew every so many steps.
        nonfinite: "raise" on a NaN or infinite loss, or "skip" the step and count it.

    """

    def __init__(
        self,
        balancer: Balancer,
        optimizer: Optimizer,
        *,
        module: nn.Module | None = None,
        shared: Iterable[Tensor] | None = None,
        engine: str = "stored",
        every: int = 1,
        nonfinite: str = "raise",
    ) -> None:
        if not isinstance(balancer, Balancer):
            raise ValueError(f"Balanced needs a balancer such as NashMTL(3), found {balancer!r}: names are for moonopt.build.")
        check_usable(optimizer)
        if nonfinite not in NONFINITE:
            raise ValueError(unknown_name(nonfinite, NONFINITE, "nonfinite"))
        if every < 1 or (every > 1 and isinstance(balancer, Aggregator)):
            found = f"{every} with {type(balancer).__name__}, which has no weights to keep" if every > 1 else str(every)
            raise ValueError(f"every must be a number of steps of at least 1, found {found}.")
        self.balancer, self.optimizer = balancer, optimizer
        self._module, self._every, self._nonfinite = module, every, nonfinite
        self._engine = Engine.read(engine)
        self._shared = None if shared is None else list(shared)
        self._pending = Pending()
        self.memory = Memory(lambda: self.param_groups[0])
        trained = self._trained()
        strangers = sum(p.requires_grad for p in set(self._shared or []) - set(trained))
        if strangers or self._shared == []:
            found = f"{strangers} that it does not train" if strangers else "none"
            raise ValueError(f"shared must be parameters of the optimizer, found {found}.")
        dtype = functools.reduce(torch.promote_types, [p.dtype for p in trained], torch.float32)
        like = torch.zeros(len(balancer.tasks), dtype=dtype, device=trained[0].device)
        start = {
            "name": balancer.name,
            "tasks": list(balancer.tasks),
            "step": 0,
            "age": 0,  # of the weights, in steps
            **KeptWeights.initial(like),
            **({} if balancer.max_norm is None else {CLIPPED: [False] * len(trained)}),
        }
        self.memory.update(start | balancer.initial(like))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Torch's, and forget combined losses whose backward has run: their step was skipped."""
        self.optimizer.zero_grad(set_to_none)
        self._pending.forget_finished()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with what the balancer remembers in the first group."""
        self._pending.watch.tell(wait=True)
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["param_groups"][0]
        for what, here in (("name", self.balancer.name), ("tasks", list(self.balancer.tasks))):
            found = saved.get(Memory.PREFIX + what)
            if found != here:
                raise ValueError(f"The checkpoint is of balancer_{what} {found!r}, expected {here!r}.")
        remembered = dict(self.memory)
        self._load_inner(state_dict)
        for name, before in remembered.items():
            if isinstance(before, Tensor):
                if self.memory[name].shape != before.shape:
                    found = tuple(self.memory[name].shape)
                    raise ValueError(f"The checkpoint's balancer_{name} has shape {found}, expected {tuple(before.shape)}.")
                self.memory[name] = self.memory[name].to(before.device)
        self._pending.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("memory", "step")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.memory = Memory(lambda: self.param_groups[0])

    def __repr__(self) -> str:
        return f"Balanced({self.balancer!r}, {self.optimizer!r})"

    # The verbs

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks."""
        return self.balancer.tasks

    @property
    def task_weights(self) -> Tensor:
        """Those of the last combined losses, in the order of the tasks; a task that was not there had none."""
        return self._kept.weights

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The inner optimizer's step; then the balancer learns from it."""
        self._pending.watch.tell()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(p.grad is None for p in self._parameters()):
            raise RuntimeError(NO_GRADIENT)
        batches = self._pending.take()
        if not batches:
            self._warn_once(
                f"step() without combine() and its backward(): a step of {type(self.optimizer).__name__} on the gradients that "
                f"are there, in which {self.balancer.name} has no part."
            )
            self.optimizer.step()
            return loss
        self.memory["step"] += 1
        if not self._is_good(batches):
            self.memory["age"] = 0  # weights of such losses must not stay
            return loss
        self.memory["age"] = (self.memory["age"] + 1) % self._every
        if self.balancer.max_norm is not None:
            chosen = self._parameters() if self._shared is None else self._shared
            nn.utils.clip_grad_norm_(noted_shared(self._trained(), self.memory) or chosen, self.balancer.max_norm)
        self.optimizer.step()
        with torch.no_grad():
            self.balancer.learn(self._learned(batches), self.memory)
        return loss

    def diagnostics(self) -> dict[str, float]:
        """Numbers for any logger: for every task its weight, and of the last step its loss. This waits for the device."""
        self._pending.watch.tell(wait=True)
        numbers: dict[str, Any] = {"step": self.memory["step"], "skipped_steps": 0} | self._pending.counters
        numbers |= {name: self.memory[name] for name in COUNTED if name in self.memory}
        numbers |= {f"lr/{index}": group["lr"] for index, group in enumerate(self.param_groups)}
        for what, values in ({"weight": self.task_weights} | self._pending.by_task).items():
            numbers |= {f"{what}/{name}": value for name, value in zip(self.tasks, values.tolist(), strict=True)}
        return {name: float(number) for name, number in numbers.items()}

    def obstacle_to_capture(self) -> str | None:
        if not self.balancer.capturable and not self._weighs_by_gram:
            asked = self.balancer.uses_gram and not self._engine.keeps_all
            advice = ', and none but engine="stored" and "stored:batched" waits for them' if asked else ""
            return f"{self.balancer.name} computes its weights on the host{advice}"
        if self._weighs_by_gram and self._has_hooks():
            return (
                f"hooks on parameters want one backward pass, and {self.balancer.name} computes its weights on the host before"
            )
        if self._every > 1 or self._nonfinite == "skip":
            return 'with every > 1 or nonfinite="skip" the host decides what to do in a step'
        if isinstance(self.optimizer, TaskOptimizer):
            return self.optimizer.obstacle_to_capture()
        if not all("capturable" in group for group in self.param_groups):
            return f"{type(self.optimizer).__name__} has no capturable form: use torch.optim.Adam or AdamW, or moonopt.Muon"
        return None

    # The parts

    def in_parts(self, closure: Closure, args: tuple[Any, ...]) -> Parts:
        if not self._keeps_gradients():
            return (yield from super().in_parts(closure, args))
        self.zero_grad()
        self._pending.watch.tell()
        answer = closure(*args)
        losses = self._read(answer, None)
        reached = set(leaves_of(losses.values))
        if not reached or reached - set(self._parameters()):  # a backward pass leaves gradients in the others as well
            run_backward(self.combine(answer))
            self.step()
            return detached(answer)
        self._warn_of_constants(losses)
        answer, batch = detached(answer), self._micro_batch(losses, None)
        tasks = Tasks(losses, self._trained(), self._shared, self._engine)
        seen = tasks.seen()  # without the graph, which is of no use any more
        del losses, tasks
        weights = torch.zeros_like(batch.before)
        batch.observed = Observed(weights)
        yield functools.partial(self._decide, seen, weights)
        heads = torch.ones_like(weights) if self.balancer.heads == "plain" else weights
        total = seen.weighted_sum(seen.shared, weights) | seen.weighted_sum(seen.heads, heads)
        for p in total:
            p.grad = as_of_backward(total[p], p)
        note_shared(seen, self.balancer, self._trained(), self.memory)
        del seen, total  # as many gradients as there are tasks, and one more
        batch.backward_has_run = True
        self._pending.batches.append(batch)
        self.step()
        return answer

    def _decide(self, seen: Tasks, weights: Tensor) -> None:
        weights.copy_(self._observed(seen).weights)

    def _keeps_gradients(self) -> bool:
        """Whether a step is best made of the task gradients themselves, once their inner products have led to weights.

        Not with several processes: what averages their gradients wants a backward pass.
        """
        return self._weighs_by_gram and self._is_due() and not self._has_hooks() and world_size() == 1

    def _has_hooks(self) -> bool:
        """On parameters, for a backward pass to call."""
        return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._parameters())

    @property
    def _weighs_by_gram(self) -> bool:
        """Whether the weights follow from the inner products of gradients that are all kept."""
        more = isinstance(self.balancer, Aggregator) or self.balancer.evaluates_again or self.balancer.takes_notes
        return self.balancer.uses_gram and self._engine.keeps_all and not more

    def _replay(self, closure: Closure, args: tuple[Any, ...]) -> Replay | None:
        if not (self._looks_ahead or self.balancer.evaluates_again):
            return None
        by_columns = self._looks_ahead and self._engine.text == COLUMNS
        return self._repeatable(closure, args, self._module, by_columns, "pass module=model")

    def _look_ahead(self, replay: Replay | None) -> None:
        """The Gram matrix of evaluations of their own, before there is a graph that would wait in memory meanwhile."""
        if not self._looks_ahead or not torch.is_grad_enabled() or not self._is_due():
            return
        if replay is None:
            raise ValueError(
                f'engine="{self._engine.text}" evaluates the losses again: pass a closure, or losses with again=function.'
            )
        shared = None if self._shared is None else [p for p in self._shared if p.requires_grad]
        gram = gram_by_columns if self._engine.text == COLUMNS else gram_anew
        self._pending.foreseen.clear()
        self._pending.foreseen["gram"] = gram(lambda: self._ahead(replay), self._parameters(), shared)

    def _read(self, answer: Losses, replay: Replay | None) -> TaskLosses:
        losses = read_losses(answer, self.tasks)
        if self.balancer.evaluates_again and replay is None and losses.values.requires_grad:
            raise ValueError(f"{self.balancer.name} evaluates the losses again: pass a closure, or losses with again=function.")
        return losses

    def _micro_batch(self, losses: TaskLosses, replay: Replay | None) -> MicroBatch:
        if self.balancer.needs_gradients:
            if self.balancer.uses_gram and not self._engine.keeps_all:
                refuse_several_ranks(f'engine="{self._engine.text}" has the gradients of one process: use engine="{STORED}"')
            for feature, remedy in graph_features(losses.values).items():
                if feature != "compiled models" or self._engine.text in (BATCHED, COLUMNS):
                    raise RuntimeError(
                        f"{self.balancer.name} takes task gradients, which do not work with {feature}: {remedy}."
                    )
        refuse_different_tasks(self.tasks, losses.present, losses.values.device)
        return MicroBatch(losses, replay, observed_before=self.task_weights)

    def _combined(self, losses: TaskLosses, batch: MicroBatch | None) -> Tensor:
        if batch is None:  # nobody differentiates this
            return self._shown(losses, self._kept.of(losses))
        check_same_tasks(self._pending.foreseen.pop("tasks", losses.names), losses.names)
        tasks = Tasks(losses, self._trained(), self._shared, self._engine, self._pending.foreseen.pop("gram", None))
        observed = batch.observed = self._observed(tasks)
        weights = observed.weights
        if isinstance(self.balancer, Aggregator) and tasks.are_finite:
            directions = self.balancer.direction(tasks, self.memory)
            rest = [p for p in [*tasks.parameters, *tasks.strangers] if p not in directions]
            return delivered(directions | tasks.plain_gradient(rest), self._shown(losses, weights))
        note_shared(tasks, self.balancer, self._trained(), self.memory)
        if self.balancer.heads == "plain" and (tasks.heads or tasks.strangers):
            return delivered(tasks.weighted_gradient(weights), self._shown(losses, weights))
        loss = (weights.to(losses.values) * losses.values).sum()
        return self._shown(losses, weights) + (loss - loss.detach())

    def _observed(self, tasks: Tasks) -> Observed:
        """The balancer's weights, or those that stay: among micro-batches, between refreshes, where a loss is not finite."""
        losses = tasks.losses
        if not self._is_due() and self._pending.batches:
            self._kept.forget_of_no_use(self._pending.batches[0].observed_before)
        stay, noted_already = not self._is_due() and self._kept.are_for(losses), self._is_noted(losses)
        if stay and noted_already:
            return Observed(self._kept.of(losses))
        if self.balancer.needs_gradients and not is_capturing(losses.values.device) and not tasks.are_finite:
            return Observed(self._kept.of(losses))
        try:
            with torch.no_grad():
                weights = None if stay else self.balancer.weights(tasks, self.memory)
                noted = None if noted_already else self.balancer.note(tasks, self.memory)
        except NonFiniteGradientError as error:
            old = self._kept.of(losses)
            return Observed(torch.where(error.bad.to(old.device), torch.nan, old))  # which the step will tell of
        kept = self._kept.of(losses) if weights is None else self._kept.take(weights, losses, anew=self._is_due())
        return Observed(kept, noted)

    def _is_noted(self, losses: TaskLosses) -> bool:
        """Whether nothing is to be noted of these tasks: it was, of batches that are sure of a part in the step."""
        sure = [each for each in self._pending.batches if each.backward_has_run]
        return not self.balancer.takes_notes or self.memory["age"] > 0 or are_noted(losses.present, sure)

    @property
    def _kept(self) -> KeptWeights:
        return KeptWeights(self.memory)

    def _shown(self, losses: TaskLosses, weights: Tensor) -> Tensor:
        return self.balancer.value(losses.values.detach(), weights.to(losses.values), self.memory)

    @property
    def _looks_ahead(self) -> bool:
        return self.balancer.uses_gram and self._engine.evaluates_again

    def _is_due(self) -> bool:
        """Whether the weights are to be computed anew: not among micro-batches, nor between refreshes."""
        return not self._pending.batches and self.memory["age"] == 0

    @contextlib.contextmanager
    def _again(self, replay: Replay) -> Iterator[TaskLosses]:
        with replay.again() as answer:
            yield read_losses(answer, self.tasks)

    @contextlib.contextmanager
    def _ahead(self, replay: Replay) -> Iterator[TaskLosses]:
        with self._again(replay) as losses:
            check_same_tasks(self._pending.foreseen.setdefault("tasks", losses.names), losses.names)
            yield losses

    def _is_good(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether all losses and weights are finite, on all ranks. An accelerator tells later, unless bad steps are skipped."""
        ill = [spread(not_finite(each.before, each.observed.weights), each.present) for each in batches]
        bad = on_any_rank(functools.reduce(torch.logical_or, ill))
        flags = torch.cat([bad, bad_gradient([p.grad for p in self._parameters()], bad)])
        if self._nonfinite == "raise":
            consequence = LEFT if flags.device.type == "cpu" else TAKEN
            self._pending.watch.note(self.memory["step"], self.tasks, flags, self.balancer.bad_loss, consequence)
            self._pending.watch.tell()
            return True
        if not bool(flags.any()):
            return True
        self._pending.count("skipped_steps", 1)
        return False

    def _learned(self, batches: Sequence[MicroBatch]) -> Learned:
        presences = [batch.present for batch in batches]
        like = self.task_weights
        present = tuple(any(here) for here in zip(*presences, strict=True))
        before = mean_over_ranks(mean_by_task([batch.before for batch in batches], presences, like))
        self._pending.by_task |= {"loss": before}
        after = None
        if self.balancer.evaluates_again:
            found = []
            for batch in batches:
                if batch.replay is not None:
                    with torch.no_grad(), self._again(batch.replay) as losses:
                        found.append(batch.evaluated_again(losses).values)
            after = mean_over_ranks(mean_by_task(found, presences, like))
        return Learned(present, before, after, notes_of(batches))
