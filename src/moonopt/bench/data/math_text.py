r"""Problems of mathematics in words: MATH-500 (Hendrycks; Lightman and others) and GSM8K (Cobbe and others), as lines of JSON.

MATH-500 is one file of 500 problems, of which 300 train, 100 validate and 100 test, drawn by a seed. GSM8K has a file to train
on, of which some validate, and a file to test on; its answers are behind ``####``.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moonopt.bench.text.answers import is_readable
from moonopt.errors import UserError, unknown_name

#: Of every data set the files, with their SHA-256.
SHA256: Mapping[str, Mapping[str, str]] = {
    "math500": {"test.jsonl": "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132"},
    "gsm8k": {
        "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    },
}
#: Where they are published.
SOURCES: Mapping[str, str] = {
    "math500": "https://huggingface.co/datasets/HuggingFaceH4/MATH-500 (test.jsonl)",
    "gsm8k": "https://github.com/openai/grade-school-math (grade_school_math/data)",
}
#: What GSM8K's answers are.
_AMOUNT = re.compile(r"[-+]?\$?[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)%?")
#: Problems of MATH-500 to train on, to validate and to test, as in the paper.
MATH500_SPLIT = (300, 100, 100)
#: Of GSM8K's training problems, how many validate: the paper does not use it.
GSM8K_VALID = 500

INSTRUCTION = r"Reason step by step, and put your final answer within \boxed{}."
#: What a model is asked.
PROMPT = f"{{question}}\n\n{INSTRUCTION}"
#: The same with an example, without which a small model never writes a box.
WORKED_PROMPT = r"""Question: What is 2 + 3 times 4?
Answer:
Step 1: 3 times 4 is 12.
Step 2: 2 + 12 = 14.
The answer is \boxed{14}.

Answer the next question in the same way, in short steps, with the final answer in \boxed{}.

Question: {question}
Answer:"""


class Problem(NamedTuple):
    """What is asked, and the answer, as MATH writes it."""

    question: str
    answer: str


class ProblemSplits(NamedTuple):
    """The problems to train on, to validate and to test."""

    train: list[Problem]
    valid: list[Problem]
    test: list[Problem]


def read_math500(folder: Path, seed: int, counts: tuple[int, int, int] = MATH500_SPLIT) -> ProblemSplits:
    """So many problems of MATH-500 to train on, to validate and to test, drawn by a seed."""
    _check_present("math500", folder)
    path = folder / "math500" / "test.jsonl"
    train, valid, test = _drawn(_problems(path, _of_math500), counts, seed, path)
    return ProblemSplits(train, valid, test)


def read_gsm8k(folder: Path, seed: int, valid: int = GSM8K_VALID) -> ProblemSplits:
    """GSM8K, of whose training problems so many validate, drawn by a seed."""
    _check_present("gsm8k", folder)
    path = folder / "gsm8k" / "train.jsonl"
    problems, test = _problems(path, _of_gsm8k), _problems(path.with_name("test.jsonl"), _of_gsm8k)
    train, held_out = _drawn(problems, (max(1, len(problems) - valid), valid), seed, path)
    return ProblemSplits(train, held_out, test)


def missing(name: str, folder: Path) -> str | None:
    """Which files are not there, in a sentence."""
    if name not in SHA256:
        raise UserError(unknown_name(name, tuple(SHA256), "data set"))
    absent = [file for file in SHA256[name] if not (folder / name / file).exists()]
    return f"Not in {folder / name}: {', '.join(absent)}. Put them there from {SOURCES[name]}." if absent else None


def verify(name: str, folder: Path) -> None:
    """Raise ``UserError`` where a file is missing or another than the published one."""
    _check_present(name, folder)
    for file, expected in SHA256[name].items():
        path = folder / name / file
        if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != expected:
            raise UserError(
                f"{path} is not that of {name}: its SHA-256 is {found}, expected {expected}. Unless it is meant to stand in, "
                f"replace it by the one from {SOURCES[name]}."
            )


def prompt_tokens(question: str, tokenizer: Any, template: str = PROMPT) -> list[int]:
    """A question in a template, as tokens: a user's turn, if the tokenizer has a template for chats.

    Without a template for chats, as base models often are, it is plain text that ends where the solution begins.
    """
    filled = template.replace("{question}", question)
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": filled}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written them
    return list(tokenizer(f"Problem: {filled}\n\nSolution:")["input_ids"])


def _check_present(name: str, folder: Path) -> None:
    if (absent := missing(name, folder)) is not None:
        raise UserError(absent)


def _problems(path: Path, read: Callable[[dict[str, Any]], Problem]) -> list[Problem]:
    """A problem of every line that is not blank."""
    problems = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                problems.append(read(_record(line)))
            except UserError as error:
                raise UserError(f"{path}, line {number}: {error}") from error
    return problems


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"found bytes that are no UTF-8 ({error.reason}), expected a JSON object.") from error
    except json.JSONDecodeError as error:
        raise UserError(f"found no JSON ({error.msg}, column {error.colno}), expected a JSON object.") from error
    except RecursionError as error:
        raise UserError("found brackets within brackets without end, expected a JSON object.") from error
    if not isinstance(record, dict):
        raise UserError(f"found a {type(record).__name__}, expected a JSON object.")
    return record


def _of_math500(record: dict[str, Any]) -> Problem:
    answer = _text(record, "answer")
    if not is_readable(answer):
        raise UserError(f"the answer {answer!r} cannot be parsed: its braces do not close, or there is nothing in it.")
    return Problem(_text(record, "problem"), answer)


def _of_gsm8k(record: dict[str, Any]) -> Problem:
    solution, marks, answer = _text(record, "answer").rpartition("####")
    if not (marks and answer.strip()):
        raise UserError(f"expected an answer that ends in '#### N', found one that ends in {(solution + answer)[-20:]!r}.")
    if _AMOUNT.fullmatch(answer.strip()) is None:
        raise UserError(f"expected a number behind '####', found {answer.strip()!r}.")
    return Problem(_text(record, "question"), answer.strip())


def _text(record: dict[str, Any], key: str) -> str:
    if not isinstance(found := record.get(key), str) or not found.strip():
        raise UserError(f"expected text under {key!r}, found {found!r} among {', '.join(map(repr, record)) or 'no keys'}.")
    return found.strip()


def _drawn(problems: Sequence[Problem], counts: Sequence[int], seed: int, place: Path) -> list[list[Problem]]:
    """Disjoint parts of so many problems each, in the order of a seed."""
    if len(problems) < sum(counts):
        raise UserError(f"{place} has {len(problems)} problems, and {' + '.join(map(str, counts))} are needed.")
    order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(seed)).tolist()
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return [[problems[index] for index in order[end - count : end]] for end, count in zip(ends, counts, strict=True)]
