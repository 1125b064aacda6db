"""The page on QM9, filled with runs on 200 molecules whose exports tell of other lengths of training."""

import importlib
import json
import re
import shutil
from statistics import fmean, stdev

import pytest
from study_pages import ROOT, beside_benchmarks, imported, moonopt, section

from moonopt.bench.data import qm9, qm9_compact
from moonopt.bench.paper import QM9, QM9_STL

pytest.importorskip("matplotlib")
stats = pytest.importorskip("scipy.stats")
pytest.importorskip("moonopt.cli")  # which needs typer

SMALL = {
    "data.valid_molecules": 40,
    "data.test_molecules": 30,
    "model.width": 8,
    "model.edge_width": 8,
    "train.epochs": 2,
    "train.batch_size": 65,
    "train.log_every": 1,
}
BUDGET = {"train.epochs": 60, "train.schedule": "plateau:0.7:1"}
SWEEP = {"train.epochs": 12, "train.schedule": "plateau:0.7:1"}
LOG_AUTO = {"optimizer.beta": "auto", "optimizer.loss": "log"}


@pytest.fixture(scope="module")
def study():
    with imported("studies.qm9.__main__") as (found,):
        yield found


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """By method, each with two seeds."""
    folder = tmp_path_factory.mktemp("qm9")
    molecules = beside_benchmarks("qm9_small").molecules(folder / "wheel")
    (folder / qm9.FOLDER).mkdir()
    qm9_compact.write(folder / qm9.FOLDER / qm9.FILE, molecules, "tests")
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    for method in ("moon", "famo", "muon"):
        for seed in (0, 1):
            moonopt("run", "qm9", "--method", method, "--seed", seed, "--data", folder, "--out", folder / "runs", *settings)
    moonopt("export", folder / "runs" / "qm9", "--out", folder / "exports")
    contents = [json.loads(path.read_text()) for path in (folder / "exports").iterdir()]
    return {content["method"]: content for content in contents}


@pytest.fixture
def fill(study, exports, tmp_path):
    """Makes the page of runs: a method, the overrides that its export shall tell, and a factor to have STL's errors times."""

    def make(*runs):
        results = tmp_path / "results" / "qm9"
        results.mkdir(parents=True, exist_ok=True)
        for number, (method, overrides, *factor) in enumerate(runs):
            content = json.loads(json.dumps(exports[method]))
            content["config"]["overrides"] = overrides
            content["config"]["settings"] |= {"train.epochs": 300, **overrides}
            for seed in content["seeds"].values() if factor else ():
                seed["result"]["metrics"] = {task: factor[0] * error for task, error in QM9_STL.items()}
            (results / f"{number}.json").write_text(json.dumps(content))
        shutil.copy(ROOT / "docs" / "qm9.md", tmp_path)
        study.main([str(results), str(tmp_path)])
        return (tmp_path / "qm9.md").read_text()

    return make


def lines(page, name):
    """The lines of a table by their first word, each by heading; of the paper's the first."""
    text = [line for line in section(page, name).splitlines() if line.startswith("|")]
    heading, _, *found = ([word.strip() for word in line.split("|")[1:-1]] for line in text)
    return {words[0]: dict(zip(heading, words, strict=True)) for words in reversed(found)}


def drops(exports, method):
    """Δm by seed, of the errors in the export."""
    results = [seed["result"]["metrics"] for seed in exports[method]["seeds"].values()]
    return [100 * fmean(found[task] / error - 1 for task, error in QM9_STL.items()) for found in results]


def test_errors_and_their_mean_drop_stand_beside_the_papers(fill, exports):
    page = fill(("moon", BUDGET), ("famo", BUDGET))
    table, found = lines(page, "main"), drops(exports, "famo")
    assert table["famo"]["Δm (%)"].strip("*") == f"{fmean(found):.1f} ± {stdev(found):.1f}"
    errors = [seed["result"]["metrics"]["homo"] for seed in exports["famo"]["seeds"].values()]
    assert table["famo"]["homo (meV)"].strip("*") == f"{fmean(errors):.1f} ± {stdev(errors):.1f}"
    assert [table["*paper*"][key] for key in ("Δm (%)", "homo (meV)")] == ["49.9", "52.9"]  # of MOON, the first
    assert set(table) == {"moon", "famo", "*paper*", "*STL, published*"}
    assert section(page, "summary").startswith("Δm (%) after 60 epochs, lower is better, 2 of 15 rows: ")
    assert sum(words["Δm (%)"].startswith("**") for words in table.values()) == 1


