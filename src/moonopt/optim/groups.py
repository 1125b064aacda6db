"""Parameter groups: from a model to groups of one kind, and loading their settings and state in place."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.errors import unknown_name
from moonopt.optim.parameters import KINDS, Placing, route_parameters

Params = nn.Module | Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]]
Group = dict[str, Any]

HALF_DTYPES = (torch.bfloat16, torch.float16)

#: Factor on the update of a matrix by its rows and columns: none (the paper), Muon's own, and the one after which the
#: update has the root mean square that AdamW's usually has.
SCALES: dict[str, Callable[[int, int], float]] = {
    "none": lambda rows, columns: 1.0,
    "spectral": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def groups_of(params: Params, rules: Mapping[str, Placing] | None, module: nn.Module | None) -> list[Group]:
    """Parameter groups as they were given, or one per kind by the routing rules."""
    if isinstance(params, nn.Module):
        routing = route_parameters(params, rules)
    else:
        given: list[Any] = list(params)
        if given and all(isinstance(each, dict) for each in given):
            if rules:
                raise ValueError("rules= needs names: pass the module or its named_parameters() instead of groups.")
            return [dict(group) for group in given]
        if not given or not all(isinstance(each, tuple) and isinstance(each[-1], Tensor) for each in given):
            raise ValueError(
                "Expected a module, its named_parameters(), or groups with a kind, found "
                f"{'a bare ' + type(given[0]).__name__ if given else 'nothing'}: without its name and module, a parameter "
                "cannot be told to be a matrix or a vector."
            )
        routing = route_parameters(given, rules, module)
    groups: list[Group] = []
    for kind in KINDS:
        if placed := routing.of_kind(kind):
            named = [(each.name, each.parameter) for each in placed]
            groups.append({"params": named, "kind": kind, "rows": [each.rows for each in placed]})
    return groups


def check_kind(group: Group) -> None:
    """Raise where a group does not say what it is."""
    if group.get("kind") not in KINDS:
        raise ValueError(
            f'A parameter group needs kind="matrix" or kind="vector", found {group.get("kind")!r}: by its shape a matrix '
            "cannot be told from an embedding. Pass the module, or its named_parameters(), to have rules tell them apart."
        )


def check_group(group: Group) -> None:
    """Raise where settings or parameters of a complete group cannot be used."""
    for name in ("lr", "weight_decay", "eps"):
        if not isinstance(group[name], Tensor) and not group[name] >= 0:
            raise ValueError(f"{name} must not be negative, found {group[name]!r}.")
    for name, values, number in (("momentum", [group["momentum"]], 1), ("betas", group["betas"], 2)):
        if len(values) != number or not all(0 <= value < 1 for value in values):
            raise ValueError(f"{name} must be at least 0 and below 1, found {group[name]!r}.")
    if group["scale"] not in SCALES:
        raise ValueError(unknown_name(str(group["scale"]), SCALES, "scale"))
    if len(group["rows"]) != len(group["params"]):
        raise ValueError(f"rows has {len(group['rows'])} entries, expected one per parameter, {len(group['params'])}.")
    for p, rows in with_rows(group):
        if not p.is_floating_point():
            raise ValueError(f"Parameters must be real floating point, found one of {p.dtype}.")
        if type(p).__name__ == "DTensor":
            raise ValueError("Sharded parameters (DTensor, as FSDP2 makes them) are not supported yet.")
        if group["kind"] == "matrix" and p.ndim < 2:
            raise ValueError(f"A matrix has at least two dimensions, found a parameter of shape {tuple(p.shape)}.")
        if rows is not None and sum(rows) != p.shape[0]:
            raise ValueError(f"The parts {rows} do not make up the {p.shape[0]} rows of a parameter.")


def with_rows(group: Group) -> list[tuple[Tensor, list[int] | None]]:
    """The parameters of a group, each with the rows of its parts if it is several matrices."""
    return list(zip(group["params"], group["rows"], strict=True))


def state_dtype(parameter: Tensor) -> torch.dtype:
    """State is kept in float32, whatever less the parameters have."""
    return torch.float32 if parameter.dtype in HALF_DTYPES else parameter.dtype


def check_loadable(groups: Sequence[Group], saved: Sequence[Group]) -> None:
    """Raise where saved groups are not those of this model, or of other tasks."""
    described = {
        "tasks": [[group["tasks"] for group in each if "tasks" in group] for each in (saved, groups)],
        "kinds of parameter groups": [[group.get("kind") for group in each] for each in (saved, groups)],
        "sizes of parameter groups": [[len(group["params"]) for group in each] for each in (saved, groups)],
    }
    for what, (found, expected) in described.items():
        if found != expected:
            raise ValueError(f"The checkpoint has other {what}: found {found}, expected {expected}.")


def load_into(current: dict[str, Any], saved: Mapping[str, Any], device: torch.device) -> None:
    """Take over saved values: tensors in place where dtype and shape agree, so that nobody's reference breaks."""
    for key, value in saved.items():
        mine = current.get(key)
        if isinstance(mine, Tensor) and isinstance(value, Tensor):
            if mine.shape != value.shape:
                raise ValueError(f"The checkpoint's {key} has shape {tuple(value.shape)}, expected {tuple(mine.shape)}.")
            if mine.dtype == value.dtype:
                mine.copy_(value)
                continue
        if isinstance(mine, Tensor) and isinstance(value, int | float):
            mine.fill_(value)
        elif isinstance(value, Tensor):
            current[key] = value.to(device, copy=True)
        else:
            current[key] = deepcopy(value)
