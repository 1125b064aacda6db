"""The page on the language model, filled with runs of a tiny one."""

import importlib
import json
import shutil
import subprocess
from itertools import pairwise
from statistics import fmean, stdev

import pytest
import torch
from study_pages import ECHO, ROOT, beside_benchmarks, imported, moonopt, with_python

from moonopt.runs.settings import parse

pytestmark = pytest.mark.filterwarnings("ignore:In an update all")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")
stats = pytest.importorskip("scipy.stats")
pytest.importorskip("moonopt.cli")  # which needs typer

METHODS = ("moon", "muon", "ls", "famo")
START = {"optimizer.lr": 0, "train.epochs": 1, "train.steps_per_epoch": 1}


@pytest.fixture(scope="module")
def study():
    with imported("studies.math_rl.__main__") as (found,):
        yield found


@pytest.fixture(scope="module")
def tiny():
    return beside_benchmarks("tiny_math_rl")


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("math-rl"))


@pytest.fixture(scope="module")
def exports(tiny, data):
    """The folder of an export: four methods with two seeds, MOON at another rate, and the model as it was."""
    cells = [(method, {"optimizer.lr": 0.01}) for method in METHODS]
    for method, changes in (*cells, ("moon", {"optimizer.lr": 0.05}), ("ls", START)):
        settings = [word for key, value in (tiny.SETTINGS | changes).items() for word in ("--set", f"{key}={value}")]
        for seed in (0, 1):
            places = ("--data", data, "--out", data / "runs")
            moonopt("run", "math-rl", "--method", method, "--seed", seed, *places, *settings)
    moonopt("export", data / "runs" / "math-rl", "--out", data / "results" / "math-rl")
    return data / "results" / "math-rl"


@pytest.fixture
def made(study, exports, tmp_path):
    """Makes the tables of the exports, each of which may be changed first, or left out by returning nothing."""

    def make(change=lambda content: content, **speed):
        results = tmp_path / "results" / "math-rl"
        results.mkdir(parents=True)
        for number, content in enumerate(contents(exports)):
            if changed := change(content):
                (results / f"{number}.json").write_text(json.dumps(changed))
        (results.parent / "speed").mkdir()
        for name, result in speed.items():
            content = {"environment": {"device": "NVIDIA H200", "torch": "2.11"}, "results": [result]}
            (results.parent / "speed" / f"{name}-h200.json").write_text(json.dumps(content))
        return study.tables(study.read(results), [])

    return make


def contents(exports):
    return [json.loads(path.read_text()) for path in sorted(exports.iterdir())]


def runs_of(exports, method, rate):
    """The runs of a method at a rate, in the order of seeds."""
    (found,) = (each for each in contents(exports) if (each["method"], rate_of(each)) == (method, rate))
    return list(found["seeds"].values())


def rate_of(content):
    return content["config"]["settings"]["optimizer.lr"]


def trained(*methods):
    """For ``made``: these methods at the usual rate alone."""
    return lambda content: content if content["method"] in methods and rate_of(content) == 0.01 else None


def lines(table):
    """The lines of a table by their first word, each by heading, without marks of what is best."""
    text = [line.replace("**", "") for line in table.splitlines() if line.startswith("|")]
    heading, _, *found = ([word.strip() for word in line.split("|")[1:-1]] for line in text)
    return {words[0]: dict(zip(heading, words, strict=True)) for words in found}


def validation_lengths(runs, place):
    return fmean(run["evaluation"][place]["valid"]["length"] for run in runs)


def test_the_selected_parameters_on_test_data_stand_beside_the_model_as_it_was(made, exports):
    found = made()
    table = lines(found["test"])
    for name, method, rate in (("moon", "moon", 0.01), ("the model as it was", "ls", 0)):
        lengths = [run["result"]["metrics"]["length"] for run in runs_of(exports, method, rate)]
        assert table[name]["length (tokens) ↓"] == f"{fmean(lengths):.1f} ± {stdev(lengths):.1f}"
        assert table[name]["seeds"] == "2"
    assert table["mgda"]["accuracy ↑"] == "not run yet"
    assert list(lines(found["others"])) == ["moon lr=0.05"]
    assert "- not run yet: mgda, nash-mtl, gradnorm\n" in found["missing"]


