"""The training loop: a seed fixes everything, looking changes nothing, and what is written is what was computed."""

import dataclasses
import json
import math
import time

import pytest
import torch
from small_runs import TINY, StopAfter, bits, cell, lines, outcome, run

from moonopt.bench import Tensors, find
from moonopt.errors import UserError
from moonopt.runs.run import RunFailedError
from moonopt.runs.train import InterruptedRun


def model_of(folder, name="checkpoint.pt"):
    return bits(torch.load(folder / name, weights_only=True)["model"])


@pytest.mark.parametrize("method", ["moon", "rlw", "pcgrad+muon"])
def test_two_runs_of_one_seed_are_equal_and_another_seed_differs(method, tmp_path):
    first, second = (run(cell(method), tmp_path / name) for name in ("first", "second"))
    other = run(cell(method, seed=1), tmp_path)
    assert outcome(first) == outcome(second)
    assert model_of(first) != model_of(other)
    assert lines(first) != lines(other)


def test_a_run_leaves_the_random_states_and_modes_of_the_process_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(cell(), tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()


def test_evaluation_and_conflict_change_neither_random_numbers_nor_buffers_nor_modes(tmp_path):
    often = cell("famo", name="tiny_benchmarks:Chancy", train__evaluate_every=1, train__select="last")
    never = cell("famo", name="tiny_benchmarks:Chancy", train__evaluate_every=4, train__conflict=False, train__select="last")
    looked, unseen = run(often, tmp_path), run(never, tmp_path)
    assert model_of(looked) == model_of(unseen)  # parameters, running means and variances, counts of batches
    train = [[line for line in lines(folder) if line["kind"] == "train"] for folder in (looked, unseen)]
    assert train[0] == train[1]
    assert [line["epoch"] for line in lines(looked) if line["kind"] == "evaluation"] == [1, 2, 3, 4]
    assert [line["epoch"] for line in lines(unseen) if line["kind"] == "evaluation"] == [4]


def test_logging_more_often_changes_nothing(tmp_path):
    often, seldom = run(cell(train__log_every=1), tmp_path), run(cell(train__log_every=7), tmp_path)
    assert model_of(often) == model_of(seldom)
    steps = [line["step"] for line in lines(seldom) if line["kind"] == "train"]
    assert steps == [7, 14, 21, 24]  # and the last
    losses = [line["loss"]["a"] for line in lines(often) if line["kind"] == "train"]
    assert lines(seldom)[1]["loss"]["a"] == pytest.approx(sum(losses[:7]) / 7)


def test_a_resumed_run_with_another_number_of_threads_is_bit_equal(tmp_path):
    chosen = cell("ls", model__width=600, train__batch_size=48, train__epochs=3)  # large enough for sums over threads
    torch.set_num_threads(2)
    try:
        expected = outcome(run(chosen, tmp_path / "whole"))
        with pytest.raises(InterruptedRun):
            run(chosen, tmp_path / "cut", stop=StopAfter(1))
        torch.set_num_threads(1)
        folder = run(chosen, tmp_path / "cut", go_on=True)
        assert torch.get_num_threads() == 1
        assert json.loads((folder / "result.json").read_text())["hardware"]["threads"] == 2
    finally:
        torch.set_num_threads(1)
    assert outcome(folder) == expected


@pytest.mark.parametrize("method", ["moon", "mgda"])
def test_what_is_drawn_from_the_model_is_drawn_once_per_step_and_goes_on_after_a_checkpoint(method, tmp_path):
    chosen = cell(method, name="tiny_benchmarks:Sampling")
    whole = run(chosen, tmp_path / "whole")
    with pytest.raises(InterruptedRun):
        run(chosen, tmp_path / "cut", stop=StopAfter(9))
    cut = run(chosen, tmp_path / "cut", go_on=True)
    assert outcome(cut) == outcome(whole)
    learned = [torch.load(folder / "checkpoint.pt", weights_only=True)["bench"] for folder in (whole, cut)]
    assert [each["prepared"] for each in learned] == [24, 24]  # not by looking at conflicts, too
    assert torch.equal(learned[0]["mean"], learned[1]["mean"])


def test_best_holds_the_parameters_of_the_best_epoch_and_its_metrics_are_reported(tmp_path):
    folder = run(cell(train__epochs=6, optimizer__lr=0.2), tmp_path)
    evaluations = [line for line in lines(folder) if line["kind"] == "evaluation"]
    best = min(evaluations, key=lambda line: line["valid"]["mean"])
    result = json.loads((folder / "result.json").read_text())
    assert best["epoch"] < 6  # or the test says nothing
    assert (result["epoch"], result["metrics"], result["valid"]) == (best["epoch"], best["test"], best["valid"])
    assert f"epoch {best['epoch']} of 6" in result["selection"]
    saved = torch.load(folder / "best.pt", weights_only=True)
    bench = find(TINY)()
    model = bench.model().eval()
    model.load_state_dict(saved["model"])
    assert saved["epoch"] == best["epoch"]
    with torch.no_grad():
        found = bench.evaluate(model, [bench.load(tmp_path, 0).test.tensors])
    assert found == best["test"]


def test_last_three_reports_the_mean_of_three(tmp_path):
    folder = run(cell(train__select="last:3"), tmp_path)
    means = [line["test"]["mean"] for line in lines(folder) if line["kind"] == "evaluation"]
    result = json.loads((folder / "result.json").read_text())
    assert result["metrics"]["mean"] == pytest.approx(sum(means[-3:]) / 3, rel=1e-12)
    assert result["selection"] == "mean of the last 3 evaluations"
    assert not (folder / "best.pt").exists()


def test_what_is_no_number_is_null_in_metrics(tmp_path):
    folder = run(cell(name="tiny_benchmarks:Diverging"), tmp_path)
    found = lines(folder)  # refuses NaN and Infinity
    assert found[-1]["test"] == {"a": None, "b": None, "c": 1.0, "mean": None}
    assert math.isnan(torch.load(folder / "checkpoint.pt", weights_only=True)["progress"]["evaluations"][0]["test"]["a"])


def test_a_task_that_is_not_there_has_no_loss(tmp_path, monkeypatch):
    import tiny_benchmarks

    whole = tiny_benchmarks.Tiny.losses

    def without_c(self, model, batch):
        losses = whole(self, model, batch)
        del losses["c"]
        return losses

    monkeypatch.setattr(tiny_benchmarks.Tiny, "losses", without_c)
    folder = run(cell(train__conflict=False), tmp_path)
    assert {line["loss"]["c"] for line in lines(folder) if line["kind"] == "train"} == {None}


@pytest.mark.parametrize(("end", "text"), [("raise", "KeyError: 'left'"), ("nan", "'b'")])
def test_a_run_that_breaks_is_one_sentence_and_a_traceback_in_its_folder(end, text, tmp_path):
    chosen = cell("ls", name="tiny_benchmarks:Vanishing", model__end=end)
    with pytest.raises(RunFailedError, match=text) as error:
        run(chosen, tmp_path)
    assert "\n" not in str(error.value)
    traceback = (chosen.folder(tmp_path) / "error.txt").read_text()
    assert traceback.startswith("Traceback")
    assert "tiny_benchmarks.py" in traceback or "moonopt" in traceback


def test_the_traceback_of_a_run_that_now_goes_on_is_taken_away(tmp_path, monkeypatch):
    import tiny_benchmarks

    chosen = cell("ls", name="tiny_benchmarks:Vanishing", model__end="raise")
    with pytest.raises(RunFailedError):
        run(chosen, tmp_path)
    monkeypatch.setattr(tiny_benchmarks.Vanishing, "losses", tiny_benchmarks.Tiny.losses)
    folder = run(chosen, tmp_path, go_on=True)
    assert (folder / "result.json").exists()
    assert not (folder / "error.txt").exists()


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("tiny_benchmarks:Absent", {}, "put absent.csv there"),
        ("tiny_benchmarks:Broken", {}, "cannot be made with these settings: OSError: the reader is broken .*line"),
        ("tiny_benchmarks:Unreadable", {}, "^tiny_benchmarks:Unreadable cannot read or write /.*: Is a directory.$"),
        ("tiny_benchmarks:Full", {}, "^tiny_benchmarks:Full cannot be made: No space left on device.$"),
        ("tiny_benchmarks:Refusing", {}, "^model.width must be even.$"),
        ("tiny_benchmarks:TestOnly", {"train__select": "best"}, "train.select=best needs validation data"),
        ("tiny_benchmarks:TestOnly", {"train__schedule": "plateau:0.5:1"}, "plateau needs validation data"),
        (TINY, {"model__width": -1}, "cannot be made with these settings: RuntimeError: .*negative dimension"),
        (TINY, {"optimizer__lr": -1.0}, "learning rate"),
        (TINY, {"train__schedule": "plateau:2:1"}, "Factor should be"),
        (TINY, {"train__schedule": "step:0:0.5"}, "at least one step"),
    ],
)
def test_a_run_that_cannot_begin_says_why_and_leaves_nothing(name, settings, text, tmp_path):
    with pytest.raises(UserError, match=text):
        run(cell("ls", name=name, **settings), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_between_two_looks_does_not_stop_without_a_checkpoint(tmp_path):
    class Late:
        """Asks to stop the second time that it is looked at."""

        looks = 0

        @property
        def requested(self):
            self.looks += 1
            return self.looks == 2

    chosen = cell()
    with pytest.raises(InterruptedRun):
        run(chosen, tmp_path, stop=Late())
    assert torch.load(chosen.folder(tmp_path) / "checkpoint.pt", weights_only=True)["progress"]["step"] == 2


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_empty_data_are_refused_and_never_replaced_by_others(split, tmp_path, monkeypatch):
    whole = find(TINY).load

    def load(bench, folder, seed):
        splits = whole(bench, folder, seed)
        empty = Tensors(*(tensor[:0] for tensor in getattr(splits, split).tensors))
        return dataclasses.replace(splits, **{split: empty})

    monkeypatch.setattr(find(TINY), "load", load)
    with pytest.raises(UserError, match=f"The {split} data have no examples"):
        run(cell(), tmp_path)


def test_the_logged_rate_is_that_of_the_step_and_not_of_the_next(tmp_path):
    folder = run(cell(optimizer__lr=0.1, train__epochs=1, train__log_every=1), tmp_path)
    rates = [line["lr"] for line in lines(folder) if line["kind"] == "train"]
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 6)) for step in range(6)])