def test_differences_are_those_of_a_paired_test(fill, exports):
    page = fill(("moon", BUDGET), ("famo", BUDGET), ("muon", SWEEP))
    table, ours, theirs = lines(page, "differences"), drops(exports, "moon"), drops(exports, "famo")
    test = stats.ttest_rel(ours, theirs)
    low, high = test.confidence_interval(0.95)
    assert set(table) == {"moon minus famo"}
    found = table["moon minus famo"]
    assert found["Δm"] == f"{fmean(ours) - fmean(theirs):+.1f}"
    assert found["95 % interval"] == f"{low:+.1f} to {high:+.1f}"
    assert found["p"] == f"{test.pvalue:.2g}"
    assert found["who is better"] == ("cannot be told" if low < 0 < high else "the first" if high < 0 else "the other")
    assert found["paper"] == f"{QM9.delta_m['moon'] - QM9.delta_m['famo']:+.1f}" == "-7.4"


@pytest.mark.parametrize(("factor", "verdict"), [(1.45, "reached"), (1.55, "not reached")])
def test_the_target_is_judged_in_the_protocol_alone(factor, verdict, fill):
    page = fill(("moon", BUDGET, 1.1), ("moon", {}, factor), ("famo", {}, 1.5))
    found = f"{100 * factor - 100:.1f} ± 0.0 (2 seeds): **{verdict}**"
    assert f"moon {found}; moon beta=auto loss=log not run yet." in section(page, "target")
    names = ["moon", "famo"] if factor < 1.5 else ["famo", "moon"]
    assert section(page, "order").startswith(f"In the order of Δm: {names[0]} ")
    assert lines(page, "main")["moon"]["Δm (%)"] == "10.0 ± 0.0"


def test_a_sweep_alone_leaves_the_main_table_empty(fill):
    log = {**SWEEP, "optimizer.loss": "log", "optimizer.beta": 0.01}
    page = fill(("moon", SWEEP, 2), ("moon", log, 3), ("moon", SWEEP | LOG_AUTO, 4), ("muon", SWEEP, 5))
    table = lines(page, "beta")
    assert (table["loss=plain"]["0.0001"], table["loss=plain"]["auto"]) == ("100.0 ± 0.0", "not run yet")
    assert (table["loss=log"]["0.01"], table["loss=log"]["auto"]) == ("200.0 ± 0.0", "300.0 ± 0.0")
    assert "muon 400.0 ± 0.0, famo+muon not run yet" in section(page, "beta")
    assert section(page, "main") == section(page, "summary") == section(page, "profile") == "Not run yet.\n"


def test_the_task_that_makes_most_of_the_drop_is_named(fill, exports):
    found = section(fill(("moon", BUDGET)), "profile")
    errors = {task: fmean(each["result"]["metrics"][task] for each in exports["moon"]["seeds"].values()) for task in QM9_STL}
    points = {task: 100 * (errors[task] / alone - 1) / 11 for task, alone in QM9_STL.items()}
    most = max(points, key=points.get)
    assert f"Of the {sum(points.values()):.1f} points of `moon` {most} alone gives {points[most]:.1f}, of the 50.3 " in found


def test_errors_are_told_relative_to_muons(fill, exports):
    table = lines(fill(("moon", BUDGET, 3), ("muon", BUDGET, 2), ("famo", BUDGET)), "relative")
    heading = "errors relative to Muon's (%)"
    assert {name: words[heading] for name, words in table.items() if name != "famo"} == {"moon": "50.0 ± 0.0"}
    means = [drop / 2 - 50 for drop in drops(exports, "famo")]  # Muon's errors are twice those that Δm refers to
    assert table["famo"][heading] == f"{fmean(means):.1f} ± {stdev(means):.1f}"
    assert section(fill(("moon", BUDGET), ("muon", SWEEP)), "relative") == "Not run yet.\n"


def tuned(score, rate):
    """A tuning file of MOON with two trials."""
    trials = [{"method": "moon", "settings": {"optimizer.lr": each}, "score": score + each} for each in (rate, 2 * rate)]
    return json.dumps({"chosen": {"moon": {"optimizer.lr": rate}}, "notes": [], "trials": trials})


