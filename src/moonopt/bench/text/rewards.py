r"""The three rewards of the paper's reinforcement fine-tuning, each 1 or 0: accuracy, conciseness and clarity.

Accuracy: the last valid ``\boxed{}`` holds the answer, after MATH's normalisation. Conciseness: the response is shorter than
the running mean over all responses so far. Clarity: a box that is not empty, and at least two enumerated steps or ordinal
transitions.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add

from moonopt.bench.text.answers import Judge, same_answer

#: The tasks, in the order of the paper.
REWARDS = ("accuracy", "conciseness", "clarity")

_CARDINALS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_ORDINALS = "first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth"

#: Where a step may begin: at a line or a sentence, behind the signs of Markdown.
_MARKS = r"[ \t>*#_-]*"
_BEGIN = rf"(?:^|(?<=[.!?;])[ \t]){_MARKS}"
_NUMBER = r"\d{1,2}(?!\d|\.\d)"
_NAMED_STEP = rf"step[ \t]*({_NUMBER}|{'|'.join(_CARDINALS)})"
#: "1." and "1)" and "(1)" at the beginning of a line; "1:" there, and the others within a line, only before a word, so that 1.5
#: and "1. 2." are none, nor is -1; "Step 1" at a beginning or before a sign.
_STEP = re.compile(
    rf"^{_MARKS}(?<!-)(?:\(({_NUMBER})\)|({_NUMBER})[.)](?!\d))"
    rf"|{_BEGIN}(?<!-)(?:\(({_NUMBER})\)|({_NUMBER})[.):])(?=[\s*_]*[^\W\d])"
    rf"|{_BEGIN}{_NAMED_STEP}\b(?!,?[ \t]+and\b)"
    rf"|\b{_NAMED_STEP}[*_]*[.:]",
    re.I | re.M,
)
#: A word of sequence that opens its clause, and is no adjective: "The second term" and "First term" are none.
_TRANSITION = re.compile(
    rf"(?:^|(?<=[.!?;])[ \t]|(?<=,)[ \t]+and[ \t]){_MARKS}(then)\b"  # not of "if ..., then"
    rf"|(?:^|(?<=[.!?;,])[ \t](?:[ \t]*and[ \t])?){_MARKS}(?:({_ORDINALS}|last|final)ly\b"
    rf"|({_ORDINALS}|next)(?:[ \t]+of[ \t]+all)?[*_]*(?:[,:]|[ \t]+(?:we|i|you|let)\b))",
    re.I | re.M,
)
#: Boxes, braces that are none of theirs, and escaped signs, of which a brace is none.
_BRACE = re.compile(r"\\(boxed|fbox)\s*\{|\\.|[{}]", re.S)
#: What a box may hold and still be empty.
_BLANK = re.compile(r"\\(?:boxed|fbox|text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf|q?quad)(?![a-zA-Z])|\\[!,;:\s]|[{}$~\s]")


@dataclass(frozen=True)
class RunningMean:
    """The mean of whole numbers that come in batches, exact and without a past: two numbers hold all of it.

    >>> RunningMean().after([3, 4]).after([8]).mean
    5.0
    """

    total: int = 0
    count: int = 0

    def after(self, numbers: Sequence[int]) -> "RunningMean":
        return RunningMean(self.total + sum(numbers), self.count + len(numbers))

    @property
    def mean(self) -> float:
        """Infinite before the first number: anything is shorter than nothing known."""
        return self.total / self.count if self.count else float("inf")


@dataclass(frozen=True)
class Tally:
    """Sums over updates, in whole numbers: of samples, their tokens and their rewards, each 1 or 0.

    ``silent`` counts for each reward the updates in which all samples had the same.
    """

    updates: int = 0
    samples: int = 0
    tokens: int = 0
    rewards: tuple[int, ...] = (0,) * len(REWARDS)
    silent: tuple[int, ...] = (0,) * len(REWARDS)

    def after(self, rewards: Sequence[int], lengths: Sequence[int], silent: Sequence[bool]) -> "Tally":
        """With one update more, whose samples have these rewards in sum and these lengths."""
        return Tally(
            self.updates + 1,
            self.samples + len(lengths),
            self.tokens + sum(lengths),
            tuple(map(add, self.rewards, rewards)),
            tuple(map(add, self.silent, silent)),
        )

    def means(self) -> dict[str, float]:
        """Of rewards and length over the samples, and the share of silent updates.

        >>> Tally().after([1, 2, 0], [3, 5], [False, True, True]).means()["length"]
        4.0
        """
        means = {name: each / self.samples for name, each in zip(REWARDS, self.rewards, strict=True)}
        silent = {f"silent {name}": each / self.updates for name, each in zip(REWARDS, self.silent, strict=True)}
        return {**means, "length": self.tokens / self.samples, **silent}


def accuracy(response: str, answer: str, judge: Judge = same_answer) -> float:
    r"""Whether the last valid box holds the answer.

    >>> accuracy(r"So \boxed{3}, or rather \boxed{\dfrac12}.", "0.5")
    1.0
    """
    given = last_box(response)
    return float(given is not None and judge(given, answer))


def conciseness(length: int, running: RunningMean) -> float:
    """Whether a response, of so many tokens, is shorter than the running mean.

    Which responses the mean has is the caller's choice. With those of the present batch it is never without any.
    """
    return float(length < running.mean)


def clarity(response: str) -> float:
    r"""Whether there is a box that is not empty, and a structure of steps.

    >>> clarity("Step 1: add. Step 2: divide."), clarity(r"First, add. Second, divide. It is \boxed{2}.")
    (0.0, 1.0)
    """
    return float(last_box(response) is not None and has_steps(response))


def last_box(response: str) -> str | None:
    r"""What is in the last ``\boxed{}`` whose braces are closed and that is not empty; without any, in the last ``\fbox{}``.

    >>> last_box(r"\boxed{\frac{1}{2}} or \boxed{ } or \boxed{3")
    '\\frac{1}{2}'
    """
    contents = (response[begin:end] for _, begin, end in sorted(_boxes(response), reverse=True))
    return next((content.strip() for content in contents if _BLANK.sub("", content)), None)


def has_steps(response: str) -> bool:
    """Whether two enumerated steps with numbers that follow each other, or two different ordinal transitions, are there."""
    steps = {_count(next(number for number in found if number)) for found in _STEP.findall(response)}
    transitions = {next(word.lower() for word in found if word) for found in _TRANSITION.findall(response)}
    return any(number + 1 in steps for number in steps) or len(transitions) > 1


def _count(number: str) -> int:
    """Of digits or a word."""
    return int(number) if number.isdecimal() else 1 + _CARDINALS.index(number.lower())


def _boxes(response: str) -> Iterator[tuple[bool, int, int]]:
    r"""Of every box that is closed whether it is a ``\boxed``, and where its content begins and ends."""
    opened: list[tuple[bool, int] | None] = []  # where the content of a box begins; None for another brace
    for sign in _BRACE.finditer(response):
        if sign[0] == "}":
            box = opened.pop() if opened else None
            if box is not None:
                yield *box, sign.start()
        elif sign[0] == "{" or sign[1]:
            opened.append((sign[1] == "boxed", sign.end()) if sign[1] else None)