def test_an_update_at_a_rate_of_zero_leaves_the_weights_on_the_disk(tiny, data, exports):
    configs = [
        path for path in (data / "runs").rglob("config.json") if json.loads(path.read_text())["settings"]["optimizer.lr"] == 0
    ]
    assert len(configs) == 2
    _, _, model = tiny.bench(data)
    for config in configs:
        selected = torch.load(config.parent / "best.pt", weights_only=True)["model"]
        assert all(torch.equal(selected[name], value) for name, value in model.state_dict().items())


def test_the_stage_start_is_such_an_update(tmp_path):
    environment = with_python(tmp_path, ECHO)
    done = subprocess.run([ROOT / "studies" / "math_rl.sh", "start"], env=environment, capture_output=True, text=True)
    asked = [parse(value) for option, value in pairwise(done.stdout.split()) if option == "--set"]
    assert START.items() <= dict(asked).items()


def test_the_model_as_it_was_is_the_first_evaluation_of_all(made, exports):
    found = made()
    first, last = validation_lengths(runs_of(exports, "ls", 0), 0), validation_lengths(runs_of(exports, "famo", 0.01), -1)
    assert lines(found["change"])["famo"]["length (tokens)"] == f"{first:.1f} → {last:.1f}"
    assert found["settings"].startswith("4 updates; the first evaluation is after 0. ")


def test_without_it_the_first_evaluation_is_after_a_round(made, exports):
    found = made(trained("moon", "famo"))
    first, last = (validation_lengths(runs_of(exports, "famo", 0.01), place) for place in (0, -1))
    assert lines(found["change"])["famo"]["length (tokens)"] == f"{first:.1f} → {last:.1f}"
    assert "the first evaluation is after 2." in found["settings"]
    assert lines(found["test"])["the model as it was"]["accuracy ↑"] == "not run yet"


def test_what_was_measured_of_samples_is_exported_and_told(made, exports):
    table = lines(made()["sampled"])
    runs = [[line["measured"] for line in run["train"]] for run in runs_of(exports, "muon", 0.01)]
    first, last = fmean(each[0]["length"] for each in runs), fmean(line["length"] for each in runs for line in each)
    assert table["muon"]["length (tokens)"] == f"{first:.1f} → {last:.1f}"
    assert table["muon"]["silent: clarity"] == f"{fmean(line['silent clarity'] for each in runs for line in each):.2f}"
    starts = {words["length (tokens)"].split(" → ")[0] for words in table.values()}
    assert len(starts) == 1  # all sample from the same weights at first


def test_differences_are_those_of_a_paired_test(made):
    rewards = {"moon": [0.5, 0.6], "ls": [0.2, 0.1]}

    def change(content):
        for seed, value in zip(content["seeds"].values(), rewards.get(content["method"], (0, 0)), strict=True):
            seed["result"]["metrics"]["reward"] = value
        return trained("moon", "ls")(content)

    found = made(change)
    test = stats.ttest_rel(*rewards.values())
    low, high = test.confidence_interval(0.95)
    words = [word.strip() for word in found["differences"].splitlines()[-1].split("|")[1:-1]]
    interval = f"{low:+.4f} to {high:+.4f}"
    assert words == ["moon minus ls", "reward ↑", "+0.4000", interval, f"{test.pvalue:.2g}", "2", "cannot be told"]
    assert found["order"] == "In the order of reward on test data: moon 0.5500, ls 0.1500."


