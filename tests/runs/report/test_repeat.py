"""How to repeat a row, and which settings rows differ in."""

from moonopt.runs.report.repeat import recipe, settings_of
from moonopt.runs.report.study import read_runs, studies


def study_of(make_run):
    (study,) = studies(read_runs([make_run.args[0]]))
    return study


def test_a_recipe_has_a_command_per_run_and_every_different_value(make_run, toy_metrics):
    make_run("moon", 0, toy_metrics("moon", 0), commit=None)
    make_run("moon", 1, toy_metrics("moon", 1), hardware={"device": "cuda", "gpu": "H200"})
    found = recipe(study_of(make_run).rows[0])
    assert found.commands == [f"moonopt run toy --method moon --seed {seed}" for seed in (0, 1)]
    assert found.commit == "not recorded / abc1234"
    assert found.versions == "moonopt 0.1.0, torch 2.13.0, python 3.11.5"
    assert found.hardware == "device cpu, cpu AVX512, threads 2 / device cuda, gpu H200"
    assert found.finished == "2026-11-15T13:00:00+00:00 to 2026-11-15T13:01:00+00:00"


def test_settings_are_told_apart_by_whether_rows_differ_in_them(make_run, toy_metrics):
    make_run("moon", 0, toy_metrics("moon", 0), overrides={"optimizer.weight_decay": 0.0})
    make_run("cagrad", 0, toy_metrics("ls", 0), overrides={"balancer.c": 0.4, "optimizer.weight_decay": 0})
    make_run("cagrad", 1, toy_metrics("ls", 1), overrides={"balancer.c": 0.4, "optimizer.weight_decay": 0})
    found = settings_of(study_of(make_run))
    assert [(row.label, [entry.text for entry in row.entries]) for row in found.differing.rows] == [
        ("optimizer.lr", ["0.02", "0.001"])
    ]
    assert [row.label for row in found.partial.rows] == ["balancer.c"]
    expected = {"amp": "false", "compile": "false", "device": "cpu", "optimizer.weight_decay": "0", "train.epochs": "3"}
    assert found.shared == expected
