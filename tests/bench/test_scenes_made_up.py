"""Made-up scenes: colour, class, depth and normals of one world, the same for the same seed, and in the layout of real ones."""

import numpy as np
import pytest
import torch
from PIL import Image

from moonopt.bench.data import scenes, scenes_sheet
from moonopt.bench.data.scenes import CITYSCAPES, NYUV2
from moonopt.bench.data.scenes_made_up import CEILING, FLOOR, SKY, made_scene, make_scenes, room_world
from moonopt.bench.data.scenes_rays import World, look, rays
from moonopt.errors import UserError

SIZE = (64, 96)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def box(centre, half, turn=0.0, **camera):
    """A world of one box, whose six faces have the classes 0 to 5."""
    faces = torch.arange(6).view(1, 3, 2)
    place = torch.tensor([centre]), torch.tensor([half]), torch.tensor([turn])
    return World(*place, faces, torch.full((1, 3, 2, 3), 0.5), torch.tensor([1.0]), **camera)


def test_the_face_of_a_box_ahead_has_its_depth_normal_and_size():
    view = look(box((0.0, 0.0, -5.0), (1.0, 0.5, 1.0)), 100, 200)
    assert set(view.label[view.hit].tolist()) == {5}  # the side of +z, towards the camera
    torch.testing.assert_close(view.depth[view.hit].unique(), torch.tensor([4.0]))
    assert torch.equal(view.normal[view.hit].unique(dim=0), torch.tensor([[0.0, 0.0, 1.0]]))
    widths = view.hit.sum(1)
    assert widths.max().item() == pytest.approx(2 / 4 * 0.81 * 200, abs=1)
    assert view.hit.sum(0).max().item() == pytest.approx(1 / 4 * 0.81 * 200, abs=1)
    assert (view.label[~view.hit] == -1).all()
    assert not view.depth[~view.hit].any()


def test_a_box_around_the_camera_is_a_room():
    view = look(box((0.0, 0.2, 0.0), (2.0, 1.2, 6.0), pitch=-0.1), *SIZE)
    assert view.hit.all()
    assert set(view.label.unique().tolist()) == {0, 1, 2, 3, 4}  # all but the wall behind
    assert view.label[-1, SIZE[1] // 2] == 2
    floor = view.normal[view.label == 2]
    torch.testing.assert_close(floor, torch.tensor([0.0, 1.0, 0.0]).expand_as(floor) @ _pitched(-0.1), rtol=0, atol=1e-5)


def _pitched(angle):
    """From the world to a camera that looks up by an angle."""
    sin, cos = np.sin(angle), np.cos(angle)
    return torch.tensor([[1, 0, 0], [0, cos, -sin], [0, sin, cos]], dtype=torch.float32)


@pytest.mark.parametrize("seed", range(5))
def test_normals_are_those_of_the_surface_that_the_depths_make(seed):
    """Neighbours on one face span it: their difference is at a right angle to the normal."""
    view = look(room_world(generator(seed)), *SIZE)
    points = view.depth.unsqueeze(2) * rays(*SIZE)
    torch.testing.assert_close(view.normal.norm(dim=2), torch.ones(SIZE))
    assert ((view.normal * points).sum(2) < 0).all()  # towards the camera
    for one, other in (((slice(None), slice(1, None)), (slice(None), slice(-1))), ((slice(1, None),), (slice(-1),))):
        along = points[one] - points[other]
        same = (view.normal[one] - view.normal[other]).norm(dim=2) < 1e-5
        off = (along * view.normal[one]).sum(2).abs()[same]
        assert (off < 1e-4).float().mean() > 0.9  # the rest are between parallel faces, one before the other


@pytest.mark.parametrize("seed", range(3))
def test_floors_are_below_and_ceilings_above(seed):
    view = look(room_world(generator(seed)), *SIZE)
    heights = torch.arange(SIZE[0]).unsqueeze(1).expand(SIZE).float()
    assert heights[view.label == FLOOR].mean() > SIZE[0] / 2
    assert (view.normal[view.label == FLOOR][:, 1] > 0.9).all()
    assert (view.normal[view.label == CEILING][:, 1] < -0.9).all()


def test_a_camera_that_looks_to_the_left_sees_what_is_there():
    left = (-3.0, 0.0, -3.0)
    assert look(box(left, (0.5, 0.5, 0.5), yaw=torch.pi / 4), *SIZE).hit[SIZE[0] // 2, SIZE[1] // 2]
    assert not look(box(left, (0.5, 0.5, 0.5), yaw=-torch.pi / 4), *SIZE).hit.any()


@pytest.mark.parametrize(("layout", "kinds"), [(NYUV2, 4), (CITYSCAPES, 3)])
def test_scenes_are_the_same_for_a_seed_whatever_their_number(layout, kinds, tmp_path):
    for name, count, seed in (("first", 4, 0), ("more", 6, 0), ("other", 4, 1)):
        make_scenes(tmp_path / name, layout, count, seed, (32, 64))
    first, more, other = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in sorted((tmp_path / name).rglob("*.npy"))}
        for name in ("first", "more", "other")
    )
    assert len(first) == kinds * (4 + 2)
    assert len(more) == kinds * (6 + 3)
    assert first == {path: more[path] for path in first}
    assert not any(first[path] == other[path] for path in first if path.parts[1] == "image")


