"""Runs on a GPU: one seed gives one run, and a run that was stopped goes on bit for bit."""

import json

import pytest
import torch

from moonopt.runs.cell import Machine, make_cell
from moonopt.runs.interrupt import Stop
from moonopt.runs.run import run_cell
from moonopt.runs.train import InterruptedRun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHORT = {"train.epochs": 2, "train.log_every": 3, "data.train_pairs": 640, "data.valid_pairs": 200, "data.test_pairs": 200}


def run(cell, root, stop_at=None, go_on=False):
    stop = Stop()

    def tell(record):
        if record["kind"] == "train" and stop_at is not None and record["step"] >= stop_at:
            stop.signal = 15

    return run_cell(cell, root, root, stop=stop, tell=tell, go_on=go_on)


def outcome(cell, root):
    folder = cell.folder(root)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
        line.pop("memory_mb", None)
    return lines, torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("method", ["moon", "muon", "famo", "nash-mtl", "pcgrad", "uw", "gradnorm"])
def test_a_stopped_run_on_a_gpu_goes_on_bit_for_bit(method, amp, tmp_path):
    pytest.importorskip("sklearn")
    cell = make_cell("multidigits", method, 0, [("test", SHORT)], Machine("cuda", amp))
    run(cell, tmp_path / "whole")
    with pytest.raises(InterruptedRun):
        run(cell, tmp_path / "parts", stop_at=7)
    result = run(cell, tmp_path / "parts", go_on=True)
    assert result["hardware"]["device"] == torch.cuda.get_device_name()
    whole, parts = (outcome(cell, tmp_path / name) for name in ("whole", "parts"))
    assert whole[0] == parts[0]
    assert all(whole[1][name].equal(parts[1][name]) for name in whole[1])


@pytest.mark.parametrize("method", ["moon", "mgda"])
def test_a_compiled_run_on_a_gpu_ends_near_the_plain_one(method, tmp_path):
    pytest.importorskip("sklearn")
    plain, compiled = (
        run(make_cell("multidigits", method, 0, [("test", SHORT)], Machine("cuda", compile=each)), tmp_path / str(each))
        for each in (False, True)
    )
    assert compiled["metrics"]["average loss"] == pytest.approx(plain["metrics"]["average loss"], rel=0.05)