def test_a_whole_number_and_its_fraction_are_one_setting(tmp_path):
    assert cell(optimizer__lr=1).folder(tmp_path) == cell(optimizer__lr=1.0).folder(tmp_path)
    assert cell(optimizer__lr=1).config == cell(optimizer__lr=1.0).config


def test_numbers_that_are_none_are_null_in_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr(find(TINY), "evaluate", lambda *args: dict.fromkeys(("a", "b", "c", "mean"), math.nan))
    folder = run(cell(), tmp_path)
    text = (folder / "result.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["metrics"]["mean"] is None


def test_time_for_evaluation_and_logging_is_no_training_time(tmp_path, monkeypatch):
    plain = json.loads((run(cell(), tmp_path / "plain") / "result.json").read_text())
    evaluate = find(TINY).evaluate

    def slow(bench, model, batches):
        time.sleep(0.2)
        return evaluate(bench, model, batches)

    monkeypatch.setattr(find(TINY), "evaluate", slow)
    tell = lambda record: time.sleep(0.02)  # noqa: E731
    slowed = json.loads((run(cell(), tmp_path / "slow", tell=tell) / "result.json").read_text())
    assert slowed["seconds"] < plain["seconds"] + 0.3  # eight evaluations take 1.6 s, and telling of 12 lines a quarter
