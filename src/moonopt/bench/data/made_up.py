"""A mark on data that were made up, so that nobody takes what was learned from them for a number of the real ones."""

from pathlib import Path

from moonopt.errors import UserError

MARK = "MADE-UP.txt"


def check_empty(folder: Path, what: str) -> None:
    """Raise where a folder has files: nothing is written over, and nothing made up is put beside the real."""
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} has files already: made-up {what} need a folder of their own, so choose another --out.")


def mark(folder: Path) -> None:
    """Say in a folder who has written it."""
    (folder / MARK).write_text("Made up by `moonopt data make`. It tells nothing of the real data.\n")


def unmark(folder: Path) -> None:
    """Where the real ones have come in their place."""
    (folder / MARK).unlink(missing_ok=True)


def is_marked(folder: Path) -> bool:
    return (folder / MARK).exists()
