"""The committed form of a study: small, stable, and as good as the runs for a report."""

import json
from dataclasses import replace

import pytest

from moonopt.errors import UserError
from moonopt.runs.export import export, thinned
from moonopt.runs.report.costs import cost_table
from moonopt.runs.report.statistics import comparison_table
from moonopt.runs.report.study import read_runs, studies
from moonopt.runs.report.tables import results_table


@pytest.fixture
def toy_runs(make_run, toy_metrics):
    for seed in (0, 1, 10):
        make_run("moon", seed, toy_metrics("moon", seed), steps=250)
        make_run("moon", seed, toy_metrics("moon", seed), overrides={"optimizer.lr": 0.01})
        make_run("a/b:c", seed, toy_metrics("other", seed) | {"first": float("nan")})
    return read_runs([make_run.args[0]])


def test_the_tables_of_an_export_are_those_of_the_runs(toy_runs, tmp_path):
    files = export(toy_runs, tmp_path / "out")
    assert [path.name for path in files] == ["a%2Fb:c.json", "moon.json", "moon,optimizer.lr=0.01.json"]
    (before,), (after,) = studies(toy_runs), studies(read_runs([tmp_path / "out"]))
    for table in (results_table, cost_table, comparison_table):
        assert repr(table(after)) == repr(table(before))  # repr: NaN is not equal to itself


def test_the_tables_of_exported_stl_runs_are_those_of_the_runs(many_runs, scenes, tmp_path):
    runs = [run for run in read_runs([many_runs]) if run.benchmark == scenes]
    files = export(runs, tmp_path / "out")
    assert [path.name for path in files][2:] == ["stl,balancer.task=depth.json", "stl,balancer.task=segment.json"]
    (before,), (after,) = studies(runs), studies(read_runs(files))
    assert results_table(after) == results_table(before)


def test_results_are_exact_and_curves_are_thin(toy_runs, tmp_path):
    file = tmp_path / "out" / "moon.json"
    export(toy_runs, file.parent)
    content = json.loads(file.read_text())
    assert list(content) == ["format", "benchmark", "method", "config", "seeds"]
    assert "seed" not in content["config"]
    assert list(content["seeds"]) == ["0", "1", "10"]
    commands = [found["result"]["command"] for found in content["seeds"].values()]
    assert commands == [f"moonopt run toy --method moon --seed {seed}" for seed in (0, 1, 10)]
    run = next(run for run in toy_runs if run.method == "moon" and not run.overrides and run.seed == 1)
    found = content["seeds"]["1"]
    assert found["result"] == run.result
    steps = [line["step"] for line in found["train"]]
    assert (len(steps), steps[0], steps[-1]) == (50, 1, 250)
    loss = run.train[-1]["loss"]["first"]
    assert found["train"][-1]["loss"]["first"] == float(f"{loss:.4g}") != loss
    assert all(line["conflict"] for line in found["evaluation"])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_examples_stay_in_the_first_and_the_last_evaluation(count, toy_runs, tmp_path):
    run = toy_runs[0]
    lines = [{**run.evaluation[0], "epoch": epoch, "examples": [{"given": {}, "made": {}}]} for epoch in range(count)]
    (file,) = export([replace(run, evaluation=lines)], tmp_path / "out")
    (found,) = json.loads(file.read_text())["seeds"].values()
    assert [line["epoch"] for line in found["evaluation"]] == list(range(count))
    kept = [epoch for epoch, line in enumerate(found["evaluation"]) if "examples" in line]
    assert kept == sorted({0, count - 1})


def test_of_many_tasks_the_last_matrix_of_conflicts_stays(toy_runs, tmp_path):
    for run in toy_runs:
        for line in run.evaluation:
            line["conflict"] = [[1.0] * 5] * 5
    export(toy_runs, tmp_path)
    found = json.loads((tmp_path / "moon.json").read_text())["seeds"]["1"]["evaluation"]
    assert [line["conflict"] is None for line in found] == [True] * 11 + [False]


