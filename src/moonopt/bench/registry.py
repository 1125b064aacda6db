"""Benchmarks by name: ours, which are imported when asked for, and anybody's as ``module:name``."""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from moonopt.bench.base import Benchmark
from moonopt.errors import UserError, one_sentence, unknown_name

#: Where each is defined.
BENCHMARKS: dict[str, str] = {
    "toy": "moonopt.bench.toy:Toy",
    "synthetic30": "moonopt.bench.synthetic:Synthetic30",
    "multidigits": "moonopt.bench.multidigits:MultiDigits",
    "multimnist": "moonopt.bench.multimnist:MultiMNIST",
    "qm9": "moonopt.bench.qm9:QM9",
    "nyuv2": "moonopt.bench.nyuv2:NYUv2",
    "nyuv2-small": "moonopt.bench.nyuv2:NYUv2Small",
    "cityscapes": "moonopt.bench.cityscapes:CityScapes",
    "celeba-cnn": "moonopt.bench.celeba:CelebaCNN",
    "celeba-vit": "moonopt.bench.celeba:CelebaViT",
    "math-rl": "moonopt.bench.math_rl:MathRL",
}

#: Data sets that have a name of their own, each with a benchmark that reads it.
DATA_SETS: dict[str, str] = {"mnist": "multimnist", "celeba": "celeba-cnn", "smollm2": "moonopt.bench.math_rl:SmolLM2"}


def find(name: str) -> type[Benchmark]:
    """The benchmark of a name, or the class that ``module:name`` says, from the Python path or the current folder.

    >>> find("toy").title
    "the paper's toy case: two least-squares tasks over one 6 x 6 matrix"
    """
    if name not in BENCHMARKS and ":" not in name:
        raise UserError(unknown_name(name, tuple(BENCHMARKS), "benchmark") + " Your own is given as module:Class.")
    found = import_object(BENCHMARKS.get(name, name), "benchmark")
    if not (inspect.isclass(found) and issubclass(found, Benchmark)):
        raise UserError(f"{name} must be a subclass of moonopt.bench.Benchmark, found {found!r}.")
    absent = [each for each in ("name", "metrics", "headline") if not hasattr(found, each)]
    if absent or inspect.isabstract(found):
        raise UserError(f"{name} lacks {', '.join([*absent, *sorted(found.__abstractmethods__)])}.")
    metrics = [metric.name for metric in found.metrics]
    if found.headline not in metrics:
        raise UserError(f"{name}: " + unknown_name(found.headline, metrics, "metric as headline"))
    return found


def find_data(name: str) -> type[Benchmark]:
    """The benchmark that reads a data set, by the name of either.

    >>> find_data("mnist").name
    'multimnist'
    """
    if name not in (*BENCHMARKS, *DATA_SETS) and ":" not in name:
        raise UserError(unknown_name(name, (*BENCHMARKS, *DATA_SETS), "benchmark or data set"))
    return find(DATA_SETS.get(name, name))


@functools.cache
def code_of(location: str) -> str | None:
    """A checksum of the file of ``module:name``, but for comments and layout; None where there is none to be read."""
    try:
        spec = importlib.util.find_spec(_within_reach(location))
        text = "" if spec is None or spec.origin is None else Path(spec.origin).read_text()
        return hashlib.sha256(_without_layout(text).encode()).hexdigest()[:12] if text else None
    except (ImportError, ValueError, OSError, SyntaxError):
        return None


def _without_layout(text: str) -> str:
    """A module without its comments and layout; as it is where its sums and chains are too long to be looked into."""
    try:
        return repr(_outline(ast.parse(text)))
    except RecursionError:
        return text


def _outline(node: object) -> Any:
    """A syntax tree as plain lists, without what is empty: the same for all versions of Python, which ``ast.dump`` is not."""
    if isinstance(node, ast.AST):
        parts = [(name, _outline(part)) for name, part in ast.iter_fields(node) if part is not None and part != []]
        return [type(node).__name__, *parts]
    return [_outline(each) for each in node] if isinstance(node, list) else ascii(node)


def import_object(location: str, what: str) -> Any:
    """The object at ``module:name``."""
    module_name, attribute = _within_reach(location), location.partition(":")[2]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{location} needs the package {error.name!r}, which is not installed.") from error
        raise UserError(f"No module {module_name!r} for {what} {location}, on the Python path or in this folder.") from error
    except Exception as error:
        raise UserError(f"The module of {what} {location} cannot be imported: {one_sentence(error)}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise UserError(unknown_name(attribute, names, f"name in module {module_name}")) from error


def _within_reach(location: str) -> str:
    """The module of ``module:name``, which may lie in the current folder."""
    module_name = location.partition(":")[0]
    here = str(Path.cwd())
    if here not in sys.path and not module_name.startswith("moonopt."):
        sys.path.append(here)  # last, so that nothing there takes the place of a package
    return module_name
