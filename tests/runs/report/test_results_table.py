"""The results table against numpy, and its forms as text."""

import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from moonopt.bench import delta_m, find
from moonopt.bench.toy import Toy
from moonopt.errors import UserError
from moonopt.runs.report.layout import DASH
from moonopt.runs.report.study import read_runs, studies
from moonopt.runs.report.tables import check_reference, results_table, to_csv, to_latex, to_markdown

SCENES = ("segment", "depth")


def table_of(root: Path, name=None, reference=None):
    (study,) = (each for each in studies(read_runs([root])) if name in (None, each.name))
    return results_table(study, reference)


def entries(table, label, published=False):
    (row,) = (row for row in table.rows if row.label == label and row.published == published)
    return dict(zip([column.heading for column in table.columns], row.entries, strict=True))


def test_means_and_sample_deviations_are_those_of_numpy(make_run, toy_metrics):
    for seed in range(4):
        make_run("moon", seed, toy_metrics("moon", seed))
    table = table_of(make_run.args[0])
    assert [column.heading for column in table.columns] == [*(metric.heading for metric in Toy.metrics), "seeds"]
    for metric in Toy.metrics:
        values = [toy_metrics("moon", seed)[metric.name] for seed in range(4)]
        entry = entries(table, "moon")[metric.heading]
        assert entry.value == pytest.approx(np.mean(values))
        assert entry.spread == pytest.approx(np.std(values, ddof=1))
        assert entry.text == f"{np.mean(values):.{metric.digits}f} ± {np.std(values, ddof=1):.{metric.digits}f}"
    assert entries(table, "moon")["seeds"].value == 4
    assert "the best on validation data" in table.notes[1]


def test_one_seed_has_no_deviation(make_run, toy_metrics):
    make_run("moon", 0, toy_metrics("moon", 0))
    table = table_of(make_run.args[0])
    assert "±" not in entries(table, "moon")["first ↓"].text
    assert table.notes[0].startswith("One seed: no standard deviation.")


@pytest.mark.parametrize("single", ["stl", "stl+muon"])
def test_the_best_is_by_direction_finite_and_not_that_of_one_model_per_task(scenes, make_run, single):
    values = {"moon": (70.0, 0.02), "ls": (72.0, 0.01), "famo": (math.nan, math.nan)}
    for method, (miou, error) in values.items():
        make_run(method, 0, {"mIoU": miou, "depth error": error}, scenes, SCENES)
    for task in SCENES:
        metrics = {"mIoU": 99.0, "pixel accuracy": 99.0, "depth error": 0.001}
        make_run(single, 0, metrics, scenes, SCENES, overrides={"balancer.task": task})
    table = table_of(make_run.args[0])
    for heading in ("mIoU (%) ↑", "depth error ↓"):
        assert {row.label for row in table.rows if dict(entries(table, row.label, row.published))[heading].best} == {"ls"}
    assert entries(table, "famo")["mIoU (%) ↑"].text == "NaN"
    assert entries(table, single)["mean score ↑"].text == DASH
    assert f"The best mean is bold ({single}, one model per task, does not compete)." in table.notes[0]


def test_what_is_shown_as_equal_to_the_best_is_bold_too(make_run):
    for method, value in (("moon", 0.50001), ("ls", 0.50002), ("famo", 0.6)):
        make_run(method, 0, {"first": value})
    table = table_of(make_run.args[0])
    assert [entries(table, label)["first ↓"].best for label in ("moon", "ls", "famo")] == [True, True, False]


def test_nothing_is_the_best_of_one(make_run, toy_metrics):
    make_run("moon", 0, toy_metrics("moon", 0))
    table = table_of(make_run.args[0])
    assert not any(entry.best for row in table.rows for entry in row.entries)
    assert table.notes[0] == "One seed: no standard deviation."


