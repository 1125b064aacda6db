"""Runs are grouped in rows, and the runs of stl make one row."""

import subprocess
import sys

import pytest

from moonopt.errors import UserError
from moonopt.runs.report.page import write_report
from moonopt.runs.report.study import read_runs, studies

SCENES = ("segment", "depth")


def rows_of(make_run, order=None):
    (study,) = studies(read_runs([make_run.args[0]]), order)
    return study


def test_rows_are_methods_with_their_overrides_in_order(make_run, toy_metrics):
    for method in ("famo", "ls", "zzz", "moon", "famo+muon"):
        make_run(method, 0, toy_metrics(method, 0))
    make_run("moon", 0, toy_metrics("moon", 0), overrides={"optimizer.lr": 0.01, "balancer.c": 2})
    ours = ["moon", "moon, balancer.c=2, optimizer.lr=0.01", "ls", "famo", "famo+muon", "zzz"]
    assert [row.label for row in rows_of(make_run).rows] == ours
    given = [row.label for row in rows_of(make_run, ["zzz", "moon, balancer.c=2, optimizer.lr=0.01", "famo"]).rows]
    assert given == ["zzz", ours[1], "famo", "moon", "ls", "famo+muon"]


def test_an_order_with_a_name_that_no_row_has_is_refused(make_run, toy_metrics, tmp_path):
    for method in ("moon", "famo"):
        make_run(method, 0, toy_metrics(method, 0), overrides={"model.width": 4, "optimizer.lr": len(method)})
    make_run("uw", 0, {}, state="failed", overrides={"model.width": 4})
    with pytest.raises(UserError, match=r"Unknown row 'fammo': .* Did you mean 'famo'\?"):
        rows_of(make_run, ["moon", "fammo"])
    with pytest.raises(UserError, match="Unknown row 'fammo'"):
        write_report(read_runs([make_run.args[0]]), tmp_path / "report", order=["fammo"])
    for name in ("famo", "famo, optimizer.lr=4", "famo, model.width=4, optimizer.lr=4"):
        assert [row.label for row in rows_of(make_run, [name, "uw"]).rows] == ["famo, optimizer.lr=4", "moon, optimizer.lr=4"]
    assert studies([], ["moon"]) == []


def test_an_order_may_name_rows_of_any_benchmark(many_runs):
    assert studies(read_runs([many_runs]), ["rlw", "famo"])[1].rows[0].label == "rlw"


def test_overrides_that_all_rows_have_are_not_in_their_labels(make_run, toy_metrics):
    for overrides in ({}, {"optimizer.lr": 0.1}):
        make_run("moon", 0, toy_metrics("moon", 0), overrides={"data.spread": 1, "model.bias": True, **overrides})
    make_run("ls", 0, toy_metrics("ls", 0), overrides={"data.spread": 1, "model.bias": False})
    make_run("famo", 0, {}, state="failed", overrides={"data.spread": 1, "data.limit": None})
    study = rows_of(make_run)
    assert study.shared == ["data.spread=1"]
    labels = ["moon, model.bias=true", "moon, model.bias=true, optimizer.lr=0.1", "ls, model.bias=false"]
    assert [row.label for row in study.rows] == labels
    assert study.left_out[0].startswith("famo, data.limit=null, seed 0: failed")


def test_a_row_alone_keeps_its_overrides(make_run, toy_metrics):
    for seed in range(2):
        make_run("moon", seed, toy_metrics("moon", seed), overrides={"data.spread": 1})
    study = rows_of(make_run)
    assert ([row.label for row in study.rows], study.shared) == (["moon, data.spread=1"], [])


def test_rows_whose_values_differ_in_writing_alone_do_not_clash(make_run, toy_metrics):
    for spread in (1, 1.0):
        make_run("moon", 0, toy_metrics("moon", 0), overrides={"data.spread": spread})
    assert [row.label for row in rows_of(make_run).rows] == ["moon, data.spread=1", "moon, data.spread=1.0"]


def test_seeds_are_sorted_and_what_gave_no_numbers_is_listed(make_run, toy_metrics):
    for seed in (10, 2):
        make_run("moon", seed, toy_metrics("moon", seed))
    make_run("moon", 3, {}, state="failed")
    make_run("ls", 0, {}, state="unfinished")
    study = rows_of(make_run)
    assert [[outcome.seed for outcome in row.outcomes] for row in study.rows] == [[2, 10]]
    assert study.left_out == ["moon, seed 3: failed (FloatingPointError: loss is NaN)", "ls, seed 0: unfinished, at step 60"]


@pytest.mark.parametrize("method", ["stl", "stl+muon"])
def test_single_task_runs_make_one_row_with_each_metric_from_its_task(scenes, make_run, method):
    own = {"segment": {"mIoU": 75.0, "pixel accuracy": 93.0}, "depth": {"depth error": 0.0125}}
    wrong = {"mIoU": 1.0, "pixel accuracy": 1.0, "depth error": 1.0, "mean score": 1.0}
    for task in SCENES:
        make_run(method, 0, wrong | own[task], scenes, SCENES, overrides={"balancer.task": task}, seconds_per_step=0.5)
    (row,) = rows_of(make_run).rows
    (outcome,) = row.outcomes
    assert row.label == method
    assert row.is_single
    assert outcome.metrics == own["segment"] | own["depth"]
    assert outcome.seconds_per_step == 1.0
    assert outcome.tasks == list(SCENES)  # not in the order of the folders
    lines = {run.overrides["balancer.task"]: run.train for run in outcome.runs}
    assert outcome.train[7]["loss"] == {task: lines[task][7]["loss"][task] for task in SCENES}
    assert outcome.train[7]["seconds"] == sum(each[7]["seconds"] for each in lines.values())


def test_stl_needs_all_of_its_tasks(scenes, make_run):
    make_run("stl", 0, {"mIoU": 1.0}, scenes, SCENES, overrides={"balancer.task": "segment"})
    make_run("stl", 1, {"mIoU": 1.0}, scenes, SCENES, overrides={"balancer.task": "segment"})
    make_run("stl", 1, {}, scenes, SCENES, overrides={"balancer.task": "depth"}, state="failed")
    study = rows_of(make_run)
    assert study.rows == []
    failed = "stl, seed 1: task depth failed (FloatingPointError: loss is NaN)"
    assert study.left_out == ["stl, seed 0: task depth not run", failed]


def test_a_cell_that_is_there_twice_is_refused(make_run, toy_metrics, tmp_path):
    folder = make_run("moon", 0, toy_metrics("moon", 0))
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"moon with seed 0 is there twice: in .*seed0 and .*elsewhere"):
        studies(read_runs([folder, copy]))


def test_benchmarks_are_studies_of_their_own(many_runs):
    assert [study.name for study in studies(read_runs([many_runs]))] == ["report_bench:Scenes", "report_bench:Thirty", "toy"]


def test_studies_and_tables_need_torch_alone():
    code = "import sys, moonopt.runs.report.tables; print({'matplotlib', 'scipy', 'jinja2', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
