"""What the documentation shows runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

DOCS = Path(__file__).parents[1] / "docs"


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_benchmark_of_thirty_lines_and_the_method_can_be_compared(tmp_path):
    own, method = python_blocks("benchmarks.md")
    assert len(own.split("class Curves")[1].splitlines()) <= 30
    (tmp_path / "curves.py").write_text(own)
    (tmp_path / "methods.py").write_text(method)
    words = ["compare", "curves:Curves", "--methods", "moon,methods:sgd", "--seeds", "1", "--set", "train.epochs=2"]
    done = subprocess.run(
        [sys.executable, "-m", "moonopt", *words, "--set", "optimizer.lr=0.01", "--report", "report"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ *moon +\d", done.stdout, re.MULTILINE)
    assert re.search(r"^ *methods:sgd +\d", done.stdout, re.MULTILINE)
    assert (tmp_path / "report" / "index.html").exists()
