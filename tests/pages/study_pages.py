"""Pages of Markdown, the packages that fill them, and scripts whose python is another."""

import contextlib
import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: A python that says what it was asked for.
ECHO = 'echo "$@"'


@contextlib.contextmanager
def imported(*names):
    """Modules of the studies, which are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield [importlib.import_module(name) for name in names]


def beside_benchmarks(name):
    """A module beside the tests of the benchmarks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests" / "bench")
        return importlib.import_module(name)


def section(page, name):
    return re.search(f"<!-- table: {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)[1]


def moonopt(*words):
    """A command that must end well."""
    cli = importlib.import_module("moonopt.cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["moonopt", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code


def with_python(folder, lines, **more):
    """The environment of a script whose python is these lines of a shell, and whose runs and data are in a folder."""
    (folder / "python").write_text(f"#!/bin/sh\n{lines}\n")
    (folder / "python").chmod(0o755)
    places = {"PATH": f"{folder}:{os.environ['PATH']}", "RUNS": str(folder), "MOONOPT_DATA": str(folder)}
    return os.environ | places | more


def with_tuned_faces(folder, rate=0.002):
    """A folder of runs in which faces were tuned."""
    tuned = {"chosen": {"famo": {"optimizer.lr": 0.1}, "ls": {"optimizer.lr": rate}}, "trials": [{"optimizer.lr": 0.3}]}
    for network in ("celeba-cnn", "celeba-vit"):
        (folder / f"tuned-{network}-adam.json").write_text(json.dumps(tuned, indent=2))
    return folder
