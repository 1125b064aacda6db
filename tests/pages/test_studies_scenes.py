"""The studies of scenes and faces: scripts that set nothing that is refused, and tables of what was run."""

import json
import math
import shutil
import subprocess
from itertools import pairwise
from statistics import fmean, stdev

import pytest
from study_pages import ECHO, ROOT, imported, with_python, with_tuned_faces

from moonopt.bench.celeba import CelebaCNN
from moonopt.bench.metrics import delta_m
from moonopt.bench.nyuv2 import NYUv2Small
from moonopt.runs.cell import make_cell
from moonopt.runs.export import export
from moonopt.runs.interrupt import Stop
from moonopt.runs.report.reading import read_runs
from moonopt.runs.run import run_cell
from moonopt.runs.settings import parse
from moonopt.runs.tune import read_grids
from moonopt.speed.faces import measure as measure_faces
from moonopt.speed.loading import measure as measure_loading


@pytest.fixture
def commands(tmp_path):
    """Runs a stage with a python that says what it was asked for: of each call the words, and the options with their values."""
    environment = with_python(with_tuned_faces(tmp_path), ECHO, SPEED=str(tmp_path / "speed"))

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
    for stage in ("tune", "main"):
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
            elif ("--set", "optimizer.lr=0.002") in options:
                assert words[3].startswith("celeba")
                assert set(methods) == {"mgda", "pcgrad", "cagrad", "imtl-g", "nash-mtl"}
            else:
                assert set(methods) <= set(tuned[value(options, "--tuned")])
    assert len({trials for methods in tuned.values() for trials in methods.values()}) == 1


def test_the_first_five_methods_of_nyuv2_have_two_seeds(commands):
    seeds = {
        method: int(value(options, "--seeds"))
        for _, options in commands("nyuv2.sh", "main")
        if ("--set", "optimizer.loss=log") not in options
        for method in value(options, "--methods").split(",")
    }
    twice = {method for method, count in seeds.items() if count >= 2}
    assert twice == {"moon", "muon", "famo+muon", "famo", "ls"}
    assert set(seeds) - twice == {"nash-mtl", "mgda", "cagrad", "uw", "stl"}


