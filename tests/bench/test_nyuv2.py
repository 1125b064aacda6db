"""Benchmarks nyuv2 and cityscapes on made-up scenes: splits, metrics, and short runs of a tiny network."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moonopt import cli
from moonopt.bench import paper
from moonopt.bench.cityscapes import CityScapes
from moonopt.bench.metrics import delta_m
from moonopt.bench.nyuv2 import NYUv2, NYUv2Small
from moonopt.bench.registry import find
from moonopt.errors import UserError
from moonopt.methods import known_settings

BENCHMARKS = {"nyuv2": NYUv2, "cityscapes": CityScapes}
COUNT, SIZE = 8, (32, 64)
TINY = {"model.width": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder with eight rooms and eight streets to train on, and four of each to test on."""
    data = tmp_path_factory.mktemp("data")
    for bench in BENCHMARKS.values():
        bench().make(data, count=COUNT, seed=0, size=SIZE)
    return data


@pytest.fixture(params=BENCHMARKS)
def bench(request):
    return BENCHMARKS[request.param]


def whole(data):
    return data.batch(torch.arange(len(data)), torch.Generator())


def perfect(bench, batch):
    """A model that knows all."""
    _, label, *others = batch

    class Knows(torch.nn.Module):
        def forward(self, image):
            logits = 9.0 * (label.unsqueeze(1) == torch.arange(bench.layout.classes)[:, None, None])
            return dict(zip(bench.tasks, (logits, *others), strict=True))

    return Knows()


def test_it_has_the_settings_of_the_protocol_and_the_numbers_of_the_paper():
    rooms, streets = NYUv2().settings, CityScapes().settings
    for settings in (rooms, streets):
        assert (settings["train.epochs"], settings["train.schedule"]) == (200, "step:100:0.5")
        assert (settings["train.select"], settings["data.metrics"], settings["data.augment"]) == ("last:10", "protocol", True)
    assert (rooms["train.batch_size"], streets["train.batch_size"]) == (2, 8)
    assert (NYUv2.published, CityScapes.published) == (paper.NYUV2, paper.CITYSCAPES)
    assert {name: NYUv2.tuned[name]["optimizer.lr"] for name in ("ls", "famo", "mgda")} == dict.fromkeys(
        ("ls", "famo", "mgda"), 1e-4
    )


def test_both_can_be_found_by_module_and_class():
    assert find("moonopt.bench.nyuv2:NYUv2") is NYUv2
    assert find("moonopt.bench.cityscapes:CityScapes") is CityScapes


@pytest.mark.parametrize("method", NYUv2.tuned)
def test_settings_for_methods_are_known_to_them(method, bench):
    assert set(bench.tuned[method]) <= set(known_settings(method))


