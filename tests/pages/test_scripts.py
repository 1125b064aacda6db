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
        ("true & true &", 0),
        ("false & true &", 1),
        ("true & sleep 0.2 && false &", 1),
        ("false & room_for 1; true & room_for 1; true &", 1),
        ("", 0),
    ],
)
def test_a_script_ends_with_a_failure_if_a_command_has_failed(commands, status):
    assert bash(["-c", f"set -mu; . studies/common.sh; {commands} finish"]).returncode == status


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


def test_a_measurement_that_fails_leaves_the_file_of_an_earlier_one(broken, tmp_path):
    file = tmp_path / "qm9-h200.json"
    file.write_text("{}")
    done = bash(["studies/qm9.sh", "speed"], PATH=broken, SPEED=str(tmp_path), AGAIN="1")
    assert done.returncode != 0
    assert file.read_text() == "{}"


@pytest.mark.parametrize("seeds", ["0", "x", "-1", "1.5", ""])
def test_seeds_that_are_none_are_refused(seeds):
    done = bash(["studies/qm9.sh", "budget"], SEEDS=seeds or " ")
    assert done.returncode == 2
    assert "SEEDS is how many" in done.stderr
