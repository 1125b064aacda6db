"""Texts of errors that every floor gives: what was found, what was expected, what to do."""

import difflib
import traceback
from collections.abc import Collection

#: Longer lists are not printed: the nearest name helps more.
LISTED_NAMES = 20


def unknown_name(name: object, known: Collection[str], what: str) -> str:
    """The text for a name that is not known, with the nearest one that is.

    >>> unknown_name("lefft", ["left", "right"], "task")
    "Unknown task 'lefft': expected one of left, right. Did you mean 'left'?"
    """
    nearest = difflib.get_close_matches(str(name), known, n=1)
    listed = f": expected one of {', '.join(known)}." if len(known) <= LISTED_NAMES else "."
    return f"Unknown {what} {name!r}{listed}" + (f" Did you mean {nearest[0]!r}?" if nearest else "")


class UserError(ValueError):
    """What a user can mend: the text says what was found, what was expected and what to do. Shown without a traceback."""


def one_sentence(error: BaseException) -> str:
    """An error of somebody else's code: its kind, its first line, and where it came from.

    >>> one_sentence(KeyError("left"))
    "KeyError: 'left'."
    """
    text = (str(error).strip().splitlines() or ["without a word"])[0].rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}."
