"""Parameter groups: from a model to groups of one kind, and loading their settings and state in place."""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from moonopt.errors import unknown_name
from moonopt.optim.parameters import KINDS, Placement, Placing, route_parameters
from moonopt.tasks.directional import Rate
from moonopt.tasks.losses import HALF_DTYPES

Params = nn.Module | Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]]
Group = dict[str, Any]

#: Factor on the update of a matrix by its rows and columns: none (the paper), Muon's own, and the one after which the
#: update has the root mean square that AdamW's usually has.
SCALES: dict[str, Callable[[int, int], float]] = {
    "none": lambda rows, columns: 1.0,
    "spectral": lambda rows, columns: math.sqrt(max(1.0, rows / max(1, columns))),
    "rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def groups_of(params: Params, rules: Mapping[str, Placing] | None, module: nn.Module | None) -> list[Group]:
    """Parameter groups as they were given, or one per kind by the routing rules."""
    if isinstance(params, nn.Module):
        _refuse_flattened(params.parameters())
        routing = route_parameters(params, rules)
    else:
        given: list[Any] = list(params)
        if given and all(isinstance(each, dict) for each in given):
            if rules:
                raise ValueError("rules= needs names: pass the module or its named_parameters() instead of groups.")
            return [dict(group) for group in given]
        routing = route_parameters(given, rules, module)
        _refuse_flattened(p for _, p in given)
    if not routing.placements:
        raise ValueError("Found no parameter that requires a gradient.")
    return _by_kind(routing.placements)


def _refuse_flattened(parameters: Iterable[Tensor]) -> None:
    """Raise where FSDP1 has left no matrix its shape; with NO_SHARD and ``use_orig_params=True`` it leaves all of them."""
    flattened = [p for p in parameters if getattr(p, "_fsdp_flattened", False)]  # of torch.distributed.fsdp
    if flattened and all(p.ndim < 2 for p in flattened):
        raise ValueError(
            "Sharded parameters (flattened, as FullyShardedDataParallel makes them) are not supported yet: no matrix can be "
            'told among them. Vectors alone can be trained as groups with kind="vector".'
        )


def _by_kind(placements: Sequence[Placement]) -> list[Group]:
    groups: list[Group] = []
    for kind in KINDS:
        if placed := [each for each in placements if each.kind == kind]:
            named = [(each.name, each.parameter) for each in placed]
            groups.append({"params": named, "kind": kind, "rows": [each.rows for each in placed]})
    return groups


def routed_groups(
    group: Group, module: nn.Module | None, rules: Mapping[str, Placing] | None, trained: Container[Tensor]
) -> list[Group]:
    """A group without a kind as one for each kind, where all its parameters have names and are the module's; else none.

    Parameters that are trained already stay where they are. ``lr`` and ``weight_decay`` are for matrices, ``vector_lr`` and
    ``vector_weight_decay`` for vectors.
    """
    params = group["params"]
    known = set(module.parameters()) if module is not None else set()
    if module is None or not params or not all(isinstance(each, tuple) and each[1] in known for each in params):
        return []
    wanted = {p for _, p in params if p not in trained}
    placed = [each for each in route_parameters(module, rules).placements if each.parameter in wanted]
    if not placed:
        raise ValueError("Found no parameter in this group that requires a gradient and is not trained already.")
    given = {key: value for key, value in group.items() if key != "params"}
    for_vectors = {key.removeprefix("vector_"): given.pop(key) for key in ("vector_lr", "vector_weight_decay") if key in given}
    others = {key: value for key, value in given.items() if key not in ("lr", "weight_decay")}
    return [each | (given if each["kind"] == "matrix" else others | for_vectors) for each in _by_kind(placed)]


def named_as(groups: Sequence[Group], group: Group) -> Group:
    """The group with made-up names, where the others have names and it has none: torch wants all or none."""
    params = group["params"]
    unnamed = not any(isinstance(each, tuple) for each in params)
    if unnamed and any("param_names" in other for other in groups):
        params = [(f"group{len(groups)}.{index}", p) for index, p in enumerate(params)]
    return group | {"params": params}


def check_one_device(groups: Sequence[Group]) -> None:
    devices = {str(p.device) for group in groups for p in group["params"]}
    if len(devices) > 1:
        raise ValueError(f"All parameters must be on one device, found {', '.join(sorted(devices))}.")


def check_kind(group: Group) -> None:
    """Raise where a group does not say what it is."""
    if group.get("kind") not in KINDS:
        raise ValueError(
            f'A parameter group needs kind="matrix" or kind="vector", found {group.get("kind")!r}: by its shape a matrix '
            "cannot be told from an embedding. Pass the model itself to have rules tell them apart, or named_parameters() in "
            "each group and module=model."
        )


def check_group(group: Group) -> None:
    """Raise where settings or parameters of a complete group cannot be used."""
    prefix = "vector_" if group["kind"] == "vector" else ""
    for name in ("lr", "weight_decay"):
        check_number(prefix + name, group[name])
    check_number("vector_eps", group["eps"])
    check_number("momentum", group["momentum"], below=1.0)
    if not isinstance(group["betas"], Sequence) or len(group["betas"]) != 2:
        raise ValueError(f"vector_betas must be two numbers, found {group['betas']!r}.")
    for beta in group["betas"]:
        check_number("vector_betas", beta, below=1.0)
    if group["scale"] not in SCALES:
        raise ValueError(unknown_name(str(group["scale"]), SCALES, "scale"))
    if not group["params"]:
        raise ValueError(f"A {group['kind']} parameter group has no parameters.")
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


def check_number(name: str, value: object, below: float = math.inf) -> None:
    """Raise where a setting is not a number from 0 on; a tensor is not looked at, which would wait for it."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        limit = f" and below {below:g}" if below < math.inf else ""
        raise ValueError(f"{name} must be a number of at least 0{limit}, found {value!r}.")


def with_rows(group: Group) -> list[tuple[Tensor, list[int] | None]]:
    """The parameters of a group, each with the rows of its parts if it is several matrices."""
    return list(zip(group["params"], group["rows"], strict=True))


def rate_of(group: Group) -> Rate:
    """The learning rate: a number, or a tensor on the parameters' device. A tensor on the host is read without waiting."""
    rate: Rate = group["lr"]
    if isinstance(rate, Tensor) and rate.device.type == "cpu" and group["params"][0].device.type != "cpu":
        return float(rate)
    return rate


def state_dtype(parameter: Tensor) -> torch.dtype:
    """State is kept in float32, whatever less the parameters have."""
    return torch.float32 if parameter.dtype in HALF_DTYPES else parameter.dtype


def load_groups(groups: Sequence[Group], state: Mapping[Tensor, dict[str, Any]], saved: Mapping[str, Any]) -> None:
    """Take over the settings and the state of a checkpoint in place, or nothing of it."""
    _check_loadable(groups, state, saved)
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        device = group["params"][0].device
        for p, key in zip(group["params"], saved_group["params"], strict=True):
            load_into(state[p], saved["state"].get(key, {}), device)
        load_into(group, {name: value for name, value in saved_group.items() if name != "params"}, device)


def _check_loadable(groups: Sequence[Group], state: Mapping[Tensor, dict[str, Any]], saved: Mapping[str, Any]) -> None:
    """Raise, before anything is loaded, where a checkpoint is of another model, optimizer or other tasks."""
    saved_groups = saved["param_groups"]
    described: dict[str, Callable[[Sequence[Group]], list[Any]]] = {
        "kinds of parameter groups": lambda each: [group.get("kind") for group in each],
        "sizes of parameter groups": lambda each: [len(group["params"]) for group in each],
        "tasks": lambda each: [group["tasks"] for group in each if "tasks" in group],
    }
    for what, describe in described.items():
        found, expected = describe(saved_groups), describe(groups)
        if found != expected:
            raise ValueError(f"The checkpoint has other {what}: found {found}, expected {expected}.")
    for group, saved_group in zip(groups, saved_groups, strict=True):
        for p, key in zip(group["params"], saved_group["params"], strict=True):
            for name, value in saved["state"].get(key, {}).items():
                mine = state[p].get(name)
                if isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.shape != value.shape:
                    raise ValueError(f"The checkpoint's {name} has shape {tuple(value.shape)}, expected {tuple(mine.shape)}.")


def load_into(current: dict[str, Any], saved: Mapping[str, Any], device: torch.device) -> None:
    """Take over saved values: tensors in place where dtype and shape agree, so that nobody's reference breaks."""
    for key, value in saved.items():
        mine: Any = current.get(key)
        both = isinstance(mine, Tensor) and isinstance(value, Tensor)
        if both and (mine.dtype, mine.shape) == (value.dtype, value.shape) and (mine.device == device or key == "lr"):
            mine.copy_(value)  # a learning rate may stay on the host
        elif isinstance(mine, Tensor) and isinstance(value, int | float):
            mine.fill_(value)
        elif isinstance(value, Tensor):
            current[key] = value.to(device, copy=True)
        else:
            current[key] = deepcopy(value)
