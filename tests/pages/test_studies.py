"""The pages of studies are what their packages make of the committed results."""

import importlib
import json
import re
import shutil
import subprocess
from itertools import pairwise

import pytest
from study_pages import ECHO, ROOT, imported, moonopt, section, with_python, with_tuned_faces

from moonopt.errors import UserError
from moonopt.runs.cell import make_cell
from moonopt.runs.report.statistics import Comparison
from moonopt.runs.settings import parse
from moonopt.runs.tune import read_grids

pytest.importorskip("matplotlib")
stats = pytest.importorskip("scipy.stats")

RESULTS = ROOT / "results" / "multimnist"
PAGE = ROOT / "docs" / "multimnist.md"
#: Of each package the folder of its results, and its page.
STUDIES = {
    "multimnist": ("results/multimnist", "multimnist.md"),
    "qm9": ("results/qm9", "qm9.md"),
    "math_rl": ("results/math-rl", "math-rl.md"),
    "scenes": ("results", "scenes-and-faces.md"),
    "synthetic30": ("results", "synthetic30.md"),
}
SCRIPTS = {
    "multimnist": (
        *("tune", "main", "tune-own", "own", "tune-components", "components", "ablations", "beyond", "exact", "efficiency"),
    ),
    "qm9": ("tune", "budget", "beta", "protocol"),
    "synthetic30": ("tune", "main", "beta"),
}


@pytest.fixture(scope="module")
def studies():
    """The main modules of the packages, which are not installed."""
    with imported(*(f"studies.{name}.__main__" for name in STUDIES)) as found:
        yield dict(zip(STUDIES, found, strict=True))


@pytest.fixture(scope="module")
def study(studies):
    return studies["multimnist"]


def by_heading(table, line):
    """One line of a table of Markdown as a dict."""
    heading, _, *lines = ([word.strip() for word in each.split("|")[1:-1]] for each in table.splitlines())
    return dict(zip(heading, lines[line], strict=True))


def changed(source, target, overrides, seconds_per_step=None, metric=None):
    """A copy of an export with other settings, another time of a step, and a metric that has other values, one per seed."""
    content = json.loads(source.read_text())
    content["config"]["overrides"] = overrides
    content["config"]["settings"] |= overrides
    if metric is not None:
        name, values = metric
        content["seeds"] = dict(list(content["seeds"].items())[: len(values)])
        for seed, found in zip(content["seeds"].values(), values, strict=True):
            seed["result"]["metrics"][name] = found
    for seed in content["seeds"].values():
        seed["result"]["seconds_per_step"] = seconds_per_step or seed["result"]["seconds_per_step"]
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(content))


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_of_a_study_is_up_to_date_and_its_figures_are_there(name, studies, tmp_path):
    results, page_name = STUDIES[name]
    committed = ROOT / "docs" / page_name
    shutil.copy(committed, tmp_path)
    studies[name].main([str(ROOT / results), str(tmp_path)])
    page = (tmp_path / page_name).read_text()
    assert page == committed.read_text(), f"run: python -m studies.{name} {results} docs"
    figures = set(re.findall(r"\(images/([^)]*\.svg)\)", page))
    assert figures == {path.name for path in (tmp_path / "images").iterdir()}
    assert figures <= {path.name for path in (ROOT / "docs" / "images").iterdir()}


def test_a_study_of_one_method_says_what_is_not_run_yet(study, tmp_path):
    shutil.copy(PAGE, tmp_path)
    (tmp_path / "results").mkdir()
    shutil.copy(RESULTS / "moon.json", tmp_path / "results")
    study.main([str(tmp_path / "results"), str(tmp_path)])
    page = (tmp_path / PAGE.name).read_text()
    assert "| famo |  | not run yet |" in section(page, "main")
    assert "does not hold" not in section(page, "claims")
    assert "muon" in section(page, "missing").splitlines()[0]


def test_runs_with_one_changed_setting_fill_the_ablations(study, tmp_path):
    shutil.copy(RESULTS / "moon.json", tmp_path)
    changed(RESULTS / "moon.json", tmp_path / "wide.json", {"optimizer.beta": 0.01})
    changed(RESULTS / "moon.json", tmp_path / "slow.json", {"optimizer.lr": 0.005})
    shutil.copy(RESULTS / "tuned-muon.json", tmp_path)
    made = study.tables(study.read(tmp_path))
    beta = by_heading(made["beta"], 0)
    assert beta["0.01"] == beta["0.0001"] != beta["0.001"] == "not run yet"
    assert "moon lr=0.005" in made["beyond"]


