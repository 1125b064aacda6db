"""Comparisons: which cells there are, which are run, skipped, gone on with, and what is told of those that fail."""

import re

import pytest
from small_runs import TINY, StopAfter, cell, outcome, run

from moonopt.errors import UserError
from moonopt.runs.compare import Plan, compare, make_cells
from moonopt.runs.interrupt import Stop
from moonopt.runs.train import InterruptedRun

SHORT = {"train.epochs": 1}


class Watcher:
    """Remembers what a screen is told."""

    def __init__(self):
        self.cells, self.records, self.ends = [], [], {}

    def begin(self, cells):
        self.cells = list(cells)

    def record(self, number, record):
        self.records.append((number, record))

    def end(self, number, outcome):
        self.ends[number] = outcome

    @property
    def started(self):
        return [number for number, record in self.records if record["kind"] == "start"]


def compared(cells, root, **how):
    screen = Watcher()
    return compare(cells, Plan(root, root, **how), Stop(), screen), screen


def cells_of(methods, seeds=(0,), name=TINY, settings=SHORT):
    return make_cells(name, methods, seeds, {method: [("--set", settings)] for method in methods})


def test_every_method_meets_every_seed_and_stl_every_task():
    labels = [each.name for each in cells_of(["moon", "stl", "stl+muon"], [4, 5], settings={})]
    tasks = [f"{method},balancer.task={task}" for method in ("stl", "stl+muon") for task in "abc"]
    assert labels == [f"{label} seed {seed}" for seed in (4, 5) for label in ("moon", *tasks)]
    (one,) = cells_of(["stl"], settings={"balancer.task": "b"})
    assert one.settings["balancer.task"] == "b"


@pytest.mark.parametrize(
    ("methods", "seeds", "text"),
    [
        ([], [0], "at least one method"),
        (["ls"], [], "at least one seed"),
        (["ls", "ls"], [0], "Every method can be in a comparison once, found ls, ls"),
        (["ls"], [1, 1], "Every seed can be in a comparison once, found 1, 1"),
    ],
)
def test_nothing_or_one_thing_twice_is_no_comparison(methods, seeds, text):
    with pytest.raises(UserError, match=text):
        cells_of(methods, seeds)


@pytest.mark.parametrize("method", ["stl", "stl+muon"])
def test_one_model_per_task_is_refused_where_no_metric_is_of_a_task(method):
    with pytest.raises(UserError, match=re.escape(f"{method} would give no number on synthetic30: ")):
        make_cells("synthetic30", ["ls", method], [0], {})


def test_done_cells_are_skipped_and_unfinished_ones_go_on(tmp_path):
    cells = cells_of(["ls", "uw", "famo"], settings={"train.epochs": 2})
    run(cells[0], tmp_path)
    with pytest.raises(InterruptedRun):
        run(cells[1], tmp_path, stop=StopAfter(7))
    before = (cells[0].folder(tmp_path) / "result.json").stat().st_mtime_ns
    comparison, screen = compared(cells, tmp_path)
    assert comparison.skipped == [cells[0]]
    assert comparison.failed == []
    assert [each.cell for each in comparison.outcomes] == cells[1:]
    assert screen.started == [1, 2]
    assert [record["step"] for _, record in screen.records if record["kind"] == "start"] == [7, 0]
    assert {number: end.status for number, end in screen.ends.items()} == {0: "done", 1: "done", 2: "done"}
    assert (cells[0].folder(tmp_path) / "result.json").stat().st_mtime_ns == before
    assert outcome(cells[1].folder(tmp_path)) == outcome(run(cells[1], tmp_path / "whole"))
    again, screen = compared(cells, tmp_path)
    assert again.skipped == cells
    assert screen.records == []
    assert compared(cells[:1], tmp_path, overwrite=True)[1].started == [0]
    assert (cells[0].folder(tmp_path) / "result.json").stat().st_mtime_ns > before


def test_a_failed_cell_is_told_and_the_others_are_done(tmp_path):
    cells = cells_of(["famo", "uw", "dwa", "ls"], name="tiny_benchmarks:Vanishing")
    comparison, screen = compared(cells, tmp_path)
    assert [each.status for each in comparison.outcomes] == ["killed", "failed", "failed", "done"]
    assert [each.cell.method for each in comparison.failed] == ["famo", "uw", "dwa"]
    assert screen.ends[3].result["steps"] == 6


def test_a_cell_that_somebody_else_runs_is_a_failed_one(tmp_path):
    from moonopt.runs.store import RunFolder

    cells = cells_of(["ls", "uw"])
    with RunFolder(cells[0].folder(tmp_path)).locked():
        comparison, _ = compared(cells, tmp_path)
    assert [each.status for each in comparison.outcomes] == ["failed", "done"]
    assert "is in use: process" in comparison.failed[0].text


def test_nothing_is_begun_where_a_folder_holds_another_run_or_data_are_missing(tmp_path):
    cells = cells_of(["ls", "uw"])
    folder = run(cells[1], tmp_path)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"train.batch_size": 8', '"train.batch_size": 9'))
    with pytest.raises(UserError, match=re.escape("other settings (train.batch_size is 9 there and 8 here)")):
        compared(cells, tmp_path)
    assert not cells[0].folder(tmp_path).exists()
    with pytest.raises(UserError, match=r"put absent.csv there"):
        compared([cell(name="tiny_benchmarks:Absent")], tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
