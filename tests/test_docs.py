"""What the documentation shows runs."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from moonopt import MOON

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


class Trunk(torch.nn.Module):
    """What docs/loops.md calls model."""

    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh())
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, 3) for _ in range(2))

    def forward(self, x, labels=None):
        return [head(self.trunk(x)) for head in self.heads]


LOOPS = python_blocks("loops.md")
HEADINGS = ["losses", "plain", "apart", "processes", "accelerate", "lightning", "transformers", "frozen"]


@pytest.mark.parametrize("number", range(1, len(LOOPS)), ids=HEADINGS[1:])
def test_the_loops_train(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("accelerate", "lightning", "transformers"):
        if f"from {name} " in LOOPS[number] or f"import {name}\n" in LOOPS[number]:
            pytest.importorskip(name)
    if "from accelerate" in LOOPS[number]:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    torch.manual_seed(0)
    x, y, model = torch.randn(64, 6), torch.randint(3, (64, 2)), Trunk()
    given = {
        "torch": torch,
        "MOON": MOON,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "model": model,
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8),
        "examples": [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)],
    }
    before = [p.detach().clone() for p in model.parameters()]
    blocks = [LOOPS[0], *([LOOPS[1]] if HEADINGS[number] == "apart" else []), LOOPS[number]]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"moonopt|__main__|<string>")
        exec("\n".join(blocks), given)
        if HEADINGS[number] == "frozen":
            given["moon"].minimize(given["task_losses"], model, x, y)
    assert not any(map(torch.equal, model.parameters(), before))