def test_a_split_has_its_scenes_and_training_alone_is_augmented(bench, folder):
    splits = bench().load(folder, 0)
    assert (len(splits.train), splits.valid, len(splits.test)) == (COUNT, None, COUNT // 2)
    assert (splits.train.augment, splits.test.augment) == (True, False)
    assert len(whole(splits.train)) == 1 + len(bench.tasks)
    assert not bench({"data.augment": False}).load(folder, 0).train.augment


def test_the_folder_of_the_splits_may_be_named_itself(bench, folder):
    made = bench()
    itself = folder / made.settings["data.folder"]
    assert made.missing(itself) is None
    assert len(made.load(itself, 0).train) == COUNT
    assert made.missing(itself / "train").startswith("Not in")


def test_held_out_scenes_are_the_same_for_every_seed_and_not_trained_on(folder):
    first, again = (NYUv2({"data.valid_scenes": 3, "data.augment": False}).load(folder, seed) for seed in (0, 1))
    assert (len(first.train), len(first.valid), len(first.test)) == (5, 3, 4)
    assert torch.equal(whole(first.valid)[0], whole(again.valid)[0])
    images = torch.cat([whole(first.train)[0], whole(first.valid)[0]]).flatten(1)
    assert len(images.unique(dim=0)) == COUNT


@pytest.mark.parametrize("convention", ["protocol", "whole"])
def test_a_model_that_knows_all_has_the_best_metrics(bench, folder, convention):
    instance = bench({"data.metrics": convention, "data.metrics_batch": 4})
    batch = whole(instance.load(folder, 0).test)
    model = perfect(instance, batch)
    losses = instance.losses(model, batch)
    assert {task: loss.item() for task, loss in losses.items()} == pytest.approx(dict.fromkeys(bench.tasks, 0.0), abs=2e-3)
    found = instance.evaluate(model, [batch])
    for metric in bench.metrics[:-1]:
        assert found[metric.name] == pytest.approx(100 if metric.higher else 0, abs=0.03)
    best = {metric.name: 100.0 if metric.higher else 0.0 for metric in bench.metrics}
    stl = bench.published.rows["stl"]
    assert found["relative to STL"] == pytest.approx(1 + delta_m(best, stl, bench.metrics) / 100, abs=1e-3)
    assert instance.score(found) == found["relative to STL"]


def test_the_score_of_a_task_is_relative_to_its_published_metrics(bench):
    stl = bench.published.rows["stl"]
    for task in bench.tasks:
        assert bench().score_of_task(stl, task) == 1
    worse = stl | {"absolute error": 2 * stl["absolute error"]}
    assert bench().score_of_task(worse, "depth") == pytest.approx(1.5)
    assert bench().score_of_task(worse, "segmentation") == 1


def test_a_task_alone_has_a_network_without_the_others(bench, folder):
    instance = bench(TINY)
    splits = instance.load(folder, 0)
    for task in bench.tasks:
        model = instance.model_of_task(task)
        assert list(model.heads) == list(model.encoder_attention) == list(model.decoder_attention) == [task]
        assert list(instance.losses(model, whole(splits.train))) == [task]
        found = instance.evaluate(model, [whole(splits.test)])
        own = {metric.name for metric in bench.metrics if metric.task == task}
        assert {name for name, value in found.items() if math.isfinite(value)} == own
        assert math.isfinite(instance.score_of_task(found, task))


def evaluated(bench, folder, size, **settings):
    """Metrics of an untrained model over batches of so many scenes."""
    instance = bench(TINY | settings)
    torch.manual_seed(0)
    model = instance.model().eval()
    data = instance.load(folder, 0).test
    with torch.no_grad():
        return instance.evaluate(model, [data.batch(some, torch.Generator()) for some in torch.arange(4).split(size)])


def test_made_up_scenes_are_told_from_others(bench, folder, tmp_path):
    assert bench().is_made_up(folder)
    shutil.copytree(folder, tmp_path / "others", ignore=shutil.ignore_patterns("MADE-UP.txt"))
    assert bench().missing(tmp_path / "others") is None
    assert not bench().is_made_up(tmp_path / "others")


@pytest.mark.parametrize("convention", ["protocol", "whole"])
def test_metrics_do_not_depend_on_how_scenes_are_fetched(bench, folder, convention):
    settings = {"data.metrics": convention, "data.metrics_batch": 2}
    one, several = (evaluated(bench, folder, size, **settings) for size in (4, 2))
    assert one == pytest.approx(several, rel=1e-4)


@pytest.mark.parametrize(("name", "metric"), [("nyuv2", "median angle"), ("cityscapes", "absolute error")])
@pytest.mark.parametrize(("convention", "same"), [("protocol", False), ("whole", True)])
def test_metrics_of_the_protocol_depend_on_its_batch_and_those_of_the_whole_do_not(name, metric, convention, same, folder):
    bench = BENCHMARKS[name]
    one, two = (evaluated(bench, folder, 4, **{"data.metrics": convention, "data.metrics_batch": size}) for size in (1, 4))
    assert (one[metric] == pytest.approx(two[metric], rel=1e-6)) == same
    assert one["mIoU"] == pytest.approx(two["mIoU"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data.metrics": "wholly"}, "Did you mean 'whole'"),
        ({"data.metrics_batch": 0}, r"data\.metrics_batch must divide 64, found 0"),
        ({"data.metrics_batch": 3}, r"data\.metrics_batch must divide 64, found 3"),
        ({"data.valid_scenes": COUNT}, r"data\.valid_scenes must be from 0 to 7"),
        ({"data.valid_scenes": -1}, r"data\.valid_scenes must be from 0 to 7"),
    ],
)
def test_settings_without_sense_are_refused(settings, text, folder):
    with pytest.raises(UserError, match=text):
        evaluated(NYUv2, folder, 4, **settings)


def test_scenes_that_the_network_does_not_divide_are_refused_before_training(tmp_path):
    NYUv2().make(tmp_path, count=1, size=SIZE)
    for path in tmp_path.rglob("*.npy"):
        np.save(path, np.load(path)[:, :40])
    with pytest.raises(UserError, match="multiples of 32, found 32 x 40"):
        NYUv2().load(tmp_path, 0)


def test_missing_data_are_told_with_what_to_do(bench, tmp_path):
    for ask in (lambda: bench().verify(tmp_path), lambda: bench().load(tmp_path, 0)):
        with pytest.raises(UserError, match=f"moonopt data make {bench.name}"):
            ask()
    assert str(tmp_path / "other") in bench({"data.folder": "other"}).missing(tmp_path)


def test_made_up_scenes_are_sound_but_told_from_real_ones(bench, folder):
    assert bench().missing(folder) is None
    with pytest.raises(UserError, match="is sound, but not"):
        bench().verify(folder)
    with pytest.raises(UserError, match="has files already"):
        bench().make(folder)


def run(bench, method, folder, runs, monkeypatch, **settings):
    """The mean losses of a short run, as they were logged, and its result."""
    words = [word for key, value in (TINY | settings).items() for word in ("--set", f"{key}={value}")]
    name = f"{bench.__module__}:{bench.__name__}"
    monkeypatch.setattr(
        sys, "argv", ["moonopt", "run", name, "--method", method, "--data", str(folder), "--out", str(runs), *words]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    lines = [line for path in runs.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    (result,) = [json.loads(path.read_text()) for path in runs.rglob("result.json")]
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"], result


SHORT = {"train.epochs": 10, "train.batch_size": 4, "train.log_every": 4, "train.evaluate_every": 5}


def falls(bench, method, folder, tmp_path, monkeypatch):
    muon = method in ("moon", "muon") or method.endswith("+muon")
    rates = {"optimizer.lr": 0.01, "optimizer.vector_lr": 0.02} if muon else {"optimizer.lr": 3e-3}
    losses, result = run(bench, method, folder, tmp_path, monkeypatch, **SHORT, **rates)
    assert all(losses[-1][task] < losses[0][task] for task in bench.tasks)
    assert {metric.name for metric in bench.metrics} == set(result["metrics"])
    assert all(np.isfinite(value) for value in result["metrics"].values())
    assert "last 2 evaluations" in result["selection"]


@pytest.mark.parametrize(
    ("name", "method"),
    [("nyuv2", "moon"), ("nyuv2", "famo"), ("nyuv2", "nash-mtl"), ("cityscapes", "moon"), ("cityscapes", "ls")],
)
def test_a_short_run_in_which_the_losses_of_all_tasks_fall(name, method, folder, tmp_path, monkeypatch):
    falls(BENCHMARKS[name], method, folder, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name, bench in BENCHMARKS.items() for method in bench.published.rows if method != "stl"]
    + [(name, method) for name in BENCHMARKS for method in ("muon", "famo+muon", "gradnorm")],
)
def test_every_method_of_the_paper_makes_the_losses_fall(name, method, folder, tmp_path, monkeypatch):
    falls(BENCHMARKS[name], method, folder, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), [(name, task) for name, bench in BENCHMARKS.items() for task in bench.tasks])
def test_one_task_alone_is_learnt(name, task, folder, tmp_path, monkeypatch):
    settings = SHORT | {"optimizer.lr": 3e-3, "balancer.task": task}
    losses, result = run(BENCHMARKS[name], "stl", folder, tmp_path, monkeypatch, **settings)
    assert losses[-1][task] < losses[0][task]
    own = {metric.name for metric in BENCHMARKS[name].metrics if metric.task == task}
    assert {metric for metric, value in result["metrics"].items() if value is not None} == own


def test_a_run_with_the_same_seed_is_the_same(folder, tmp_path, monkeypatch):
    settings = SHORT | {"train.epochs": 2, "train.evaluate_every": 1, "optimizer.lr": 0.02}
    first, again = (run(NYUv2, "moon", folder, tmp_path / name, monkeypatch, **settings) for name in ("first", "again"))
    assert first[0] == again[0]
    assert first[1]["metrics"] == again[1]["metrics"]


def test_our_own_protocol_claims_nothing_published_and_has_the_same_scale(folder):
    assert NYUv2Small.published is None
    with pytest.raises(UserError, match="NYU-v2 at 96 x 128's: it has 8 samples, expected 795"):
        NYUv2Small({"data.folder": "nyuv2"}).verify(folder)
    assert NYUv2Small.reference == NYUv2.published.rows["stl"]
    settings = {"data.folder": "nyuv2", "data.valid_scenes": 2}
    splits = NYUv2Small(settings).load(folder, 0)
    assert (len(splits.train), len(splits.valid), len(splits.test)) == (6, 2, 4)
    ours, theirs = (evaluated(each, folder, 4, **settings, **{"data.metrics": "whole"}) for each in (NYUv2Small, NYUv2))
    assert ours == theirs


def test_the_real_scenes_of_96_by_128_pixels_are_read():
    place = os.environ.get("MOONOPT_DATA")
    if place is None or NYUv2({"data.folder": "nyuv2_96x128_tree"}).missing(Path(place)) is not None:
        pytest.skip("needs nyuv2_96x128_tree, unpacked from nyuv2_96x128, in $MOONOPT_DATA")
    NYUv2Small().verify(Path(place))
    splits = NYUv2({"data.folder": "nyuv2_96x128_tree"}).load(Path(place), 0)
    image, label, depth, normal = splits.train.tensors
    assert (image.shape[1:], image.dtype) == ((3, 96, 128), torch.uint8)
    assert set(label.unique().tolist()) == set(range(-1, 13))
    assert 0.7 < depth.min() < depth.max() < 10
    torch.testing.assert_close(normal.norm(dim=1), torch.ones_like(depth[:, 0]), rtol=0, atol=1e-4)
