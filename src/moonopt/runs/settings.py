"""Settings of a run: every key with its value and where that comes from, checked once, here.

The sections: ``model.*`` and ``data.*`` belong to the benchmark, ``train.*`` to the training loop, ``optimizer.*``,
``balancer.*`` and ``method.*`` to the method.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import nn

from moonopt.bench import Benchmark
from moonopt.bench.base import section_of
from moonopt.bench.registry import import_object
from moonopt.errors import UserError, unknown_name
from moonopt.methods import METHODS, build, known_settings
from moonopt.runs.schedules import read_schedule
from moonopt.runs.select import Selection
from moonopt.tasks.verbs import TaskOptimizer

Layer = tuple[str, Mapping[str, Any]]  # where settings come from, and the settings


@dataclass(frozen=True)
class Setting:
    """A value with where it comes from."""

    value: Any
    source: str


def resolve(bench: type[Benchmark], method: str, layers: Sequence[Layer] = ()) -> dict[str, Setting]:
    """Every setting of a method on a benchmark; a later layer overrides an earlier one."""
    protocol = "paper"
    for source, values in layers:
        protocol = values.get("method.protocol", protocol)
        if not isinstance(protocol, str):
            raise UserError(f"method.protocol must be a name, found {protocol!r} in {source}.")
    known = _known(bench, method, protocol)
    settings = {key: Setting(_normal(each.annotation, each.default), each.source) for key, each in known.items()}
    for source, values in [*_suggested(bench, method, known), *layers]:
        for key, value in values.items():
            if key not in known:
                raise UserError(unknown_name(key, tuple(known), f"setting of {method} on {bench.name}"))
            if not _accepts(known[key].annotation, value):
                raise UserError(f"{key} must be {_words(known[key].annotation)}, found {value!r} in {source}.")
            settings[key] = Setting(_normal(known[key].annotation, value), source)
    _check_training({key: each.value for key, each in settings.items()})
    return settings


def make_method(method: str, model: nn.Module, tasks: Sequence[str], settings: Mapping[str, Any]) -> TaskOptimizer:
    """The method with its settings; what a constructor refuses is the user's to mend."""
    sections = {name: section_of(settings, name) for name in ("optimizer", "balancer", "method")}
    dtype = sections["optimizer"].get("polar_dtype")
    if isinstance(dtype, str):
        sections["optimizer"]["polar_dtype"] = getattr(torch, dtype)
    try:
        if method not in METHODS:
            made: TaskOptimizer = find_method(method)(model, tasks, **sections["optimizer"])
            return made
        optimizer, balancer = sections["optimizer"], sections["balancer"]
        return build(method, model, tasks, balancer=balancer, optimizer=optimizer, **sections["method"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{method}: {error}") from error


def find_method(location: str) -> Callable[..., Any]:
    """A user's method, ``module:name``: called with model, tasks and its settings, it returns an optimizer with the verbs."""
    if ":" not in location:
        raise UserError(unknown_name(location, METHODS, "method") + " Your own is given as module:name.")
    found = import_object(location, "method")
    if not callable(found):
        raise UserError(f"{location} must be callable as name(model, tasks, **settings), found {found!r}.")
    return found  # type: ignore[no-any-return]


def parse(text: str) -> tuple[str, Any]:
    """A setting of the command line, ``key=value``. The value is JSON, or a word.

    >>> parse("optimizer.lr=1e-3"), parse("train.schedule=constant")
    (('optimizer.lr', 0.001), ('train.schedule', 'constant'))
    """
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise UserError(f"A setting is written key=value, for example optimizer.lr=0.01; found {text!r}.")
    return key, read_value(value)


def read_value(text: str) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def read_file(path: Path) -> dict[str, Any]:
    """Settings of a JSON file: a flat object of keys and values, or a ``config.json``, whose settings are taken."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.") from error
    if isinstance(found, dict) and isinstance(found.get("settings"), dict):
        found = found["settings"]
    if not isinstance(found, dict):
        raise UserError(f'{path} must hold an object such as {{"optimizer.lr": 0.01}}, found a {type(found).__name__}.')
    return found


@dataclass(frozen=True)
class _Known:
    """A key that may be set."""

    default: Any
    annotation: Any
    source: str


def _known(bench: type[Benchmark], method: str, protocol: str) -> dict[str, _Known]:
    found = {}
    for key, default in bench.all_defaults().items():
        source = bench.name if key in bench.defaults else "training loop"
        found[key] = _Known(default, _ANNOTATIONS.get(key, Any if default is None else type(default)), source)
    for key, parameter in _method_settings(method, protocol).items():
        found[key] = _Known(parameter.default, parameter.annotation, f"{method}'s default")
    return found


def _suggested(bench: type[Benchmark], method: str, known: Mapping[str, _Known]) -> list[Layer]:
    """What the benchmark has found for the method; a pattern such as ``*+muon`` may cover methods that lack some of it."""
    fitting = [(pattern, values) for pattern, values in bench.tuned.items() if fnmatchcase(method, pattern)]
    return [
        (f"{bench.name}'s choice for {pattern}", {key: value for key, value in values.items() if key in known})
        for pattern, values in fitting
    ]


def _method_settings(method: str, protocol: str) -> dict[str, inspect.Parameter]:
    if method in METHODS:
        try:
            return known_settings(method, protocol)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(str(error)) from error
    parameters = list(inspect.signature(find_method(method), eval_str=True).parameters.values())[2:]
    taken = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    for each in taken:
        if each.default is each.empty:
            raise UserError(f"{method} needs a default for its argument {each.name!r}, which is then optimizer.{each.name}.")
        try:
            json.dumps(_plain(each.default))
        except TypeError as error:
            raise UserError(f"{method}: the default of {each.name!r} must be plain JSON, found {each.default!r}.") from error
    return {f"optimizer.{each.name}": each for each in taken}


def _check_training(settings: Mapping[str, Any]) -> None:
    for key in ("epochs", "batch_size", "log_every", "evaluate_every", "steps_per_epoch"):
        value = settings[f"train.{key}"]
        if value is not None and value < 1:
            raise UserError(f"train.{key} must be at least 1, found {value}.")
    read_schedule(settings["train.schedule"])
    Selection.read(settings["train.select"], has_validation=True)


#: Of settings whose default does not say what else they take.
_ANNOTATIONS: dict[str, Any] = {"train.steps_per_epoch": int | None}

_DTYPES = ("float64", "float32", "bfloat16", "float16")


def _accepts(annotation: Any, value: Any) -> bool:
    """Whether a value that was read from JSON may stand for an argument of that type."""
    if annotation is Any or annotation is inspect.Parameter.empty:
        return True
    origin, choices = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(_accepts(choice, value) for choice in choices)
    if origin is Literal:
        return value in choices
    if annotation is torch.dtype:
        return value in _DTYPES
    if annotation in (None, NoneType):
        return value is None
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # NaN is no setting
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is tuple:
        return isinstance(value, list | tuple) and (
            Ellipsis in choices
            or (len(value) == len(choices) and all(_accepts(each, part) for each, part in zip(choices, value, strict=True)))
        )
    plain = origin or annotation
    if plain in (list, tuple, Sequence):
        return isinstance(value, list | tuple)
    return isinstance(plain, type) and isinstance(value, plain)


_WORDS = {float: "a number", int: "a whole number", str: "a word", bool: "true or false", NoneType: "null", None: "null"}


def _words(annotation: Any) -> str:
    """A type as a user would say it."""
    origin, choices = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_words(choice) for choice in choices if choice is not torch.Tensor)
    if origin is Literal or annotation is torch.dtype:
        return "one of " + ", ".join(map(str, choices or _DTYPES))
    if origin is tuple and Ellipsis not in choices:
        return f"a list of {len(choices)}"
    return _WORDS.get(annotation, "an object" if origin else f"a {getattr(annotation, '__name__', annotation)}")


def _normal(annotation: Any, value: Any) -> Any:
    """One form for equal values: 1 is 1.0 where a number need not be whole."""
    choices = get_args(annotation) or (annotation,)
    if isinstance(value, int) and not isinstance(value, bool) and float in choices and int not in choices:
        return float(value)
    return _plain(value)


def _plain(value: Any) -> Any:
    """As JSON has it: tuples are lists."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
