"""Made-up faces: the same for a seed, in CelebA's layout, with attributes that are visible and keep CelebA's company."""

import hashlib
from random import Random

import pytest
import torch
from PIL import Image, ImageChops

from moonopt.bench.data import celeba, faces
from moonopt.bench.data.faces_attributes import HAIR_COLOURS, person
from moonopt.bench.data.faces_drawing import draw
from moonopt.errors import UserError

PEOPLE = [person(Random(number)) for number in range(300)]


def share(name, *given, people=PEOPLE, no=()):
    """Of the people that have some attributes and lack others, the share that has one."""
    chosen = [each for each in people if all(each[name] for name in given) and not any(each[name] for name in no)]
    return sum(each[name] for each in chosen) / len(chosen)


def content(place):
    files = sorted(path for path in place.rglob("*") if path.is_file())
    return {str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("faces") / "celeba"
    faces.make_faces(place, count=20, seed=3)
    return place


def test_equal_seeds_make_equal_files_and_others_other_ones(made, tmp_path):
    faces.make_faces(tmp_path / "again", count=20, seed=3)
    assert content(tmp_path / "again") == content(made)
    faces.make_faces(tmp_path / "other", count=20, seed=4)
    assert not set(content(tmp_path / "other").values()) & set(content(made).values()) - {
        content(made)[str(celeba.PARTITION_LIST)]
    }


def test_the_first_of_more_faces_are_those_of_fewer(made, tmp_path):
    faces.make_faces(tmp_path / "fewer", count=7, seed=3)
    images = {name: found for name, found in content(tmp_path / "fewer").items() if name.endswith(".jpg")}
    assert len(images) == 7
    assert images.items() <= content(made).items()


def test_made_up_faces_are_read_as_celeba_with_their_attributes(made):
    found = celeba.read(made, 16)
    assert [len(each.images) for each in found.values()] == [16, 2, 2]
    rows = torch.cat([each.attributes for each in found.values()])
    for number, row in enumerate(rows):
        _, attributes = faces.face(3, number)
        assert row.tolist() == [attributes[name] for name in celeba.ATTRIBUTES]
    with Image.open(made / celeba.IMAGES / "000001.jpg") as first:
        assert first.size == celeba.SIZE


def test_made_up_faces_are_told_from_celeba(made):
    with pytest.raises(UserError, match="found 20 faces, expected 202,599"):
        celeba.verify(made)


def test_faces_are_never_written_over_others(made):
    with pytest.raises(UserError, match="has files already"):
        faces.make_faces(made)


@pytest.mark.parametrize("count", [0, 2, -1])
def test_too_few_faces_are_refused(count, tmp_path):
    with pytest.raises(UserError, match=f"found {count}"):
        faces.make_faces(tmp_path / "celeba", count=count)
    assert not (tmp_path / "celeba").exists()


@pytest.mark.parametrize("count", [3, 5])
def test_a_few_faces_have_all_three_splits(count, tmp_path):
    faces.make_faces(tmp_path / "celeba", count=count)
    lines = (tmp_path / "celeba" / "Eval" / "list_eval_partition.txt").read_text().split()
    assert sorted(set(lines[1::2])) == ["0", "1", "2"]


def test_people_have_the_forty_attributes():
    assert all(set(each) == set(celeba.ATTRIBUTES) for each in PEOPLE)


@pytest.mark.parametrize("name", celeba.ATTRIBUTES)
def test_every_attribute_is_there_and_absent_among_300_faces(name):
    assert 0.02 < share(name) < 0.95


def test_attributes_keep_the_company_that_they_keep_in_celeba():
    assert share("No_Beard", no=["Male"]) == 1
    assert share("No_Beard", "Male") < 0.6
    assert share("Wearing_Lipstick", "Male") < 0.1 < 0.5 < share("Wearing_Lipstick", no=["Male"])
    assert share("Gray_Hair", "Young") < 0.1 < 0.3 < share("Gray_Hair", no=["Young"])
    assert share("High_Cheekbones", "Smiling") > 2 * share("High_Cheekbones", no=["Smiling"])
    assert share("Double_Chin", "Chubby") > 3 * share("Double_Chin", no=["Chubby"])
    assert share("Attractive", "Young") > 1.3 * share("Attractive", no=["Young"])


def test_attributes_do_not_contradict_each_other():
    for each in PEOPLE:
        assert sum(each[name] for name in HAIR_COLOURS) <= 1
        assert not (each["Straight_Hair"] and each["Wavy_Hair"])
        assert not (each["Bald"] and any(each[name] for name in (*HAIR_COLOURS, "Bangs", "Wavy_Hair", "Straight_Hair")))
        assert each["No_Beard"] != any(each[name] for name in ("5_o_Clock_Shadow", "Goatee", "Mustache", "Sideburns"))


@pytest.mark.parametrize("name", [name for name in celeba.ATTRIBUTES if name != "No_Beard"])
def test_every_attribute_can_be_seen(name):
    """Of faces that differ in nothing else, many pixels differ, whatever the skin; No_Beard is seen by what it excludes."""
    plain = dict.fromkeys(celeba.ATTRIBUTES, False)
    for seed in range(5):
        one, other = (draw(plain | {name: yes, "No_Beard": True}, Random(seed)) for yes in (False, True))
        changed = ImageChops.difference(one, other).convert("L").point(lambda value: 255 if value > 16 else 0)
        assert changed.histogram()[255] > 40


def test_the_sheet_has_faces_side_by_side(tmp_path):
    faces.sheet(tmp_path / "sheet.png", rows=2, columns=3)
    with Image.open(tmp_path / "sheet.png") as whole:
        assert whole.size == (3 * 178, 2 * 218)
        last = whole.convert("RGB").crop((2 * 178, 218, 3 * 178, 2 * 218))
    assert last.tobytes() == faces.face(0, 5)[0].tobytes()