def test_no_scene_comes_twice(tmp_path):
    make_scenes(tmp_path / "tree", NYUV2, 6, 0, (32, 64))
    images = [path.read_bytes() for path in (tmp_path / "tree").rglob("image/*.npy")]
    assert len(images) == len(set(images)) == 9


def test_all_classes_come_and_some_pixels_have_none(tmp_path):
    for layout in (NYUV2, CITYSCAPES):
        make_scenes(tmp_path / layout.title, layout, 24, 0, (32, 64))
        found = scenes.read(tmp_path / layout.title, "train", layout)
        assert set(found.label.unique().tolist()) == set(range(-1, layout.classes))
        assert found.image.dtype is torch.uint8
        assert 0 < (found.depth == 0).float().mean() < 0.5


def test_streets_have_inverse_depths_that_fall_to_none_in_the_sky():
    street = made_scene(CITYSCAPES, generator(), SIZE)
    depth, label = street["depth"].squeeze(2), street["label"]
    assert (depth[label == SKY] == 0).all()
    assert (depth[label != SKY] > 0).all()
    ground = depth.where(label == 0, torch.nan)
    assert (ground.nanmedian(1).values.diff().nan_to_num(0) >= 0).all()  # the lower in the picture, the nearer


@pytest.mark.parametrize(
    ("count", "size", "text"),
    [(0, (32, 64), "must be at least 1, found 0"), (2, (48, 64), "multiples of 32, found 48 x 64")],
)
def test_numbers_without_sense_are_refused(count, size, text, tmp_path):
    with pytest.raises(UserError, match=text):
        make_scenes(tmp_path / "tree", NYUV2, count, 0, size)
    assert not (tmp_path / "tree").exists()


def test_files_that_are_there_are_left_alone(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="has files already"):
        make_scenes(tmp_path, NYUV2, 1, 0, (32, 64))


@pytest.mark.parametrize(("layout", "kinds"), [(NYUV2, 4), (CITYSCAPES, 3)])
def test_the_sheet_shows_the_scenes_that_are_made(layout, kinds, tmp_path):
    height, width = 32, 64
    make_scenes(tmp_path / "tree", layout, 2, 3, (height, width))
    scenes_sheet.sheet(tmp_path / "sheet.png", layout, (height, width), count=2, seed=3)
    with Image.open(tmp_path / "sheet.png") as picture:
        pixels = np.array(picture)
    step = height + scenes_sheet.GAP, width + scenes_sheet.GAP
    assert pixels.shape == (kinds * step[0], 2 * step[1], 3)
    for number in range(2):
        column = pixels[:, number * step[1] : number * step[1] + width]
        parts = [column[kind * step[0] : kind * step[0] + height] for kind in range(kinds)]
        files = [np.load(folder / f"{number}.npy") for folder in layout.folders(tmp_path / "tree" / "train").values()]
        assert np.array_equal(parts[0], np.rint(255 * files[0]))
        pairs = {(label, tuple(colour)) for label, colour in zip(files[1].flat, parts[1].reshape(-1, 3).tolist(), strict=True)}
        assert len(pairs) == len({label for label, _ in pairs}) == len({colour for _, colour in pairs})
        shades, depth = parts[2][..., 0].astype(int).ravel(), files[2].ravel()
        assert (shades[depth == 0] == 0).all()
        order = np.argsort(depth, kind="stable")
        assert (np.diff(shades[order]) >= 0).all()  # the more, the brighter
        if kinds == 4:
            known = np.abs(files[3]).sum(2) > 0
            assert np.abs(parts[3][known] / 127.5 - 1 - files[3][known]).max() < 0.01
            assert not parts[3][~known].any()
