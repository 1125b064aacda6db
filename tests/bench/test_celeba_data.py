"""CelebA's layout on the disk: what is read, what is kept of it, and what is said where something is wrong."""

import errno
import os
import sys

import pytest
import torch
from PIL import Image

from moonopt.bench.data import celeba, celeba_cache, celeba_images
from moonopt.errors import UserError

COUNT = 12
SPLIT_OF = [1, 0, 0, 2, 0, 0, 1, 2, 0, 0, 0, 0]


def colour(number):
    return (20 * number, 255 - 20 * number, 7 * number)


@pytest.fixture
def place(tmp_path):
    """A folder with twelve images of one colour each, in mixed splits; attribute k of image n is bit k % 4 of n."""
    place = tmp_path / "celeba"
    (place / celeba.IMAGES).mkdir(parents=True)
    names = [f"{number:06}.jpg" for number in range(1, COUNT + 1)]
    for number, name in enumerate(names):
        Image.new("RGB", celeba.SIZE, colour(number)).save(place / celeba.IMAGES / name, quality=95)
    rows = [[bool(number >> bit % 4 & 1) for bit in range(40)] for number in range(COUNT)]
    celeba.write_lists(place, names, rows, SPLIT_OF)
    return place


def image(place, number):
    return place / celeba.IMAGES / f"{number + 1:06}.jpg"


def rewrite(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def decodings(monkeypatch):
    """A list that grows with every time that images are decoded."""
    calls, decoded = [], celeba_images.decoded
    monkeypatch.setattr(celeba_images, "decoded", lambda *args: calls.append(len(args[0])) or decoded(*args))
    return calls


def test_every_split_has_its_images_with_their_attributes(place):
    found = celeba.read(place.parent, 8)
    assert list(found) == ["train", "valid", "test"]
    for split, faces in enumerate(found.values()):
        numbers = [number for number in range(COUNT) if SPLIT_OF[number] == split]
        assert faces.images.shape == (len(numbers), 3, 8, 8)
        assert faces.images.dtype == faces.attributes.dtype == torch.uint8
        for picture, attributes, number in zip(faces.images, faces.attributes, numbers, strict=True):
            expected = torch.tensor(colour(number)).view(3, 1, 1)
            assert (picture.int() - expected).abs().max() <= 4  # jpg
            assert attributes.tolist() == [number >> bit % 4 & 1 for bit in range(40)]


def test_the_lists_have_the_format_of_celeba(place):
    first, second, third = (place / celeba.ATTRIBUTE_LIST).read_text().splitlines()[:3]
    assert first == "12"
    assert second.startswith("5_o_Clock_Shadow Arched_Eyebrows Attractive ")
    assert third.startswith("000001.jpg -1 -1")
    assert (place / celeba.PARTITION_LIST).read_text().splitlines()[:2] == ["000001.jpg 1", "000002.jpg 0"]


def test_the_folder_may_be_that_of_the_layout_itself(place):
    assert celeba.missing(place) is None
    assert len(celeba.read(place, 8)["train"].images) == 8


def test_images_are_resized_as_pillow_does_without_keeping_the_aspect(place):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (*celeba.SIZE[::-1], 3), dtype=torch.uint8, generator=generator)
    picture = Image.frombytes("RGB", celeba.SIZE, noise.numpy().tobytes())
    picture.save(image(place, 0), quality=95)
    with Image.open(image(place, 0)) as saved:
        small = saved.resize((16, 16), Image.Resampling.BILINEAR)
    expected = torch.tensor(list(small.tobytes()), dtype=torch.uint8).view(16, 16, 3).permute(2, 0, 1)
    assert torch.equal(celeba.read(place, 16)["valid"].images[0], expected)


def test_images_are_decoded_once_for_every_size(place, monkeypatch):
    calls = decodings(monkeypatch)
    first, again = celeba.read(place, 8), celeba.read(place, 8)
    assert calls == [COUNT]
    for split in first:
        assert torch.equal(first[split].images, again[split].images)
        assert torch.equal(first[split].attributes, again[split].attributes)
    celeba.read(place, 16)
    assert calls == [COUNT, COUNT]


def damage_content(path):
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-300]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        damage_content,
        lambda path: path.unlink(),
    ],
    ids=["cut", "empty", "longer", "one bit", "gone"],
)
def test_a_damaged_cache_is_made_again(damage, place, monkeypatch):
    expected = celeba.read(place, 8)["train"].images.clone()
    calls = decodings(monkeypatch)
    damage(place / "faces_8x8.bytes")
    assert torch.equal(celeba.read(place, 8)["train"].images, expected)
    celeba.read(place, 8)
    assert calls == [COUNT]


def test_a_changed_image_or_split_makes_the_cache_anew(place, monkeypatch):
    celeba.read(place, 8)
    calls = decodings(monkeypatch)
    Image.new("RGB", celeba.SIZE, (255, 255, 255)).save(image(place, 3))
    assert celeba.read(place, 8)["test"].images[0].min() > 250
    rewrite(place / celeba.PARTITION_LIST, "000004.jpg 2", "000004.jpg 1")
    assert celeba.read(place, 8)["valid"].images[1].min() > 250
    assert len(calls) == 2


def test_changed_attributes_need_no_decoding(place, monkeypatch):
    celeba.read(place, 8)
    calls = decodings(monkeypatch)
    rewrite(place / celeba.ATTRIBUTE_LIST, "000001.jpg -1", "000001.jpg  1")
    assert celeba.read(place, 8)["valid"].attributes[0, 0] == 1
    assert not calls


