"""The folder of a run: its files, which are written whole or not at all, and the lock of the process that works in it."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from moonopt.errors import UserError
from moonopt.runs.cell import Cell, cell_of

CONFIG, METRICS, RESULT, ERROR, LOCK = "config.json", "metrics.jsonl", "result.json", "error.txt", ".lock"


class State(Enum):
    """What there is of a cell."""

    NEW = "new"
    UNFINISHED = "unfinished"
    DONE = "done"
    OTHER = "other settings"


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def state(self, cell: Cell) -> State:
        """A cell is done when its result is there and its config equals the requested one."""
        if not (self.path / CONFIG).exists():
            return State.NEW
        found, wanted = self.config(), _as_json(cell.config)
        if found != wanted and ("code" in found or found != {key: wanted[key] for key in wanted if key != "code"}):
            return State.OTHER
        return State.DONE if (self.path / RESULT).exists() else State.UNFINISHED

    def other_settings(self, cell: Cell) -> UserError:
        """What to raise where the state is ``OTHER``."""
        return UserError(
            f"{self.path} holds a run with other settings ({what_differs(cell, self.config())}). "
            "Use --overwrite to replace it, or another folder with --out."
        )

    def cell(self) -> Cell:
        """The cell whose run this is."""
        if not (self.path / CONFIG).exists():
            raise UserError(f"{self.path} is not the folder of a run: it has no {CONFIG}.")
        return cell_of(self.config(), self.path / CONFIG)

    def config(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG)

    def result(self) -> dict[str, Any] | None:
        """What came out; None while it is unfinished."""
        return read_json(self.path / RESULT) if (self.path / RESULT).exists() else None

    def begin(self, cell: Cell) -> None:
        """Write the config of a new run; whatever another run left here is removed."""
        with writing(self.path):
            (self.path / CONFIG).unlink(missing_ok=True)  # first: without it nobody takes the rest for a run
            for path in self.path.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_json(self.path / CONFIG, cell.config)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. The system lets go of it with the process, however that ends."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                raise UserError(f"{self.path} is in use: process {file.read().strip() or '?'} is running it.") from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                if not (self.path / CONFIG).exists():
                    self._leave_nothing()

    def _leave_nothing(self) -> None:
        """Of a run that never began."""
        (self.path / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for folder in (self.path, self.path.parent, self.path.parent.parent):
                folder.rmdir()


def what_differs(cell: Cell, found: Mapping[str, Any]) -> str:
    """The keys in which the config of a folder is not that of a cell, as a sentence."""
    wanted = _as_json(cell.config)
    flat = {**wanted, **wanted["settings"]}, {**found, **found.get("settings", {})}
    keys = [key for key in dict.fromkeys([*flat[0], *flat[1]]) if key not in ("settings", "overrides")]
    differing = [key for key in keys if flat[0].get(key) != flat[1].get(key)]
    shown = [f"{key} is {flat[1].get(key)!r} there and {flat[0].get(key)!r} here" for key in differing[:3]]
    return "; ".join([*shown, *([f"{len(differing) - 3} more"] if len(differing) > 3 else [])])


class MetricsLog:
    """``metrics.jsonl``: a line per record. On resume it is cut back to where the checkpoint was made."""

    def __init__(self, path: Path, length: int = 0) -> None:
        with writing(path):
            self._file: TextIO = path.open("a+")
            self._file.truncate(length)

    def write(self, record: Mapping[str, Any]) -> None:
        with writing(Path(self._file.name)):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def saved(self) -> int:
        """How long it is, with every byte on the disk."""
        with writing(Path(self._file.name)):
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take was told when it was written
            self._file.close()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system says against writing somewhere, as a sentence; nothing that was written before is lost."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"Cannot write {path}: {error.strerror or error}. What was written before is whole; make room or choose "
            "another folder with --out."
        ) from error


def write_whole(path: Path, content: bytes) -> None:
    """The file is there whole, or as it was before."""
    part = path.with_name(path.name + ".part")
    with writing(path):
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of ours."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: expected an object, found a {type(found).__name__}.")
    return found


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    back: dict[str, Any] = json.loads(json.dumps(content))
    return back
