"""Problems as prompts: read by the name of their data set, in tokens, padded on the left."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moonopt.bench.data.math_text import Problem, ProblemSplits, prompt_tokens, read_gsm8k, read_math500
from moonopt.bench.text.sampling import left_padded
from moonopt.errors import UserError

#: Padding of prompts; it is masked, so that any token will do.
FILL = 0


class Prompts(NamedTuple):
    """A batch of problems: tokens (n, p) padded on the left, a mask that is True where they are no padding, and problems."""

    tokens: Tensor
    mask: Tensor
    problems: list[Problem]

    @property
    def answers(self) -> list[str]:
        return [problem.answer for problem in self.problems]


class Problems:
    """Prompts as tokens, with the problems."""

    def __init__(self, problems: Sequence[Problem], tokenizer: Any, template: str) -> None:
        self.prompts = [prompt_tokens(problem.question, tokenizer, template) for problem in problems]
        if not all(self.prompts):
            raise UserError("The tokenizer makes no tokens of a problem: are its files (tokenizer.json) beside the weights?")
        self.problems = problems

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))

    def batch(self, indices: Tensor, generator: torch.Generator) -> Prompts:
        chosen = indices.tolist()
        tokens, mask = left_padded([self.prompts[index] for index in chosen], FILL)
        return Prompts(tokens, mask, [self.problems[index] for index in chosen])


def _first(splits: ProblemSplits, counts: Sequence[int]) -> ProblemSplits:
    """So many of every part."""
    for name, part, count in zip(splits._fields, splits, counts, strict=True):
        if len(part) < count:
            raise UserError(f"There are {len(part)} problems for data.{name}_problems={count}: ask for fewer.")
    return ProblemSplits(*(part[:count] for part, count in zip(splits, counts, strict=True)))


#: Problems from a folder, split by a seed into so many to train on, to validate and to test; by the name of the data set.
READERS: Mapping[str, Callable[[Path, int, tuple[int, int, int]], ProblemSplits]] = {
    "math500": read_math500,
    "gsm8k": lambda folder, seed, counts: _first(read_gsm8k(folder, seed, counts[1]), counts),
}
