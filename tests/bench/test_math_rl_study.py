"""The script of the study: its stages set nothing that is refused, and what it packs can be unpacked and converted."""

import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_math_rl as tiny

from moonopt.runs.cell import make_cell
from moonopt.runs.settings import parse

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "studies" / "math_rl.sh"


def stage(name, tmp_path, python, **environment):
    """What a stage prints, with another python."""
    (tmp_path / "bin").mkdir(parents=True, exist_ok=True)
    (tmp_path / "bin" / "python").write_text(f"#!/bin/sh\n{python}\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    places = {"DATA": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment = {**os.environ, **places, **environment}
    found = subprocess.run([SCRIPT, name], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize("name", ["main", "rates"])
def test_a_stage_sets_nothing_that_is_refused_and_no_run_twice(name, tmp_path):
    cells = []
    for words in map(str.split, stage(name, tmp_path, 'echo "$@"').splitlines()):
        options = list(pairwise(words))
        given = dict(parse(value) for option, value in options if option == "--set")
        (methods,) = (value.split(",") for option, value in options if option == "--methods")
        cells += [make_cell("math-rl", method, 0, [("the test", given)]).label for method in methods]
    assert len(set(cells)) == len(cells) == 7


@pytest.mark.skipif(shutil.which("xz") is None, reason="needs xz")
def test_what_is_packed_can_be_unpacked_elsewhere_and_converted(tmp_path):
    pytest.importorskip("transformers")
    home, away = tmp_path / "home", tmp_path / "away"
    tiny.write(home, count=500)
    python, common = f'exec {sys.executable} "$@"', {"MODEL": "tiny", "PIECES": str(tmp_path / "pieces")}
    stage("pack", home, python, **common)
    stage("unpack", away, python, **common)
    assert (away / "math500" / "test.jsonl").read_bytes() == (home / "math500" / "test.jsonl").read_bytes()
    converted = common | {"MODEL": "tiny-bf16"}
    (away / "tiny").rename(away / "smollm2")
    stage("convert", away, python, **converted)
    assert (away / "tiny-bf16" / "model.safetensors").stat().st_size < (away / "smollm2" / "model.safetensors").stat().st_size
