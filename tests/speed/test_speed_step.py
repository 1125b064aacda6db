"""The measurement of a whole step, in small."""

import json

import pytest
import torch

from moonopt.speed import step


def test_a_small_measurement(monkeypatch, capsys):
    monkeypatch.setattr(step, "BATCH", 4)
    step.main(["--rounds", "2", "--json"])
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert 135_000 < result["parameters"] < 145_000
    assert set(result["times"]) == set(step.METHODS)
    assert result["ratios"]["ls+adam"] == 1
    assert all(found["ms"] > 0 for found in result["times"].values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.slow
def test_a_captured_and_compiled_step_takes_at_most_1_9_ms_and_1_7_times_ls_with_adam():
    result = step.measure(rounds=5, device="cuda")
    way = "moon, loss_difference, captured, compiled"
    assert result["times"][way]["ms"] <= 1.9
    assert result["ratios"][way] <= 1.7
