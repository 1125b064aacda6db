"""Tuning: as many trials for every method, judged on validation data, all written down, and read back."""

import json
import re

import pytest
from small_runs import TINY, cell, run

from moonopt.bench import find
from moonopt.errors import UserError
from moonopt.runs.compare import Plan
from moonopt.runs.interrupt import Stop
from moonopt.runs.store import write_json
from moonopt.runs.tune import find_judge, read_grids, read_tuned, tune


class Silent:
    def begin(self, cells):
        self.cells = list(cells)

    def record(self, number, record):
        pass

    def end(self, number, outcome):
        pass


def tuned(root, grids, name="tiny_benchmarks:Disagreeing", seeds=(0,), layers=(), judge=None):
    return tune(name, grids, seeds, layers, Plan(root, root), Stop(), Silent(), judge=judge)


def test_grids_are_for_all_methods_or_for_one():
    found = read_grids(["a=1,2", "b=x,y", "moon/a=3,4"], ["ls", "moon"])
    assert found == {"ls": {"a": [1, 2], "b": ["x", "y"]}, "moon": {"a": [3, 4], "b": ["x", "y"]}}
    assert read_grids(["a=[0.9,0.95],[0.8,0.9]"], ["ls"]) == {"ls": {"a": [[0.9, 0.95], [0.8, 0.9]]}}


@pytest.mark.parametrize(
    ("texts", "text"),
    [
        (["moon/a=1,2,3", "ls/a=1,2"], "Every method must get the same number of trials, at least one; found ls 2, moon 3."),
        (["moon/a=1,2"], "the same number of trials, at least one; found ls 0, moon 2."),
        ([], "at least one; found ls 0, moon 0."),
        (["a"], "A grid is written key=value,value or METHOD/key=value,value; found 'a'."),
        (["moon/=1"], "A grid is written"),
        (["mon/a=1"], "is for 'mon', which is not among the methods ls, moon."),
        (["a=0.1,1e-1"], "has one value twice"),
    ],
)
def test_unequal_and_wrong_grids_are_refused(texts, text):
    with pytest.raises(UserError, match=re.escape(text)):
        read_grids(texts, ["ls", "moon"])


def test_the_best_on_validation_data_is_chosen_even_where_test_data_disagree(tmp_path):
    grid = {"model.width": [4, 6, 9]}
    comparison, found = tuned(tmp_path, {"ls": grid, "famo": grid}, seeds=(0, 1))
    assert found["chosen"] == {"ls": {"model.width": 9}, "famo": {"model.width": 9}}  # 4 is the best on test data
    assert found["trials_per_method"] == 3
    assert [(row["method"], row["settings"]["model.width"]) for row in found["trials"]] == [
        (method, width) for method in ("ls", "famo") for width in (4, 6, 9)
    ]
    assert [row["score"] for row in found["trials"]] == pytest.approx([1 / 4, 1 / 6, 1 / 9] * 2)
    assert {tuple(row["by_seed"]) for row in found["trials"]} == {("0", "1")}
    assert len(comparison.cells) == 12
    assert "validation data" in found["score"]
    assert found["notes"] == [f"{method}: model.width=9 is at the edge of its grid" for method in ("ls", "famo")]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_trials_are_judged_by_the_metric_that_is_asked_for(tmp_path):
    judge = find_judge(find("tiny_benchmarks:Disagreeing"), "c", ["ls"])
    _, found = tuned(tmp_path, {"ls": {"model.width": [4, 6, 9]}}, judge=judge)
    assert found["chosen"] == {"ls": {"model.width": 4}}
    assert [row["score"] for row in found["trials"]] == [4, 6, 9]
    assert found["score"].startswith("c on validation data")


def test_a_metric_that_cannot_judge_is_refused():
    bench = find("tiny_benchmarks:Disagreeing")
    with pytest.raises(UserError, match=r"Unknown metric 'maen': expected one of .*mean\. Did you mean 'mean'\?"):
        find_judge(bench, "maen", ["ls"])
    with pytest.raises(
        UserError, match=re.escape("One metric cannot judge stl+muon: each of its runs has the metrics of one task.")
    ):
        find_judge(bench, "mean", ["ls", "stl+muon"])


