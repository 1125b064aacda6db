"""Checkpoints: two generations, checked before use, readable without running foreign code."""

import random

import pytest
import torch
from small_runs import StopAfter, cell, run

from moonopt.errors import UserError
from moonopt.methods import METHODS
from moonopt.runs import checkpoint
from moonopt.runs.single import is_single
from moonopt.runs.train import InterruptedRun


def content(step, **more):
    return {"config": cell().config, "step": step, "metrics_length": 0, "weights": torch.arange(1000.0), **more}


def told(folder):
    texts = []
    return checkpoint.load(folder, cell(), texts.append), texts


def test_the_latest_is_loaded_and_the_one_before_kept(tmp_path):
    assert told(tmp_path) == (None, [])
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, content(step))
    found, texts = told(tmp_path)
    assert (found["step"], texts) == (3, [])
    assert torch.load(tmp_path / "checkpoint.previous.pt", weights_only=True)["step"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt", "checkpoint.previous.pt"}


def test_any_damage_is_noticed_and_the_one_before_used(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, content(step))
    path, chance = tmp_path / "checkpoint.pt", random.Random(0)
    whole = path.read_bytes()
    damaged = [whole[: chance.randrange(len(whole))] for _ in range(20)] + [b"", b"x" * 100, whole[:-1], whole[1:]]
    for _ in range(60):
        place = chance.randrange(len(whole))
        damaged.append(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])
    used = []
    for number, bytes_ in enumerate(damaged):
        path.write_bytes(bytes_)
        found, texts = told(tmp_path)
        used.append(found["step"])
        if found["step"] == 2:  # the bit is in a field that nobody reads, or in padding
            assert number >= 24
            assert torch.equal(found["weights"], torch.arange(1000.0))
        else:
            assert len(texts) == 1
            assert f"{path} is damaged (" in texts[0]
            assert "\n" not in texts[0]
    assert used.count(1) > 60


def test_a_kill_between_the_two_renames_leaves_the_one_before(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, content(step))
    (tmp_path / "checkpoint.pt").replace(tmp_path / "checkpoint.previous.pt")
    assert told(tmp_path)[0]["step"] == 2


def test_a_checkpoint_of_another_version_or_run_is_refused(tmp_path):
    checkpoint.save(tmp_path, content(1, format=0))
    with pytest.raises(UserError, match="is of format 0, expected 1: another version made it"):
        told(tmp_path)
    checkpoint.save(tmp_path, content(1, config=cell(seed=4).config))
    with pytest.raises(UserError, match=r"belongs to another run \(seed is 4 there and 0 here\)"):
        told(tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_the_checkpoint_of_every_method_loads_as_weights_alone(method, tmp_path):
    chosen = cell(method, train__epochs=1, **({"balancer__task": "b"} if is_single(method) else {}))
    with pytest.raises(InterruptedRun):
        run(chosen, tmp_path, stop=StopAfter(2))
    saved = torch.load(chosen.folder(tmp_path) / "checkpoint.pt", weights_only=True)
    assert saved["progress"]["step"] == 2
    assert saved["config"] == chosen.config


def test_the_checkpoint_of_another_model_is_told(tmp_path):
    chosen = cell(train__epochs=1)
    with pytest.raises(InterruptedRun):
        run(chosen, tmp_path, stop=StopAfter(2))
    folder = chosen.folder(tmp_path)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    name, _ = saved["model"].popitem()
    checkpoint.save(folder, saved)
    with pytest.raises(UserError, match=rf"The checkpoint is of another model; --overwrite begins anew\. (?s:.*){name}"):
        run(chosen, tmp_path, go_on=True)
