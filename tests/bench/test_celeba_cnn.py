"""The convolutional network of CelebA: its size, its matrices, and heads that belong to one task each."""

import pytest
import torch

from moonopt import route_parameters
from moonopt.bench.data.celeba import ATTRIBUTES
from moonopt.bench.models.celeba_cnn import FaceCNN
from moonopt.tasks.gradients import shared_by


@pytest.fixture
def whole():
    with torch.device("meta"):
        return FaceCNN(ATTRIBUTES)


def test_it_has_the_parameters_of_the_protocol(whole):
    assert sum(p.numel() for p in whole.parameters()) == 5_197_160
    assert sum(p.numel() for name, p in whole.named_parameters() if not name.startswith("heads.")) == 5_176_640


def test_the_share_of_the_matrices_is_that_of_the_paper(whole):
    routing = route_parameters(whole)
    assert routing.matrix_share == pytest.approx(0.9946, abs=0.001)
    matrices = [each.parameter for each in routing.of_kind("matrix")]
    assert len(matrices) == 9
    first = whole.convolutions[0][0].weight
    without_first = sum(p.numel() for p in matrices if p is not first)
    assert round(100 * without_first / 5_197_160, 2) == 99.46


def test_it_sees_an_eighth_of_the_image_before_the_mean(whole):
    images = torch.zeros(2, 3, 64, 64, device="meta")
    assert whole.convolutions(images).shape == (2, 512, 8, 8)
    assert all(logits.shape == (2, 1) for logits in whole(images).values())


@pytest.mark.parametrize("size", [8, 9, 30, 63])
def test_images_that_the_pools_do_not_divide_lose_their_last_pixels(size):
    model = FaceCNN(["a"], width=2).eval()
    images = torch.rand(2, 3, size, size)
    seen = model.convolutions(images)
    assert seen.shape == (2, 16, size // 8, size // 8)
    assert model(images)["a"].isfinite().all()


def test_features_keep_their_channels_last():
    model = FaceCNN(["a"], width=2)
    seen = []
    for module in model.convolutions:
        module.register_forward_hook(lambda module, given, output: seen.append(output.stride()[1]))
    model(torch.rand(2, 3, 16, 16))
    assert seen == [1] * 10


def test_every_head_belongs_to_its_task_alone():
    model = FaceCNN(["a", "b", "c"], width=2)
    outputs = model(torch.rand(4, 3, 16, 16))
    shared = {id(p) for p in shared_by([each.mean() for each in outputs.values()], list(model.parameters()))}
    assert {name for name, p in model.named_parameters() if id(p) not in shared} == {
        f"heads.{task}.{part}" for task in "abc" for part in ("weight", "bias")
    }
