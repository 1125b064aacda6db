"""SegNet with attention: its sizes, and that it computes what torch's own pooling, unpooling and interpolation would."""

import pytest
import torch
from torch.nn import functional

from moonopt import route_parameters
from moonopt.bench.models.segnet import SegNetMTAN, growth, pool, resized, unpool
from moonopt.errors import UserError

ROOMS = {"segmentation": 13, "depth": 1, "normal": 3}
STREETS = {"segmentation": 7, "depth": 1}


def on_meta(outputs):
    with torch.device("meta"):
        return SegNetMTAN(outputs)


def size_of(module):
    return sum(p.numel() for p in module.parameters())


def segnet(outputs=ROOMS, width=2):
    torch.manual_seed(0)
    return SegNetMTAN(outputs, width=width)


def reference(model, images):
    """The network in the order of its paper: all of the SegNet, then one task after the other, with torch's own layers."""
    x, down, places, up = images, [], [], []
    for stage in model.encoder:
        down.append(stage(x))
        x, place = functional.max_pool2d(down[-1][1], 2, return_indices=True)
        places.append(place)
    for stage, place in zip(reversed(model.decoder), reversed(places), strict=True):
        spread = functional.max_unpool2d(x, place, 2)
        x = stage(spread)[1]
        up.append((spread, x))
    outputs = {}
    for task, head in model.heads.items():
        masks, branch = model.encoder_attention[task], None
        for mask, transition, (first, last) in zip(masks, model.encoder_transitions, down, strict=True):
            seen = first if branch is None else torch.cat([first, branch], 1)
            branch = functional.max_pool2d(transition(mask(seen) * last), 2)
        masks, transitions = reversed(model.decoder_attention[task]), reversed(model.decoder_transitions)
        for mask, transition, (spread, last) in zip(masks, transitions, up, strict=True):
            grown = functional.interpolate(branch, scale_factor=2, mode="bilinear", align_corners=True)
            branch = mask(torch.cat([spread, transition(grown)], 1)) * last
        outputs[task] = head(branch)
    return outputs


@pytest.mark.parametrize(("outputs", "total", "shared"), [(ROOMS, 44_229_073, 44_117_184), (STREETS, 41_206_984, 41_132_608)])
def test_there_are_as_many_parameters_as_in_the_protocol(outputs, total, shared):
    model = on_meta(outputs)
    assert size_of(model) == total
    assert total - size_of(model.heads) == shared


def test_the_attention_of_the_tasks_is_of_the_size_in_the_protocol():
    model = on_meta(ROOMS)
    assert size_of(model.encoder_attention) + size_of(model.decoder_attention) == 8_953_728
    assert sum("heads" not in name for name, _ in model.named_parameters()) == 384


def test_the_share_of_the_matrices_is_that_of_the_paper():
    assert route_parameters(on_meta(STREETS)).matrix_share == pytest.approx(0.9967, abs=5e-5)  # the paper has one for both
    routing = route_parameters(on_meta(ROOMS))
    assert routing.matrix_share == pytest.approx(0.9957, abs=0.001)
    assert all(placement.parameter.ndim == 4 for placement in routing.of_kind("matrix"))
    assert all(placement.kind == "vector" for placement in routing.placements if "heads" in placement.name)


def test_convolutions_start_as_in_the_protocol():
    model = segnet(width=16)
    weight = model.encoder[3].first[0].weight
    assert weight.std().item() == pytest.approx((2 / (9 * (64 + 128))) ** 0.5, rel=0.02)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith(".0.bias"))


@pytest.mark.parametrize("outputs", [ROOMS, STREETS])
def test_it_computes_what_the_layers_of_torch_do(outputs):
    images = torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for compute in (lambda model: model(images), lambda model: reference(model, images)):
        model = segnet(outputs).double()
        answers = compute(model)
        sum(answer.square().mean() for answer in answers.values()).backward()
        found.append((answers, {name: p.grad for name, p in model.named_parameters()}, dict(model.named_buffers())))
    assert [tuple(answer.shape) for answer in found[0][0].values()] == [(2, size, 64, 32) for size in outputs.values()]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_pooling_is_that_of_torch_also_where_pixels_are_equal():
    x = torch.randint(3, (2, 3, 8, 12), generator=torch.Generator().manual_seed(0)).float()
    expected, indices = functional.max_pool2d(x, 2, return_indices=True)
    pooled, chosen = pool(x)
    assert torch.equal(pooled, expected)
    assert (chosen.sum((2, 4)) == 1).all()
    values = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(unpool(values, chosen), functional.max_unpool2d(values, indices, 2))
    forms = (lambda x: pool(x)[0], lambda x: functional.max_pool2d(x, 2))
    ours, theirs = (torch.func.vjp(form, x)[1](values)[0] for form in forms)
    assert torch.equal(ours, theirs)
    along = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.func.jvp(form, (x,), (along,))[1] for form in forms)
    assert torch.equal(ours, theirs)


def test_pooling_passes_on_what_is_no_number():
    x = torch.zeros(1, 1, 2, 4)
    x[0, 0, 1, 2] = torch.nan
    assert pool(x)[0].isnan().tolist() == [[[[False, True]]]]


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (9, 12), (144, 5)])
def test_pictures_are_doubled_bilinearly_with_the_corners_staying(size):
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    expected = functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
    found = resized(x, *(growth(length, x) for length in size))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_channels_lie_last_in_memory_all_the_way():
    model, found = segnet(), []
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    model(torch.randn(2, 3, 32, 64))
    assert len(found) == 122
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in found)


def test_vmap_maps_over_images():
    model, images = segnet().eval(), torch.randn(2, 3, 32, 64, generator=torch.Generator().manual_seed(0))
    found = torch.func.vmap(lambda image: model(image[None])["depth"][0])(images)
    torch.testing.assert_close(found, model(images)["depth"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [(48, 64), (32, 40), (16, 32)])
def test_images_that_five_poolings_do_not_divide_are_refused(size):
    with pytest.raises(UserError, match=rf"multiples of 32, found {size[0]} x {size[1]}"):
        segnet()(torch.zeros(2, 3, *size))


def test_a_width_of_nothing_is_refused():
    with pytest.raises(UserError, match=r"model\.width must be at least 1, found 0"):
        segnet(width=0)


def test_it_has_derivatives_in_forward_mode():
    model, images = segnet().double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    point = {name: p.detach() for name, p in model.named_parameters()}
    along = {name: torch.randn_like(p) for name, p in point.items()}

    def loss(parameters):
        return torch.func.functional_call(model.eval(), parameters, (images,))["depth"].square().mean()

    _, exact = torch.func.jvp(loss, (point,), (along,))
    gradients = torch.func.grad(loss)(point)
    torch.testing.assert_close(exact, sum((gradients[name] * along[name]).sum() for name in point))
