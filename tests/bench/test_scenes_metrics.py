"""Losses and metrics of scenes against torch's own, scikit-learn and float64."""

import math

import pytest
import torch
from torch.nn import functional

from moonopt.bench.data.scenes_metrics import (
    AngleErrors,
    Confusion,
    DepthErrors,
    HistogramMedian,
    MeanOfMedians,
    angles,
    depth_loss,
    normal_loss,
    segmentation_loss,
)

CLASSES = 5


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def unit(shape, generator):
    return functional.normalize(torch.randn(shape, generator=generator), dim=1)


def some_unknown(target, generator):
    """A third of the pixels 0."""
    return target * (torch.rand(target[:, :1].shape, generator=generator) > 1 / 3)


def labels(generator, count=4):
    return torch.randint(-1, CLASSES, (count, 8, 9), generator=generator, dtype=torch.int8)


def test_cross_entropy_is_that_of_torch(generator):
    logits, label = torch.randn(4, CLASSES, 8, 9, generator=generator), labels(generator)
    expected = functional.nll_loss(functional.log_softmax(logits, 1), label.long(), ignore_index=-1)
    torch.testing.assert_close(segmentation_loss(logits, label), expected)


def test_depths_and_normals_count_where_they_are_known(generator):
    depth = some_unknown(torch.rand(4, 1, 8, 9, generator=generator) + 1, generator)
    guess = torch.rand(4, 1, 8, 9, generator=generator)
    torch.testing.assert_close(depth_loss(guess, depth), (guess - depth)[depth != 0].abs().mean())
    normal, guess = some_unknown(unit((4, 3, 8, 9), generator), generator), unit((4, 3, 8, 9), generator)
    cosines = (guess * normal).sum(1)[normal.norm(dim=1) > 0]
    torch.testing.assert_close(normal_loss(guess, normal), 1 - cosines.mean())


@pytest.mark.parametrize(
    ("loss", "channels", "target"),
    [
        (segmentation_loss, CLASSES, torch.full((2, 4, 4), -1)),
        (depth_loss, 1, torch.zeros(2, 1, 4, 4)),
        (normal_loss, 3, torch.zeros(2, 3, 4, 4)),
    ],
)
def test_a_batch_of_which_nothing_is_known_has_no_loss_and_no_gradient(loss, channels, target):
    guess = torch.randn(2, channels, 4, 4, requires_grad=True)
    found = loss(guess, target)
    found.backward()
    assert found.item() == 0
    assert not guess.grad.any()


def test_iou_and_accuracy_are_those_of_scikit_learn(generator):
    sklearn = pytest.importorskip("sklearn.metrics")
    logits, label = torch.randn(6, CLASSES, 8, 9, generator=generator), labels(generator, 6)
    tally = Confusion(CLASSES)
    for part in range(0, 6, 2):
        tally.add(logits[part : part + 2], label[part : part + 2])
    counted = label >= 0
    truth, guess = label[counted].numpy(), logits.argmax(1)[counted].numpy()
    assert tally.metrics() == pytest.approx(
        {
            "mIoU": 100 * sklearn.jaccard_score(truth, guess, average="macro"),
            "pixel accuracy": 100 * sklearn.accuracy_score(truth, guess),
        }
    )


def test_a_class_that_never_comes_is_left_out_of_the_mean():
    label = torch.tensor([[[0, 0, 1, 1]]])
    tally = Confusion(3)
    tally.add(functional.one_hot(torch.tensor([[[0, 1, 1, 1]]]), 3).movedim(3, 1).float(), label)
    assert tally.metrics() == pytest.approx({"mIoU": 100 * (1 / 2 + 2 / 3) / 2, "pixel accuracy": 75})


def test_angles_are_those_of_float64_also_where_vectors_agree(generator):
    normal = unit((3, 3, 16, 16), generator)
    for noise in (1e-4, 1e-2, 1.0):
        guess = functional.normalize(normal + noise * torch.randn(normal.shape, generator=generator), dim=1)
        a, b = guess.double(), normal.double()
        exact = torch.rad2deg(2 * torch.atan2((a - b).norm(dim=1), (a + b).norm(dim=1)))
        torch.testing.assert_close(angles(guess, normal).double(), exact, rtol=0, atol=2e-5)
    torch.testing.assert_close(angles(-normal, normal), torch.full((3, 16, 16), 180.0), rtol=0, atol=1e-4)