@pytest.mark.parametrize(
    ("metric", "last", "says"),
    [
        ("clarity", 0.3, "Clarity rises: with moon; not with ls."),
        ("clarity", 0.1, "Clarity rises: not with moon, ls."),
        ("length", 3.0, "Length falls: with moon; not with ls."),
        ("accuracy", 0.1, "Accuracy does not collapse: with moon, ls."),
        ("accuracy", 0.09, "Accuracy does not collapse: with ls; not with moon."),
    ],
)
def test_what_is_to_be_shown_is_judged_by_the_first_and_the_last_evaluation(metric, last, says, made):
    def change(content):
        for seed in content["seeds"].values():
            for line in seed["evaluation"]:
                line["valid"] |= {"clarity": 0.2, "length": 5.0, "accuracy": 0.2}
            if content["method"] == "moon":
                seed["evaluation"][-1]["valid"][metric] = last
        return trained("moon", "ls")(content)

    assert f"- {says}\n" in made(change)["target"]


def test_of_an_accuracy_that_was_zero_it_cannot_be_told_whether_it_collapses(made):
    def change(content):
        for seed in content["seeds"].values():
            seed["evaluation"][0]["valid"]["accuracy"] = 0.0
        return trained("moon", "ls")(content)

    found = made(change)
    assert "- Accuracy does not collapse: it cannot be told, since it was 0 at first, of moon, ls.\n" in found["target"]
    assert lines(found["change"])["moon"]["accuracy does not collapse"] == "cannot be told"


def test_the_page_is_filled_and_its_figures_are_drawn(study, exports, tmp_path):
    shutil.copy(ROOT / "docs" / "math-rl.md", tmp_path)
    study.main([str(exports), str(tmp_path)])
    assert "![Weights of the tasks](images/math-rl-weights.svg)" in (tmp_path / "math-rl.md").read_text()
    drawn = {path.stem: path.read_text() for path in (tmp_path / "images").iterdir()}
    assert drawn.keys() == {"math-rl-objectives", "math-rl-sampled", "math-rl-weights"}
    for name in ("math-rl-objectives", "math-rl-sampled"):
        assert all(f">{text}</text>" in drawn[name] for text in (*METHODS, "accuracy", "length (tokens)", "clarity", "update"))
    assert all(f">{text}</text>" in drawn["math-rl-weights"] for text in ("moon", "famo", "conciseness"))
    assert ">muon</text>" not in drawn["math-rl-weights"]


@pytest.fixture(scope="module")
def step():
    """What ``moonopt speed language`` measures, of a tiny model."""
    language = importlib.import_module("moonopt.speed.language")
    return language.measure(rounds=2, device="cpu", size=language.SMALL)


@pytest.mark.parametrize(
    ("moon", "muon", "told"),
    [
        (60.0, 59.5, "64.4 GB, 1.008 times: **reached**"),
        (60.0, 58.0, "64.4 GB, 1.034 times: **not reached**"),
        (75.0, 75.0, "80.5 GB, 1.000 times: **not reached**"),
    ],
)
def test_memory_must_fit_and_be_hardly_more_than_muons(moon, muon, told, made, step):
    result = step | {"peaks_gib": {"ls+adamw": 50.0, "muon": muon, "moon": moon}}
    found = made(language=result)
    assert told in found["target"]
    table = lines(found["speed"])
    assert table["moon"]["peak (GB)"] == f"{moon * 2**30 / 1e9:.2f}"
    assert table["ls+adamw"]["times ls+adamw"] == "1.00"


def test_sampling_is_told_in_tokens_a_second(made):
    measured = importlib.import_module("moonopt.speed.sampling")
    result = measured.measure(rounds=2, device="cpu", task=measured.SMALL)
    found = made(sampling=result)
    table = lines(found["sampling"])
    assert table["transformers"]["times as fast as transformers"] == "1.00"
    assert float(table["fixed cache"]["tokens a second"].replace(",", "")) == pytest.approx(
        result["tokens_per_second"]["fixed cache"], abs=1
    )
    assert "3 prompts of 5 tokens, responses of 8" in found["sampling"]
    assert "sampling" not in found["missing"]
