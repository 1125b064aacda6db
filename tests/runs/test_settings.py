"""Settings: every key has a value and a source, and what is wrong is told with the nearest that is right."""

import json
import re

import pytest
import torch
from torch import nn

from moonopt.bench import find
from moonopt.errors import UserError
from moonopt.methods import METHODS
from moonopt.runs.settings import make_method, parse, read_file, resolve

TOY, TINY = find("toy"), find("tiny_benchmarks:Tiny")


def test_every_setting_names_its_source():
    found = resolve(
        TOY, "moon", [("--config f.json", {"optimizer.lr": 0.3, "train.epochs": 2}), ("--set", {"train.epochs": 3})]
    )
    sources = {key: (found[key].value, found[key].source) for key in found}
    assert sources["train.epochs"] == (3, "--set")
    assert sources["optimizer.lr"] == (0.3, "--config f.json")
    assert sources["train.steps_per_epoch"] == (50, "toy")
    assert sources["train.schedule"] == ("cosine", "training loop")
    assert sources["optimizer.beta"] == (1e-4, "moon's default")
    assert resolve(TOY, "ls")["optimizer.lr"].source == "toy's choice for *"


@pytest.mark.parametrize("method", METHODS)
def test_every_default_is_json_and_makes_the_method(method):
    values = {key: each.value for key, each in resolve(TINY, method).items()}
    back = json.loads(json.dumps(values))
    assert back == values
    made = make_method(method, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ("a", "b"), back)
    assert made.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("method", ["moon", "ls", "nash-mtl", "famo+muon"])
def test_every_default_may_also_be_given(method):
    values = {key: each.value for key, each in resolve(TINY, method).items()}
    assert {key: each.value for key, each in resolve(TINY, method, [("config.json", values)]).items()} == values


@pytest.mark.parametrize(
    ("method", "key", "value", "text"),
    [
        ("moon", "optimizer.l", 0.1, "Unknown setting of moon on tiny 'optimizer.l'. Did you mean 'optimizer.lr'?"),
        ("moon", "train.epoch", 1, "Did you mean 'train.epochs'?"),
        ("moon", "balancer.c", 0.1, "Unknown setting of moon on tiny 'balancer.c'"),
        ("ls", "optimizer.lr", "fast", "optimizer.lr must be a number, found 'fast' in --set."),
        ("ls", "optimizer.lr", True, "optimizer.lr must be a number, found True in --set."),
        ("ls", "optimizer.lr", float("nan"), "optimizer.lr must be a number, found nan in --set."),
        ("ls", "optimizer.lr", None, "optimizer.lr must be a number, found None in --set."),
        ("ls", "optimizer.betas", [0.9], "optimizer.betas must be a list of 2, found [0.9] in --set."),
        ("ls", "balancer.reduction", "max", "balancer.reduction must be one of mean, sum, found 'max' in --set."),
        ("ls", "train.epochs", 1.5, "train.epochs must be a whole number, found 1.5 in --set."),
        ("ls", "train.epochs", True, "train.epochs must be a whole number, found True in --set."),
        ("ls", "train.epochs", 0, "train.epochs must be at least 1, found 0."),
        ("ls", "train.batch_size", -3, "train.batch_size must be at least 1, found -3."),
        ("ls", "train.steps_per_epoch", 0, "train.steps_per_epoch must be at least 1, found 0."),
        ("ls", "train.conflict", "maybe", "train.conflict must be true or false, found 'maybe' in --set."),
        ("ls", "train.schedule", "cosin", "Unknown train.schedule 'cosin': expected one of constant, cosine, linear, step"),
        ("ls", "train.schedule", "step:1", "train.schedule=step takes 2 numbers, as in step:100:0.5; found 'step:1'."),
        ("ls", "train.select", "first", "train.select must be last, best or last:10 (any number), found 'first'."),
        ("ls", "method.protocol", "papper", "Unknown protocol 'papper': expected one of paper, nash-mtl, famo. Did you mean"),
        ("ls", "method.protocol", 3, "method.protocol must be a name, found 3 in --set."),
        ("moon", "optimizer.polar_dtype", "int8", "optimizer.polar_dtype must be one of float64, float32, bfloat16, float16"),
    ],
)
def test_a_wrong_key_or_value_is_one_clear_sentence(method, key, value, text):
    with pytest.raises(UserError, match=re.escape(text)) as error:
        resolve(TINY, method, [("--set", {key: value})])
    assert "\n" not in str(error.value)


