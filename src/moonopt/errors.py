"""Texts of errors that every floor gives: what was found, what was expected, what to do."""

import contextlib
import difflib
import re
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path

#: Longer lists are not printed where there is a nearest name, which helps more, and lists twice as long never.
LISTED_NAMES = 20


def unknown_name(name: object, known: Collection[str], what: str) -> str:
    """The text for a name that is not known, with the nearest one that is.

    >>> unknown_name("lefft", ["left", "right"], "task")
    "Unknown task 'lefft': expected one of left, right. Did you mean 'left'?"
    >>> unknown_name("lr", ["optimizer.lr", "optimizer.steps"], "setting")
    "Unknown setting 'lr': expected one of optimizer.lr, optimizer.steps. Did you mean 'optimizer.lr'?"
    """
    wanted = str(name)
    ends = [each for each in known if each.rpartition(".")[2] == wanted]
    near = ends or difflib.get_close_matches(wanted, known) or difflib.get_close_matches(wanted.lower(), known)
    listed = f": expected one of {', '.join(known)}." if len(known) <= LISTED_NAMES * (1 if near else 2) else "."
    hint = f" Did you mean {min(near, key=lambda each: _edits(wanted, each))!r}?" if near else ""
    return f"Unknown {what} {name!r}{listed}{hint}"


def _edits(first: str, second: str) -> int:
    """How many letters must be changed, put in or left out to make one word of the other.

    >>> _edits("monn", "moon"), _edits("monn", "muon")
    (1, 2)
    """
    row = list(range(len(second) + 1))
    for number, letter in enumerate(first, start=1):
        before, row[0] = row[0], number
        for place, other in enumerate(second, start=1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (letter != other))
    return row[-1]


class UserError(ValueError):
    """What a user can mend: the text says what was found, what was expected and what to do. Shown without a traceback."""


@contextlib.contextmanager
def noted(text: str) -> Iterator[None]:
    """Say in an error of torch's what it may come from, and what works instead."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(text)
        raise


def one_sentence(error: BaseException) -> str:
    """An error's kind, its first line, and where it came from, unless it is a whole sentence of ours, which needs no place.

    >>> one_sentence(KeyError("left"))
    "KeyError: 'left'."
    """
    text = (str(error).strip().splitlines() or ["without a word"])[0]
    frames = traceback.extract_tb(error.__traceback__)
    ours = text.endswith(".") and bool(frames) and Path(__file__).parent in Path(frames[-1].filename).parents
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and not ours else ""
    return f"{type(error).__name__}: {text.rstrip('.')}{where}."


def first_sentence(text: str) -> str:
    """Of several, without its full stop.

    >>> first_sentence("In run.py the loss is NaN. Nothing was changed.")
    'In run.py the loss is NaN'
    """
    return re.split(r"\.(?:\s|$)", text, maxsplit=1)[0]
