"""The scripts of the studies: whether something has failed can be told afterwards, and nothing is lost by it."""

import os
import shutil
import subprocess

import pytest
from study_pages import ROOT

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def bash(words, **variables):
    return subprocess.run(["bash", *words], cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("commands", "status"),
    [
        ("start true; start true;", 0),
        ("start false; start true;", 1),
        ("start true; start sleep 0.1; start false;", 1),
        ("start false; room_for 1; start true; room_for 1; start true;", 1),
        ("for each in true false true true; do room_for 2; start $each; done;", 1),
        ("", 0),
    ],
)
def test_a_script_ends_with_a_failure_if_a_command_has_failed(commands, status):
    for _ in range(10):
        assert bash(["-c", f"set -mu; . studies/common.sh; {commands} finish"]).returncode == status


def test_checkpoints_of_finished_cells_go_also_when_a_script_is_ended(tmp_path):
    cell = tmp_path / "qm9" / "moon" / "seed0"
    cell.mkdir(parents=True)
    for name in ("result.json", "checkpoint.pt"):
        (cell / name).touch()
    lines = "set -u; RUNS=$1; . studies/common.sh; end_with_checkpoints; trap tidy EXIT; start sleep 20; kill -TERM $$; finish"
    assert bash(["-c", lines, "bash", str(tmp_path)]).returncode == 143
    assert [path.name for path in cell.iterdir()] == ["result.json"]


@pytest.fixture
def broken(tmp_path):
    """A python that fails, before the others in the path."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho '{'\nexit 3\n")
    python.chmod(0o755)
    return f"{python.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("stage", ["tune", "budget", "beta", "protocol"])
def test_the_study_of_qm9_tells_that_nothing_was_trained(stage, broken, tmp_path):
    assert bash(["studies/qm9.sh", stage], PATH=broken, RUNS=str(tmp_path / "runs")).returncode == 1


@pytest.mark.parametrize("script", ["multimnist", "faces"])
def test_other_studies_tell_it_too(script, broken, tmp_path):
    stages = {"multimnist": ("tune", "exact", "efficiency"), "faces": ("make", "speed", "tune")}[script]
    folders = {"RUNS": str(tmp_path / "runs"), "SPEED": str(tmp_path / "speed"), "MOONOPT_DATA": str(tmp_path)}
    for stage in stages:
        assert bash([f"studies/{script}.sh", stage], PATH=broken, **folders).returncode == 1


def test_a_measurement_that_fails_leaves_the_file_of_an_earlier_one(broken, tmp_path):
    file = tmp_path / "qm9-h200.json"
    file.write_text("{}")
    done = bash(["studies/qm9.sh", "speed"], PATH=broken, SPEED=str(tmp_path), AGAIN="1")
    assert done.returncode == 1
    assert file.read_text() == "{}"


@pytest.mark.parametrize("seeds", ["0", "x", "-1", "1.5", ""])
def test_seeds_that_are_none_are_refused(seeds):
    done = bash(["studies/qm9.sh", "budget"], SEEDS=seeds or " ")
    assert done.returncode == 2
    assert "SEEDS is how many" in done.stderr
