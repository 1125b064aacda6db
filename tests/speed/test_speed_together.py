"""Runs at once: the steps of all processes are counted, and what fails in one of them is told."""

import json
import multiprocessing

import pytest

from moonopt.bench.nyuv2 import NYUv2
from moonopt.errors import UserError
from moonopt.speed.together import GONE, Training, main, measure

QUITTER = """
import os
from moonopt.bench.nyuv2 import NYUv2

class Quitter(NYUv2):
    def load(self, folder, seed):
        os._exit(3)
"""


@pytest.fixture
def training(tmp_path):
    NYUv2().make(tmp_path, count=2, size=(32, 32))
    return Training("nyuv2", tmp_path, "cpu", "ls", "float32", {"model.width": 2, "train.batch_size": 2})


def test_the_steps_of_all_processes_are_counted(training, capsys):
    words = ["nyuv2", "--data", str(training.folder), "--settings", json.dumps(training.settings)]
    main([*words, "--jobs", "1", "2", "--seconds", "0.3", "--json"])
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert (found["method"], found["compiled"], found["mps"]) == ("moon", False, False)
    rates = found["steps_per_second"]
    assert rates["1"] > 0
    assert found["ratios"] == {"1": 1.0, "2": pytest.approx(rates["2"] / rates["1"])}
    assert 0.3 < found["ratios"]["2"] < 4


def test_an_engine_may_be_named(training, capsys):
    words = ["nyuv2", "--data", str(training.folder), "--settings", json.dumps(training.settings), "--jobs", "1"]
    main([*words, "--seconds", "0.1", "--method", "nash-mtl", "--engine", "stored:batched"])
    assert ", stored:batched: steps per second" in capsys.readouterr().out
    with pytest.raises(UserError, match="engine must be"):
        measure(training._replace(method="nash-mtl", engine="stord"), [1], seconds=0.1)


def test_what_fails_in_a_process_is_told_and_none_stays(training):
    with pytest.raises(UserError, match=r"Of 2 at once one failed: Not in .*none.*moonopt data make nyuv2"):
        measure(training._replace(folder=training.folder / "none"), [2], seconds=0.1)
    assert not multiprocessing.active_children()


def test_a_process_that_is_gone_is_told(training, tmp_path, monkeypatch):
    (tmp_path / "quitting.py").write_text(QUITTER)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"Of 1 at once one failed: {GONE}"):
        measure(training._replace(benchmark="quitting:Quitter"), [1], seconds=0.1)