def test_own_parameters_are_in_their_own_table_alone(study, tmp_path):
    for name in ("ls.json", "tuned-adam.json"):
        shutil.copy(RESULTS / name, tmp_path)
    changed(RESULTS / "ls.json", tmp_path / "slow.json", {"optimizer.lr": 0.0007})
    changed(RESULTS / "ls.json", tmp_path / "fast.json", {"optimizer.lr": 0.003})
    trials = [
        {"method": "ls", "settings": {"optimizer.lr": rate}, "score": score} for rate, score in ((0.0007, -96), (0.1, None))
    ]
    own = {"grids": {"ls": {"optimizer.lr": [0.0007, 0.1]}}, "chosen": {"ls": {"optimizer.lr": 0.0007}}, "trials": trials}
    (tmp_path / "tuned-own.json").write_text(json.dumps(own))
    made = study.tables(study.read(tmp_path))
    line = by_heading(made["own"], 0)
    assert line["validation accuracy by value"] == "0.0007: 96.00, 0.1: failed"
    assert line["chosen"] == line["main table"]  # a copy of the same runs
    assert "ls lr=0.003" in made["beyond"]
    assert "ls lr=0.0007" not in made["beyond"]


def test_unequal_tasks_are_set_beside_equal_ones_seed_by_seed(study, tmp_path):
    changed(
        RESULTS / "moon.json", tmp_path / "moon.json", {"data.right_factor": 10.0}, metric=("average accuracy", (90.0, 91.0))
    )
    changed(RESULTS / "moon.json", tmp_path / "equal.json", {}, metric=("average accuracy", (92.0, 95.0, 0.0)))
    line = by_heading(study.tables(study.read(tmp_path))["imbalance"], 0)
    low, high = stats.ttest_rel([90, 91], [92, 95]).confidence_interval(0.95)
    assert (line["average"], line["seeds"]) == ("90.50 ± 0.71", "2")
    assert (line["minus equal tasks"], line["95 % interval"]) == ("-3.00", f"{low:+.2f} to {high:+.2f}")


def test_moon_and_muon_are_also_compared_at_one_rate(study, tmp_path):
    for name in ("moon.json", "muon,optimizer.lr=0.005.json", "tuned-muon.json"):
        shutil.copy(RESULTS / name, tmp_path)
    changed(RESULTS / "moon.json", tmp_path / "slow.json", {"optimizer.lr": 0.005})
    lines = study.tables(study.read(tmp_path))["against-muon"]
    assert "moon minus muon |" in lines
    assert "moon lr=0.005 minus muon |" in lines


@pytest.fixture
def timed(study, tmp_path):
    """Makes the tables of the study with three methods timed alone: MOON at so many seconds a step, FAMO and MGDA at 2 ms."""

    def make(moon):
        for name in ("moon", "famo", "mgda"):
            shutil.copy(RESULTS / f"{name}.json", tmp_path / "results")
            target = tmp_path / "results-alone" / f"{name}.json"
            changed(RESULTS / f"{name}.json", target, {"train.epochs": 12.0}, moon if name == "moon" else 0.002)
        return study.tables(study.read(tmp_path / "results"))

    (tmp_path / "results").mkdir()
    return make


def test_claims_on_time_are_judged_by_the_runs_that_were_alone(timed):
    fast, slow = timed(moon=0.002), timed(moon=0.02)
    for made, verdict in ((fast, "holds"), (slow, "does not hold")):
        assert by_heading(made["claims"], 16)["verdict"] == f"**{verdict}**"
    assert by_heading(fast["claims"], 15)["verdict"] == "**holds**"
    assert by_heading(slow["claims"], 15)["verdict"] != "**holds**"


def test_time_to_the_threshold_is_told_with_and_without_the_first_steps(timed):
    made = timed(moon=0.002)
    moon, steps = by_heading(made["time"], 0), by_heading(made["efficiency"], 0)["steps to 0.15"]
    assert float(moon["without the first steps"].split()[0]) == pytest.approx(0.002 * float(steps.split()[0]), abs=0.01)
    assert float(moon["s to 0.15"].split()[0]) > 10  # of the runs that shared the GPU
    assert "reached only without the first steps" in made["target"]


def test_the_first_run_on_a_machine_is_told_beside_the_others_and_judges_nothing(timed, tmp_path):
    without = timed(moon=0.002)
    changed(RESULTS / "moon.json", tmp_path / "results-first" / "moon.json", {}, 0.02)
    made = timed(moon=0.002)
    assert made["time"] == without["time"]
    added = made["target"].removeprefix(without["target"])
    assert added.startswith(" As the first run on a machine")
    assert added.endswith(" 12.00 ± 0.69 s.")  # 600 ± 35 steps


def test_a_loss_after_the_end_of_training_is_not_made_up(timed):
    assert by_heading(timed(moon=0.0005)["time"], 0)["loss after 2 s"] == "over"


@pytest.mark.parametrize(
    ("region", "low", "high", "verdict"),
    [
        ((0, float("inf")), 0.1, 0.5, "holds"),
        ((0, float("inf")), -0.1, 0.5, "cannot be told"),
        ((0, float("inf")), -0.5, -0.1, "does not hold"),
        ((-0.3, 0.3), -0.2, 0.1, "holds"),
        ((-0.3, 0.3), -0.4, 0.1, "cannot be told"),
        ((-0.3, 0.3), -0.4, 0.4, "cannot be told"),
        ((-0.3, 0.3), 0.4, 0.5, "does not hold"),
    ],
)
def test_a_claim_is_judged_by_where_the_interval_lies(study, region, low, high, verdict):
    verdicts = importlib.import_module("studies.verdicts")
    gap = verdicts.Gap(("moon", {}), ("famo", {}), "average accuracy", region)
    found = Comparison("moon", "famo", [0, 1, 2], difference=(low + high) / 2, low=low, high=high, p=0.5)
    assert gap.verdict(found) == verdict


