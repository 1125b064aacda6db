"""The results table against numpy, and its forms as text."""

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest

from moonopt.bench import delta_m, find
from moonopt.bench.toy import Toy
from moonopt.errors import UserError
from moonopt.runs.report.layout import DASH
from moonopt.runs.report.study import read_runs, studies
from moonopt.runs.report.tables import results_table, to_csv, to_latex, to_markdown

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


def test_the_best_is_by_direction_finite_and_not_that_of_stl(scenes, make_run):
    values = {"moon": (70.0, 0.02), "ls": (72.0, 0.01), "famo": (math.nan, math.nan)}
    for method, (miou, error) in values.items():
        make_run(method, 0, {"mIoU": miou, "depth error": error}, scenes, SCENES)
    for task in SCENES:
        metrics = {"mIoU": 99.0, "pixel accuracy": 99.0, "depth error": 0.001}
        make_run("stl", 0, metrics, scenes, SCENES, overrides={"balancer.task": task})
    table = table_of(make_run.args[0])
    for heading in ("mIoU (%) ↑", "depth error ↓"):
        assert {row.label for row in table.rows if dict(entries(table, row.label, row.published))[heading].best} == {"ls"}
    assert entries(table, "famo")["mIoU (%) ↑"].text == "NaN"
    assert entries(table, "stl")["mean score ↑"].text == DASH
    assert "stl, one model per task, does not compete" in table.notes[0]


def test_what_is_shown_as_equal_to_the_best_is_bold_too(make_run):
    for method, value in (("moon", 0.50001), ("ls", 0.50002), ("famo", 0.6)):
        make_run(method, 0, {"first": value})
    table = table_of(make_run.args[0])
    assert [entries(table, label)["first ↓"].best for label in ("moon", "ls", "famo")] == [True, True, False]


def test_nothing_is_the_best_of_one(make_run, toy_metrics):
    make_run("moon", 0, toy_metrics("moon", 0))
    assert not any(entry.best for row in table_of(make_run.args[0]).rows for entry in row.entries)


def test_delta_refers_to_the_mean_of_the_stl_runs(many_runs, scenes):
    (study,) = (each for each in studies(read_runs([many_runs])) if each.name == scenes)
    metrics = find(scenes).metrics
    rows = {row.label: row for row in study.rows}
    names = [metric.name for metric in metrics if metric.task]
    reference = {name: np.mean(list(rows["stl"].values(name).values())) for name in names}
    expected = [delta_m(outcome.metrics, reference, metrics) for outcome in rows["moon"].outcomes]
    for asked in (None, "stl"):
        table = results_table(study, asked)
        entry = entries(table, "moon")["Δm (%) ↓"]
        assert entry.value == pytest.approx(np.mean(expected))
        assert entry.spread == pytest.approx(np.std(expected, ddof=1))
        assert entries(table, "stl")["Δm (%) ↓"].text == DASH
        assert any("against the mean of the stl runs here" in note for note in table.notes)


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
    assert any("No Δm" in note for note in table_of(many_runs, "toy", "stl").notes)
    with pytest.raises(UserError, match="Unknown reference for Δm 'sti': expected one of published, stl"):
        table_of(many_runs, "toy", "sti")


def test_a_reference_that_rounds_to_zero_gives_no_delta(scenes, make_run):
    make_run("moon", 0, {"mIoU": 70.0, "pixel accuracy": 90.0, "depth error": 0.01}, scenes, SCENES)
    for task in SCENES:
        metrics = {"mIoU": 99.0, "pixel accuracy": 99.0, "depth error": 1e-20}
        make_run("stl", 0, metrics, scenes, SCENES, overrides={"balancer.task": task})
    table = table_of(make_run.args[0], None, "stl")
    assert not any("Δm" in column.heading for column in table.columns)
    assert "No Δm: in its reference, the mean of the stl runs here, a metric is missing or rounds to zero." in table.notes
    assert any("Δm" in column.heading for column in table_of(make_run.args[0], None, "published").columns)


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