def test_faces_are_not_trained_before_both_networks_are_tuned(tmp_path):
    (with_tuned_faces(tmp_path) / "tuned-celeba-vit-adam.json").unlink()
    done = subprocess.run(
        [ROOT / "studies" / "faces.sh", "main"], env=with_python(tmp_path, ECHO), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "tuned-celeba-vit-adam.json: run the stage tune first." in done.stderr
    assert not done.stdout


def test_faces_are_learnt_by_both_networks_with_the_nine_methods(commands):
    by_network = {}
    for words, options in commands("faces.sh", "main"):
        by_network.setdefault(words[3], []).extend(value(options, "--methods").split(","))
    nine = {"moon", "muon", "famo", "ls", "mgda", "pcgrad", "cagrad", "imtl-g", "nash-mtl"}
    assert {network: set(methods) for network, methods in by_network.items()} == {"celeba-cnn": nine, "celeba-vit": nine}


@pytest.mark.parametrize(
    ("script", "files"),
    [
        (
            "nyuv2.sh",
            [
                *(
                    f"loading-nyuv2-small-{method}-{kind}"
                    for kind in ("tf32", "bfloat16")
                    for method in ("muon", "moon", "nash-mtl")
                ),
                *(f"loading-{bench}-moon-tf32" for bench in ("nyuv2", "cityscapes")),
            ],
        ),
        ("faces.sh", ["faces-tf32", "loading-celeba-cnn-tf32", "loading-celeba-vit-tf32"]),
    ],
)
def test_the_stage_speed_writes_a_file_for_each_measurement(script, files, commands, tmp_path):
    commands(script, "speed")
    kept = tmp_path / "speed" / f"{files[0]}-h200.json"
    kept.write_text("measured")
    commands(script, "speed")
    assert kept.read_text() == "measured"
    kept.unlink()
    commands(script, "speed")
    written = {path.name: path.read_text().split() for path in (tmp_path / "speed").iterdir()}
    assert sorted(written) == sorted(f"{name}-h200.json" for name in files)
    for name, words in written.items():
        assert words[:2] == ["-m", f"moonopt.speed.{name.partition('-')[0]}"]
        assert words[words.index("--products") + 1] in name
        assert words[-1] == "--json"


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
def study():
    pytest.importorskip("matplotlib")
    with imported("studies.scenes.__main__") as (found,):
        yield found


@pytest.fixture
def rooms(study, tmp_path):
    """Makes the tables on scenes of the runs that were written."""

    def make():
        export(read_runs([tmp_path / "runs"]), tmp_path / "results" / "nyuv2")
        found = study.read(tmp_path / "results").rooms
        return found, study.rooms_tables(found, study.plots(found))

    return make


def write_single(root, factor):
    for task in NYUv2Small.tasks:
        write_run(root, "stl", 0, [factor], **{"balancer.task": task})


def lines(table):
    """The lines of a table by their first word, each by heading."""
    text = [line for line in table.splitlines() if line.startswith("|")]
    heading, _, *found = ([word.strip() for word in line.split("|")[1:-1]] for line in text)
    return {words[0]: dict(zip(heading, words, strict=True)) for words in found}


def drop(factor):
    """Δm of runs worse by a factor, against single-task runs that are worse by 1.1."""
    return delta_m(metrics(factor), metrics(1.1), NYUv2Small.metrics)


def test_delta_m_is_against_the_single_task_runs_of_the_same_folder(rooms, study, tmp_path):
    write_single(tmp_path / "runs", 1.1)
    write_run(tmp_path / "runs", "moon", 0, [1.5, 1.2])
    write_run(tmp_path / "runs", "moon", 1, [1.4, 1.1])
    write_run(tmp_path / "runs", "moon", 0, [1.3, 1.1], **{"optimizer.loss": "log", "optimizer.beta": "auto"})
    found, made = rooms()
    moon, log = (row for row in found.study.rows if not row.is_single)
    drawn = {outcome.seed: [line["test"]["Δm"] for line in outcome.evaluation] for outcome in moon.outcomes}
    expected = {0: [drop(1.5), drop(1.2)], 1: [drop(1.4), drop(1.1)]}
    assert drawn == {seed: pytest.approx(values, abs=0.01) for seed, values in expected.items()}  # exports round
    assert log.outcomes[0].evaluation[-1]["test"]["Δm"] == pytest.approx(0, abs=0.01)
    table, ends = lines(made["nyuv2-main"]), [drop(1.2), drop(1.1)]
    assert table["moon"]["Δm (%) ↓"] == f"{fmean(ends):.2f} ± {stdev(ends):.2f}"
    assert table["moon beta=auto loss=log"]["Δm (%) ↓"] == "**0.00**"
    assert table["stl"]["Δm (%) ↓"] == "0.00"  # which does not compete
    assert table["ls"]["Δm (%) ↓"] == "not run yet"
    shutil.copy(ROOT / "docs" / "scenes-and-faces.md", tmp_path)
    study.main([str(tmp_path / "results"), str(tmp_path)])
    figure = (tmp_path / "images" / "nyuv2-delta.svg").read_text()
    assert all(word in figure for word in ("epoch", ">moon<", ">moon beta=auto loss=log<"))
    assert "(images/nyuv2-delta.svg)" in (tmp_path / "scenes-and-faces.md").read_text()


def test_a_folder_without_single_task_runs_has_metrics_alone(rooms, tmp_path):
    write_run(tmp_path / "runs", "moon", 0, [1.5, 1.2])
    _, made = rooms()
    line = lines(made["nyuv2-main"])["moon"]
    assert line["mIoU (%) ↑"] == f"{metrics(1.2)['mIoU']:.2f}"
    assert not any("Δm" in heading for heading in line)
    assert made["nyuv2-delta"] == made["nyuv2-differences"] == "Not run yet."


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"famo": 1.3, "ls": 1.4}, "**not yet told**; not run yet: nash-mtl, mgda, cagrad, uw."),
        ({"famo": 1.1, "ls": 1.4}, "**not reached**; not above it: famo 0.00; not run yet: nash-mtl, mgda, cagrad, uw."),
        (dict.fromkeys(("famo", "ls", "nash-mtl", "mgda", "cagrad", "uw"), 1.3), "**reached**."),
    ],
)
def test_moon_is_to_be_ahead_of_every_method_with_adam(others, told, rooms, tmp_path):
    write_single(tmp_path / "runs", 1.1)
    for method, factor in {"moon": 1.2, "muon": 1.15, **others}.items():
        write_run(tmp_path / "runs", method, 0, [factor])
    _, made = rooms()
    assert f"moon has {drop(1.2):.2f} (seeds: 1), by the means {told}" in made["nyuv2-target"]
    assert f"in the order of Δm: muon {drop(1.15):.2f}, moon {drop(1.2):.2f}." in made["nyuv2-target"]


