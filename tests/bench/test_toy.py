"""The paper's toy case: MOON ends lowest and gets there fastest; MGDA stops at the first Pareto point that it meets."""

import math

import pytest

from moonopt.bench.toy import Toy
from moonopt.runs.cell import make_cell
from moonopt.runs.interrupt import Stop
from moonopt.runs.run import run_cell

ALL_STEPS = {"train.conflict": False, "train.log_every": 1, "train.evaluate_every": 30}


def path_and_end(method, seed, folder):
    """The average loss before every step, and the final metrics."""
    records = []
    cell = make_cell("toy", method, seed, [("test", ALL_STEPS)])
    result = run_cell(cell, folder, folder, stop=Stop(), tell=records.append)
    averages = [sum(each["loss"].values()) / 2 for each in records if each["kind"] == "train"]
    assert len(averages) == 1500
    return averages, result["metrics"]


def lowest_average(metrics):
    return metrics["average loss"] / (1 + metrics["above the lowest"] / 100)


def is_on_the_front(metrics):
    """There the losses are (1 - t)^2 and (1 + t)^2 of the lowest average, -1 <= t <= 1."""
    roots = math.sqrt(metrics["first"]) + math.sqrt(metrics["second"])
    return math.isclose(roots, 2 * math.sqrt(lowest_average(metrics)), rel_tol=1e-3)


def check_the_papers_figure(seed, folder):
    found = {method: path_and_end(method, seed, folder) for method in ("moon", "mgda", "mgda+muon")}
    lowest = lowest_average(found["moon"][1])
    first_near = {
        method: next((step for step, average in enumerate(averages) if average < 1.05 * lowest), math.inf)
        for method, (averages, _) in found.items()
    }
    ends = {method: metrics["above the lowest"] for method, (_, metrics) in found.items()}
    assert ends["moon"] < 0.01  # percent
    assert min(ends["mgda"], ends["mgda+muon"]) > 1
    assert first_near["moon"] < 50
    assert first_near["moon"] <= min(first_near.values())
    assert is_on_the_front(found["mgda"][1])
    assert is_on_the_front(found["moon"][1])


def test_moon_is_lowest_and_fastest_and_mgda_stays_on_its_pareto_point(tmp_path):
    check_the_papers_figure(0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_the_papers_figure_for_more_seeds(seed, tmp_path):
    check_the_papers_figure(seed, tmp_path)


def test_a_seed_makes_its_own_problem(tmp_path):
    first, second = (Toy().load(tmp_path, seed).train.tensors for seed in (0, 1))
    assert not first[0].equal(second[0])
    assert first[0].equal(Toy().load(tmp_path, 0).train.tensors[0])
