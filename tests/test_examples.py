"""The examples do what they say. What rates.py measures is tested in analysis/test_rates.py."""

import sys

import pytest
import torch


@pytest.fixture(scope="module")
def quickstart(example):
    return example("quickstart")


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


def test_two_task_example(example, monkeypatch, capsys, tmp_path):
    two_task = example("two_task")
    mgda, moon = two_task.mgda_direction(two_task.APPENDIX), two_task.moon_direction()
    assert two_task.guarantee(two_task.APPENDIX, mgda) == pytest.approx(5 / 2)
    assert two_task.guarantee(two_task.APPENDIX, moon) == pytest.approx(3)
    assert two_task.crossing(mgda, moon) == pytest.approx(4 / 3)
    eta = 0.7
    assert two_task.loss(-eta * mgda).tolist() == pytest.approx([-5 / 2 * eta + 5 / 8 * eta**2] * 2)
    assert two_task.loss(-eta * moon).tolist() == pytest.approx([-3 * eta + eta**2] * 2)

    monkeypatch.setattr(sys, "argv", ["two_task.py", "--plot", str(tmp_path / "two_task.png")])
    two_task.main()
    printed = capsys.readouterr().out
    assert all(number in printed for number in ("-2.5000", "-3.0000", "1.3333", "Certificate gap 0.3333", "(1.0000, 0.3333)"))
    assert (tmp_path / "two_task.png").stat().st_size > 10_000


def test_rates_example_prints_tables_and_saves_its_plot(example, monkeypatch, capsys, tmp_path):
    rates = example("rates")
    monkeypatch.setattr(sys, "argv", ["rates.py", "--steps", "20", "40", "--seeds", "1", "--plot", str(tmp_path / "rates.png")])
    rates.main()
    printed = capsys.readouterr().out
    assert printed.count("slope") == 5
    assert (tmp_path / "rates.png").stat().st_size > 10_000
