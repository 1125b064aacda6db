"""Cells: the folder and the command that settings give."""

import shlex
from pathlib import Path

import pytest
from small_runs import TINY

from moonopt.errors import UserError
from moonopt.runs.cell import Machine, cell_of, make_cell
from moonopt.runs.settings import parse


def made(method="moon", seed=0, settings=(), machine=None):
    return make_cell(TINY, method, seed, [("--set", dict(settings))], machine or Machine())


def test_the_folder_has_the_benchmark_the_method_the_sorted_overrides_and_the_seed():
    chosen = made(seed=3, settings={"train.epochs": 2, "optimizer.lr": 0.5})
    assert chosen.folder(Path("runs")) == Path(f"runs/{TINY}/moon,optimizer.lr=0.5,train.epochs=2/seed3")
    assert made().folder(Path("runs")) == Path(f"runs/{TINY}/moon/seed0")


def test_what_equals_the_choice_of_the_benchmark_is_no_override():
    assert made(settings={"optimizer.lr": 0.02, "train.epochs": 4}).overrides == {}


def test_what_a_protocol_brings_along_is_no_override():
    chosen = made("cagrad", settings={"method.protocol": "nash-mtl"})
    assert chosen.overrides == {"method.protocol": "nash-mtl"}
    assert chosen.settings["balancer.times_tasks"] is True
    assert "balancer.c" in made("cagrad", settings={"method.protocol": "nash-mtl", "balancer.c": 0.5}).overrides


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer.lr": 0.5},
        {"optimizer.betas": [0.9, 0.95], "balancer.reduction": "sum"},
        {"data.limit": "a b/c"},
        {"data.limit": 'x"y'},
        {"data.limit": [1, "z"]},
        {"data.limit": "../../etc"},
        {"data.limit": "x" * 500},
    ],
)
def test_the_command_repeats_the_cell_in_the_same_folder(settings):
    chosen = made("ls", 7, settings)
    words = shlex.split(chosen.command)
    assert words[:7] == ["moonopt", "run", TINY, "--method", "ls", "--seed", "7"]
    again = made("ls", 7, dict(parse(word) for word in words[8::2]))
    assert again == chosen
    folder = chosen.folder(Path("runs"))
    assert len(folder.parts) == 4
    assert max(len(part.encode()) for part in folder.parts) <= 255
    assert ".." not in folder.parts


def test_very_long_names_that_differ_at_the_end_have_different_folders():
    assert len({made(settings={"data.limit": "x" * 500 + end}).folder(Path()) for end in "ab"}) == 2


def test_a_config_gives_its_cell_back():
    chosen = made("famo+muon", 2, {"optimizer.lr": 0.5}, Machine("cpu", amp=True, tf32=True))
    assert cell_of(chosen.config, Path("config.json")) == chosen
    assert "--amp" in chosen.command
    assert "--tf32" in chosen.command


def test_a_config_from_before_there_was_tf32_is_that_of_a_run_without():
    config = made().config
    assert "tf32" not in config
    assert cell_of(config, Path("config.json")).machine.tf32 is False


@pytest.mark.parametrize(
    ("change", "text"),
    [({"format": 0}, "is of format 0, expected 1: another version"), ({"device": ...}, "is damaged: it lacks device.")],
)
def test_a_config_of_another_version_or_damaged_is_refused(change, text):
    config = {key: value for key, value in {**made().config, **change}.items() if value is not ...}
    with pytest.raises(UserError, match=text):
        cell_of(config, Path("config.json"))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_no_generator_takes_is_refused(seed):
    with pytest.raises(UserError, match="A seed must be a whole number of at least 0"):
        made(seed=seed)
