"""What a closure takes from outside of its arguments: the tensors that it finds by name, and the generators that it has."""

import contextlib
import dis
import functools
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: A batch has no more parts than this: longer lists are not looked through.
SMALL_BATCH = 16

#: A closure's functions are looked into, but not more of them.
MOST_FUNCTIONS = 16

_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_OUTSIDE = ("GLOBAL", "NAME", "DEREF")  # the kinds of names in a function's code that may be of something outside of it


def body_of(closure: object) -> object:
    """What stands for the text of a closure, whatever arguments it is bound to."""
    while isinstance(closure, functools.partial):
        closure = closure.func
    return getattr(closure, "__code__", type(closure))


class _Found(NamedTuple):
    """What a name stands for: a tensor, or a batch of some."""

    number: int  # of the object
    tensors: tuple[weakref.ref[Tensor], ...]

    def is_other(self, later: "_Found | None") -> bool:
        """A list that has only grown is the same."""
        if later is None or self.number == later.number:
            return False
        pairs = zip(self.tensors, later.tensors, strict=False)
        return len(self.tensors) != len(later.tensors) or any(before() is not now() for before, now in pairs)


def looked_up(closure: object) -> dict[str, _Found]:
    """The tensors, and small batches of them, that a function finds by name when it is called, outside of itself."""
    found = {name: _Found(id(value), _weakly(value)) for name, value in _named(closure).items()}
    return {name: each for name, each in found.items() if each.tensors}


def own_generators(closure: object, args: tuple[Any, ...], modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """Those that it may draw from.

    They are looked for among arguments and defaults, among what it and the functions that it calls by name find by name, and
    among the attributes of modules, of what it is a method of, and of what it finds.
    """
    values: list[object] = list(args)
    owners: list[object] = [each for each in modules if not type(each).__module__.startswith("torch.nn.modules.")]  # have none
    functions, known = [closure], set[int]()
    while functions and len(known) < MOST_FUNCTIONS:
        function = functions.pop()
        while isinstance(function, functools.partial):
            values += [*function.args, *function.keywords.values()]
            function = function.func
        if id(function) in known:
            continue
        known.add(id(function))
        values += getattr(function, "__defaults__", None) or ()
        values += (getattr(function, "__kwdefaults__", None) or {}).values()
        owners.append(function.__self__ if isinstance(function, types.MethodType) else function)
        found = [each for each in _named(function).values() if not isinstance(each, types.ModuleType | type | Tensor)]
        values += found
        functions += [each for each in found if isinstance(each, _CALLED) and not _is_of_torch(each)]
        owners += [each for each in found if not isinstance(each, _CALLED)]
    parts = [part for value in values for part in _parts(value)]
    parts += [value for owner in owners for value in _attributes(owner)]
    return list(dict.fromkeys(each for each in parts if type(each) is torch.Generator))  # isinstance takes 15 times as long


def _attributes(owner: object) -> Iterable[object]:
    try:
        return owner.__dict__.values()
    except Exception:  # it has none, or stands for something that is not there
        return ()


def _is_of_torch(function: Any) -> bool:
    return getattr(function, "__module__", None) is not None and function.__module__.partition(".")[0] == "torch"


def _named(closure: object) -> dict[str, Any]:
    """What a function finds by name outside of itself."""
    code = getattr(closure, "__code__", None)
    if code is None:
        return {}
    around, names = getattr(closure, "__globals__", {}), _read_names(code)
    values = {name: around[name] for name in names if name in around}
    for name, cell in zip(code.co_freevars, getattr(closure, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # that has no value yet
            values |= {name: cell.cell_contents} if name in names else {}
    return values


@functools.lru_cache(maxsize=256)
def _read_names(code: types.CodeType) -> frozenset[str]:
    """The names that are read in it, of globals and of what is around; not those of attributes, nor what it writes itself."""
    inside = [each for each in code.co_consts if isinstance(each, types.CodeType)]  # comprehensions and inner functions
    own = _names(code, "STORE").union(code.co_cellvars)
    return frozenset(_names(code, "LOAD").union(*map(_read_names, inside)) - own)


def _names(code: types.CodeType, verb: str) -> set[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname in {f"{verb}_{kind}" for kind in _OUTSIDE}}


def _weakly(value: object) -> tuple[weakref.ref[Tensor], ...]:
    """The tensors in it."""
    return tuple(weakref.ref(each) for each in _parts(value) if isinstance(each, Tensor))


def _parts(value: object) -> Sequence[object]:
    """Of a small batch; or else the value itself."""
    parts = list(value.values()) if type(value) is dict else value
    if not isinstance(parts, list | tuple):
        return (value,)
    return parts if len(parts) <= SMALL_BATCH else ()
