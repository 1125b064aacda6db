"""What is a matrix, and why: the table that sends every parameter to the orthonormal update or to AdamW.

A matrix is the weight of a linear map. What looks like one but is a table of vectors (embeddings), a bundle of small
filters (depthwise convolutions) or the last map to the outputs (heads) is left to AdamW. Rules are data, first match first.
"""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from moonopt.errors import unknown_name

Kind = Literal["matrix", "vector"]
KINDS: tuple[Kind, ...] = ("matrix", "vector")


class Split:
    """Rows of one parameter that are several matrices: fused projections, gates of recurrent cells.

    ``Split(3)`` is three equal parts, ``Split(2048, 512, 512)`` parts with so many rows.
    """

    def __init__(self, *sizes: int) -> None:
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"Split needs positive numbers, found {sizes}.")
        self.sizes = sizes

    def rows(self, total: int) -> list[int]:
        """How many rows each part has, of ``total``."""
        if len(self.sizes) > 1:
            if sum(self.sizes) != total:
                raise ValueError(f"{self} has {sum(self.sizes)} rows in all, the parameter {total}.")
            return list(self.sizes)
        if total % self.sizes[0]:
            raise ValueError(f"{self} asks for {self.sizes[0]} equal parts, the parameter has {total} rows.")
        return [total // self.sizes[0]] * self.sizes[0]

    def __repr__(self) -> str:
        return f"Split({', '.join(map(str, self.sizes))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Split) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)


Placing = Literal["matrix", "vector"] | Split


class Placement(NamedTuple):
    """Where one parameter goes."""

    name: str
    parameter: nn.Parameter
    kind: Kind
    rows: list[int] | None  # of each part, where the parameter is several matrices
    reason: str


class Routing(NamedTuple):
    """Where all parameters go. Printed, it is a table with the reason for each and the matrix share."""

    placements: tuple[Placement, ...]

    @property
    def matrix_share(self) -> float:
        """The part of all parameters that is in matrices, between 0 and 1."""
        total = sum(each.parameter.numel() for each in self.placements)
        return sum(each.parameter.numel() for each in self.of_kind("matrix")) / max(1, total)

    def of_kind(self, kind: Kind) -> list[Placement]:
        return [each for each in self.placements if each.kind == kind]

    def __str__(self) -> str:
        lines = [
            (each.name, "x".join(map(str, each.parameter.shape)) or "scalar", each.kind, each.reason)
            for each in self.placements
        ]
        widths = [max((len(line[column]) for line in lines), default=0) for column in range(3)]
        table = "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[3]]) for line in lines
        )
        total = sum(each.parameter.numel() for each in self.placements)
        return f"{table}\n{self.matrix_share:.2%} of {total:,} parameters are in matrices"

    def __repr__(self) -> str:  # in a notebook; not all numbers of all parameters
        return str(self)


class Rule(NamedTuple):
    """One line of the table. Every condition that is given must hold."""

    kind: Kind
    reason: str
    owner: tuple[type[nn.Module], ...] = ()  # the module that the parameter belongs to
    owner_name: str = ""  # its class name, for classes of packages that may be absent
    parameter: str = "*"  # pattern for the parameter's name within its module
    path: tuple[str, ...] = ()  # patterns for any component of the full name
    first: str = "*"  # pattern for the first component
    unless: tuple[str, ...] = ()  # components that the path's patterns do not mean
    shape: Callable[[torch.Size], bool] | None = None
    when: Callable[[nn.Module], bool] | None = None  # asked of the owner
    split: Split | Callable[[nn.Module], Split | None] | None = None


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _depthwise(owner: nn.Module) -> bool:
    return bool(owner.groups > 1 and owner.groups == owner.in_channels)  # type: ignore[operator]


def _by_groups(owner: nn.Module) -> Split | None:
    return Split(owner.groups) if isinstance(owner.groups, int) and owner.groups > 1 else None


def _three_squares(shape: torch.Size) -> bool:
    return len(shape) == 2 and shape[0] == 3 * shape[1]


_NO_HEADS = ("*multihead*", "*multi_head*", "*overhead*")
_NOT_A_LINEAR_MAP = Rule("vector", "fewer than two dimensions", shape=lambda shape: len(shape) < 2)
_BY_NAME = (
    Rule("vector", "prediction head, by name", path=("*head*", "*classifier*", "score", "logits"), unless=_NO_HEADS),
    Rule("vector", "prediction head, by name", first="fc"),  # of torchvision's convolutional networks
    Rule("vector", "embedding, by name", path=("*embed*", "*emb", "emb_*", "conv_proj")),
)

