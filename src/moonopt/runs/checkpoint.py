"""Checkpoints of a run: two generations, each written whole, checked before it is used."""

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from moonopt.errors import UserError
from moonopt.runs.cell import FORMAT, Cell
from moonopt.runs.store import METRICS, what_differs, write_whole

LATEST, PREVIOUS, BEST = "checkpoint.pt", "checkpoint.previous.pt", "best.pt"

Tell = Callable[[str], None]


def save(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint; the one before stays as ``checkpoint.previous.pt``."""
    latest, new = folder / LATEST, folder / "checkpoint.new.pt"
    write_whole(new, _bytes({"format": FORMAT, **content}))
    if latest.exists():
        latest.replace(folder / PREVIOUS)
    new.replace(latest)


def save_best(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the parameters that were best on validation data."""
    write_whole(folder / BEST, _bytes({"format": FORMAT, **content}))


def load(folder: Path, cell: Cell, tell: Tell) -> dict[str, Any] | None:
    """The latest checkpoint that is whole; None where none was written yet."""
    found = [folder / name for name in (LATEST, PREVIOUS) if (folder / name).exists()]
    for path in found:
        content, damage = _read(path)
        if content is None:
            tell(f"{path} is damaged ({damage}): using the one before it.")
            continue
        if content.get("format") != FORMAT:
            raise UserError(f"{path} is of format {content.get('format')!r}, expected {FORMAT}: another version made it.")
        if content["config"] != cell.config:
            raise UserError(f"{path} belongs to another run ({what_differs(cell, content['config'])}).")
        if _size(folder / METRICS) < content["metrics_length"]:
            tell(f"{path} is newer than {METRICS}: using the one before it.")
            continue
        return content
    if found:
        raise UserError(f"No checkpoint in {folder} can be used. Begin anew with --overwrite.")
    return None


def _bytes(content: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The content, or None and what is wrong."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is not None:
            return None, f"{bad} has a wrong checksum"
        content = torch.load(path, map_location="cpu", weights_only=True)
        return (content, "") if isinstance(content, dict) else (None, f"it holds a {type(content).__name__}")
    except Exception as error:  # bytes that are not what they were can raise anything
        return None, str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _size(path: Path) -> int:
    return os.stat(path).st_size if path.exists() else 0