def test_delta_refers_to_the_stl_run_of_the_same_seed(many_runs, scenes):
    (study,) = (each for each in studies(read_runs([many_runs])) if each.name == scenes)
    metrics = find(scenes).metrics
    rows = {row.label: row for row in study.rows}
    reference = {outcome.seed: outcome.metrics for outcome in rows["stl"].outcomes}
    expected = [delta_m(outcome.metrics, reference[outcome.seed], metrics) for outcome in rows["moon"].outcomes]
    for asked in (None, "stl"):
        table = results_table(study, asked)
        entry = entries(table, "moon")["Δm (%) ↓"]
        assert entry.value == pytest.approx(np.mean(expected))
        assert entry.spread == pytest.approx(np.std(expected, ddof=1))
        assert entries(table, "stl")["Δm (%) ↓"].text == DASH
        assert any(note.endswith("against stl with the same seed.") for note in table.notes)


def write_scenes(make_run, scenes, method, seed, factor):
    """Metrics that are all worse by a factor; of a single-task method, one run per task."""
    metrics = {"mIoU": 70 / factor, "pixel accuracy": 90 / factor, "depth error": 0.01 * factor}
    for task in SCENES if method.startswith("stl") else (None,):
        overrides = {} if task is None else {"balancer.task": task}
        make_run(method, seed, metrics, scenes, SCENES, overrides=overrides)


def test_delta_of_a_seed_that_stl_lacks_refers_to_the_mean_of_stl(scenes, make_run):
    for seed, factor in ((0, 1.0), (1, 3.0)):
        write_scenes(make_run, scenes, "stl", seed, factor)
    for seed in (0, 5):
        write_scenes(make_run, scenes, "moon", seed, 2.0)
    table = table_of(make_run.args[0], None, "stl")
    same = {"mIoU": 70, "pixel accuracy": 90, "depth error": 0.01}
    mean = {"mIoU": 70 * 2 / 3, "pixel accuracy": 90 * 2 / 3, "depth error": 0.02}
    own, metrics = {"mIoU": 35, "pixel accuracy": 45, "depth error": 0.02}, find(scenes).metrics
    expected = [delta_m(own, same, metrics), delta_m(own, mean, metrics)]
    assert entries(table, "moon")["Δm (%) ↓"].value == pytest.approx(np.mean(expected))
    assert any("with seed 5, which stl lacks, against its mean" in note for note in table.notes)


def test_delta_refers_to_plain_stl_and_to_stl_with_another_optimizer_without_it(scenes, make_run):
    write_scenes(make_run, scenes, "moon", 0, 2.0)
    write_scenes(make_run, scenes, "stl+muon", 0, 2.0)
    table = table_of(make_run.args[0], None, "stl")
    assert entries(table, "moon")["Δm (%) ↓"].value == pytest.approx(0)
    assert any(note.endswith("against stl+muon with the same seed.") for note in table.notes)
    write_scenes(make_run, scenes, "stl", 0, 1.0)
    table = table_of(make_run.args[0])
    assert entries(table, "moon")["Δm (%) ↓"].value == pytest.approx((50 + 50 + 100) / 3)
    assert any(note.endswith("against stl with the same seed.") for note in table.notes)
    assert [entries(table, label)["Δm (%) ↓"].text for label in ("stl", "stl+muon")] == [DASH, DASH]
    assert "(stl and stl+muon, one model per task, do not compete)" not in table.notes[0]  # moon alone has nothing to beat


def test_delta_refers_to_what_is_published(many_runs, scenes):
    table = table_of(many_runs, scenes, "published")
    (study,) = (each for each in studies(read_runs([many_runs])) if each.name == scenes)
    published = find(scenes).published
    outcomes = next(row.outcomes for row in study.rows if row.label == "moon")
    expected = [delta_m(each.metrics, published.rows["stl"], find(scenes).metrics) for each in outcomes]
    assert entries(table, "moon")["Δm (%) ↓"].value == pytest.approx(np.mean(expected))
    assert any("against stl in Doe et al." in note for note in table.notes)


def test_without_a_reference_there_is_no_delta(many_runs):
    assert not any("Δm" in column.heading for column in table_of(many_runs, "toy").columns)
    assert not any("Δm" in note for note in table_of(many_runs, "toy").notes)
    assert "No Δm: there is no stl run here." in table_of(many_runs, "toy", "stl").notes
    assert "No Δm: nothing is published for toy that it could refer to." in table_of(many_runs, "toy", "published").notes
    with pytest.raises(UserError, match="Unknown reference for Δm 'sti': expected one of published, stl"):
        table_of(many_runs, "toy", "sti")


