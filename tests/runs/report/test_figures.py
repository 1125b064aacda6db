"""The numbers behind the figures, what is drawn for how many tasks, and SVG that fits in a page."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from moonopt.runs.report import drawing, figures
from moonopt.runs.report.curves import MOST_POINTS, conflict_matrix, loss_band, metric_band, timed_loss_band, weight_bands
from moonopt.runs.report.drawing import Plot
from moonopt.runs.report.study import read_runs, studies
from moonopt.runs.report.styles import STYLES, method_styles


@pytest.fixture
def by_name(many_runs):
    return {study.name: study for study in studies(read_runs([many_runs]))}


def row(study, label):
    return next(row for row in study.rows if row.label == label)


def test_a_band_has_mean_and_sample_deviation_over_seeds(by_name):
    moon = row(by_name["toy"], "moon")
    losses = np.array([[line["loss"]["first"] for line in outcome.train] for outcome in moon.outcomes])
    band = loss_band(moon, ["first"])
    assert band.places.tolist() == list(range(1, 61))
    np.testing.assert_allclose(band.mean, losses.mean(0))
    np.testing.assert_allclose(band.spread, losses.std(0, ddof=1))


@pytest.mark.parametrize(("slow", "scale"), [(0.4, "linear"), (0.6, "log")])
def test_losses_by_time_stand_at_the_mean_time_of_their_step(make_run, toy_metrics, slow, scale):
    paces = {"moon": (slow, 3 * slow), "ls": (0.1, 0.3)}  # seconds per step by seed
    for method, both in paces.items():
        for seed, pace in enumerate(both):
            folder = make_run(method, seed, toy_metrics(method, seed))
            (run,) = read_runs([folder])
            lines = [{**line, "seconds": pace * line["step"]} for line in run.train]
            (folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (study,) = studies(read_runs([make_run.args[0]]))
    for each in study.rows:
        by_step, by_time = loss_band(each, ["first"]), timed_loss_band(each, ["first"])
        np.testing.assert_allclose(by_time.places, np.mean(paces[each.label]) * by_step.places)
        np.testing.assert_allclose(by_time.mean, by_step.mean)
    axes = Figure().add_subplot()
    figures.losses(study).panels[1].draw(axes)
    assert (axes.get_xlabel(), axes.get_xscale()) == ("seconds of training", scale)
    assert sorted(line.get_xdata()[-1] for line in axes.lines) == pytest.approx([60 * 0.2, 60 * 2 * slow])


def test_without_seconds_there_is_no_loss_by_time(make_run, toy_metrics):
    folder = make_run("moon", 0, toy_metrics("moon", 0))
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text().replace('"seconds"', '"other"'))
    (study,) = studies(read_runs([folder]))
    assert [panel.title for panel in figures.losses(study).panels] == ["mean of 2 tasks, by step", "first", "second"]


def test_a_metric_is_of_validation_data_where_test_data_are_kept_for_the_end(by_name):
    moon = row(by_name["toy"], "moon")
    lines = [
        {"step": 5, "test": {"first": 1.0}, "valid": {"first": 3.0}},
        {"step": 9, "test": {}, "valid": {"first": 2.0}},
    ]
    band = metric_band(replace(moon, outcomes=[replace(moon.outcomes[0], evaluation=lines)]), "first")
    assert (band.places.tolist(), band.mean.tolist()) == ([5, 9], [1.0, 2.0])


def test_seeds_of_other_lengths_are_read_on_the_steps_of_the_shortest(make_run, toy_metrics):
    make_run("moon", 0, toy_metrics("moon", 0), steps=40)
    make_run("moon", 1, toy_metrics("moon", 1), steps=2000)
    ((moon,),) = (study.rows for study in studies(read_runs([make_run.args[0]])))
    assert loss_band(moon, ["first", "second"]).places[-1] == 40
    long = type(moon)("moon", "moon", moon.outcomes[1:])
    assert len(loss_band(long, ["first"]).places) == MOST_POINTS


def test_weights_and_conflict_are_means_over_seeds(by_name):
    moon = row(by_name["toy"], "moon")
    weights = np.array([[line["weight"]["second"] for line in outcome.train] for outcome in moon.outcomes])
    np.testing.assert_allclose(weight_bands(moon, ["first", "second"])["second"].mean, weights.mean(0))
    np.testing.assert_allclose(conflict_matrix(moon), [[1, -0.24], [-0.24, 1]])
    assert conflict_matrix(row(by_name["report_bench:Scenes"], "stl")) is None


def test_few_tasks_have_panels_of_their_own_and_many_do_not(by_name):
    plots = {plot.name: plot for plot in figures.plots(by_name["toy"])}
    assert list(plots) == ["losses", "progress", "weights", "pareto", "conflict", "costs"]
    titles = [panel.title for panel in plots["losses"].panels]
    assert titles == ["mean of 2 tasks, by step", "mean of 2 tasks, by time", "first", "second"]
    assert "Constant and not drawn: ls." in plots["weights"].caption
    many = {plot.name: plot for plot in figures.plots(by_name["report_bench:Thirty"])}
    assert [panel.title for panel in many["losses"].panels] == ["mean of 30 tasks, by step", "mean of 30 tasks, by time"]
    assert many["weights"].legend == {}
    assert "t0 and t1 are drawn: their gradients disagree most" in many["pareto"].caption
    assert "against those of moon" in many["costs"].caption
    assert "There is no run of ls here." in many["costs"].caption


def test_the_conflicting_pair_is_the_one_with_the_lowest_cosine(by_name, monkeypatch):
    study = by_name["report_bench:Thirty"]
    matrix = np.zeros((30, 30))
    matrix[4, 9] = matrix[9, 4] = -0.7
    monkeypatch.setattr(figures, "conflict_matrix", lambda row: matrix)
    assert figures.pareto(study).panels[0].title == "t4 and t9"
    monkeypatch.setattr(figures, "conflict_matrix", lambda row: None)
    assert "t0 and t1 are drawn: the first two, since conflict was not measured" in figures.pareto(study).caption


def test_a_loss_that_vanishes_gets_a_logarithmic_axis_of_few_decades(make_run, toy_metrics):
    folder = make_run("moon", 0, toy_metrics("moon", 0))
    (run,) = read_runs([folder])
    lines = [{**line, "loss": {"first": 10.0 ** (-line["step"] / 3), "second": 1.0}} for line in (*run.train,)]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (study,) = studies(read_runs([folder]))
    axes = Figure().add_subplot()
    next(panel for panel in figures.losses(study).panels if panel.title == "first").draw(axes)
    assert axes.get_yscale() == "log"
    low, high = axes.get_ylim()
    assert 1e4 < high / low < 1e6
    (svg,) = drawing.inline(Plot("p", "", "", [figures.losses(study).panels[2]], {}), "p")
    assert "mathdefault" not in svg


def test_known_methods_always_look_the_same_and_all_looks_differ():
    few, many = method_styles(["moon", "ls"]), method_styles(["zzz", "moon", "yyy", "ls", "moon, optimizer.lr=1"])
    assert few["moon"] == many["moon"]
    assert few["ls"] == many["ls"]
    assert len(set(many.values())) == 5
    assert len(set(STYLES)) == len(STYLES)
    assert len(method_styles([str(number) for number in range(60)])) == 60


def test_panels_are_well_formed_themed_and_share_no_ids(by_name):
    seen = set()
    for plot in figures.plots(by_name["toy"]):
        for svg in drawing.inline(plot, f"toy-{plot.name}"):
            root = ElementTree.fromstring(svg)
            assert "currentColor" in svg
            assert drawing.INK not in svg
            ids = set(re.findall(r'\bid="([^"]*)"', svg))
            assert not ids & seen
            assert set(re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', svg)) <= {
                pair for each in ids for pair in ((each, ""), ("", each))
            }
            assert "width" not in root.attrib
            seen |= ids


def test_files_are_svg_and_png_and_the_same_every_time(by_name):
    plot = figures.costs(by_name["toy"])
    first, second = drawing.files(plot), drawing.files(plot)
    assert first.keys() == {".svg", ".png"}
    assert first[".png"].startswith(b"\x89PNG")
    assert first[".svg"] == second[".svg"]
