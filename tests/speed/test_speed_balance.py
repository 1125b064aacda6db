"""The measurement works and compares like with like; what it finds holds on an idle machine (marked slow)."""

import json
import os
import subprocess
import sys

import pytest
import torch

from moonopt.methods import BALANCERS
from moonopt.speed import balance

REDUCED = [
    *("--rounds", "2"),
    *("--methods", "uw", "nash-mtl", "--tasks", "2"),
    *("--solvers", "imtl-g", "graddrop", "--solver-tasks", "5"),
]


def _measure(*arguments):
    command = [sys.executable, "-W", "ignore", "-m", "moonopt.speed.balance", "--json", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(answer.stdout)["results"]


def test_json_has_times_and_ratios_of_steps_and_solvers(capsys):
    pytest.importorskip("torchjd")
    balance.main(["--json", *REDUCED])
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["torch"]
    steps, solvers = found["results"]
    assert set(steps["ratios"]) == {"ls", "uw", "nash-mtl"}
    assert steps["ratios"]["ls"] == {"2": 1}
    expected = steps["times"]["nash-mtl, 2"]["ms"] / steps["times"]["ls, 2"]["ms"]
    assert steps["ratios"]["nash-mtl"]["2"] == pytest.approx(expected)
    assert set(solvers["speedups"]) == {"imtl-g", "graddrop"}
    expected = solvers["times"]["torchjd imtl-g, 5"]["ms"] / solvers["times"]["moonopt imtl-g, 5"]["ms"]
    assert solvers["speedups"]["imtl-g"]["5"] == pytest.approx(expected)
    assert not solvers["skipped"]


def test_markdown_has_a_row_for_every_method(capsys):
    pytest.importorskip("torchjd")
    balance.main(["--markdown", *REDUCED])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| `")] == [
        *("`ls`", "`uw`", "`nash-mtl`"),
        *("`imtl-g`", "`graddrop`"),
    ]


def test_every_balancer_is_timed_by_default():
    assert set(balance.measure_steps(tasks=[2], rounds=2)["ratios"]) == set(BALANCERS)


def test_without_torchjd_the_contest_is_left_out_with_a_sentence(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    balance.main(REDUCED)
    printed = capsys.readouterr().out
    assert "Not measured beside TorchJD: imtl-g, graddrop." in printed
    assert "nash-mtl" in printed  # the steps are there


def test_two_ways_to_print_are_refused(capsys):
    with pytest.raises(SystemExit):
        balance.main(["--json", "--markdown"])
    assert "choose one" in capsys.readouterr().err


@pytest.mark.parametrize(("solver", "tolerance"), [("mgda", 2e-2), ("cagrad", 1e-3), ("imtl-g", 1e-4), ("nash-mtl", 1e-3)])
@pytest.mark.filterwarnings("ignore:You are solving a parameterized problem")
def test_both_sides_of_a_contest_give_the_same_gradient(solver, tolerance):
    """PCGrad and GradDrop draw other random numbers; where those are the same is tested with the balancers."""
    pytest.importorskip("torchjd")
    contestants, skipped = balance.contestants_of([solver], [5])
    if skipped:
        pytest.skip(str(skipped))
    for _ in range(balance.JACOBIANS):
        theirs, ours = contestants[f"torchjd {solver}, 5"](), contestants[f"moonopt {solver}, 5"]()
        assert torch.dist(ours, theirs) <= tolerance * theirs.norm()


@pytest.mark.slow
def test_solvers_are_faster_than_torchjds():
    """The best of three runs: neighbours of a shared machine slow a short computation down more than a long one."""
    pytest.importorskip("torchjd")
    runs = [_measure("--methods", "--tasks", "2")[1] for _ in range(3)]
    assert not runs[0]["skipped"]
    best = {
        (solver, count): max(run["speedups"][solver][count] for run in runs)
        for solver, by_count in runs[0]["speedups"].items()
        for count in by_count
    }
    assert best["nash-mtl", "11"] >= 20, best
    assert best["pcgrad", "40"] >= 10, best
    assert min(best.values()) > 1, best


@pytest.mark.slow
def test_loss_based_methods_cost_what_ls_does():
    (steps, _) = _measure("--solvers")
    for name in ("stl", "si", "rlw", "dwa", "uw"):
        assert max(steps["ratios"][name].values()) < 1.5, steps["ratios"]
    assert max(steps["ratios"]["famo"].values()) < 2, steps["ratios"]