def test_a_page_without_one_of_the_tables_is_refused(study):
    page = importlib.import_module("studies.page")
    with pytest.raises(UserError, match="each table once: it has main, expected main, naive"):
        page.filled("<!-- table: main -->\n<!-- end -->", {"main": "", "naive": ""})


def of(options, key):
    """The values that an option has in a command."""
    return [value for option, value in options if option == key]


@pytest.mark.parametrize(("name", "stage"), [(name, stage) for name, stages in SCRIPTS.items() for stage in stages])
def test_a_stage_of_a_script_sets_nothing_that_is_refused_and_no_run_twice(name, stage, tmp_path):
    script = ROOT / "studies" / f"{name}.sh"
    done = subprocess.run([script, stage], env=with_python(tmp_path, ECHO, JOBS="6"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = []
    for words in map(str.split, done.stdout.splitlines()):
        options = list(pairwise(words))
        given, grids = dict(map(parse, of(options, "--set"))), of(options, "--grid")
        (folder,), (names,) = of(options, "--out"), of(options, "--methods")
        methods = names.split(",")
        runs += [(folder, make_cell(name, method, 0, [("--set", given)]).label) for method in methods]
        for method, grid in read_grids(grids, methods).items() if grids else ():
            for key, tried in grid.items():
                assert all(make_cell(name, method, 0, [("--set", {**given, key: value})]) for value in tried)
    assert runs
    assert len(set(runs)) == len(runs)


@pytest.mark.parametrize(
    ("script", "stage", "runs"),
    [("qm9.sh", "budget", 1), ("nyuv2.sh", "main", 4), ("nyuv2.sh", "speed", 1), ("faces.sh", "main", 4)],
)
def test_scripts_wait_for_the_checkpoints_of_their_runs_when_they_are_told_to_stop(script, stage, runs, tmp_path):
    """A moonopt that is told to stop twice ends without one; sleep gets no signal, since none is for a group."""
    log = tmp_path / "log"
    lines = f"trap 'echo told >> {log}' TERM\necho begun >> {log}\nsleep 2\nsleep 0.5\necho checkpoint >> {log}"
    environment = with_python(with_tuned_faces(tmp_path), lines, JOBS=str(runs), SPEED=str(tmp_path / "speed"))
    done = subprocess.run(["timeout", "1", ROOT / "studies" / script, stage], env=environment)
    assert done.returncode == 124
    assert sorted(log.read_text().split()) == sorted(["begun", "told", "checkpoint"] * runs)


def test_the_script_of_qm9_takes_rates_where_they_were_tuned_and_can_be_restricted(tmp_path):
    tuned = {"grids": {"ls": {"optimizer.lr": [0.1, 0.2]}}, "chosen": {"ls": {"optimizer.lr": 0.002}}, "trials": []}
    (tmp_path / "tuned-ls.json").write_text(json.dumps(tuned, indent=2))
    environment = with_python(tmp_path, ECHO, METHODS="ls,dwa,moon-log-auto", SEEDS="0,2", TUNED=str(tmp_path / "none"))
    done = subprocess.run([ROOT / "studies" / "qm9.sh", "budget"], env=environment, capture_output=True, text=True)
    dwa, ls, moon = sorted(done.stdout.splitlines(), key=lambda line: line.partition("--methods ")[2])
    assert "--methods dwa --set optimizer.lr=0.002" in dwa
    assert f"--methods ls --tuned {tmp_path}/tuned-ls.json" in ls
    assert "--methods moon --set optimizer.beta=auto --set optimizer.loss=log" in moon
    assert "--tuned" not in moon
    assert all("--seeds 0,2" in line for line in (dwa, ls, moon))
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "tuned-moon-log-auto.json").write_text(json.dumps(tuned))
    done = subprocess.run([ROOT / "studies" / "qm9.sh", "budget"], env=environment, capture_output=True, text=True)
    assert "none/tuned-moon-log-auto.json" in done.stdout


def test_the_report_reads_the_folder_in_spite_of_its_tuning_files(tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("moonopt.cli")  # which needs typer
    for name in ("moon.json", "famo.json", "tuned-adam.json"):
        shutil.copy(RESULTS / name, tmp_path)
    moonopt("report", tmp_path, "--out", tmp_path / "report")
    assert "famo" in (tmp_path / "report" / "index.html").read_text()


@pytest.mark.parametrize(("ratio", "differ"), [(6.1, False), (6.4, True), (1 / 6.1, False), (1 / 6.4, True)])
def test_deviations_of_three_seeds_differ_from_a_factor_of_six_on(study, ratio, differ):
    claims = importlib.import_module("studies.multimnist.claims")
    assert claims._differ(0.1 * ratio, 3, 0.1, 3) == differ
