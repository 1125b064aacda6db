"""Evaluating a closure again as it was evaluated before: same random numbers, buffers, training flags and autocast.

What is protected is what torch knows of: its generators on the CPU and on the accelerators in use, a closure's own where
it is given them, looks them up by name or has them as attributes, and the module's buffers and flags. A closure that draws
from Python's or NumPy's generators, advances a data loader, or logs, does so twice. One that differentiates inside (a
gradient penalty) fails where no graph is made; it is evaluated with one, and remembered by its code. Gradients that it
leaves in the module's parameters, by a backward pass of its own, are not there afterwards.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from moonopt.tasks.capturing import draw_again, is_capturing
from moonopt.tasks.closures import body_of, looked_up, own_generators
from moonopt.tasks.kernels import KERNELS, has_dropout, plain_kernels
from moonopt.tasks.losses import detached

Answer = Any

#: What torch says where something is to be differentiated that has no graph, or to keep its gradient.
NO_GRAPH = ("require grad", "retain_grad")


class Replay:
    """A closure bound to its arguments, and the circumstances of its first evaluation.

    Made before that evaluation; ``first()`` runs it, ``again()`` repeats it and leaves no trace. With ``plain``, the
    repetition takes kernels that can be differentiated in any way, and so does a first evaluation with dropout.
    ``differentiating`` has the code of closures that were seen to differentiate inside, and is added to.
    """

    def __init__(
        self,
        closure: Callable[..., Answer],
        args: tuple[Any, ...],
        module: nn.Module | None,
        devices: Iterable[torch.device],
        plain: bool = False,
        warn: Callable[[str], None] = warnings.warn,
        differentiating: set[object] | None = None,
    ) -> None:
        self._closure, self._args, self._module, self._plain = closure, args, module, plain
        self._code = body_of(closure)
        self._differentiating = set() if differentiating is None else differentiating
        self._looked_up, self._warn = looked_up(closure), warn
        self._plain_at_first = False
        modules = self._modules()
        self._generators = _generators(devices, own_generators(closure, args, modules))
        self._autocast = _Autocast(devices)
        self._buffers = _Buffers(modules)
        self._flags = _Flags(modules)

    def first(self) -> Answer:
        """The first evaluation, in the circumstances that are."""
        self._plain_at_first = self._plain and has_dropout(self._module)
        with plain_kernels() if self._plain_at_first else contextlib.nullcontext():
            return self._closure(*self._args)

    def notice_backward(self) -> None:
        """In a backward pass through the first evaluation: what checkpointing computes again, it computes likewise."""
        if self._plain_at_first:
            KERNELS.want_plain()
            torch.autograd.Variable._execution_engine.queue_callback(KERNELS.release)  # at the end of the pass

    @contextlib.contextmanager
    def again(self) -> Iterator[Answer]:
        """The closure's answer under the circumstances of the first evaluation; nothing but parameters has changed.

        It has a graph only where the caller has one made. Buffers come back at the end of the context: a backward pass
        through the answer belongs inside.
        """
        self._warn_of_others()
        modules = self._modules()
        here = (_Buffers(modules), _Flags(modules), self._generators.here(), _Gradients(self._module))
        try:
            self._rewind()
            with plain_kernels() if self._plain else contextlib.nullcontext():
                yield self._answer()
        finally:
            for state in here:
                state.restore()

    def _modules(self) -> list[nn.Module]:
        return [] if self._module is None else list(self._module.modules())

    def _warn_of_others(self) -> None:
        now = looked_up(self._closure)
        others = [name for name, found in self._looked_up.items() if found.is_other(now.get(name))]
        if others:
            self._warn(
                f"The closure looks up {', '.join(sorted(others))} by name and finds another than at its first evaluation: the "
                "second one is of another batch. Pass what it needs as arguments, combine(closure, x, y), or bind it, "
                "lambda x=x, y=y: ..."
            )

    def _rewind(self) -> None:
        for state in (self._buffers, self._flags, self._generators):
            state.restore()

    def _answer(self) -> Answer:
        if torch.is_grad_enabled():
            return self._evaluated()
        if self._code not in self._differentiating:
            try:
                return self._evaluated()
            except RuntimeError as error:
                if not any(text in str(error) for text in NO_GRAPH) or not self._generators.can_rewind:
                    raise
            self._rewind()
        with torch.enable_grad():
            answer = self._evaluated()
        self._differentiating.add(self._code)
        return detached(answer)

    def _evaluated(self) -> Answer:
        fast_attention = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # without a graph it would take over, and round otherwise
        try:
            with self._autocast.restored():
                return self._closure(*self._args)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_attention)

    def signature(self) -> tuple[Any, ...]:
        """The dtypes and shapes of the arguments, up to the next power of two, and whether the module is training."""
        tensors = [each for each in torch.utils._pytree.tree_leaves(self._args) if isinstance(each, torch.Tensor)]
        return self._flags.training(), *((each.dtype, *(size.bit_length() for size in each.shape)) for each in tensors)


class _Buffers:
    """Every buffer of a module: which tensor it is, if any, and its contents."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [(owner, name, buffer) for owner in modules for name, buffer in owner._buffers.items()]
        self._tensors = [buffer for _, _, buffer in self._places if buffer is not None and _is_writable(buffer)]
        self._contents = [torch.empty_like(buffer) for buffer in self._tensors]
        _copy(self._contents, self._tensors)

    def restore(self) -> None:
        for owner, name, buffer in self._places:
            if owner._buffers.get(name) is not buffer:
                owner._buffers[name] = buffer
        # A graph that waits may have saved them: after an evaluation they are for it what they were.
        with _unsafe_preserve_version_counter(tuple(self._tensors)):
            _copy(self._tensors, self._contents)


