"""The measurement of a step of a language model, in small."""

import json

import pytest
import torch

from moonopt.speed import language

pytest.importorskip("transformers")


def test_a_small_measurement(capsys):
    language.main(["--small", "--rounds", "2", "--json"])
    result, in_float32 = json.loads(capsys.readouterr().out)["results"]
    assert [result["dtype"], in_float32["dtype"]] == ["bfloat16", "float32"]
    assert in_float32["states_gib"]["ls+adamw"] == pytest.approx(2 * result["states_gib"]["ls+adamw"], rel=0.01)
    assert in_float32["states_gib"]["moon"] == pytest.approx(result["states_gib"]["moon"], rel=0.01)
    assert set(result["times"]) == set(result["ratios"]) == set(language.METHODS) == {"ls+adamw", "muon", "moon"}
    assert all(found["ms"] > 0 for found in result["times"].values())
    assert result["peaks_gib"] == dict.fromkeys(language.METHODS)
    # In bfloat16 AdamW has two numbers of 2 bytes for each parameter; Muon has one of 4 for a matrix and two for a vector.
    assert result["states_gib"]["ls+adamw"] * 2**30 == pytest.approx(4 * result["parameters"], rel=0.01)
    matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    expected = 4 * matrices + 8 * (result["parameters"] - matrices)
    assert result["states_gib"]["muon"] * 2**30 == pytest.approx(expected, rel=0.01)


def test_the_table_has_a_line_for_each_method(capsys):
    language.main(["--small", "--rounds", "2"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in language.METHODS)


def test_a_cpu_is_not_asked_for_the_large_model(capsys):
    with pytest.raises(SystemExit):
        language.main([])
    assert "--device cuda, or --small" in capsys.readouterr().err


def test_the_large_model_is_qwen3_of_1_7_billion_parameters():
    with torch.device("meta"):
        model = language._model(language.LARGE, "meta")
    assert sum(p.numel() for p in model.parameters()) == 1_720_574_976
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", language.DTYPES)
def test_losses_are_those_of_chance_with_gradients(dtype):
    torch.manual_seed(0)
    model = language._model(language.SMALL, "cpu", dtype)
    assert next(model.parameters()).dtype == getattr(torch, dtype)
    losses = language._losses(model, language.SMALL, "cpu")()
    assert losses.dtype == torch.float32
    assert losses.shape == (3,)
    losses.sum().backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())
