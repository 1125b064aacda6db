"""Commands that repeat what was done, or go on from it, for a person to type."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moonopt.runs.cell import Machine, word
from moonopt.runs.settings import Layer

_IRRELEVANT = ("--out", "--file", "--data", "--jobs", "--engine", "--checkpoint-seconds")


def repeating(words: Sequence[str]) -> str:
    """A command without what changes no number: where files lie, and how many processes there are.

    >>> repeating(["tune", "toy", "--jobs", "2", "--out=there", "--overwrite", "--dataset", "mine"])
    'moonopt tune toy --dataset mine'
    """
    kept, skip = ["moonopt"], False
    for each in words:
        name, has_value, _ = each.partition("=")
        if not skip and name not in _IRRELEVANT and each != "--overwrite":
            kept.append(each)
        skip = not skip and name in _IRRELEVANT and not has_value
    return shlex.join(kept)


def uses(
    benchmark: str, chosen: Mapping[str, Mapping[str, Any]], tuned: Path, layers: Sequence[Layer], machine: Machine
) -> list[str]:
    """The command that compares methods as they were tuned; several where one was tuned in what is set for another."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for method, values in chosen.items():
        alike.setdefault((*_words_beside(values, layers), *machine.words), []).append(method)
    return [
        shlex.join(["moonopt", "compare", benchmark, "--methods", ",".join(methods), "--tuned", str(tuned), *words])
        for words, methods in alike.items()
    ]


def _words_beside(chosen: Mapping[str, Any], layers: Sequence[Layer]) -> list[str]:
    """The options that repeat layers of settings, without the keys that were chosen, which they would override."""
    words: list[str] = []
    for source, values in layers:
        kept = [f"{key}={word(value)}" for key, value in values.items() if key not in chosen]
        option, _, file = source.partition(" ")
        words += [option, file] if file and len(kept) == len(values) else [each for text in kept for each in ("--set", text)]
    return words
