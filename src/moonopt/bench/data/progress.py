"""What goes on, in a terminal where rich is there; without either, nothing is shown."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, BinaryIO, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")


def tracked(items: Iterable[Item], what: str, total: int) -> Iterable[Item]:
    """The items, with a bar."""
    if (console := _terminal()) is None:
        return items
    from rich.progress import track

    return track(items, what, total=total, console=console)


def status(text: str) -> AbstractContextManager[object]:
    """A line that says what goes on."""
    console = _terminal()
    return nullcontext() if console is None else console.status(text)


def read_with_bar(body: BinaryIO, length: int | None, name: str) -> AbstractContextManager[BinaryIO]:
    """What is read from, with a bar."""
    if (console := _terminal()) is None:
        return nullcontext(body)
    from rich.progress import wrap_file

    return wrap_file(body, length or 0, description=name, console=console)


def _terminal() -> "Console | None":
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(stderr=True)
    return console if console.is_terminal else None