def test_differences_are_paired_where_both_seeds_are_there(rooms, tmp_path):
    write_single(tmp_path / "runs", 1.1)
    for seed, (moon, famo) in enumerate([(1.1, 1.3), (1.2, 1.5)]):
        write_run(tmp_path / "runs", "moon", seed, [moon])
        write_run(tmp_path / "runs", "famo", seed, [famo])
    write_run(tmp_path / "runs", "ls", 0, [1.4])
    found = lines(rooms()[1]["nyuv2-differences"])
    stats = pytest.importorskip("scipy.stats")
    test = stats.ttest_rel([drop(1.1), drop(1.2)], [drop(1.3), drop(1.5)])
    low, high = test.confidence_interval(0.95)
    assert found["moon minus famo"]["95 % interval"] == f"{low:+.2f} to {high:+.2f}"
    assert found["moon minus famo"]["p"] == f"{test.pvalue:.2g}"
    assert found["moon minus ls"]["mean"] == f"{drop(1.1) - drop(1.4):+.2f}"
    assert found["moon minus ls"]["95 % interval"] == ""


def test_tuning_of_two_rates_has_a_line_for_each_of_the_second(rooms, tmp_path):
    write_run(tmp_path / "runs", "moon", 0, [1.2], **{"optimizer.lr": 0.003, "optimizer.vector_lr": 0.003})
    pairs = [(rate, vector) for rate in (0.003, 0.01) for vector in (0.001, 0.003)]
    settings = [{"optimizer.lr": rate, "optimizer.vector_lr": vector} for rate, vector in pairs]
    trials = [{"method": "moon", "settings": each, "score": 1 + number} for number, each in enumerate(settings)]
    content = {"chosen": {"moon": settings[1]}, "notes": [], "trials": trials}
    (tmp_path / "results" / "nyuv2").mkdir(parents=True)
    (tmp_path / "results" / "nyuv2" / "tuned-muon.json").write_text(json.dumps(content))
    _, made = rooms()
    found = lines(made["nyuv2-tuning"])
    assert found["moon vector_lr=0.001"] == {"rate": "moon vector_lr=0.001", "0.003": "1.0000", "0.01": "3.0000"}
    assert found["moon vector_lr=0.003"] == {"rate": "moon vector_lr=0.003", "0.003": "**2.0000**", "0.01": "4.0000"}
    assert lines(made["nyuv2-main"])["moon"]["rate"] == "0.003"
    assert made["nyuv2-missing"].startswith("- not tuned yet: muon, famo+muon, ")


SMALL_FACES = {
    "celeba-cnn": {"model.width": 4},
    "celeba-vit": {"model.width": 8, "model.depth": 1, "model.attention_heads": 2},
}