def test_a_reference_that_rounds_to_zero_gives_no_delta(scenes, make_run):
    make_run("moon", 0, {"mIoU": 70.0, "pixel accuracy": 90.0, "depth error": 0.01}, scenes, SCENES)
    for task in SCENES:
        metrics = {"mIoU": 99.0, "pixel accuracy": 99.0, "depth error": 1e-20}
        make_run("stl", 0, metrics, scenes, SCENES, overrides={"balancer.task": task})
    table = table_of(make_run.args[0], None, "stl")
    assert not any("Δm" in column.heading for column in table.columns)
    assert "No Δm: in its reference, stl, depth error is zero." in table.notes
    assert any("Δm" in column.heading for column in table_of(make_run.args[0], None, "published").columns)


def test_without_metrics_of_tasks_there_is_no_delta(make_run):
    make_run("moon", 0, {"average loss": 0.5}, "synthetic30", ("y0",))
    for reference in ("stl", "published"):
        notes = table_of(make_run.args[0], None, reference).notes
        assert "No Δm: synthetic30 has no metric that belongs to a task." in notes


def test_stl_runs_that_gave_no_numbers_are_no_reference(scenes, make_run):
    make_run("moon", 0, {"mIoU": 70.0, "pixel accuracy": 90.0, "depth error": 0.01}, scenes, SCENES)
    for task in SCENES:
        make_run("stl", 0, {"mIoU": None, "pixel accuracy": 99.0}, scenes, SCENES, overrides={"balancer.task": task})
    table = table_of(make_run.args[0], None, "stl")
    assert "No Δm: no stl run here gave all its numbers." in table.notes
    assert entries(table, "stl")["mIoU (%) ↑"].text == "NaN"
    assert any("against stl in Doe et al." in note for note in table_of(make_run.args[0]).notes)


@pytest.mark.parametrize(
    ("name", "bench", "methods", "text"),
    [
        ("sti", "toy", ["stl"], "Unknown reference for Δm 'sti': expected one of published, stl. Did you mean 'stl'?"),
        ("published", "toy", ["stl"], "moonopt has no published reference for toy."),
        ("stl", "toy", ["moon", "ls"], "Δm against stl needs stl among the methods, found moon, ls."),
    ],
)
def test_a_reference_that_cannot_be_is_refused_before_anything_runs(name, bench, methods, text):
    with pytest.raises(UserError, match=re.escape(text)):
        check_reference(name, find(bench), methods)


def test_a_reference_that_can_be_is_let_through(scenes):
    check_reference(None, find("toy"), ["moon"])
    check_reference("stl", find("toy"), ["moon", "stl+muon"])
    check_reference("published", find(scenes), ["moon"])


def test_it_is_said_what_runs_of_a_table_were_made_with_where_that_differs(make_run, toy_metrics):
    make_run("moon", 0, toy_metrics("moon", 0))
    make_run("ls", 0, toy_metrics("ls", 0))
    assert not any("made alike" in note for note in table_of(make_run.args[0]).notes)
    versions, hardware = {"moonopt": "0.1.0", "torch": "2.12.0"}, {"device": "NVIDIA H200"}
    folder = make_run("famo", 0, toy_metrics("famo", 0), commit=None, versions=versions, hardware=hardware)
    set_config(folder, device="cuda", amp=True)
    differing = "commit (abc1234, not recorded); torch (2.13.0, 2.12.0); device (cpu, NVIDIA H200); amp (false, true)"
    assert f"The runs were not all made alike: they differ in {differing}." in table_of(make_run.args[0]).notes