def test_what_a_constructor_refuses_is_a_users_error():
    for settings in ({"optimizer.lr": -1.0}, {"optimizer.fused": True, "optimizer.foreach": True}):
        values = {key: each.value for key, each in resolve(TINY, "ls", [("--set", settings)]).items()}
        with pytest.raises(UserError, match=r"^ls: "):
            make_method("ls", nn.Linear(4, 4), ("a", "b"), values)


def test_a_setting_without_a_default_value_takes_anything():
    assert resolve(TINY, "ls", [("--set", {"data.limit": 100})])["data.limit"].value == 100


def test_a_dtype_is_written_as_a_word():
    values = {key: each.value for key, each in resolve(TINY, "moon", [("--set", {"optimizer.polar_dtype": "float64"})]).items()}
    assert values["optimizer.polar_dtype"] == "float64"
    assert (
        make_method("moon", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ("a", "b"), values)._polar.dtype is torch.float64
    )


def test_a_users_method_has_its_arguments_as_settings():
    found = resolve(TINY, "tiny_benchmarks:sgd", [("--set", {"optimizer.momentum": 0.5})])
    assert (found["optimizer.lr"].value, found["optimizer.momentum"].value) == (0.02, 0.5)
    values = {key: each.value for key, each in found.items()}
    made = make_method("tiny_benchmarks:sgd", nn.Linear(4, 4), ("a", "b"), values)
    assert (made.param_groups[0]["lr"], made.param_groups[0]["momentum"]) == (0.02, 0.5)
    with pytest.raises(UserError, match=r"optimizer.momentum must be a number"):
        resolve(TINY, "tiny_benchmarks:sgd", [("--set", {"optimizer.momentum": "x"})])


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("mooon", "Unknown method 'mooon'. Did you mean 'moon'? Your own is given as module:name."),
        ("tiny_benchmarks:sdg", "Unknown name in module tiny_benchmarks 'sdg'"),
        ("tiny_benchmarks:NUMBER", "must be callable as name(model, tasks, **settings), found 3"),
        ("tiny_benchmarks:defaultless", "needs a default for its argument 'lr', which is then optimizer.lr"),
        ("tiny_benchmarks:unspeakable", "the default of 'kernel' must be plain JSON"),
        ("no_such_module:sgd", "No module 'no_such_module' for method no_such_module:sgd"),
        (":sgd", "cannot be imported"),
    ],
)
def test_a_wrong_method_is_one_clear_sentence(method, text):
    with pytest.raises(UserError, match=re.escape(text)) as error:
        resolve(TINY, method)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("optimizer.lr=1e-3", ("optimizer.lr", 0.001)),
        ("a.b=c=d", ("a.b", "c=d")),
        ("optimizer.betas=[0.9, 0.95]", ("optimizer.betas", [0.9, 0.95])),
        ("train.conflict=false", ("train.conflict", False)),
        ("data.limit=null", ("data.limit", None)),
    ],
)
def test_a_setting_is_json_or_a_word(text, found):
    assert parse(text) == found


@pytest.mark.parametrize("text", ["lr", "=1", "lr=", ""])
def test_what_is_no_setting_is_told(text):
    with pytest.raises(UserError, match="A setting is written key=value, for example"):
        parse(text)


def test_a_file_of_settings_is_flat_or_a_config(tmp_path):
    flat, config = tmp_path / "flat.json", tmp_path / "config.json"
    flat.write_text('{"optimizer.lr": 0.1}')
    config.write_text('{"settings": {"optimizer.lr": 0.1}, "seed": 3}')
    assert read_file(flat) == read_file(config) == {"optimizer.lr": 0.1}


@pytest.mark.parametrize(("content", "text"), [("[1]", "must hold an object"), ("{", "is not JSON"), (None, "Cannot read")])
def test_a_file_that_is_no_settings_is_told(content, text, tmp_path):
    path = tmp_path / "settings.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=text):
        read_file(path)
