"""Two digits on one canvas."""

import importlib.util
from pathlib import Path

import pytest
import torch

from moonopt import build, route_parameters
from moonopt.bench import find, multidigits
from moonopt.bench.multidigits import MultiDigits
from moonopt.bench.two_digits import overlaid
from moonopt.errors import UserError
from moonopt.methods import known_settings

SPLITS = ("train", "valid", "test")
SMALL = {"data.train_pairs": 300, "data.valid_pairs": 200, "data.test_pairs": 200}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn")


def corners(images):
    """The pixels that belong to one digit alone: the left 4 columns of the left one, the right 4 of the right one, as bytes."""
    pixels = (images.squeeze(1) * 16).to(torch.uint8)
    left, right = pixels[:, :8, :4].flatten(1), pixels[:, 4:, 8:].flatten(1)
    return [bytes(row) for row in left.tolist()], [bytes(row) for row in right.tolist()]


def load(seed=0, **settings):
    return MultiDigits(settings).load(Path(), seed)


def test_the_registry_has_it():
    assert find("multidigits") is MultiDigits


def test_the_digits_are_those_that_were_tuned_on():
    MultiDigits().verify(Path())
    images, labels = multidigits.digits()
    assert images.shape == (1797, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert labels.bincount().min() > 150


def test_other_digits_are_refused(monkeypatch):
    images, labels = multidigits.digits()
    monkeypatch.setattr(multidigits, "digits", lambda: (images, labels.flip(0)))
    with pytest.raises(UserError, match="SHA-256"):
        MultiDigits().verify(Path())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "scikit-learn" in MultiDigits().missing(Path())
    with pytest.raises(UserError, match="scikit-learn"):
        MultiDigits().verify(Path())


def test_no_digit_is_in_two_splits():
    """The halves that nothing overlaps, where they are unique among all digits, occur in one split alone."""
    pixels = (multidigits.digits()[0] * 16).to(torch.uint8)
    splits = load()
    for side, half in enumerate((pixels[:, :, :4], pixels[:, :, 4:])):
        halves = [bytes(row) for row in half.flatten(1).tolist()]
        unique = {each for each in halves if halves.count(each) == 1}
        assert len(unique) > 1600
        seen = [set(corners(getattr(splits, split).tensors[0])[side]) & unique for split in SPLITS]
        assert all(len(each) > 300 for each in seen)
        assert len(set.union(*seen)) == sum(map(len, seen))


def test_every_digit_is_in_some_split():
    """Five pairs to a digit leave few out."""
    splits = load()
    assert sum(len(set(corners(getattr(splits, split).tensors[0])[0])) for split in SPLITS) > 1600


def test_labels_are_those_of_the_digits():
    images, labels = multidigits.digits()
    halves = (images[:, :, :4] * 16).to(torch.uint8).flatten(1).tolist()
    by_left = {bytes(half): label for half, label in zip(halves, labels, strict=True)}
    pictures, left, _ = load(**SMALL).train.tensors
    agree = [by_left[corner] == label for corner, label in zip(corners(pictures)[0], left, strict=True)]
    assert sum(agree) > 0.98 * len(agree)  # a few halves belong to two digits


def test_digits_overlap_and_the_brighter_pixel_wins():
    left, right = torch.zeros(1, 8, 8), torch.zeros(1, 8, 8)
    left[0, 5, 6], right[0, 1, 2] = 0.25, 0.75  # the same place of the canvas
    left[0, 7, 7], right[0, 0, 7] = 0.5, 0.125
    picture = overlaid(left, right, canvas=12)
    assert picture.shape == (1, 1, 12, 12)
    assert (picture[0, 0, 5, 6], picture[0, 0, 7, 7], picture[0, 0, 4, 11]) == (0.75, 0.5, 0.125)
    assert picture.count_nonzero() == 3


def test_most_pictures_have_ink_of_both_digits_in_the_overlap():
    images, _ = multidigits.digits()
    lower_right, upper_left = (images[:, 4:, 4:] > 0), (images[:, :4, :4] > 0)
    assert (lower_right.flatten(1).any(1)).float().mean() > 0.95
    assert (upper_left.flatten(1).any(1)).float().mean() > 0.95


def test_pairs_depend_on_the_seed_of_the_data_alone():
    first, again, other = load(seed=0, **SMALL), load(seed=1, **SMALL), load(seed=0, **SMALL, **{"data.seed": 1})
    for split in SPLITS:
        ours, theirs = getattr(first, split).tensors, getattr(again, split).tensors
        assert all(map(torch.equal, ours, theirs))
        assert not torch.equal(ours[0], getattr(other, split).tensors[0])


def test_most_parameters_are_in_matrices_and_heads_are_not():
    routing = route_parameters(MultiDigits().model())
    assert routing.matrix_share > 0.8
    assert not any("heads" in placement.name for placement in routing.of_kind("matrix"))


def test_metrics_are_exact_whatever_the_batches():
    bench = MultiDigits(SMALL)
    torch.manual_seed(0)
    model = bench.model().eval()
    test = bench.load(Path(), 0).test
    batches = [test.batch(indices, torch.Generator()) for indices in torch.arange(200).split(70)]
    with torch.no_grad():
        found = bench.evaluate(model, batches)
        logits, losses = model(test.tensors[0]), bench.losses(model, test.tensors)
    assert set(found) == {metric.name for metric in bench.metrics}
    assert found["right accuracy"] == pytest.approx(100 * (logits["right"].argmax(1) == test.tensors[2]).float().mean().item())
    assert found["average accuracy"] == pytest.approx((found["left accuracy"] + found["right accuracy"]) / 2)
    assert found["average loss"] == pytest.approx(sum(losses.values()).item() / 2, rel=1e-5)


@pytest.mark.parametrize("method", MultiDigits.tuned)
def test_tuned_settings_are_known_to_the_method(method):
    assert set(MultiDigits.tuned[method]) <= set(known_settings(method))


def test_a_few_steps_of_moon_read_digits_better_than_chance():
    bench = MultiDigits(SMALL | {"data.train_pairs": 1000})
    splits = bench.load(Path(), 0)
    torch.manual_seed(0)
    model = bench.model()
    optimizer = build("moon", model, bench.tasks)
    for indices in torch.randperm(1000).repeat(4).split(64):
        optimizer.minimize(lambda batch: bench.losses(model, batch), splits.train.batch(indices, torch.Generator()))
    with torch.no_grad():
        assert bench.evaluate(model.eval(), [splits.test.tensors])["average accuracy"] > 40