def test_without_room_for_the_cache_a_run_goes_on_and_says_so(place, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(celeba_cache, "write", full)
    with pytest.warns(UserWarning, match=r"faces_8x8\.bytes cannot be written \(No space left on device\)"):
        found = celeba.read(place, 8)
    assert len(found["train"].images) == 8


def test_a_cache_is_written_whole_or_not_at_all(place, monkeypatch):
    images = celeba_images.decoded([image(place, number) for number in range(COUNT)], 8)
    monkeypatch.setattr(celeba_cache, "_checksum", lambda content: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        celeba_cache.write(place / "faces_8x8.bytes", images, "source")
    assert sorted(path.name for path in place.iterdir()) == ["Anno", "Eval", "Img"]


@pytest.mark.parametrize(
    ("part", "left"), [(celeba.IMAGES, ["Img"]), (celeba.ATTRIBUTE_LIST, ["Anno"]), (celeba.PARTITION_LIST, ["Eval"])]
)
def test_what_is_missing_is_named_with_what_to_do(part, left, place):
    os.rename(place / part, place / "elsewhere")
    for action in (celeba.read, celeba.verify):
        with pytest.raises(UserError, match=f"{part}.*moonopt data make celeba"):
            action(place, *([8] if action is celeba.read else []))


def test_a_missing_image_is_named(place):
    image(place, 6).unlink()
    with pytest.raises(UserError, match=r"000007\.jpg is missing"):
        celeba.read(place, 8)


@pytest.mark.parametrize("content", [b"", b"no picture at all", None], ids=["empty", "text", "cut"])
def test_a_damaged_image_is_named(content, place):
    path = image(place, 6)
    path.write_bytes(path.read_bytes()[:600] if content is None else content)
    with pytest.raises(UserError, match=r"000007\.jpg is no image or a damaged one"):
        celeba.read(place, 8)
    assert not (place / "faces_8x8.bytes").exists()


@pytest.mark.parametrize(
    ("path", "old", "new", "text"),
    [
        (celeba.ATTRIBUTE_LIST, "12\n", "13\n", "first line says 13, but it lists 12 faces"),
        (celeba.ATTRIBUTE_LIST, "Attractive", "Pretty", "Line 2 of .* must name CelebA's 40 attributes"),
        (celeba.ATTRIBUTE_LIST, "000003.jpg -1", "000003.jpg  0", "Line 5 of .*: expected a file name and 40 of 1 and -1"),
        (celeba.ATTRIBUTE_LIST, "000003.jpg -1", "000003.jpg", r"Line 5 of .* \(40 words\)"),
        (celeba.PARTITION_LIST, "000004.jpg 2", "000004.jpg 3", "Line 4 of .*: expected a file name and 0, 1 or 2, found"),
        (celeba.PARTITION_LIST, "000004.jpg 2", "000003.jpg 2", "Line 4 of .*: 000003.jpg is there for the second time"),
        (celeba.PARTITION_LIST, "000004.jpg 2\n", "", "list_eval_partition.txt lacks 000004.jpg"),
        (celeba.PARTITION_LIST, "000012.jpg 0\n", "000012.jpg 0\n13.jpg 1\n", "list_attr_celeba.txt lacks 13.jpg"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(path, old, new, text, place):
    rewrite(place / path, old, new)
    with pytest.raises(UserError, match=text):
        celeba.read(place, 8)


@pytest.mark.parametrize("path", [celeba.ATTRIBUTE_LIST, celeba.PARTITION_LIST])
def test_an_empty_list_is_refused(path, place):
    (place / path).write_text("")
    with pytest.raises(UserError, match=path.name):
        celeba.read(place, 8)


def test_verify_says_everything_that_is_unlike_celeba(place):
    image(place, 0).unlink()
    image(place, 1).write_bytes(b"")
    Image.new("RGB", (100, 50)).save(image(place, 2))
    Image.new("RGB", celeba.SIZE).save(place / celeba.IMAGES / "stranger.jpg")
    with pytest.raises(UserError) as raised:
        celeba.verify(place)
    text = str(raised.value)
    for part in (
        "found 12 faces, expected 202,599",
        "found splits 8 / 2 / 2, expected 162,770 / 19,867 / 19,962",
        "lacks 000001.jpg",
        "has stranger.jpg, which no list has",
        "000002.jpg is no image or a damaged one",
        "000003.jpg has 100 x 50 pixels, expected 178 x 218",
    ):
        assert part in text


def test_verify_passes_what_has_the_counts_and_shapes(place, monkeypatch):
    monkeypatch.setattr(celeba, "SPLITS", {"train": 8, "valid": 2, "test": 2})
    celeba.verify(place)


def test_verify_counts_what_it_does_not_name(place, monkeypatch):
    monkeypatch.setattr(celeba, "SPLITS", {"train": 8, "valid": 2, "test": 2})
    for number in range(COUNT):
        image(place, number).write_bytes(b"")
    with pytest.raises(UserError, match=r"000005\.jpg .*; 7 more images are wrong"):
        celeba.verify(place)


def test_an_attribute_that_never_changes_is_told(place, monkeypatch):
    monkeypatch.setattr(celeba, "SPLITS", {"train": 8, "valid": 2, "test": 2})
    path = place / celeba.ATTRIBUTE_LIST
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:2] + [f"{line[:10]} -1{line[13:]}" for line in lines[2:]]))
    with pytest.raises(UserError, match="all faces have the same value of 5_o_Clock_Shadow"):
        celeba.verify(place)


def test_without_pillow_the_error_says_what_to_install(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UserError, match="pip install pillow"):
        celeba.read(place, 8)
