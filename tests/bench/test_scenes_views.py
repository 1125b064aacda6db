"""The views that training sees: against torch's own cropping and resizing, one by one, and against geometry."""

import pytest
import torch
from torch.nn import functional

from moonopt.bench.data.scenes import NYUV2, SceneTensors
from moonopt.bench.data.scenes_made_up import made_scene, room_world
from moonopt.bench.data.scenes_rays import look, rays
from moonopt.bench.data.scenes_views import SCALES, Scenes, drawn_views, seen

SIZE = (32, 64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def rooms():
    """Twenty-four rooms."""
    made = [made_scene(NYUV2, generator(seed), SIZE) for seed in range(24)]
    image, label, depth, normal = (torch.stack([each[kind] for each in made]) for kind in made[0])
    first = [each.movedim(3, 1).contiguous() for each in (image, depth, normal)]
    return SceneTensors((first[0] * 255).round().to(torch.uint8), 255.0, label.to(torch.int8), first[1], first[2])


def everything(scenes):
    return scenes.image.float() / scenes.divisor, scenes.label, scenes.depth, scenes.normal


def test_scenes_without_augmentation_are_as_they_are(rooms):
    indices = torch.tensor([5, 2])
    batch = Scenes(rooms).batch(indices, generator())
    assert all(torch.equal(found, whole[indices]) for found, whole in zip(batch, everything(rooms), strict=True))
    assert [each.dtype for each in batch] == [torch.float32, torch.int8, torch.float32, torch.float32]


def test_chosen_scenes_alone_are_there(rooms):
    data = Scenes(rooms, torch.tensor([3, 7]))
    assert len(data) == 2
    assert torch.equal(data.batch(torch.tensor([1]), generator())[2][0], rooms.depth[7])


def test_views_depend_on_the_generator_alone(rooms):
    data, indices = Scenes(rooms, augment=True), torch.arange(24)
    torch.manual_seed(1)
    first = data.batch(indices, generator())
    torch.manual_seed(2)
    again, other = data.batch(indices, generator()), data.batch(indices, generator(1))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert [each.shape for each in first] == [each.shape for each in everything(rooms)]


def test_every_scale_place_and_side_comes():
    views = drawn_views(3000, *SIZE, generator())
    for scale in SCALES:
        assert (views.scale == scale).float().mean().item() == pytest.approx(1 / 3, abs=0.04)
        top = views.near_rows[views.scale == scale][:, 0]
        assert set(top.tolist()) == set(range(SIZE[0] - int(SIZE[0] / scale) + 1))
    assert views.mirrored.float().mean().item() == pytest.approx(0.5, abs=0.04)


def one_by_one(scene, scale, top, left, mirrored):
    """The protocol's augmentation of one scene."""
    height, width = int(SIZE[0] / scale), int(SIZE[1] / scale)
    image, label, depth, normal = (each[None, ..., top : top + height, left : left + width].float() for each in scene)
    image, normal = (functional.interpolate(each, SIZE, mode="bilinear", align_corners=True) for each in (image, normal))
    label = functional.interpolate(label.unsqueeze(1), SIZE, mode="nearest").squeeze(1)
    depth = functional.interpolate(depth, SIZE, mode="nearest") / scale
    if mirrored:
        image, label, depth, normal = (each.flip(-1) for each in (image, label, depth, normal))
        normal = normal * torch.tensor([-1.0, 1.0, 1.0]).view(3, 1, 1)
    return image[0], label[0], depth[0], normal[0]


def test_a_batch_is_what_the_protocol_makes_of_each_scene(rooms):
    scenes = everything(rooms)
    views = drawn_views(24, *SIZE, generator(3))
    image, label, depth, normal = seen(scenes, views)
    assert len(set(zip(views.scale.tolist(), views.mirrored.tolist(), strict=True))) == 6
    for number in range(24):
        columns = views.near_columns[number]
        place = int(views.near_rows[number, 0]), int(columns.min())
        view = views.scale[number].double().round(decimals=1).item(), *place, bool(views.mirrored[number])
        expected = one_by_one([each[number] for each in scenes], *view)
        assert torch.equal(label[number].float(), expected[1])
        assert torch.equal(depth[number], expected[2])
        torch.testing.assert_close(image[number], expected[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(normal[number], expected[3], rtol=0, atol=5e-5)


@pytest.mark.parametrize("size", [(288, 384), (128, 256), (96, 128)])
def test_the_nearest_pixels_are_those_of_torch_at_the_sizes_of_real_data(size):
    views = drawn_views(60, *size, generator())
    for dim, near in ((0, views.near_rows), (1, views.near_columns)):
        for scale, found in zip(views.scale.tolist(), near, strict=True):
            part = torch.arange(int(size[dim] / round(scale, 1)), dtype=torch.float32)
            expected = functional.interpolate(part[None, None], size[dim], mode="nearest")[0, 0]
            assert torch.equal((found - found.min()).sort().values, expected.long())


def test_a_mirrored_view_is_that_of_a_mirrored_world():
    world = room_world(generator(5))
    ours, mirrored = look(world, *SIZE), look(world.mirrored(), *SIZE)
    scenes = [ours.colour.movedim(2, 0)[None], ours.label[None], ours.depth[None, None], ours.normal.movedim(2, 0)[None]]
    views = next(
        views for views in (drawn_views(1, *SIZE, generator(seed)) for seed in range(50)) if views.mirrored and views.scale == 1
    )
    image, label, depth, normal = seen(scenes, views)
    assert (label[0] == mirrored.label).float().mean() > 0.999  # a ray along an edge may fall to either side
    same = (label[0] == mirrored.label) & ((depth[0, 0] - mirrored.depth).abs() < 1e-3)
    assert same.float().mean() > 0.995
    torch.testing.assert_close(normal[0].movedim(0, 2)[same], mirrored.normal[same], rtol=0, atol=1e-4)
    torch.testing.assert_close(image[0].movedim(0, 2)[same], mirrored.colour[same], rtol=0, atol=1e-3)


def test_an_enlarged_view_keeps_every_point_where_it_was_but_for_its_distance():
    """With the focal length s times as long and depths s times as short, a pixel is as far to the side as before."""
    world = room_world(generator(2))
    view = look(world, *SIZE)
    directions = rays(*SIZE).movedim(2, 0)
    points = view.depth * directions[:2]  # x and y
    scenes = [points[None].repeat(24, 1, 1, 1), view.label[None].repeat(24, 1, 1), view.depth[None, None].repeat(24, 1, 1, 1)]
    views = drawn_views(24, *SIZE, generator())
    _, _, depth = seen(scenes, views)
    for number in range(24):
        rows, columns = views.near_rows[number], views.near_columns[number]
        enlarged = views.scale[number] * directions[:2][:, rows][:, :, columns]
        torch.testing.assert_close(depth[number] * enlarged, points[:, rows][:, :, columns])
