"""Texts of errors that every floor gives: what was found, what was expected, what to do."""

import difflib
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
