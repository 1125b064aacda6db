"""Trees of npy files: what is read of them, kept in memory and checked, and what is said of files that are not sound."""

import numpy as np
import pytest
import torch

from moonopt.bench.data import scenes
from moonopt.bench.data.scenes import CITYSCAPES, NYUV2
from moonopt.bench.data.scenes_made_up import make_scenes
from moonopt.errors import UserError

SIZE = (32, 64)


@pytest.fixture
def rooms(tmp_path):
    make_scenes(tmp_path / "rooms", NYUV2, 3, 0, SIZE)
    return tmp_path / "rooms"


@pytest.fixture
def streets(tmp_path):
    make_scenes(tmp_path / "streets", CITYSCAPES, 3, 0, SIZE)
    return tmp_path / "streets"


def change(path, function):
    np.save(path, function(np.load(path)))


def set_pixel(value, place=(5, 7)):
    def function(array):
        array[place] = value
        return array

    return function


def test_tensors_are_what_the_files_say(rooms):
    found = scenes.read(rooms, "val", NYUV2)
    assert (len(found.image), found.size) == (2, SIZE)
    for number in range(2):
        image, label, depth, normal = (
            torch.from_numpy(np.load(rooms / "val" / kind / f"{number}.npy")) for kind in ("image", "label", "depth", "normal")
        )
        assert torch.equal(found.image[number].float() / found.divisor, image.movedim(2, 0))
        assert torch.equal(found.label[number].float(), label)
        assert torch.equal(found.depth[number], depth.movedim(2, 0))
        assert torch.equal(found.normal[number], normal.movedim(2, 0))


@pytest.mark.parametrize(
    ("stored", "divisor", "dtype"),
    [
        (lambda image: image, 255, torch.uint8),
        (lambda image: np.rint(image * 255), 1, torch.uint8),
        (lambda image: np.rint(image * 255).astype(np.uint8), 1, torch.uint8),
        (lambda image: (image * 0.9).astype(np.float32), 1, torch.float32),
        (lambda image: image.astype(np.float64) / 3, 1, torch.float32),
    ],
    ids=["from 0 to 1", "from 0 to 255", "bytes", "anything", "float64"],
)
def test_images_are_bytes_where_that_is_exact(stored, divisor, dtype, rooms):
    for number in range(3):
        change(rooms / "train" / "image" / f"{number}.npy", stored)
    found = scenes.read(rooms, "train", NYUV2)
    assert (found.divisor, found.image.dtype) == (divisor, dtype)
    expected = torch.from_numpy(np.load(rooms / "train" / "image" / "2.npy")).movedim(2, 0).float()
    assert torch.equal(found.image[2].float() / divisor, expected)


@pytest.mark.parametrize("name", ["label_7", "label"])
def test_labels_of_streets_may_lie_in_either_folder(name, streets):
    for split in scenes.SPLITS:
        (streets / split / "label_7").rename(streets / split / name)
    assert scenes.missing(streets, CITYSCAPES) is None
    found = scenes.read(streets, "train", CITYSCAPES)
    assert found.normal is None
    assert set(found.label.unique().tolist()) <= set(range(-1, 7))


def test_what_is_missing_is_told(rooms, tmp_path):
    assert scenes.missing(rooms, NYUV2) is None
    (rooms / "val" / "depth" / "0.npy").unlink()
    assert "Not in" in scenes.missing(rooms, NYUV2)
    assert "val/depth/0.npy" in scenes.missing(rooms, NYUV2)
    nothing = scenes.missing(tmp_path / "none", NYUV2)
    assert all(
        f"{split}/{kind}/0.npy" in nothing for split in ("train", "val") for kind in ("image", "label", "depth", "normal")
    )
    with pytest.raises(UserError, match=r"val/depth/0\.npy"):
        scenes.verify(rooms, NYUV2)


#: A file whose header promises more than any memory has.
HUGE = (
    b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000, 10)}".ljust(117) + b"\n"
)


