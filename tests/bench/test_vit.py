"""The small ViT of the image benchmarks."""

import pytest
import torch

from moonopt import route_parameters
from moonopt.bench.models.vit import ViT


def vit(**settings):
    torch.manual_seed(0)
    return ViT({"left": 10, "right": 7}, **({"image_size": 12, "patch_size": 4, "width": 16, "depth": 2} | settings))


@pytest.mark.parametrize(("image_size", "patch_size", "channels"), [(12, 4, 1), (12, 3, 3), (8, 8, 2)])
def test_every_task_has_its_outputs(image_size, patch_size, channels):
    model = vit(image_size=image_size, patch_size=patch_size, channels=channels)
    outputs = model(torch.randn(5, channels, image_size, image_size))
    assert {task: tuple(each.shape) for task, each in outputs.items()} == {"left": (5, 10), "right": (5, 7)}


def test_matrices_are_the_attention_projections_and_mlp_layers_alone():
    routing = route_parameters(vit())
    matrices = {placement.name for placement in routing.of_kind("matrix")}
    layers = ("attention.qkv", "attention.out", "mlp.0", "mlp.2")
    assert matrices == {f"blocks.{block}.{layer}.weight" for block in range(2) for layer in layers}
    width = 16
    total = sum(placement.parameter.numel() for placement in routing.placements)
    assert routing.matrix_share == 2 * (4 * width**2 + 2 * 2 * width**2) / total


def test_fused_projections_are_three_matrices():
    by_name = {placement.name: placement for placement in route_parameters(vit()).placements}
    assert by_name["blocks.0.attention.qkv.weight"].rows == [16, 16, 16]


@pytest.mark.parametrize(("head_width", "layers"), [(0, [""]), (24, [".0", ".2"])], ids=["linear", "with a hidden layer"])
def test_heads_are_vectors_with_one_module_per_task(head_width, layers):
    model = vit(head_width=head_width)
    assert set(model.heads) == {"left", "right"}
    kinds = {placement.name: placement.kind for placement in route_parameters(model).placements}
    for task in ("left", "right"):
        assert all(kinds[f"heads.{task}{layer}.weight"] == "vector" for layer in layers)
    assert sum("heads" in name and "weight" in name for name in kinds) == 2 * len(layers)


def test_a_task_does_not_touch_the_head_of_another():
    model = vit()
    model(torch.randn(2, 1, 12, 12))["left"].sum().backward()
    assert model.heads["right"].weight.grad is None
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "right" not in name)


def test_attention_is_the_softmax_of_scaled_products():
    attention = vit(attention_heads=2).blocks[0].attention
    x = torch.randn(3, 9, 16)
    query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in attention.qkv(x).chunk(3, dim=-1))
    weights = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1)
    torch.testing.assert_close(attention(x), attention.out((weights @ value).transpose(1, 2).flatten(2)))


def test_positions_tell_patches_apart():
    model = vit()
    image = torch.randn(1, 1, 12, 12)
    moved = image.roll(4, dims=-1)
    assert not torch.allclose(model(image)["left"], model(moved)["left"], atol=1e-5)
    model.positions.data.zero_()
    torch.testing.assert_close(model(image)["left"], model(moved)["left"])


@pytest.mark.parametrize("settings", [{"patch_size": 5}, {"attention_heads": 3}])
def test_sizes_that_do_not_divide_are_refused(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must divide"):
        vit(**settings)