def _is_writable(buffer: Tensor) -> bool:
    """Nobody writes to what is expanded from fewer numbers, nor, in training, to what was made in inference mode."""
    return not buffer.is_inference() and (buffer.numel() < 2 or 0 not in buffer.stride())


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """All of one kind at once: a list of several dtypes would be copied one by one."""
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if type(target) is Tensor and not (target.is_conj() or target.is_neg()):
            kinds.setdefault((target.device, target.dtype), []).append((target, source))
        else:  # a list of DTensors, or of such views, is refused
            target.copy_(source)
    for pairs in kinds.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class _Gradients:
    """Those of a module's parameters, set aside: a closure may have a backward pass of its own, or clear them."""

    def __init__(self, module: nn.Module | None) -> None:
        self._gradients = [] if module is None else [(p, p.grad) for p in module.parameters()]
        for p, _ in self._gradients:
            p.grad = None

    def restore(self) -> None:
        for p, gradient in self._gradients:
            p.grad = gradient


class _Flags:
    """The training flag of every submodule."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._flags = [(each, each.training) for each in modules]

    def training(self) -> bool:
        return any(training for _, training in self._flags)

    def restore(self) -> None:
        for module, training in self._flags:
            if module.training != training:
                module.training = training


class _Generators:
    """The default generators of the CPU and of every accelerator in use, and those that a closure has of its own."""

    can_rewind = True

    def __init__(self, devices: Iterable[torch.device], own: Iterable[torch.Generator]) -> None:
        self._devices = sorted({device for device in devices if device.type not in ("cpu", "meta")}, key=str)
        self._cpu = torch.get_rng_state()
        self._accelerators = [torch.get_device_module(device).get_rng_state(*_index(device)) for device in self._devices]
        self._own = [(generator, generator.get_state()) for generator in own]

    def here(self) -> "_Generators":
        return _Generators(self._devices, [generator for generator, _ in self._own])

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._accelerators, strict=True):
            torch.get_device_module(device).set_rng_state(state, *_index(device))
        for generator, state in self._own:
            generator.set_state(state)


class _CapturedGenerators:
    """The generator of a GPU in a capture, which has no state to save: it is told to draw the same again, or to go on.

    It is told once: there is no third time. A closure cannot be captured with generators of its own.
    """

    can_rewind = False

    def __init__(self, device: torch.device, again: bool = True) -> None:
        self._device, self._again = device, again

    def here(self) -> "_CapturedGenerators":
        return _CapturedGenerators(self._device, again=False)

    def restore(self) -> None:
        draw_again(self._device, self._again)


def _generators(devices: Iterable[torch.device], own: Iterable[torch.Generator]) -> _Generators | _CapturedGenerators:
    captured = [device for device in devices if is_capturing(device)]
    return _CapturedGenerators(captured[0]) if captured else _Generators(devices, own)


class _Autocast:
    """Whether and how autocast is on, for the CPU and every accelerator in use."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        types = {"cpu"} | {device.type for device in devices if device.type != "meta"}
        self._states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(types)]
        self._cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._states:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
            torch.clear_autocast_cache()  # casts of weights that have moved since
            try:
                yield
            finally:
                torch.clear_autocast_cache()


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """The device as an argument; there is only one of Apple's, and its functions take none."""
    return () if device.type == "mps" else (device,)