def test_stl_is_judged_by_the_task_of_each_model(tmp_path):
    _, found = tuned(tmp_path, {"stl": {"optimizer.lr": [1e-9, 0.02]}}, name=TINY)
    assert found["chosen"] == {"stl": {"optimizer.lr": 0.02}}
    assert list(found["trials"][0]["by_seed"]) == ["0/a", "0/b", "0/c"]


def test_a_benchmark_with_test_data_alone_is_refused(tmp_path):
    with pytest.raises(UserError, match="testonly has test data and no validation data: moonopt does not tune on test data"):
        tuned(tmp_path, {"ls": {"optimizer.lr": [0.1]}}, name="tiny_benchmarks:TestOnly")
    with pytest.raises(UserError, match=r"put absent.csv there"):
        tuned(tmp_path, {"ls": {"optimizer.lr": [0.1]}}, name="tiny_benchmarks:Absent")
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_that_reports_training_data_is_tuned_on_them(tmp_path):
    layers = [("--set", {"train.epochs": 2})]
    _, found = tuned(tmp_path, {"ls": {"optimizer.lr": [1e-6, 0.1]}}, name="toy", layers=layers)
    assert found["chosen"] == {"ls": {"optimizer.lr": 0.1}}
    assert "training data" in found["score"]


def test_a_trial_that_fails_or_diverges_is_written_down_and_not_chosen(tmp_path):
    comparison, found = tuned(tmp_path, {"ls": {"model.end": ["kill", "", "nan"]}}, name="tiny_benchmarks:Vanishing")
    assert [row["score"] is None for row in found["trials"]] == [True, False, True]
    assert found["chosen"] == {"ls": {"model.end": ""}}
    assert len(comparison.failed) == 2
    _, found = tuned(tmp_path, {"ls": {"model.width": [4, 8]}}, name="tiny_benchmarks:Diverging")
    assert found["chosen"] == {}
    assert [row["score"] for row in found["trials"]] == [None, None]


def test_a_trial_whose_headline_is_null_has_no_score_and_is_not_chosen(tmp_path):
    for width in (4, 6):
        path = run(cell("ls", name="tiny_benchmarks:Disagreeing", model__width=width), tmp_path) / "result.json"
        result = json.loads(path.read_text())
        if width == 6:  # else the best
            result["valid"]["mean"] = None
        path.write_text(json.dumps(result))
    _, found = tuned(tmp_path, {"ls": {"model.width": [4, 6]}})
    assert [row["score"] for row in found["trials"]] == [1 / 4, None]
    assert found["chosen"] == {"ls": {"model.width": 4}}


def test_what_was_tuned_is_read_back(tmp_path):
    _, found = tuned(tmp_path, {"ls": {"model.width": [4, 6]}})
    path = tmp_path / "tuned.json"
    write_json(path, found)
    name = "tiny_benchmarks:Disagreeing"
    assert read_tuned(path, name, ["ls"]) == {"ls": (f"--tuned {path}", {"model.width": 6})}
    with pytest.raises(UserError, match="was tuned on tiny_benchmarks:Disagreeing, not on toy"):
        read_tuned(path, "toy", ["ls"])
    with pytest.raises(UserError, match="has nothing for moon, uw: it has ls"):
        read_tuned(path, name, ["moon", "ls", "uw"])
    for content in ("{}", '{"format": 1}', '{"format": 1, "chosen": {}}'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"is not a file of `moonopt tune`|was tuned on None"):
            read_tuned(path, name, ["ls"])


def test_trials_that_are_done_are_not_run_again(tmp_path):
    chosen = cell("ls", name="tiny_benchmarks:Disagreeing", model__width=4)
    before = (run(chosen, tmp_path) / "result.json").stat().st_mtime_ns
    comparison, found = tuned(tmp_path, {"ls": {"model.width": [4, 6]}})
    assert comparison.skipped == [chosen]
    assert (chosen.folder(tmp_path) / "result.json").stat().st_mtime_ns == before
    assert found["trials"][0]["score"] == 1 / 4