def batches_of_depth(generator):
    """Three batches of which different shares are known, and by how much."""
    found = []
    for share in (0.2, 0.5, 0.9):
        depth = (torch.rand(2, 1, 8, 9, generator=generator) + 1) * (torch.rand(2, 1, 8, 9, generator=generator) < share)
        found.append((torch.rand(2, 1, 8, 9, generator=generator), depth))
    return found


@pytest.mark.parametrize("convention", ["protocol", "whole"])
def test_depth_errors_are_averaged_as_the_convention_says(convention, generator):
    tally, absolute, relative = DepthErrors(convention), [], []
    for guess, depth in batches_of_depth(generator):
        tally.add(guess, depth)
        where = depth != 0
        absolute.append((guess - depth)[where].abs().double())
        relative.append(absolute[-1] / depth[where])
    if convention == "whole":
        absolute, relative = [torch.cat(absolute)], [torch.cat(relative)]
    expected = [sum(part.mean().item() for part in parts) / len(parts) for parts in (absolute, relative)]
    assert list(tally.metrics().values()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("convention", ["protocol", "whole"])
def test_angle_errors_are_averaged_as_the_convention_says(convention, generator):
    tally, errors = AngleErrors(convention), []
    for share in (0.3, 0.9):
        normal = unit((2, 3, 16, 16), generator) * (torch.rand(2, 1, 16, 16, generator=generator) < share)
        guess = functional.normalize(normal + 0.3 * torch.randn(normal.shape, generator=generator), dim=1)
        tally.add(guess, normal)
        errors.append(angles(guess, normal)[normal.norm(dim=1) > 0].double())
    if convention == "whole":
        errors = [torch.cat(errors)]
    computed = [
        (part.mean(), part.quantile(0.5), *(100 * (part < limit).double().mean() for limit in (11.25, 22.5, 30)))
        for part in errors
    ]
    expected = [sum(values).item() / len(values) for values in zip(*computed, strict=True)]
    assert list(tally.metrics()) == ["mean angle", "median angle", "within 11.25°", "within 22.5°", "within 30°"]
    assert list(tally.metrics().values()) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("count", [1, 2, 1001, 40_000])
def test_the_median_of_a_histogram_is_that_of_torch(count, generator):
    error = 180 * torch.rand(count, generator=generator).pow(3)
    median = HistogramMedian()
    for part in error.split(333):
        median.add(part, torch.ones_like(part, dtype=torch.bool))
    expected = (error.median() + -(-error).median()) / 2  # of an even number torch has the lower one
    assert median.value() == pytest.approx(expected.item(), abs=1e-3)


@pytest.mark.parametrize("convention", ["protocol", "whole"])
def test_predictions_that_are_no_numbers_are_not_hidden(convention, generator):
    normal, depth = unit((2, 3, 4, 4), generator), torch.rand(2, 1, 4, 4, generator=generator) + 1
    angle, error = AngleErrors(convention), DepthErrors(convention)
    for factor in (1.0, math.nan):
        angle.add(factor * normal, normal)
        error.add(factor * depth, depth)
    assert all(math.isnan(value) for value in error.metrics().values())
    assert all(math.isnan(angle.metrics()[name]) for name in ("mean angle", "median angle"))


def test_the_protocol_takes_all_normals_for_unit_vectors_and_the_whole_does_not(generator):
    normal = unit((2, 3, 16, 16), generator)
    guess = functional.normalize(normal + 0.05 * torch.randn(normal.shape, generator=generator), dim=1)
    found = {}
    for convention in ("protocol", "whole"):
        for length in (1.0, 0.99):
            tally = AngleErrors(convention)
            tally.add(guess, length * normal)
            found[convention, length] = tally.metrics()["mean angle"]
    assert found["protocol", 1.0] == pytest.approx(found["whole", 1.0], abs=1e-3)
    assert found["whole", 0.99] == pytest.approx(found["whole", 1.0], abs=1e-3)
    cosine = (guess * 0.99 * normal).double().sum(1).clamp(-1, 1)
    assert found["protocol", 0.99] == pytest.approx(cosine.acos().rad2deg().mean().item(), abs=1e-4)
    assert found["protocol", 0.99] > found["protocol", 1.0] + 1


@pytest.mark.parametrize("median", [HistogramMedian, MeanOfMedians])
def test_medians_take_known_pixels_alone(median):
    error, known = torch.tensor([1.0, 90.0, 2.0, 3.0, 0.0]), torch.tensor([True, False, True, True, False])
    tally = median()
    tally.add(error, torch.zeros(5, dtype=torch.bool))
    assert math.isnan(tally.value())
    tally.add(error, known)
    assert tally.value() == pytest.approx(2, abs=6e-4)