#: For parameters whose module is known.
RULES: tuple[Rule, ...] = (
    _NOT_A_LINEAR_MAP,
    Rule("vector", "embedding", owner=(nn.Embedding, nn.EmbeddingBag)),
    Rule("vector", "depthwise convolution", owner=_CONVOLUTIONS, when=_depthwise),
    *_BY_NAME,
    Rule("matrix", "fused attention projections", (nn.MultiheadAttention,), parameter="in_proj_weight", split=Split(3)),
    Rule("matrix", "attention projection", (nn.MultiheadAttention,), parameter="[qkv]_proj_weight"),
    Rule("matrix", "four gates", (nn.LSTM, nn.LSTMCell), parameter="weight_[ih]h*", split=Split(4)),
    Rule("matrix", "three gates", (nn.GRU, nn.GRUCell), parameter="weight_[ih]h*", split=Split(3)),
    Rule("matrix", "recurrent weight", (nn.RNNBase, nn.RNNCellBase), parameter="weight_*"),
    Rule("matrix", "fused attention projections", (nn.Linear,), path=("*qkv*",), shape=_three_squares, split=Split(3)),
    Rule("matrix", "linear weight", (nn.Linear,), parameter="weight"),
    Rule("matrix", "linear weight", owner_name="Conv1D", parameter="weight"),  # of transformers
    Rule(
        "matrix",
        "convolution as (out, in * kernel)",
        (nn.Conv1d, nn.Conv2d, nn.Conv3d),
        parameter="weight",
        split=_by_groups,
    ),
    Rule("matrix", "transposed convolution as (in, out * kernel)", _CONVOLUTIONS, parameter="weight", split=_by_groups),
    Rule("vector", "free parameter"),
)

#: For parameters of which only name and shape are known.
RULES_WITHOUT_MODULE: tuple[Rule, ...] = (
    _NOT_A_LINEAR_MAP,
    *_BY_NAME,
    Rule("vector", "embedding, by name", path=("*token", "pos", "position", "positions")),
    Rule("matrix", "fused attention projections, by name", parameter="in_proj_weight", split=Split(3)),
    Rule("matrix", "two dimensions", shape=lambda shape: len(shape) == 2),
    Rule("matrix", "convolution, by shape", parameter="*weight", shape=lambda shape: min(shape[:2]) > 1),
    Rule("vector", "neither a matrix nor a convolution, by shape"),
)


def route_parameters(
    params: nn.Module | Iterable[tuple[str, nn.Parameter]],
    rules: Mapping[str, Placing] | None = None,
    module: nn.Module | None = None,
) -> Routing:
    """Decide for every trainable parameter whether it is a matrix.

    Args:
        params: a module, or ``named_parameters()``; then pass ``module``, too, or only names and shapes decide.
        rules: overrides, from a pattern for the name of a parameter or module to "matrix", "vector" or ``Split``.
        module: the owner of ``named_parameters()``.

    Tied weights count once, and are vectors if any of their places says so. Frozen parameters are left out.

    >>> print(route_parameters(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))))
    0.weight  3x4  matrix  linear weight
    0.bias    3    vector  fewer than two dimensions
    1.weight  3    vector  fewer than two dimensions
    1.bias    3    vector  fewer than two dimensions
    57.14% of 21 parameters are in matrices

    """
    if isinstance(params, nn.Module):
        module, named = params, list(params.named_parameters())
    else:
        given = list(params)
        if not all(isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], Tensor) for each in given):
            raise ValueError(
                f"Expected a model or its named_parameters(), found a bare {type(given[0]).__name__}: without its name and "
                "module a parameter cannot be told to be a matrix or a vector. Pass the model itself, or named_parameters() "
                "with module=model, or groups with a kind."
            )
        named = list({p: (name, p) for name, p in given}.values())  # tied weights once
    places = _places(module)
    overrides = _Overrides(rules or {})
    placements = [overrides.apply(name, p) or _placed(name, p, places.get(p, [(name, None)])) for name, p in named]
    overrides.check_used([name for name, _ in named])
    return Routing(tuple(each for each in placements if each.parameter.requires_grad))


def blocks(tensor: Tensor, rows: Sequence[int] | None) -> list[Tensor]:
    """The matrices that a tensor of a matrix parameter's shape is made of, as (rows, everything else)."""
    matrix = tensor if tensor.ndim == 2 else tensor.flatten(1)
    return [matrix] if rows is None else list(torch.split(matrix, list(rows)))


def joined(matrices: Sequence[Tensor], rows: Sequence[Sequence[int] | None], parameters: Sequence[Tensor]) -> list[Tensor]:
    """The other way round: the matrices of each parameter, one below the other, in its shape."""
    remaining = iter(matrices)
    counts = [1 if of is None else len(of) for of in rows]
    together = [next(remaining) if n == 1 else torch.cat([next(remaining) for _ in range(n)]) for n in counts]
    return [each if each.shape == p.shape else each.reshape(p.shape) for each, p in zip(together, parameters, strict=True)]