def test_it_is_said_where_code_of_ones_own_has_changed_between_runs(make_run, toy_metrics):
    for method, code in (("moon", {"own:Toy": "a" * 12}), ("ls", {"own:Toy": "a" * 12, "own:ls": "c" * 12})):
        set_config(make_run(method, 0, toy_metrics(method, 0)), code=code)
    assert not any("made alike" in note for note in table_of(make_run.args[0]).notes)
    set_config(make_run("moon", 1, toy_metrics("moon", 1)), code={"own:Toy": "b" * 12})
    differing = f"code of own:Toy ({'a' * 12}, {'b' * 12})"
    assert f"The runs were not all made alike: they differ in {differing}." in table_of(make_run.args[0]).notes


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_overrides_that_all_rows_share_are_said_below(make_run, toy_metrics):
    for method in ("moon", "ls"):
        make_run(method, 0, toy_metrics(method, 0), overrides={"data.spread": 1, "model.bias": True})
    table = table_of(make_run.args[0])
    assert [row.label for row in table.rows] == ["moon", "ls"]
    assert "All with data.spread=1, model.bias=true." in table.notes


def test_null_is_not_a_number(make_run):
    make_run("moon", 0, {"first": None, "second": 0.5})
    make_run("moon", 1, {"first": 0.5, "second": 0.5})
    found = entries(table_of(make_run.args[0]), "moon")
    assert found["first ↓"].text == "NaN"
    assert found["second ↓"].text.startswith("0.5")


@pytest.mark.parametrize(
    ("selection", "said"),
    [("epoch 30, the last", "the last"), ("epoch 7 of 8, the best", "the best"), ("epochs 3 to 7, their mean", "their mean")],
)
def test_the_rule_of_selection_is_said_without_the_epoch(make_run, toy_metrics, selection, said):
    make_run("moon", 0, toy_metrics("moon", 0), selection=selection)
    assert f"Which evaluation counts: {said}." in table_of(make_run.args[0]).notes


def test_published_rows_stand_below_their_method_and_the_others_at_the_end(many_runs, scenes):
    table = table_of(many_runs, scenes)
    expected = [("moon", 0), ("moon", 1), ("stl", 0), ("stl", 1), ("famo", 0), ("sdmgrad", 1)]
    assert [(row.label, row.published) for row in table.rows] == expected
    assert entries(table, "moon", published=True)["Δm (%) ↓"].text == "-1.77"
    assert entries(table, "moon", published=True)["mIoU (%) ↑"].text == "75.90"
    assert not any(entry.best for row in table.rows if row.published for entry in row.entries)


def test_what_is_not_finished_is_said_below(many_runs, make_run):
    note = table_of(many_runs, "toy").notes[-1]
    assert note == "Not in the table: uw, seed 0: failed (FloatingPointError: loss is NaN); uw, seed 1: unfinished, at step 60."
    make_run("moon", 0, {}, state="unfinished")
    table = table_of(make_run.args[0])
    assert table.rows == []
    assert table.notes == ["No run is finished.", "Not in the table: moon, seed 0: unfinished, at step 60."]


def test_with_many_metrics_summaries_come_first(many_runs):
    assert [column.heading for column in table_of(many_runs, "report_bench:Thirty").columns][:3] == ["mean ↓", "t0 ↓", "t1 ↓"]


def test_csv_has_the_raw_values(many_runs, scenes):
    table = table_of(many_runs, scenes)
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [(line["method"], line["source"]) for line in lines][:2] == [("moon", "runs"), ("moon", "published")]
    assert float(lines[0]["mIoU (%) ↑"]) == entries(table, "moon")["mIoU (%) ↑"].value
    assert float(lines[0]["mIoU (%) ↑ std"]) == entries(table, "moon")["mIoU (%) ↑"].spread
    assert lines[2]["mean score ↑"] == ""


def test_markdown_and_latex_escape_labels_and_mark_the_best(many_runs):
    table = table_of(many_runs, "toy")
    markdown, latex = to_markdown(table), to_latex(table)
    assert "<script>" not in markdown
    best = next(entry.text for row in table.rows for entry in row.entries if entry.best)
    assert f"**{best}**" in markdown
    assert rf"\textbf{{{best.replace('±', chr(36) + chr(92) + 'pm' + chr(36))}}}" in latex
    assert r"\textless{}script\textgreater{}alert('x')\textless{}/script\textgreater{} \$a\_b\$" in latex
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert {line.count(" & ") for line in rows} == {len(table.columns)}
    assert len({line.count(" | ") for line in markdown.splitlines() if line.startswith("|")}) == 1
