"""The measurement of sampling, in small."""

import json

import pytest
import torch

from moonopt.speed import sampling

pytest.importorskip("transformers")


def test_a_small_measurement(capsys):
    sampling.main(["--small", "--rounds", "2", "--json"])
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert set(result["times"]) == set(result["ratios"]) == {"transformers", "growing cache", "fixed cache"}
    for name, found in result["times"].items():
        assert result["tokens_per_second"][name] == pytest.approx(3 * 8 / found["ms"] * 1e3)
    assert result["ratios"]["transformers"] == 1


def test_the_table_has_a_line_for_each_way(capsys):
    sampling.main(["--small", "--rounds", "2"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ("transformers", "growing cache", "fixed cache"))


def test_every_way_samples_as_many_tokens():
    model = sampling._model(sampling.SMALL.model, "cpu")
    prompt = torch.ones(3, 5, dtype=torch.int64)
    assert sampling._generate(model, prompt, sampling.SMALL).shape == (3, 5 + 8)
    found = sampling._sample(model, prompt, sampling.SMALL, lambda model, _: sampling.GrowingDecoder(model))
    assert found.response.shape == (3, 8)


def test_a_cpu_is_not_asked_for_the_large_model(capsys):
    with pytest.raises(SystemExit):
        sampling.main([])
    assert "--device cuda, or --small" in capsys.readouterr().err
