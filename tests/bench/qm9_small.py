"""The 200 molecules of ``qm9_200.csv`` and wheels made of them, for tests."""

import csv
import hashlib
import io
import zipfile
from pathlib import Path

from moonopt.bench.data import qm9_wheel
from moonopt.bench.data.qm9_molecules import Molecules

TABLES = tuple(qm9_wheel.SHA256)
METADATA = "Metadata-Version: 2.1\nName: qm9pack\nVersion: 1.0.3\n"
KIND = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def rows() -> list[dict[str, str]]:
    with (Path(__file__).parent / "qm9_200.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def table(some: list[dict[str, str]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, some[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(some)
    return text.getvalue().encode()


def tables(some: list[dict[str, str]]) -> dict[str, bytes]:
    """The rows as the three tables of a wheel."""
    third = -(-len(some) // 3)
    return {name: table(some[part * third : (part + 1) * third]) for part, name in enumerate(TABLES)}


def write_wheel(folder: Path, contents: dict[str, bytes]) -> Path:
    """A wheel with these tables, which pip takes for that of qm9pack."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / qm9_wheel.WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr("qm9pack-1.0.3.dist-info/METADATA", METADATA)
        archive.writestr("qm9pack-1.0.3.dist-info/WHEEL", KIND)
        archive.writestr("qm9pack-1.0.3.dist-info/RECORD", "")
    return folder / qm9_wheel.WHEEL


def checksums(contents: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def molecules(folder: Path) -> Molecules:
    """All 200, through a wheel in an empty folder."""
    return qm9_wheel.parse(write_wheel(folder, tables(rows())))
