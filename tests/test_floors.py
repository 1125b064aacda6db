"""The house of docs/design.md: a floor imports only from floors below it, and ``import moonopt`` needs torch alone."""

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import moonopt

PACKAGE = Path(moonopt.__file__).parent

#: From the ground up. Parts of one floor do not import each other. The package's own __init__.py is the roof.
FLOORS = (
    ("errors",),
    ("linalg",),
    ("tasks",),
    ("optim", "balance", "analysis"),
    ("methods",),
    ("bench",),
    ("runs", "speed", "integrations"),
    ("cli",),
    ("__main__",),
)
LEVELS = {part: level for level, parts in enumerate(FLOORS) for part in parts}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of_ours(source: str, package: str) -> Iterator[str]:
    """Every module of ours that a source imports, anywhere in it, by its full name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found = [f"{base}.{alias.name}" if alias.name in LEVELS else base for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found = [each.value for each in node.args if isinstance(each, ast.Constant)]
        else:
            continue
        yield from (name for name in found if name.split(".")[0] == "moonopt")


def offences(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a source imports although it is not below the module that the source is of."""
    part = module.split(".")[1]
    if part not in LEVELS:
        return [f"{module} stands on no floor"]
    found = []
    for name in imports_of_ours(source, module if is_package else module.rpartition(".")[0]):
        other = f"{name}.".split(".")[1]
        if other != part and LEVELS.get(other, len(FLOORS)) >= LEVELS[part]:
            found.append(f"{module} imports {name}")
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_every_file_imports_only_from_floors_below(path):
    assert offences(path.read_text(), module_name(path), path.name == "__init__.py") == []


def test_the_files_of_several_floors_are_looked_at():
    seen = {module_name(path) for path in FILES}
    assert {"moonopt.errors", "moonopt.linalg.polar", "moonopt.tasks", "moonopt.optim.muon"} <= seen


def test_what_the_files_import_is_found():
    source = (PACKAGE / "optim" / "moon.py").read_text()
    assert {"moonopt.errors", "moonopt.optim.muon", "moonopt.tasks.losses"} <= set(imports_of_ours(source, "moonopt.optim"))


@pytest.mark.parametrize(
    ("module", "source", "imported"),
    [
        ("moonopt.tasks.losses", "from moonopt.optim.muon import Muon", "moonopt.optim.muon"),
        ("moonopt.linalg.polar", "import torch, moonopt.tasks.losses as losses", "moonopt.tasks.losses"),
        ("moonopt.errors", "from moonopt.linalg import polar", "moonopt.linalg"),
        ("moonopt.optim.moon", "from moonopt.balance.famo import FAMO", "moonopt.balance.famo"),
        ("moonopt.optim.moon", "from moonopt import balance", "moonopt.balance"),
        ("moonopt.balance.famo", "from moonopt.analysis import conflict", "moonopt.analysis"),
        ("moonopt.runs.train", "from moonopt.speed import measure", "moonopt.speed"),
        ("moonopt.methods", "from moonopt.bench.toy import Toy", "moonopt.bench.toy"),
        ("moonopt.bench.toy", "from moonopt.cli import main", "moonopt.cli"),
        ("moonopt.cli", "from moonopt.__main__ import main", "moonopt.__main__"),
        ("moonopt.tasks.losses", "from ..optim import muon", "moonopt.optim"),
        ("moonopt.tasks.losses", "from .. import optim", "moonopt.optim"),
        ("moonopt.tasks.losses", "from moonopt import MOON", "moonopt"),
        ("moonopt.tasks.losses", "def late():\n    import moonopt.optim.moon", "moonopt.optim.moon"),
        ("moonopt.tasks.losses", "if TYPE_CHECKING:\n    from moonopt.optim.moon import MOON", "moonopt.optim.moon"),
        ("moonopt.tasks.losses", "importlib.import_module('moonopt.optim.moon')", "moonopt.optim.moon"),
    ],
)
def test_an_import_from_above_or_beside_is_caught(module, source, imported):
    assert offences(source, module) == [f"{module} imports {imported}"]


def test_a_relative_import_in_a_package_is_read_from_that_package():
    assert offences("from . import losses", "moonopt.tasks", is_package=True) == []
    assert offences("from .. import bench", "moonopt.tasks", is_package=True) == ["moonopt.tasks imports moonopt.bench"]


def test_a_file_on_no_floor_is_caught():
    assert offences("", "moonopt.utils") == ["moonopt.utils stands on no floor"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("moonopt.optim.moon", "from moonopt.optim.muon import Muon\nfrom moonopt.tasks import losses"),
        ("moonopt.optim.moon", "from . import muon\nfrom ..linalg.polar import polar"),
        ("moonopt.tasks.losses", "import torch, moonoptics\nfrom optim import muon\nfrom moonopt.errors import unknown_name"),
        ("moonopt.__main__", "from moonopt.cli import main"),
    ],
)
def test_imports_from_below_from_the_own_floor_and_from_elsewhere_pass(module, source):
    assert offences(source, module) == []


def packages_after(statement: str) -> set[str]:
    """The third-party packages that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    return {name.split(".")[0] for name in loaded} - sys.stdlib_module_names - {"moonopt"}


def test_importing_moonopt_loads_no_package_that_torch_does_not_load():
    with_torch = packages_after("import torch")
    assert "torch" in with_torch
    assert packages_after("import moonopt") - with_torch == set()
    assert packages_after("import torch, pluggy") - with_torch == {"pluggy"}  # so that an extra package would show


@pytest.mark.slow
def test_importing_moonopt_adds_less_than_half_a_second_to_torch():
    code = "import time, torch; start = time.perf_counter(); import moonopt; print(time.perf_counter() - start)"
    seconds = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0 < seconds < 0.5