@pytest.mark.parametrize(("tasks", "lines"), [(20, 50), (21, 10)])
def test_of_many_tasks_fewer_losses_and_weights_stay(tasks, lines, toy_runs, tmp_path):
    run = next(run for run in toy_runs if run.method == "moon" and not run.overrides and run.seed == 1)
    many = replace(run, result=run.result | {"tasks": [f"y{number}" for number in range(tasks)]})
    (file,) = export([many], tmp_path)
    (found,) = json.loads(file.read_text())["seeds"].values()
    steps = [line["step"] for line in found["train"]]
    assert (len(steps), steps[0], steps[-1]) == (lines, 1, 250)
    assert len(found["evaluation"]) == len(run.evaluation)


def test_exporting_an_export_changes_nothing(toy_runs, tmp_path):
    first = export(toy_runs, tmp_path / "first")
    second = export(read_runs([tmp_path / "first"]), tmp_path / "second")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_files_have_the_whole_label_also_of_overrides_that_all_share(make_run, toy_metrics, tmp_path):
    for method in ("moon", "ls"):
        make_run(method, 0, toy_metrics(method, 0), overrides={"model.bias": True})
    files = export(read_runs([make_run.args[0]]), tmp_path / "out")
    assert [path.name for path in files] == ["ls,model.bias=true.json", "moon,model.bias=true.json"]


def test_seeds_that_ran_elsewhere_keep_their_config(make_run, toy_metrics, tmp_path):
    for seed, device in enumerate(("cpu", "cuda:1")):
        folder = make_run("moon", seed, toy_metrics("moon", seed))
        config = json.loads((folder / "config.json").read_text()) | {"device": device}
        (folder / "config.json").write_text(json.dumps(config))
    runs = read_runs([make_run.args[0]])
    again = read_runs(export(runs, tmp_path / "out"))
    assert [run.config for run in again] == [run.config for run in runs]


def test_seeds_that_an_earlier_export_left_stay(make_run, toy_metrics, tmp_path):
    folders = [make_run("moon", seed, toy_metrics("moon", seed)) for seed in range(3)]
    (together,) = export(read_runs(folders), tmp_path / "together")
    export(read_runs(folders[:1] + folders[2:]), tmp_path / "apart")
    with pytest.warns(UserWarning, match=r"^moon\.json: seed 2 kept from before\.$") as told:
        (apart,) = export(read_runs(folders[:2]), tmp_path / "apart")
    assert len(told) == 1
    assert apart.read_text() == together.read_text()


def test_a_seed_that_is_given_again_is_replaced_and_that_is_told(make_run, toy_metrics, tmp_path):
    folder = make_run("moon", 0, toy_metrics("moon", 0))
    (file,) = export(read_runs([folder]), tmp_path / "out")
    result = json.loads((folder / "result.json").read_text())
    result["metrics"]["first"] = 0.25
    (folder / "result.json").write_text(json.dumps(result))
    with pytest.warns(UserWarning, match=r"^moon\.json: seed 0 replaced\.$"):
        export(read_runs([folder]), file.parent)
    (run,) = read_runs([file])
    assert run.result["metrics"]["first"] == 0.25


def test_runs_on_made_up_data_are_told_and_do_not_mix(make_run, toy_metrics, tmp_path):
    folders = [make_run("moon", seed, toy_metrics("moon", seed)) for seed in range(2)]
    export(read_runs(folders[:1]), tmp_path / "out")
    result = json.loads((folders[1] / "result.json").read_text()) | {"made_up_data": True}
    (folders[1] / "result.json").write_text(json.dumps(result))
    with pytest.warns(UserWarning, match="On made-up data, and not to be kept beside others: moon"):
        export(read_runs(folders[1:]), tmp_path / "rehearsal")
    with (
        pytest.warns(UserWarning, match="made-up"),
        pytest.raises(UserError, match="not both of real data, nor both of made-up ones"),
    ):
        export(read_runs(folders[1:]), tmp_path / "out")


