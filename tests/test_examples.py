"""The examples do what they say: the paper's toy case."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [1, 5])
def test_moon_ends_lowest_in_the_papers_toy_case_and_mgda_stops_at_its_pareto_point(quickstart, seed):
    toy = quickstart.Toy(seed)
    ends = {name: quickstart.train(name, seed)[-1] for name in ("MOON", "MGDA", "MGDA+Muon")}
    averages = {name: losses.mean().item() for name, losses in ends.items()}
    lowest = toy.y.square().sum().item() / 6
    assert averages["MOON"] == pytest.approx(lowest, rel=1e-4)
    assert averages["MOON"] < 0.9 * min(averages["MGDA"], averages["MGDA+Muon"])

    # MGDA removes what is orthogonal to y and keeps Theta x = t y, where the two gradients cancel.
    start = toy.theta(toy.x).detach()
    t = ((start @ toy.y) / toy.y.square().sum()).clamp(-1, 1).item()
    pareto = [(t - 1) ** 2 * lowest, (t + 1) ** 2 * lowest]
    assert ends["MGDA"].tolist() == pytest.approx(pareto, rel=1e-3, abs=1e-4)


def test_quickstart_prints_a_table_and_saves_its_plot(quickstart, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(quickstart, "STEPS", 20)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--plot", str(tmp_path / "toy.png")])
    quickstart.main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in quickstart.METHODS)
    assert (tmp_path / "toy.png").stat().st_size > 10_000
    assert torch.get_default_dtype() == torch.float32
