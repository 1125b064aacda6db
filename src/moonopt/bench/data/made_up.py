"""A mark on data that were made up, so that nobody takes what was learned from them for a number of the real ones."""

from pathlib import Path

MARK = "MADE-UP.txt"


def mark(folder: Path) -> None:
    """Say in a folder who has written it."""
    (folder / MARK).write_text("Made up by `moonopt data make`. It tells nothing of the real data.\n")


def unmark(folder: Path) -> None:
    """Where the real ones have come in their place."""
    (folder / MARK).unlink(missing_ok=True)


def is_marked(folder: Path) -> bool:
    return (folder / MARK).exists()
