"""Runs of math-rl on a tiny model: every method, stopped and killed runs, test data at the end only, rewards that rise."""

import json
import multiprocessing
import os
import signal

import pytest
import tiny_math_rl as tiny
import torch

from moonopt.bench.math_rl import MathRL
from moonopt.errors import UserError
from moonopt.methods import METHODS
from moonopt.runs.interrupt import Stop
from moonopt.runs.single import is_single
from moonopt.runs.train import InterruptedRun

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:In an update all")

RESULT = ("metrics", "valid", "selection", "epoch", "steps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("math") / "data")


class StopAfter(Stop):
    """After some steps asks to stop, or is killed."""

    def __init__(self, steps, kill=False):
        super().__init__()
        self._left, self._kill = steps, kill

    @property
    def requested(self):
        self._left -= 1
        if self._left <= 0 and self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._left <= 0


def outcome(run):
    """All that a run leaves, as text that is equal only if every bit is."""
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    result = json.loads((run / "result.json").read_text())
    kept = {key: saved[key] for key in ("model", "method", "bench")} | {"evaluations": saved["progress"]["evaluations"]}
    return repr(
        (hexed(kept), [tiny.lines(run, kind) for kind in ("train", "evaluation")], {key: result[key] for key in RESULT})
    )


def hexed(value):
    if isinstance(value, torch.Tensor):
        return value.contiguous().flatten().view(torch.uint8).numpy().tobytes().hex()
    if isinstance(value, dict):
        return {key: hexed(each) for key, each in value.items()}
    return [hexed(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("method", METHODS)
def test_every_method_makes_two_updates(method, folder, tmp_path):
    task = {"balancer__task": "clarity"} if is_single(method) else {}
    run = tiny.run(tiny.cell(method, train__epochs=1, **task), tmp_path, folder)
    lines = tiny.lines(run, "train")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(0 < loss < 1 for line in lines for loss in line["loss"].values())
    began, ended = tiny.bench(folder)[2].state_dict(), torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    assert all(each.isfinite().all() for each in ended.values())
    assert any(not torch.equal(each, began[name]) for name, each in ended.items())


@pytest.mark.parametrize("settings", [{"loss": "log"}, {"loss": "log", "beta": "auto"}, {"beta": "auto"}, {"dual": "exact"}])
def test_every_kind_of_moon_makes_two_updates(settings, folder, tmp_path):
    chosen = tiny.cell("moon", train__epochs=1, **{f"optimizer__{key}": value for key, value in settings.items()})
    run = tiny.run(chosen, tmp_path, folder)
    assert [line["step"] for line in tiny.lines(run, "train")] == [1, 2]


@pytest.mark.parametrize(("method", "kl"), [("moon", 0.0), ("famo", 0.1), ("mgda", 0.0)])
def test_a_run_that_is_stopped_again_and_again_ends_the_same(method, kl, folder, tmp_path):
    chosen = tiny.cell(method, data__kl=kl, train__epochs=3, train__log_every=4)
    expected = outcome(tiny.run(chosen, tmp_path / "whole", folder))
    for steps in (1, 2, 2):
        with pytest.raises(InterruptedRun):
            tiny.run(chosen, tmp_path / "stopped", folder, stop=StopAfter(steps), go_on=True)
    assert outcome(tiny.run(chosen, tmp_path / "stopped", folder, go_on=True)) == expected


def test_a_run_that_is_killed_goes_on_bit_for_bit(folder, tmp_path):
    chosen = tiny.cell("moon", train__log_every=3)
    expected = outcome(tiny.run(chosen, tmp_path / "whole", folder))
    for number in range(1, 4):
        root, stop = tmp_path / str(number), StopAfter(number + 1, kill=True)
        arguments = (chosen, root, folder)
        process = multiprocessing.get_context("fork").Process(
            target=tiny.run, args=arguments, kwargs={"stop": stop, "checkpoint_seconds": 0}
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert outcome(tiny.run(*arguments, go_on=True)) == expected


def test_the_running_mean_of_a_checkpoint_is_of_all_responses_so_far(folder, tmp_path):
    run = tiny.run(tiny.cell(train__log_every=4), tmp_path, folder)
    saved = torch.load(run / "checkpoint.pt", weights_only=True)["bench"]
    assert saved["running"]["count"] == 4 * 12  # four updates; evaluations do not count
    (line,) = tiny.lines(run, "train")
    assert line["measured"]["running length"] == line["measured"]["length"] == saved["running"]["total"] / 48


def test_test_data_are_looked_at_once_with_the_best_parameters(folder, tmp_path, monkeypatch):
    looked = []
    evaluate = MathRL.evaluate

    def watched(made, model, batches):
        batches = list(batches)
        looked.append([answer for batch in batches for answer in batch.answers])
        return evaluate(made, model, batches)

    monkeypatch.setattr(MathRL, "evaluate", watched)
    chosen = tiny.cell("ls", train__epochs=4, data__valid_problems=3, data__test_problems=5, optimizer__lr=0.05)
    run = tiny.run(chosen, tmp_path, folder)
    assert [len(answers) for answers in looked] == [3, 3, 3, 3, 5]
    lines = tiny.lines(run, "evaluation")
    assert all(line["test"] == {} for line in lines)
    assert [len(line["examples"]) for line in lines] == [3, 3, 3, 3]
    best = max(lines, key=lambda line: line["valid"]["reward"])
    result = json.loads((run / "result.json").read_text())
    assert (result["epoch"], result["valid"]) == (best["epoch"], best["valid"])
    assert best["epoch"] < 4  # or the test says nothing
    made, splits, model = tiny.bench(folder, data__valid_problems=3, data__test_problems=5)
    model.load_state_dict(torch.load(run / "best.pt", weights_only=True)["model"])
    made.load_state_dict(torch.load(run / "checkpoint.pt", weights_only=True)["bench"])
    assert result["metrics"] == evaluate(made, model, [splits.test.batch(torch.arange(5), torch.Generator())])


def test_the_mean_of_several_evaluations_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"math-rl tests once, at the end: train\.select must be best or last"):
        tiny.run(tiny.cell(train__select="last:2"), tmp_path, folder)
    assert not list(tmp_path.rglob("config.json"))


def test_a_method_without_a_meaning_is_refused_before_anything_is_written(folder, tmp_path):
    with pytest.raises(UserError, match="famo takes logarithms of losses"):
        tiny.run(tiny.cell("famo", data__loss="surrogate"), tmp_path, folder)
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize("method", ["moon", "ls"])
def test_rewards_rise(method, folder, tmp_path):
    settings = {"train__epochs": 6, "train__steps_per_epoch": 5, "train__log_every": 5, "data__samples": 8}
    chosen = tiny.cell(method, optimizer__lr=0.02 if method == "moon" else 0.01, train__evaluate_every=6, **settings)
    lines = tiny.lines(tiny.run(chosen, tmp_path, folder), "train")
    first, last = (sum(lines[at]["measured"][task] for task in MathRL.tasks) for at in (0, -1))
    assert last > first + 0.3