@pytest.fixture
def faces(tmp_path):
    """Runs of made-up faces by both networks, with their exports."""
    CelebaCNN().make(tmp_path / "data", 60)
    for network, sizes in SMALL_FACES.items():
        settings = {**sizes, "train.epochs": 1, "train.batch_size": 16, "data.image_size": 16, "train.conflict": False}
        for method in ("moon", "famo"):
            cell = make_cell(network, method, 0, [("test", settings)])
            run_cell(cell, tmp_path / "runs", tmp_path / "data", stop=Stop(), tell=lambda record: None)
        export(read_runs([tmp_path / "runs" / network]), tmp_path / "results" / network)
    return tmp_path / "results"


def test_faces_have_the_mean_f1_of_both_networks(faces, study):
    made = study.faces_tables(study.read(faces).faces)
    tables = dict(zip(SMALL_FACES, made["faces-main"].split("`:\n\n")[1:], strict=True))
    for network, table in tables.items():
        (path,) = (faces / network).glob("famo*.json")
        result = json.loads(path.read_text())["seeds"]["0"]["result"]
        assert (
            lines(table)["famo"]["mean F1 ↑"].strip("*") == f"{fmean(result['metrics'][task] for task in result['tasks']):.4f}"
        )
        assert lines(table)["ls"]["mean F1 ↑"] == "not run yet"
    assert "- celeba-vit, not run yet: muon, ls, mgda" in made["faces-missing"]


@pytest.fixture
def speed(study, tmp_path):
    """Makes the tables of results, each a file of its name."""

    def make(**files):
        (tmp_path / "speed").mkdir()
        for name, result in files.items():
            content = {"environment": {"device": "NVIDIA H200", "torch": "2.11"}, "results": [result]}
            (tmp_path / "speed" / f"{name.replace('_', '-')}-h200.json").write_text(json.dumps(content))
        found = study.read(tmp_path)
        return study.speed_tables(found.steps, found.loading)

    return make


@pytest.mark.parametrize(("ratio", "verdict"), [(1.25, "reached"), (1.35, "not reached")])
def test_a_step_of_moon_is_judged_with_every_number_of_tasks(ratio, verdict, speed):
    found = measure_faces("cnn", [2, 3], 2, "cpu", 4, "float32", ("muon", "moon"), {"model.width": 4, "data.image_size": 16})
    found["ratios"] = {2: {"muon": 1.0, "moon": 1.1}, 3: {"muon": 1.0, "moon": ratio}}
    made = speed(faces_float32=found)
    assert f"cnn in float32: 1.10 with 2 tasks, {ratio} with 3 tasks: **{verdict}**." in made["faces-target"]
    line = lines(made["faces-steps"])["moon"]
    assert line["ms, 3 tasks"] == f"{found['times'][3]['moon']['ms']:.2f}"
    assert line["times muon, 3"] == f"{ratio}"


@pytest.fixture(scope="module")
def loading(tmp_path_factory):
    """Steps on made-up faces, in batches of 8."""
    folder = tmp_path_factory.mktemp("loading")
    CelebaCNN().make(folder, 60)
    settings = {"model.width": 4, "data.image_size": 16, "train.batch_size": 8}
    return measure_loading("celeba-cnn", folder, rounds=2, settings=settings)


@pytest.mark.parametrize(("ratio", "verdict"), [(1.04, "the GPU"), (1.4, "loading")])
def test_what_bounds_training_is_told_by_steps_with_and_without_loading(ratio, verdict, loading, speed):
    found = loading | {"ratios": loading["ratios"] | {"new batches from the device": ratio}}
    line = lines(speed(loading_celeba_cnn_tf32=found)["loading"])["celeba-cnn"]
    assert line["bound by"] == verdict
    assert line["new batches from the host"] == f"{8e3 / found['times']['new batches from the host']['ms']:.0f}"