def test_both_rows_of_moon_are_at_the_rates_that_were_chosen_for_them(fill, tmp_path):
    (tmp_path / "results" / "qm9").mkdir(parents=True)
    for name, score, rate in (("moon", 2, 0.01), ("moon-log-auto", 3, 0.005)):
        (tmp_path / "results" / "qm9" / f"tuned-{name}.json").write_text(tuned(score, rate))
    runs = [("moon", {**BUDGET, **changes, "optimizer.lr": rate}) for changes in ({}, LOG_AUTO) for rate in (0.005, 0.01)]
    page = fill(*((*run, factor) for factor, run in enumerate(runs, start=2)))
    table = lines(page, "main")
    found = {name: (words["rate"], words["Δm (%)"].strip("*")) for name, words in table.items()}
    assert found["moon"] == ("0.01", "200.0 ± 0.0")
    assert found["moon beta=auto loss=log"] == ("0.005", "300.0 ± 0.0")
    assert "| moon | **101.0** | 102.0 |" in section(page, "tuning")
    assert "| moon beta=auto loss=log | **200.5** | 201.0 |" in section(page, "tuning")
    assert section(page, "missing").startswith("- not tuned yet: muon, ")


def test_earlier_rounds_are_told_with_what_came_of_their_choices(fill, tmp_path):
    fill(("moon", {**BUDGET, "optimizer.lr": 0.02}, 4))
    earlier = tmp_path / "results" / "qm9" / "first-round"
    earlier.mkdir()
    (tmp_path / "results" / "qm9" / "0.json").rename(earlier / "0.json")
    command = "moonopt tune qm9 --set train.epochs=12"
    (earlier / "tuned-moon.json").write_text(json.dumps({**json.loads(tuned(2, 0.02)), "command": command}))
    page = fill()
    told = section(page, "earlier")
    assert "`first-round`:\n\n12 epochs:\n\n| rate | 0.02 | 0.04 |" in told
    assert "60 epochs, `train.schedule=plateau:0.7:1`.\n\n|  | rate | seeds | Δm (%) |" in told
    assert "| moon | 0.02 | 2 | 300.0 ± 0.0 |" in told
    assert section(page, "main") == "Not run yet.\n"


def test_runs_that_no_trials_chose_are_told_without(fill, tmp_path):
    fill(("moon", {**BUDGET, "train.schedule": "plateau:0.7:5"}))
    apart = tmp_path / "results" / "qm9" / "slow-plateau"
    apart.mkdir()
    (tmp_path / "results" / "qm9" / "0.json").rename(apart / "0.json")
    told = section(fill(), "earlier")
    assert told.startswith("`slow-plateau`:\n\n60 epochs, `train.schedule=plateau:0.7:5`.\n\n| ")


def test_figures_are_drawn_of_what_was_run(fill, tmp_path):
    page = fill(("moon", BUDGET), ("famo", BUDGET), ("famo", {}))
    assert section(page, "qm9-beta") == "Not run yet.\n"
    drawn = {path.name: path.read_text() for path in (tmp_path / "images").iterdir()}
    assert drawn.keys() == {"qm9-delta.svg", "qm9-weights.svg"} == set(re.findall(r"\(images/([^)]*)\)", page))
    assert all(f">{text}</text>" in drawn["qm9-delta.svg"] for text in ("60 epochs", "300 epochs", "moon", "famo"))
    assert all(f">{task}</text>" in drawn["qm9-weights.svg"] for task in QM9_STL)


@pytest.fixture(scope="module")
def measured():
    """What ``moonopt.speed.molecules`` finds here, in JSON."""
    pytest.importorskip("torch_geometric")
    return json.dumps(importlib.import_module("moonopt.speed.molecules").measure(rounds=2, batch=3))


def test_the_forms_that_were_measured_are_held_against_the_target(measured, fill, tmp_path):
    result = json.loads(measured)
    for form, seconds in (("captured, tf32", 3.5), ("compiled, captured, tf32", 2.5)):
        for method in ("ls", "moon"):
            name = f"{method}, dense, {form}"
            result["times"][name] = {"ms": 1e3, "low_ms": 1e3, "high_ms": 1e3}
            result["epoch_seconds"][name], result["ratios"][name] = seconds, 8.0
    (tmp_path / "results" / "speed").mkdir(parents=True)
    content = {"environment": {"device": "NVIDIA H200", "torch": "2.11"}, "results": [result]}
    (tmp_path / "results" / "speed" / "qm9-h200.json").write_text(json.dumps(content))
    page = fill()
    trained, compiled = section(page, "target").split("; compiled: ")
    assert trained.endswith("moon 3.50 s and 8.0 times: **not reached**")
    assert "moon 2.50 s and 8.0 times: **reached**" in compiled
    assert lines(page, "speed")["ls, pyg"]["times as fast as pyg"] == "1.00"
