"""What training costs, and what has no part in it."""

import subprocess
import time

import pytest
import torch

from moonopt.runs import provenance
from moonopt.runs.meter import Cost, Meter, resident_mb

CPU = torch.device("cpu")


def test_only_what_happens_while_it_runs_is_counted():
    cost = Cost()
    meter = Meter(cost, CPU, resident_mb())
    time.sleep(0.05)
    meter.step()
    for _ in range(2):
        time.sleep(0.01)
        meter.step()
    meter.pause()
    time.sleep(0.2)
    meter.run()
    time.sleep(0.01)
    meter.step()
    meter.pause()
    assert 0.08 <= cost.seconds < 0.2
    assert cost.timed_steps == 3
    assert 0.01 <= cost.seconds_per_step < 0.03  # without the first step


def test_the_first_step_of_a_run_of_one_is_all_there_is():
    cost = Cost()
    meter = Meter(cost, CPU, resident_mb())
    meter.step()
    meter.pause()
    assert cost.timed_steps == 0
    assert cost.seconds_per_step == cost.seconds > 0


def test_the_peak_is_that_of_the_steps_and_not_of_what_came_between():
    cost, size = Cost(), 50_000_000
    meter = Meter(cost, CPU, resident_mb())
    torch.ones(size // 4).sum()
    meter.step()
    meter.pause()
    during = cost.peak_memory_mb
    torch.ones(size).sum()
    meter.run()
    meter.pause()
    if during > 4 * size / 1e6:
        pytest.skip("this system does not forget the peak of a process")
    assert 40 < during < 100
    assert cost.peak_memory_mb < during + 40


def test_a_commit_has_a_plus_when_any_file_of_the_package_differs(tmp_path, monkeypatch):
    package = tmp_path / "src" / "package"
    (package / "runs").mkdir(parents=True)
    (package / "optim.py").write_text("x = 1\n")
    (package / "runs" / "provenance.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "runs" / "provenance.py"))
    clean = provenance.commit()
    assert clean is not None
    assert "+" not in clean
    (package / "optim.py").write_text("x = 2\n")
    assert provenance.commit() == clean + "+"
    monkeypatch.setattr(provenance, "__file__", str(tmp_path.parent / "elsewhere" / "provenance.py"))
    assert provenance.commit() is None