def _plain(name: str) -> str:
    """The name without what torch.compile and DDP put into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod").removeprefix("module.")


def _places(module: nn.Module | None) -> dict[Tensor, list[tuple[str, nn.Module | None]]]:
    """For every parameter of a module, all of its names with the modules that own it."""
    if module is None:
        return {}
    places: dict[Tensor, list[tuple[str, nn.Module | None]]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for leaf, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{leaf}" if path else leaf
            places.setdefault(parameter, []).append((name, owner))
    return {p: [_without_parametrization(name, owner, module) for name, owner in found] for p, found in places.items()}


def _without_parametrization(name: str, owner: nn.Module | None, root: nn.Module) -> tuple[str, nn.Module | None]:
    """``layer.parametrizations.weight.original`` is the weight of ``layer``."""
    parts = name.split(".")
    if "parametrizations" not in parts or parts[-1] != "original":
        return name, owner
    at = len(parts) - 3
    return ".".join([*parts[:at], parts[at + 1]]), root.get_submodule(".".join(parts[:at]))


def _placed(name: str, parameter: nn.Parameter, places: Sequence[tuple[str, nn.Module | None]]) -> Placement:
    placements = [_by_rules(name, place, parameter, owner) for place, owner in places]
    return next((each for each in placements if each.kind == "vector"), placements[0])


def _by_rules(name: str, place: str, parameter: nn.Parameter, owner: nn.Module | None) -> Placement:
    components = _plain(place).split(".")
    for rule in RULES if owner is not None else RULES_WITHOUT_MODULE:
        if _matches(rule, components, parameter, owner):
            break
    split = rule.split(owner) if callable(rule.split) and owner is not None else rule.split
    rows = _rows(split, name, parameter) if isinstance(split, Split) else None
    reason = f"{rule.reason}, {split}" if rows is not None else rule.reason
    return Placement(name, parameter, rule.kind, rows, reason)


def _matches(rule: Rule, components: Sequence[str], parameter: nn.Parameter, owner: nn.Module | None) -> bool:
    def component_matches(component: str) -> bool:
        return _any_match(component.lower(), rule.path) and not _any_match(component.lower(), rule.unless)

    return (
        (not rule.owner or isinstance(owner, rule.owner))
        and (not rule.owner_name or type(owner).__name__ == rule.owner_name)
        and fnmatch.fnmatchcase(components[-1], rule.parameter)
        and fnmatch.fnmatchcase(components[0], rule.first)
        and (not rule.path or any(map(component_matches, components)))
        and (rule.shape is None or rule.shape(parameter.shape))
        and (rule.when is None or (owner is not None and rule.when(owner)))
    )


def _any_match(component: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(component, pattern) for pattern in patterns)


class _Overrides:
    """A user's rules: the first that matches a parameter's name, or the name of a module that it is in, wins."""

    def __init__(self, rules: Mapping[str, Placing]) -> None:
        for pattern, placing in rules.items():
            if placing not in KINDS and not isinstance(placing, Split):
                raise ValueError(f'rules[{pattern!r}] must be "matrix", "vector" or Split(...), found {placing!r}.')
        self._rules = {str(pattern): placing for pattern, placing in rules.items()}
        self._used: set[str] = set()
        self._too_small: dict[str, str] = {}  # a parameter that a rule cannot make a matrix

    def apply(self, name: str, parameter: nn.Parameter) -> Placement | None:
        for pattern, placing in self._rules.items():
            if not _covers(pattern, name):
                continue
            if parameter.ndim < 2 and placing != "vector":  # perhaps only the bias beside a weight that is meant
                self._too_small.setdefault(pattern, f"{name!r} a matrix, but its shape is {tuple(parameter.shape)}")
                return None
            self._used.add(pattern)
            if isinstance(placing, Split):
                rows = _rows(placing, name, parameter)
                return Placement(name, parameter, "matrix", rows, f"rules[{pattern!r}], {placing}")
            return Placement(name, parameter, placing, None, f"rules[{pattern!r}]")
        return None

    def check_used(self, names: Sequence[str]) -> None:
        for pattern in self._rules:
            if pattern not in self._used:
                if pattern in self._too_small:
                    raise ValueError(
                        f"rules[{pattern!r}] makes {self._too_small[pattern]}: a matrix has at least two dimensions."
                    )
                if any(_covers(pattern, name) for name in names):
                    raise ValueError(f"rules[{pattern!r}] never applies: a rule before it matches first. Put it further up.")
                text = unknown_name(pattern, [_plain(name) for name in names], "parameter in rules")
                raise ValueError(f"{text} print(moonopt.route_parameters(model)) shows their names.")


def _covers(pattern: str, name: str) -> bool:
    """Whether a pattern means a parameter or a module that it is in, by the name as it is or without wrappers."""
    return any(fnmatch.fnmatchcase(each, p) for each in (name, _plain(name)) for p in (pattern, f"{pattern}.*"))


def _rows(split: Split, name: str, parameter: nn.Parameter) -> list[int]:
    try:
        return split.rows(parameter.shape[0])
    except ValueError as error:
        raise ValueError(f"{name!r} cannot be split: {error}") from None