def test_seeds_of_another_kind_of_machine_are_told(make_run, toy_metrics, tmp_path):
    folders = [make_run("moon", seed, toy_metrics("moon", seed)) for seed in range(2)]
    config = json.loads((folders[1] / "config.json").read_text()) | {"device": "cuda"}
    (folders[1] / "config.json").write_text(json.dumps(config))
    export(read_runs(folders[:1]), tmp_path / "out")
    with pytest.warns(UserWarning, match="seed 0 kept from before, which ran on another kind of machine"):
        export(read_runs(folders[1:]), tmp_path / "out")


def test_seeds_with_other_settings_do_not_share_a_file(make_run, toy_metrics, tmp_path):
    folders = [make_run("moon", seed, toy_metrics("moon", seed)) for seed in range(2)]
    (file,) = export(read_runs(folders[:1]), tmp_path)
    before, content = file.read_text(), json.loads(file.read_text())
    content["config"]["settings"]["optimizer.lr"] = 0.5
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"moon\.json has seed 0 with other settings or code \(optimizer\.lr\): move it"):
        export(read_runs(folders[1:]), tmp_path)
    file.write_text(before[:100])
    with pytest.raises(UserError, match="is damaged"):
        export(read_runs(folders[1:]), tmp_path)
    assert file.read_text() == before[:100]


def test_seeds_of_other_code_of_ones_own_do_not_share_a_file(make_run, toy_metrics, tmp_path):
    folders = [make_run("moon", seed, toy_metrics("moon", seed)) for seed in range(2)]
    for folder, checksum in zip(folders, ("a" * 12, "b" * 12), strict=True):
        config = json.loads((folder / "config.json").read_text()) | {"code": {"own:Toy": checksum}}
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"seed1 is not of the same code of own:Toy as .*seed0: run one of them anew"):
        export(read_runs(folders), tmp_path)
    export(read_runs(folders[:1]), tmp_path / "out")
    with pytest.raises(UserError, match=r"moon\.json has seed 0 with other settings or code \(code of own:Toy\): move it"):
        export(read_runs(folders[1:]), tmp_path / "out")
    config = json.loads((folders[1] / "config.json").read_text())
    del config["code"]  # as of an older run
    (folders[1] / "config.json").write_text(json.dumps(config))
    assert len(export(read_runs(folders), tmp_path / "both")) == 1


def test_unfinished_runs_are_left_out_with_a_warning(make_run, toy_metrics, tmp_path):
    make_run("moon", 0, toy_metrics("moon", 0))
    make_run("moon", 1, {}, state="failed")
    make_run("ls", 0, {}, state="unfinished")
    with pytest.warns(UserWarning, match=r"Not exported: ls seed 0 \(unfinished, at step 60\); moon seed 1 \(failed") as caught:
        files = export(read_runs([make_run.args[0]]), tmp_path / "out")
    assert len(caught) == 1
    assert [path.name for path in files] == ["moon.json"]


def test_nothing_finished_and_several_benchmarks_are_refused(make_run, many_runs, tmp_path):
    make_run("ls", 0, {}, state="unfinished")
    with pytest.raises(UserError, match="No run of toy is finished"):
        export(read_runs([make_run.args[0]]), tmp_path / "out")
    with pytest.raises(UserError, match="An export is of one benchmark, found report_bench:Scenes, report_bench:Thirty, toy"):
        export(read_runs([many_runs]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_export_is_named(toy_runs, tmp_path):
    file = export(toy_runs, tmp_path / "out")[0]
    content = json.loads(file.read_text())
    del content["seeds"]["1"]["train"]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="seed 1 has no train"):
        read_runs([file])
    file.write_text(file.read_text()[:100])
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_runs([file.parent])


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 99, 5000])
def test_thinning_keeps_the_first_and_the_last_and_repeats_nothing(count):
    kept = [line["step"] for line in thinned([{"step": step} for step in range(count)])]
    assert len(kept) == min(count, 50)
    assert kept == sorted(set(kept))
    assert not count or (kept[0], kept[-1]) == (0, count - 1)
