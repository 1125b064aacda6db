"""The measurement works; what it finds holds on an idle machine (marked slow)."""

import json

import pytest

from moonopt.speed import tasks


@pytest.fixture
def small(monkeypatch):
    for name, value in {"WIDTH": 16, "LAYERS": 1, "BATCH": 2, "TOKENS": 4}.items():
        monkeypatch.setattr(tasks, name, value)


def test_json_has_times_growth_and_environment(small, capsys):
    tasks.main(["--json", "--rounds", "2", "--tasks", "2", "3"])
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["torch"]
    (result,) = found["results"]
    assert set(result["growth"]) == {"muon", *tasks.MODES}
    expected = result["times"]["per_task, 3"]["ms"] / result["times"]["per_task, 2"]["ms"]
    assert result["growth"]["per_task"] == pytest.approx(expected)


def test_table_names_every_mode(small, capsys):
    tasks.main(["--rounds", "2", "--tasks", "2", "3"])
    printed = capsys.readouterr().out
    assert all(mode in printed for mode in ("muon", *tasks.MODES))


@pytest.mark.slow
def test_forty_tasks_cost_little_more_than_two_in_the_exact_modes():
    growth = tasks.measure(rounds=8)["growth"]
    assert growth["forward_mode"] <= 1.3, growth
    assert growth["double_backward"] <= 1.3, growth
    assert growth["per_task"] >= 5, growth
