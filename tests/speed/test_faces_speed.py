"""The measurements of faces and of loading work; what they find holds on a GPU."""

import json

import pytest
import torch

from moonopt.bench.celeba import CelebaCNN
from moonopt.errors import UserError
from moonopt.speed import faces, loading
from moonopt.speed.measure import PRODUCTS, autocast

TINY = {
    "cnn": {"data.image_size": 16, "model.width": 2},
    "vit": {"data.image_size": 16, "model.width": 16, "model.depth": 1},
}


@pytest.fixture
def small(monkeypatch):
    """Networks that a CPU trains in no time."""
    for name, kind in list(faces.NETWORKS.items()):
        monkeypatch.setitem(faces.NETWORKS, name, type("Small", (kind,), {"defaults": kind.defaults | TINY[name]}))


def test_json_has_the_times_of_every_method_and_what_they_are_to_muons(small, capsys):
    faces.main(["--json", "--rounds", "2", "--tasks", "2", "3", "--batch", "4"])
    found = json.loads(capsys.readouterr().out)
    assert [result["network"] for result in found["results"]] == ["cnn", "vit"]
    for result in found["results"]:
        assert set(result["times"]) == {"2", "3"}
        for count, times in result["times"].items():
            assert set(times) == set(faces.METHODS)
            assert result["ratios"][count]["moon"] == pytest.approx(times["moon"]["ms"] / times["muon"]["ms"])


def test_the_table_names_methods_and_numbers_of_tasks(small, capsys):
    faces.main(["--rounds", "2", "--tasks", "2", "--batch", "4", "--network", "vit"])
    printed = capsys.readouterr().out
    assert "cnn" not in printed
    assert all(word in printed for word in ("2 tasks", *faces.METHODS))


@pytest.mark.parametrize("count", [0, 41])
def test_more_tasks_than_there_are_attributes_are_refused(count):
    with pytest.raises(UserError, match=f"must be from 1 to 40, found 2, {count}"):
        faces.measure("cnn", tasks=(2, count))


@pytest.mark.parametrize("products", PRODUCTS)
def test_losses_alone_are_under_autocast(products):
    one = torch.ones(2, 2)
    with autocast(products, "cpu"):
        assert (one @ one).dtype == (torch.bfloat16 if products == "bfloat16" else torch.float32)


def test_loading_has_the_times_of_every_way(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loading, "REPEAT", 2)
    CelebaCNN().make(tmp_path, 20)
    settings = json.dumps(TINY["cnn"] | {"train.batch_size": 4})
    loading.main(["celeba-cnn", "--data", str(tmp_path), "--settings", settings, "--rounds", "2", "--json"])
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["batch"], result["method"]) == (4, "moon")
    for name, times in result["times"].items():
        assert result["examples_per_second"][name] == pytest.approx(4000 / times["ms"])
        assert result["ratios"][name] == pytest.approx(times["ms"] / result["times"][loading.STAYS]["ms"])
    assert result["ratios"]["fetching alone"] < 1
    loading.main(["celeba-cnn", "--data", str(tmp_path), "--settings", settings, "--rounds", "2"])
    assert "examples/s" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.slow
@pytest.mark.parametrize("network", faces.NETWORKS)
def test_moon_takes_at_most_1_3_times_as_long_as_muon_whatever_the_number_of_tasks(network):
    ratios = faces.measure(network, device="cuda", methods=("muon", "moon"))["ratios"]
    assert all(found["moon"] <= 1.3 for found in ratios.values()), ratios
