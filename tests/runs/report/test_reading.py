"""Runs are read from folders of any level; what is broken is named."""

import json
import shutil
from pathlib import Path

import pytest

from moonopt.errors import UserError
from moonopt.runs.report.study import read_runs


def test_a_root_a_benchmark_and_a_run_are_read(make_run, toy_metrics):
    folders = [make_run("moon", seed, toy_metrics("moon", seed)) for seed in (2, 10)]
    root = folders[0].parents[2]
    for path in (root, root / "toy", folders[0].parent):
        assert [run.seed for run in read_runs([path])] == [2, 10]
    (run,) = read_runs([folders[1]])
    assert (run.benchmark, run.method, run.overrides, run.seed, run.error) == ("toy", "moon", {}, 10, None)
    assert run.result["metrics"] == toy_metrics("moon", 10)
    assert (len(run.train), len(run.evaluation)) == (60, 3)


def test_a_run_that_several_paths_reach_is_read_once(make_run, toy_metrics):
    folder = make_run("moon", 0, toy_metrics("moon", 0))
    assert len(read_runs([folder.parents[2], folder, folder.parent / "." / "seed0"])) == 1


def test_trials_of_tuning_count_where_their_folder_is_given(make_run, toy_metrics, tmp_path):
    folder = make_run("moon", 0, toy_metrics("moon", 0))
    root = folder.parents[2]
    shutil.copytree(root / "toy", root / "tune" / "toy")
    assert [run.source for run in read_runs([root])] == [folder]
    assert [run.source for run in read_runs([root / "tune"])] == [root / "tune" / folder.relative_to(root)]
    shutil.copytree(root / "toy", tmp_path / "only" / "tune" / "toy")
    with pytest.raises(UserError, match=r"has no runs.* Trials of moonopt tune count where their folder tune is given"):
        read_runs([tmp_path / "only"])


def test_a_path_without_runs_is_refused(tmp_path):
    (tmp_path / "measurement.json").write_text("[1, 2]")
    with pytest.raises(UserError, match="has no runs: expected folders with a"):
        read_runs([tmp_path])
    with pytest.raises(UserError, match="expected an object, found a list"):
        read_runs([tmp_path / "measurement.json"])
    with pytest.raises(UserError, match="There is no nowhere"):
        read_runs([Path("nowhere")])


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_half_written_json_is_named(make_run, toy_metrics, name):
    folder = make_run("moon", 0, toy_metrics("moon", 0))
    (folder / name).write_text((folder / name).read_text()[:40])
    with pytest.raises(UserError, match=f"{name} is damaged"):
        read_runs([folder])


def test_a_half_written_last_line_belongs_to_a_run_at_work(make_run):
    folder = make_run("moon", 0, {}, state="unfinished")
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text() + '{"kind": "train", "st')
    (run,) = read_runs([folder])
    assert len(run.train) == 60
    assert run.trouble == "unfinished, at step 60"
    lines = log.read_text().splitlines()
    (folder / "result.json").write_text('{"format": 1, "tasks": [], "metrics": {}}')
    with pytest.raises(UserError, match="damaged in line 64"):
        read_runs([folder])
    log.write_text("\n".join([lines[0], "{", *lines[1:]]))
    with pytest.raises(UserError, match="damaged in line 2"):
        read_runs([folder])


def test_a_failed_run_has_its_last_line_of_traceback(make_run):
    (run,) = read_runs([make_run("moon", 0, {}, state="failed")])
    assert run.result is None
    assert run.error.startswith("Traceback")
    assert run.trouble == "failed (FloatingPointError: loss is NaN)"


def test_a_run_that_failed_first_and_finished_later_is_finished(make_run, toy_metrics):
    folder = make_run("moon", 0, toy_metrics("moon", 0))
    (folder / "error.txt").write_text("Traceback\nOSError: disk full")
    (run,) = read_runs([folder])
    assert run.error is None
    assert run.trouble is None


def test_another_format_and_missing_parts_are_refused(make_run, toy_metrics):
    folder = make_run("moon", 0, toy_metrics("moon", 0))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"format": 2}))
    with pytest.raises(UserError, match="format 2, expected 1"):
        read_runs([folder])
    del config["method"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="there is no method"):
        read_runs([folder])
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"but no config\.json"):
        read_runs([folder])
