"""Methods by name: a balancer with an optimizer, MOON or Muon, with the conventions of a protocol."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from moonopt.balance import (
    DWA,
    FAMO,
    IMTLG,
    LS,
    MGDA,
    RLW,
    SI,
    STL,
    UW,
    Balanced,
    Balancer,
    CAGrad,
    GradDrop,
    GradNorm,
    NashMTL,
    PCGrad,
)
from moonopt.errors import unknown_name
from moonopt.optim.moon import MOON
from moonopt.optim.muon import Muon
from moonopt.tasks.losses import task_names

Protocol = Literal["paper", "nash-mtl", "famo"]

#: The balancers by name.
BALANCERS: dict[str, type[Balancer]] = {
    each.name: each for each in (STL, LS, SI, RLW, DWA, UW, GradNorm, MGDA, PCGrad, GradDrop, CAGrad, IMTLG, NashMTL, FAMO)
}

#: Where public codes differ, by protocol: what is not here is the balancer's default, and the same everywhere.
#: "paper" takes every method as its own paper has it, without factors of K that match a summed loss (LS is the mean), and no
#: clipping but Nash-MTL's. The MOON paper does not state its own.
PROTOCOLS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {"nash-mtl": {"max_norm": 1.0}},
    "nash-mtl": {
        "ls": {"reduction": "sum"},
        "si": {"reduction": "sum"},
        "dwa": {"reduction": "mean"},
        "mgda": {"times_tasks": True},
        "cagrad": {"times_tasks": True},
        "nash-mtl": {"max_norm": 1.0},
    },
}
PROTOCOLS["famo"] = PROTOCOLS["nash-mtl"] | {"famo": {"max_norm": 1.0}}

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": lambda model, **settings: torch.optim.Adam(model.parameters(), **_fused(settings)),
    "muon": Muon,
}


def _fused(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All of Adam in one kernel, unless something else was asked for."""
    chosen = settings.get("differentiable") or any(settings.get(form) is not None for form in ("fused", "foreach"))
    return dict(settings) if chosen else {**settings, "fused": True}


#: What takes the settings of an optimizer, by name.
_TAKES: dict[str, type] = {"adam": torch.optim.Adam, "muon": Muon, "moon": MOON}


def _takes(name: str) -> type:
    """What takes the settings of a method's optimizer."""
    base, _, inner = name.partition("+")
    return _TAKES[inner or ("adam" if base in BALANCERS else base)]


def build(
    name: str,
    model: nn.Module,
    tasks: int | Sequence[str],
    *,
    balancer: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    protocol: Protocol = "paper",
    **options: Any,
) -> Muon | Balanced:
    """The method of a name: "moon", "muon", a balancer such as "nash-mtl" (with Adam), or that with Muon, "nash-mtl+muon".

    Args:
        name: see ``METHODS``.
        model: whose parameters to train.
        tasks: their names, or how many.
        balancer: settings of the balancer, over those of the protocol.
        optimizer: settings of the optimizer: Adam's (``lr=1e-3`` by default), Muon's or MOON's.
        protocol: which conventions: see ``PROTOCOLS``.
        options: of ``Balanced``: engine, every, shared, nonfinite.

    >>> build("famo+muon", nn.Linear(3, 3), 3, balancer={"gamma": 0.01}).balancer.gamma
    0.01

    """
    if protocol not in PROTOCOLS:
        raise ValueError(unknown_name(protocol, tuple(PROTOCOLS), "protocol"))
    base, _, inner = name.partition("+")
    if name not in METHODS:
        raise ValueError(unknown_name(name, METHODS, "method"))
    if not isinstance(model, nn.Module):
        raise ValueError(f"build needs the model itself, an nn.Module; found {type(model).__name__}.")
    _check_optimizer(_takes(name), optimizer, options)
    if base in ("moon", "muon"):
        if balancer or options:
            raise ValueError(f"{name} has no balancer: found settings {', '.join([*(balancer or {}), *options])}.")
        settings = dict(optimizer or {})
        return MOON(model, tasks=tasks, **settings) if base == "moon" else Muon(model, **settings)
    chosen = PROTOCOLS[protocol].get(base, {}) | dict(balancer or {})
    _check_settings(chosen, BALANCERS[base], f"setting of {base}")
    _check_settings(options, Balanced, "option of Balanced")
    return Balanced(
        BALANCERS[base](task_names(tasks), **chosen),
        OPTIMIZERS[inner or "adam"](model, **(optimizer or {})),
        module=model,
        **options,
    )


def by_optimizer(adam: Mapping[str, Any], muon: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """For every method, the settings for the optimizer that it updates by; MOON's are Muon's.

    >>> rates = by_optimizer({"optimizer.lr": 1e-3}, {"optimizer.lr": 1e-2})
    >>> [rates[name]["optimizer.lr"] for name in ("famo", "famo+muon", "moon")]
    [0.001, 0.01, 0.01]
    """
    return {name: adam if _takes(name) is torch.optim.Adam else muon for name in METHODS}


def known_settings(name: str, protocol: Protocol = "paper") -> dict[str, inspect.Parameter]:
    """What ``build`` takes for a method, by section: "optimizer.lr", "balancer.c", "method.engine"; with its default and type.

    >>> known_settings("cagrad")["balancer.c"].default
    0.4
    """
    if protocol not in PROTOCOLS:
        raise ValueError(unknown_name(protocol, tuple(PROTOCOLS), "protocol"))
    if name not in METHODS:
        raise ValueError(unknown_name(name, METHODS, "method"))
    base, _, _ = name.partition("+")
    found = _section("optimizer", _takes(name))
    if base not in BALANCERS:
        return found
    chosen = {f"balancer.{key}": value for key, value in PROTOCOLS[protocol].get(base, {}).items()}
    balancer = _section("balancer", BALANCERS[base])
    balancer |= {key: balancer[key].replace(default=value) for key, value in chosen.items()}
    options = _section("method", Balanced) | {
        "method.protocol": inspect.Parameter("protocol", inspect.Parameter.KEYWORD_ONLY, default=protocol, annotation=Protocol)
    }
    return found | balancer | options


def _section(name: str, takes: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(takes, eval_str=True).parameters
    return {f"{name}.{key}": parameter for key, parameter in parameters.items() if key not in (*_GIVEN, "shared")}


#: What ``build`` gives. ``shared``, which are parameters, a user may give, but it is no setting.
_GIVEN = ("params", "tasks", "balancer", "optimizer", "module")


def _check_optimizer(kind: type, settings: object, options: Mapping[str, Any]) -> None:
    if settings is not None and not isinstance(settings, Mapping):
        raise ValueError(
            f'optimizer= has settings, such as {{"lr": 1e-3}}; found {type(settings).__name__}. '
            "For an optimizer of your own there is Balanced(balancer, optimizer)."
        )
    _check_settings(settings or {}, kind, f"setting of {kind.__name__}")
    own = inspect.signature(Balanced).parameters
    misplaced = [name for name in inspect.signature(kind).parameters if name in options and name not in own]
    if misplaced:
        found = ", ".join(f'"{name}": {options[name]!r}' for name in misplaced)
        raise ValueError(f"Settings of {kind.__name__} go into optimizer={{{found}}}.")


def _check_settings(settings: Mapping[str, Any], of: type, what: str) -> None:
    known = [name for name in inspect.signature(of).parameters if name not in _GIVEN]
    for name in settings:
        if name not in known:
            raise ValueError(unknown_name(name, known, what))


#: Every name that ``build`` knows.
METHODS: tuple[str, ...] = ("moon", "muon", *BALANCERS, *(f"{name}+muon" for name in BALANCERS))