def test_files_of_another_byte_order_are_the_same_scenes(rooms):
    expected = scenes.read(rooms, "train", NYUV2)
    for kind in ("image", "depth", "normal", "label"):
        path = rooms / "train" / kind / "0.npy"
        np.save(path, np.load(path).astype(">f4"))
    found = scenes.read(rooms, "train", NYUV2)
    assert torch.equal(found.depth, expected.depth)
    assert torch.equal(found.image, expected.image)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("kind", "damage", "text"),
    [
        ("depth", lambda path: path.write_bytes(HUGE), "is truncated or no npy file"),
        ("depth", lambda path: path.unlink(), "is missing: every folder must have the samples that image has"),
        ("normal", truncate, "is truncated or no npy file"),
        ("image", lambda path: path.write_bytes(b""), "is truncated or no npy file"),
        ("label", lambda path: path.write_text("no array"), "is truncated or no npy file"),
        ("label", lambda path: np.save(path, np.array([{}]), allow_pickle=True), "is truncated or no npy file"),
        ("label", lambda path: np.save(path, np.full((32, 64), "bed")), "must hold an array of numbers, found <U3"),
        ("depth", lambda path: np.save(path, np.zeros((32, 64))), r"has shape \(32, 64\), expected \(32, 64, 1\)"),
        ("image", lambda path: np.save(path, np.zeros((64, 64, 3))), r"has shape \(64, 64, 3\), expected \(32, 64, 3\)"),
        ("depth", lambda path: change(path, set_pixel(np.nan)), "has values that are not finite"),
        (
            "label",
            lambda path: change(path, set_pixel(13)),
            r"has 13\.0 as a class: expected whole numbers from 0 to 12, or -1",
        ),
        ("label", lambda path: change(path, set_pixel(0.5)), r"has 0\.5 as a class"),
        ("label", lambda path: change(path, set_pixel(-2)), r"has -2\.0 as a class"),
    ],
)
def test_a_file_that_is_not_sound_is_named(kind, damage, text, rooms):
    path = rooms / "train" / kind / "1.npy"
    damage(path)
    for look in (lambda: scenes.read(rooms, "train", NYUV2), lambda: scenes.verify(rooms, NYUV2)):
        with pytest.raises(UserError, match=text) as raised:
            look()
        if path.exists() or kind != "image":
            assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "function", "text"),
    [
        ("image", set_pixel(256), "expected colours from 0 to 1, or from 0 to 255"),
        ("image", set_pixel(-0.5), "expected colours"),
        ("depth", set_pixel(-1), "expected depths that are positive"),
        ("normal", set_pixel(5), "expected normals of length 1"),
        ("normal", lambda array: array / 2, "expected normals of length 1"),
    ],
)
def test_verifying_finds_values_that_are_none_of_their_kind(kind, function, text, rooms):
    path = rooms / "val" / kind / "1.npy"
    change(path, function)
    with pytest.raises(UserError, match=text) as raised:
        scenes.verify(rooms, NYUV2)
    assert str(path) in str(raised.value)


def test_verifying_finds_samples_without_an_image(streets):
    np.save(streets / "val" / "depth" / "2.npy", np.zeros((*SIZE, 1)))
    with pytest.raises(UserError, match=r"depth must have 2 samples, as many as .*image; found 3"):
        scenes.verify(streets, CITYSCAPES)


def test_verifying_tells_other_data_from_the_real_ones(rooms, streets, monkeypatch):
    with pytest.raises(UserError, match=r"train is sound, but not NYU-v2's: it has 3 samples, expected 795"):
        scenes.verify(rooms, NYUV2)
    monkeypatch.setitem(CITYSCAPES.counts, "train", 3)
    monkeypatch.setitem(CITYSCAPES.counts, "val", 2)
    with pytest.raises(UserError, match=r"it has 32 x 64 pixels, expected 128 x 256"):
        scenes.verify(streets, CITYSCAPES)


def test_data_that_have_all_they_should_are_verified(tmp_path, monkeypatch):
    make_scenes(tmp_path / "tree", CITYSCAPES, 2, 0, CITYSCAPES.size)
    for split, count in (("train", 2), ("val", 1)):
        monkeypatch.setitem(CITYSCAPES.counts, split, count)
    scenes.verify(tmp_path / "tree", CITYSCAPES)


def test_a_split_without_samples_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no samples"):
        scenes.read(tmp_path, "train", NYUV2)
