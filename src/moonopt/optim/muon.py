"""Muon: momentum, its polar factor as the update of every matrix, and AdamW for the rest. MOON builds on it."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moonopt.errors import unknown_name
from moonopt.linalg.polar import EXACT, check_schedule, polar_each
from moonopt.optim.groups import (
    SCALES,
    Group,
    Params,
    check_group,
    check_kind,
    check_one_device,
    groups_of,
    load_groups,
    named_as,
    rate_of,
    routed_groups,
    state_dtype,
    with_rows,
)
from moonopt.optim.masking import Finite, Tensors, effective, follow, move, streams, usable
from moonopt.optim.parameters import Placing, blocks, joined
from moonopt.optim.vectors import adamw_state, adamw_step
from moonopt.tasks.directional import Rate
from moonopt.tasks.pending import MicroBatch, Pending
from moonopt.tasks.reduce import with_other_ranks
from moonopt.tasks.verbs import NO_GRADIENT, TaskOptimizer
from moonopt.tasks.watch import NONFINITE, entries_not_finite, not_finite


class _PolarSettings(NamedTuple):
    schedule: str
    steps: int
    dtype: torch.dtype | None


class Active(NamedTuple):
    """The parameters of a group that have a gradient and are not frozen."""

    group: Group
    parameters: list[Tensor]
    gradients: list[Tensor]
    rows: list[list[int] | None]


FROZEN = "No parameter is trained: {} have a gradient and do not require one, and frozen parameters rest. Use requires_grad_()."


class Muon(TaskOptimizer):
    """Momentum, orthonormalized: M <- momentum * M + (1 - momentum) * G, Theta <- Theta - lr * scale * polar(M).

    Args:
        params: a module (its matrices and vectors are told apart by ``route_parameters``), its ``named_parameters()``, or
            groups that carry ``kind="matrix"`` or ``kind="vector"``.
        lr: length of a matrix update in the spectral norm (times ``scale``). Weight decay follows the move:
            Theta <- (1 - lr * weight_decay) * Theta.
        scale: ``none``, ``spectral`` = sqrt(max(1, rows / cols)), ``rms`` = 0.2 * sqrt(max(rows, cols)).
        vector_lr, vector_betas, vector_eps, vector_weight_decay: AdamW's, for everything that is not a matrix.
        schedule, steps, polar_dtype: see ``moonopt.polar``.
        rules: overrides of the routing, from a name pattern to "matrix", "vector" or ``Split``.
        module: the model, where ``params`` is not all of it.
        nonfinite: "raise" on a NaN or infinite loss or gradient, or "skip" the step and count it. With combined losses, one
            process decides so for all, which must make the same steps.
        capturable: keep learning rates as tensors on the device, for a CUDA graph of your own: a step in it counts bad losses
            and gradients, and does not raise; nothing can be evaluated twice in it. ``moonopt.capture`` needs no such thing.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = Muon(model, lr=0.02)
    >>> losses = optimizer.minimize(lambda x: model(x).square().mean(0), torch.ones(3, 4))
    >>> losses.shape
    torch.Size([2])

    """

    _step_supports_amp_scaling = True  # a GradScaler leaves its scale and its verdict on us instead of waiting for it
    _bad_loss = "NaN or infinite"

    def __init__(
        self,
        params: Params,
        *,
        lr: Rate = 0.02,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        scale: str = "none",
        vector_lr: Rate = 1e-3,
        vector_betas: tuple[float, float] = (0.9, 0.999),
        vector_eps: float = 1e-8,
        vector_weight_decay: float = 0.0,
        schedule: str = "polar_express",
        steps: int = 5,
        polar_dtype: torch.dtype | None = None,
        rules: Mapping[str, Placing] | None = None,
        module: nn.Module | None = None,
        nonfinite: str = "raise",
        capturable: bool = False,
    ) -> None:
        check_schedule(schedule, steps)
        if polar_dtype is not None and not (isinstance(polar_dtype, torch.dtype) and polar_dtype.is_floating_point):
            raise ValueError(f"polar_dtype must be a floating point torch.dtype or None, found {polar_dtype!r}.")
        if module is not None and not isinstance(module, nn.Module):
            raise ValueError(f"module must be a torch.nn.Module, found a {type(module).__name__}.")
        if nonfinite not in NONFINITE:
            raise ValueError(unknown_name(nonfinite, NONFINITE, "nonfinite"))
        root = params if isinstance(params, nn.Module) else module  # whose names and rules tell matrices
        self._module, self._root, self._rules = root if module is None else module, root, rules
        self._polar = _PolarSettings(schedule, steps, polar_dtype)
        self._nonfinite, self._capturable = nonfinite, capturable
        self._pending = Pending()
        self._vector_defaults = {"lr": vector_lr, "weight_decay": vector_weight_decay}
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "scale": scale,
            "betas": vector_betas,
            "eps": vector_eps,
        }
        super().__init__(groups_of(params, rules, module), defaults)
        self.param_groups[0]["step"] = 0
        self._frozen = [p for p in params.parameters() if not p.requires_grad] if isinstance(params, nn.Module) else []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the matrices, let the task weights follow (MOON), then decay the matrices and move the vectors."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._take_step()
        except BaseException:  # a GradScaler takes its marks away only from steps that return
            for mark in ("grad_scale", "found_inf"):
                self.__dict__.pop(mark, None)
            raise
        return loss

    def diagnostics(self) -> dict[str, float]:
        """Numbers for any logger. This waits for the device, and costs about a step."""
        self._pending.watch.tell(wait=True)
        self._keep_state_with_parameters()
        numbers = {"step": self.param_groups[0]["step"], "skipped_steps": 0}
        numbers |= self._pending.counters | self._pending.latest
        momenta: list[Tensor] = []
        for index, group in enumerate(self.param_groups):
            numbers[f"lr/{index}"] = group["lr"]
            if group["kind"] == "matrix":
                matrices = [m for p, rows in with_rows(group) for m in blocks(self.state[p]["momentum"], rows)]
                scales = [SCALES[group["scale"]](*matrix.shape) for matrix in matrices]
                numbers[f"effective_lr/{index}"] = group["lr"] * sum(scales) / len(scales)
                momenta += matrices
        numbers["nuclear_norm"] = sum((m * w).sum() for m, w in zip(momenta, polar_each(momenta, steps=8), strict=True))
        return {name: float(number) for name, number in numbers.items()}

    def obstacle_to_capture(self) -> str | None:
        exact = self._polar.schedule in EXACT
        return f'schedule="{self._polar.schedule}" waits for the device: use "polar_express"' if exact else None

    def is_setting(self, name: str) -> bool:
        return name not in ("rows", "tasks") and super().is_setting(name)

    def known_module(self) -> nn.Module | None:
        return self._module

    # The parts of a step

    def _take_step(self) -> None:
        self._pending.watch.tell()
        self._keep_state_with_parameters()
        self._warn_of_thawed()
        active, batches = self._active(), self._pending.take()
        self.param_groups[0]["step"] += 1
        finite = self._finiteness(active, batches)
        if finite is False:
            return
        directions = self._directions(active, batches, finite)
        try:
            self._advance(batches, directions, finite, functools.partial(self._move_matrices, active, directions, finite))
        finally:  # a closure that fails when it is called again must not leave half a step
            self._decay_matrices(active, finite)
            self._move_vectors(active, finite)

    def _warn_of_thawed(self) -> None:
        """Of parameters that were frozen when this was made, and are not any more."""
        thawed = [p for p in self._frozen if p.requires_grad and p.grad is not None and p not in self.state]
        if thawed:
            self._warn_once(
                f"{len(thawed)} parameters of the model have gradients and are not trained, because they were frozen when the "
                'optimizer was made: optimizer.add_param_group({"params": layer.named_parameters()}), or freeze after that.'
            )

    def _active(self) -> list[Active]:
        """The parameters that have a gradient and are not frozen, by group."""
        active = []
        for group in self.param_groups:
            entries = [(p, p.grad, rows) for p, rows in with_rows(group) if p.grad is not None and p.requires_grad]
            if entries:
                active.append(Active(group, *map(list, zip(*entries, strict=True))))
        if not active:
            given = sum(p.grad is not None for p in self._trained())
            raise RuntimeError(FROZEN.format(given) if given else NO_GRADIENT)
        if any(gradient.is_sparse for each in active for gradient in each.gradients):
            raise RuntimeError("Sparse gradients are not supported: build the embedding with sparse=False.")
        return active

    def _finiteness(self, active: Sequence[Active], batches: Sequence[MicroBatch]) -> Finite | bool:
        """Whether losses and gradients are finite on all ranks: known at once on a CPU, a flag on an accelerator."""
        of_gradients = entries_not_finite([gradient for each in active for gradient in each.gradients])
        of_losses = [not_finite(each.before.to(of_gradients.device)) for each in batches]
        bad = torch.cat([*of_losses, of_gradients.reshape(1)])
        if batches:  # without losses, as in torch, nobody is waited for
            bad = with_other_ranks(bad)
        finite, found_inf = ~bad.any(), getattr(self, "found_inf", None)
        if found_inf is not None:
            marked = found_inf.to(bad.device).reshape(()) != 0
            finite, bad = finite & ~marked, bad & ~marked
        on_host = bad.device.type == "cpu"
        if on_host and finite:
            return True
        self._pending.count("skipped_steps", 1 if on_host else (~finite).to(torch.int64))
        if self._nonfinite == "raise":
            names = [name for each in batches for name in each.names]
            self._pending.watch.note(self.param_groups[0]["step"], names, bad, self._bad_loss)
            self._pending.watch.tell()
        return False if on_host else finite

    def _directions(self, active: Sequence[Active], batches: Sequence[MicroBatch], finite: Finite) -> dict[Tensor, Tensor]:
        """scale * W by parameter, where W is the polar factor of the momentum."""
        directions: dict[Tensor, Tensor] = {}
        ran: Counter[str] = Counter()
        for group, parameters, raw_gradients, rows in active:
            if group["kind"] != "matrix":
                continue
            momenta = [self.state[p]["momentum"] for p in parameters]
            source, largest = self._advance_momenta(momenta, raw_gradients, group, finite)
            parts = [blocks(each, of) for each, of in zip(source, rows, strict=True)]
            whole = all(len(part) == 1 for part in parts)
            matrices = [matrix for part in parts for matrix in part]
            factors = polar_each(matrices, *self._polar, ran, cast=False, largest=largest if whole else {})
            updates = joined(_scaled(factors, group["scale"]), rows, parameters)
            directions |= zip(parameters, updates, strict=True)
        self._pending.latest |= {f"polar/{what}": count for what, count in ran.items()}
        return directions

    def _advance_momenta(
        self, momenta: list[Tensor], gradients: list[Tensor], group: Group, finite: Finite
    ) -> tuple[Tensors, dict[torch.Size, Tensor]]:
        """Let the momenta follow the gradients; returns what is orthonormalized, and by shape the largest entries, if known."""
        rate, scale = group["momentum"], self._gradient_scale
        largest: dict[torch.Size, Tensor] = {}
        rest = list(range(len(momenta)))
        if finite is not True and not group["nesterov"] and scale is None and momenta[0].dtype == torch.float32:
            streamed, rest = streams(list(zip(momenta, gradients, strict=True)))
            for indices in streamed:
                from moonopt.linalg.kernels.streaming import advance  # needs triton

                these = [momenta[index] for index in indices]
                largest[these[0].shape] = advance(these, [gradients[index] for index in indices], rate, finite)
        if not rest:
            return momenta, largest
        slow = [momenta[index] for index in rest]
        followed = usable([gradients[index] for index in rest], slow, finite, scale)
        follow(slow, followed, 1 - rate, finite)
        if group["nesterov"]:
            return torch._foreach_lerp(followed, momenta, rate), largest
        return momenta, largest

    def _advance(
        self,
        batches: Sequence[MicroBatch],
        directions: Mapping[Tensor, Tensor],
        finite: Finite,
        move_matrices: Callable[[], None],
    ) -> None:
        """Move the matrices, and whatever a method does just before or after, while nothing else has moved."""
        move_matrices()

    def _move_matrices(self, active: Sequence[Active], directions: Mapping[Tensor, Tensor], finite: Finite) -> None:
        """Theta <- Theta - lr * scale * W."""
        for group, parameters, _, _ in active:
            moving = [p for p in parameters if p in directions]
            if moving:
                move(moving, [directions[p] for p in moving], effective(finite, rate_of(group), state_dtype(moving[0])))

    def _decay_matrices(self, active: Sequence[Active], finite: Finite) -> None:
        for group, parameters, _, _ in active:
            if group["kind"] == "matrix" and group["weight_decay"]:
                rate = effective(finite, rate_of(group), state_dtype(parameters[0]))
                torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])

    def _move_vectors(self, active: Sequence[Active], finite: Finite) -> None:
        for group, parameters, gradients, _ in active:
            if group["kind"] == "vector":
                states = [self.state[p] for p in parameters]
                adamw_step(
                    parameters,
                    gradients,
                    states,
                    rate=effective(finite, rate_of(group), states[0]["exp_avg"].dtype),
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    finite=finite,
                    scale=self._gradient_scale,
                )

    @property
    def _gradient_scale(self) -> Tensor | None:
        """The factor that a GradScaler has left on us."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        return scale

    def _of_kind(self, kind: str) -> list[Group]:
        return [group for group in self.param_groups if group["kind"] == kind]

    # Groups and state

    def add_param_group(self, param_group: Group) -> None:
        """Torch's; the group says ``kind="matrix"`` or ``kind="vector"``, or has named parameters of the model."""
        params = param_group["params"]
        param_group = param_group | {"params": [params] if isinstance(params, Tensor) else list(params)}
        if "kind" not in param_group:
            routed = routed_groups(param_group, self._root, self._rules, self.state)
            if not routed:  # of another part of the model, perhaps, which no rule can speak of
                routed = routed_groups(param_group, self._module, None, self.state)
            for group in routed:
                self.add_param_group(group)
            if routed:
                return
        check_kind(param_group)
        param_group = (self._vector_defaults if param_group["kind"] == "vector" else {}) | param_group
        super().add_param_group(named_as(self.param_groups, param_group))
        group = self.param_groups[-1]
        group.setdefault("rows", [None] * len(group["params"]))
        try:
            check_group(group)
            check_one_device(self.param_groups)
        except ValueError:
            self.param_groups.pop()
            raise
        if self._capturable:
            group["lr"] = torch.as_tensor(group["lr"], dtype=state_dtype(group["params"][0]), device=group["params"][0].device)
        for p in group["params"]:
            momentum = torch.zeros_like(p, dtype=state_dtype(p), memory_format=torch.contiguous_format)
            self.state[p] = {"momentum": momentum} if group["kind"] == "matrix" else adamw_state(p, state_dtype(p))

    def _keep_state_with_parameters(self) -> None:
        """Parameters that were moved to another device after construction take their state along."""
        first = self.param_groups[0]["params"][0]
        if next(iter(self.state[first].values())).device == first.device:
            return
        for p, state in self.state.items():
            state |= {name: value.to(p.device) for name, value in state.items()}
        for group in self.param_groups:
            own = {name: value for name, value in group.items() if isinstance(value, Tensor)}
            group |= {name: value.to(first.device) for name, value in own.items() if name != "lr" or self._capturable}
        self._pending.counters |= {name: int(count) for name, count in self._pending.counters.items()}

    def state_dict(self) -> dict[str, Any]:
        """Torch's. Non-finite losses and gradients that were not told of yet are told of now."""
        self._pending.watch.tell(wait=True)
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch's, but in place and in the saved dtypes: torch would cast float32 state to that of bfloat16 parameters."""
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        load_groups(self.param_groups, self.state, state_dict)
        self._pending.clear()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        ours = ("_module", "_root", "_rules", "_polar", "_nonfinite", "_capturable", "_pending", "_vector_defaults", "_frozen")
        return super().__getstate__() | {name: getattr(self, name) for name in ours}


def _scaled(factors: list[Tensor], scale: str) -> list[Tensor]:
    if scale != "none":
        torch._foreach_mul_(factors, [SCALES[scale](*factor.shape) for factor in factors])
    return factors
