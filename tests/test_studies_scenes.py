"""The scripts of the studies of scenes and faces: nothing refused, nothing twice, and as many trials for every method."""

import importlib
import json
import math
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from moonopt.bench.metrics import delta_m
from moonopt.bench.nyuv2 import NYUv2Small
from moonopt.errors import UserError
from moonopt.runs.cell import make_cell
from moonopt.runs.export import export
from moonopt.runs.report.reading import read_runs
from moonopt.runs.settings import parse
from moonopt.runs.tune import read_grids

ROOT = Path(__file__).parents[1]


@pytest.fixture
def commands(tmp_path):
    """Runs a stage with a python that says what it was asked for: of each call the words, and the options with their values."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RUNS": str(tmp_path),
        "MOONOPT_DATA": str(tmp_path),
    }

    def run(script, stage):
        done = subprocess.run([ROOT / "studies" / script, stage], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [(line.split(), list(pairwise(line.split()))) for line in done.stdout.splitlines()]

    return run


def value(options, name):
    return next(value for option, value in options if option == name)


@pytest.mark.parametrize("script", ["nyuv2.sh", "faces.sh"])
def test_stages_train_what_is_tuned_and_nothing_twice(script, commands):
    places, tuned = set(), {}
    for stage in ("tune", "main", *(["beyond"] if script == "nyuv2.sh" else [])):
        for words, options in commands(script, stage):
            given = dict(parse(value) for option, value in options if option == "--set")
            methods = value(options, "--methods").split(",")
            grids = read_grids([value for option, value in options if option == "--grid"], methods) if stage == "tune" else {}
            for method in methods:
                first = {key: values[0] for key, values in grids.get(method, {}).items()}
                cell = make_cell(words[3], method, 0, [("--set", given | first)])
                place = value(options, "--out"), cell.benchmark, cell.label
                assert place not in places
                places.add(place)
            if stage == "tune":
                tuned[value(options, "--file")] = {method: math.prod(map(len, grids[method].values())) for method in methods}
            else:
                assert set(methods) <= set(tuned[value(options, "--tuned")])
    assert len({trials for methods in tuned.values() for trials in methods.values()}) == 1


def test_the_first_five_methods_of_nyuv2_have_two_seeds(commands):
    seeds = {
        method: int(value(options, "--seeds"))
        for _, options in commands("nyuv2.sh", "main")
        for method in value(options, "--methods").split(",")
    }
    twice = {method for method, count in seeds.items() if count >= 2}
    assert twice == {"moon", "muon", "famo+muon", "famo", "ls"}
    assert set(seeds) - twice == {"nash-mtl", "mgda", "cagrad", "uw", "stl"}


def test_faces_are_learnt_by_both_networks_with_the_nine_methods(commands):
    by_network = {}
    for words, options in commands("faces.sh", "main"):
        by_network.setdefault(words[3], []).extend(value(options, "--methods").split(","))
    nine = {"moon", "muon", "famo", "ls", "mgda", "pcgrad", "cagrad", "imtl-g", "nash-mtl"}
    assert {network: set(methods) for network, methods in by_network.items()} == {"celeba-cnn": nine, "celeba-vit": nine}


@pytest.mark.parametrize(
    ("script", "stage", "modules"),
    [("nyuv2.sh", "speed", {"moonopt.speed.loading"}), ("faces.sh", "speed", {"moonopt.speed.faces", "moonopt.speed.loading"})],
)
def test_the_stage_speed_measures(script, stage, modules, commands):
    assert {words[1] for words, _ in commands(script, stage)} == modules


@pytest.mark.parametrize("script", ["nyuv2.sh", "faces.sh"])
def test_an_unknown_stage_is_refused(script):
    done = subprocess.run([ROOT / "studies" / script, "tunes"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no stage tunes" in done.stderr


BENCH = "nyuv2-small"


def metrics(factor):
    """Those of the published single-task learning, all worse by a factor."""
    scale = {metric.name: 1 / factor if metric.higher else factor for metric in NYUv2Small.metrics}
    return {name: value * scale[name] for name, value in NYUv2Small.reference.items()} | {"relative to STL": factor}


def write_run(root, method, seed, factors, **settings):
    """A finished run that was worse by these factors at its evaluations."""
    cell = make_cell(BENCH, method, seed, [("test", settings)])
    folder = cell.folder(root)
    folder.mkdir(parents=True)
    steps = 10 * len(factors)
    result = {"format": 1, "tasks": list(NYUv2Small.tasks), "metrics": metrics(factors[-1]), "valid": None}
    result |= {"steps": steps, "epochs": len(factors), "seconds_per_step": 1.0, "peak_memory_mb": 1.0, "seconds": 1.0}
    lines = [
        {"kind": "evaluation", "step": 10 * (number + 1), "epoch": number + 1, "valid": None, "test": metrics(factor)}
        for number, factor in enumerate(factors)
    ]
    (folder / "config.json").write_text(json.dumps(cell.config))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def study(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("studies.nyuv2.__main__")


def test_the_figure_has_delta_m_against_the_single_task_runs_of_the_same_folder(study, tmp_path):
    for task in NYUv2Small.tasks:
        write_run(tmp_path / "runs", "stl", 0, [1.1], **{"balancer.task": task})
    write_run(tmp_path / "runs", "moon", 0, [1.5, 1.2])
    write_run(tmp_path / "runs", "moon", 1, [1.4, 1.1])
    write_run(tmp_path / "runs", "moon", 0, [1.3, 1.1], **{"optimizer.loss": "log"})
    export(read_runs([tmp_path / "runs"]), tmp_path / "results")
    moon, log = study.rows(tmp_path / "results")
    found = {outcome.seed: [line["test"]["Δm"] for line in outcome.evaluation] for outcome in moon.outcomes}
    expected = {
        seed: [delta_m(metrics(factor), metrics(1.1), NYUv2Small.metrics) for factor in factors]
        for seed, factors in ((0, [1.5, 1.2]), (1, [1.4, 1.1]))
    }
    assert found == {seed: pytest.approx(values, abs=0.01) for seed, values in expected.items()}
    assert found[1][1] == pytest.approx(0, abs=0.01)  # exports round
    study.main([str(tmp_path / "results"), str(tmp_path)])
    drawn = (tmp_path / "images" / "nyuv2-delta.svg").read_text()
    assert all(word in drawn for word in ("epoch", ">moon<", ">moon loss=log<"))
    assert log.outcomes[0].evaluation[-1]["test"]["Δm"] == pytest.approx(0, abs=0.01)


def test_a_folder_without_single_task_runs_has_no_figure(study, tmp_path):
    write_run(tmp_path / "runs", "moon", 0, [1.5, 1.2])
    export(read_runs([tmp_path / "runs"]), tmp_path / "results")
    with pytest.raises(UserError, match="against stl"):
        study.rows(tmp_path / "results")
