"""MATH-500 and GSM8K: reading, splitting, what is said of damaged lines, and prompts."""

import json
import os
from pathlib import Path

import pytest

from moonopt.bench.data import math_text
from moonopt.bench.data.math_text import INSTRUCTION, Problem, read_gsm8k, read_math500
from moonopt.errors import UserError


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in records))


def sums(count):
    return [{"problem": f"What is {n} + 1?", "answer": str(n + 1), "level": 1} for n in range(count)]


def words(count):
    return [{"question": f"Ann has {n} eggs.", "answer": f"She has {n}.\n#### {n},000"} for n in range(count)]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "math500" / "test.jsonl", sums(500))
    write(tmp_path / "gsm8k" / "train.jsonl", words(30))
    write(tmp_path / "gsm8k" / "test.jsonl", words(8))
    return tmp_path


def test_math_500_is_split_by_the_seed_into_300_100_and_100(folder):
    one, same, other = (read_math500(folder, seed) for seed in (0, 0, 1))
    assert [len(part) for part in one] == [300, 100, 100]
    assert one == same
    assert one.test != other.test
    assert {problem for part in one for problem in part} == {Problem(each["problem"], each["answer"]) for each in sums(500)}


def test_gsm8k_validates_on_some_of_its_training_problems_and_keeps_its_test(folder):
    splits = read_gsm8k(folder, 0, valid=5)
    assert [len(part) for part in splits] == [25, 5, 8]
    assert not set(splits.train) & set(splits.valid)
    assert splits.test[3] == Problem("Ann has 3 eggs.", "3,000")
    assert read_gsm8k(folder, 1, valid=5).valid != splits.valid


def test_too_few_problems_are_told(folder):
    write(folder / "math500" / "test.jsonl", sums(10))
    with pytest.raises(UserError, match=r"test\.jsonl has 10 problems, and 300 \+ 100 \+ 100 are needed"):
        read_math500(folder, 0)
    assert [len(part) for part in read_math500(folder, 0, counts=(6, 2, 2))] == [6, 2, 2]
    with pytest.raises(UserError, match=r"train\.jsonl has 30 problems, and 1 \+ 30 are needed"):
        read_gsm8k(folder, 0, valid=30)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"problem": "What', r"no JSON \(Unterminated string"),
        ("[1, 2]\n", "found a list, expected a JSON object"),
        ('{"problem": "What?"}\n', "expected text under 'answer', found None among 'problem'"),
        ('{"problem": "What?", "answer": 3}\n', "expected text under 'answer', found 3"),
        ('{"problem": " ", "answer": "3"}\n', "expected text under 'problem', found ' '"),
        ("{}\n", "found None among no keys"),
        ("[" * 100_000 + "\n", "found brackets within brackets without end"),
        ('{"problem": "What?", "answer": "\\\\frac{1"}\n', r"the answer '.*frac\{1' cannot be parsed"),
        ('{"problem": "What?", "answer": "$$"}\n', r"the answer '\$\$' cannot be parsed"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(line, text, folder):
    path = folder / "math500" / "test.jsonl"
    write(path, [*sums(2), "\n", line])
    with pytest.raises(UserError, match=rf"test\.jsonl, line 4: .*{text}"):
        read_math500(folder, 0, counts=(1, 1, 1))


def test_bytes_that_are_no_text_are_named_by_file_and_number(folder):
    path = folder / "math500" / "test.jsonl"
    path.write_bytes(b'{"problem": "a", "answer": "b"}\n{"problem": "\xff\xfe"}\n')
    with pytest.raises(UserError, match=r"test\.jsonl, line 2: found bytes that are no UTF-8"):
        read_math500(folder, 0, counts=(1, 1, 1))


@pytest.mark.parametrize("answer", ["She has three.", "She has three.\n####", "#### "])
def test_an_answer_of_gsm8k_without_its_marks_is_named(answer, folder):
    write(folder / "gsm8k" / "test.jsonl", [*words(1), {"question": "How many?", "answer": answer}])
    with pytest.raises(UserError, match=r"gsm8k/test\.jsonl, line 2: expected an answer that ends in '#### N'"):
        read_gsm8k(folder, 0, valid=5)


@pytest.mark.parametrize("answer", ["abc", "twelve", "1/0", "1,00", "-", "$", "%", "-%", "."])
def test_an_answer_of_gsm8k_that_is_no_number_is_named(answer, folder):
    write(folder / "gsm8k" / "test.jsonl", [*words(1), {"question": "How many?", "answer": f"So.\n#### {answer}"}])
    with pytest.raises(UserError, match=r"gsm8k/test\.jsonl, line 2: expected a number behind '####', found "):
        read_gsm8k(folder, 0, valid=5)


@pytest.mark.parametrize("answer", ["7", "-3", "1,000", "12.50", ".5", "$4", "15%", "+2", "$-5", "5."])
def test_numbers_of_gsm8k_are_taken_as_they_are(answer, folder):
    write(folder / "gsm8k" / "test.jsonl", [{"question": "How many?", "answer": f"So.\n#### {answer}"}])
    assert read_gsm8k(folder, 0, valid=5).test == [Problem("How many?", answer)]


def test_line_separators_inside_text_end_no_line(folder):
    write(folder / "math500" / "test.jsonl", ['{"problem": "a\u2028b\\n", "answer": "1"}\r\n'] * 3)
    assert read_math500(folder, 0, counts=(1, 1, 1)).test == [Problem("a\u2028b", "1")]


def test_missing_files_and_other_data_are_told_with_what_to_do(folder, tmp_path):
    assert math_text.missing("gsm8k", folder) is None
    (folder / "gsm8k" / "test.jsonl").unlink()
    assert "Not in" in math_text.missing("gsm8k", folder)
    with pytest.raises(UserError, match=r"test\.jsonl\. Put them there from https"):
        read_gsm8k(folder, 0)
    with pytest.raises(UserError, match="is not that of math500: its SHA-256 is"):
        math_text.verify("math500", folder)
    with pytest.raises(UserError, match="Did you mean 'gsm8k'"):
        math_text.missing("gsm", folder)


def test_the_published_files():
    folder = Path(os.environ.get("MOONOPT_DATA", "nowhere"))
    if any(not (folder / name).is_dir() for name in math_text.SHA256):
        pytest.skip("needs MATH-500 and GSM8K in $MOONOPT_DATA")
    for name in math_text.SHA256:
        math_text.verify(name, folder)
    assert [len(part) for part in read_math500(folder, 0)] == [300, 100, 100]
    gsm8k = read_gsm8k(folder, 0)
    assert [len(part) for part in gsm8k] == [6973, 500, 1319]
    assert gsm8k.test[0].answer == "18"


class Letters:
    """A tokenizer of which a letter is a token; a plain text begins with the token of the beginning."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "\x01" + "".join(f"<{turn['role']}>{turn['content']}" for turn in turns) + "<assistant>"


def test_a_prompt_is_plain_text_without_a_template_and_a_turn_with_one():
    tokenizer = Letters()
    plain = "".join(map(chr, math_text.prompt_tokens("What is 1 + 1?", tokenizer)))
    assert plain == f"\x01Problem: What is 1 + 1?\n\n{INSTRUCTION}\n\nSolution:"
    tokenizer.chat_template = "a template"
    turn = "".join(map(chr, math_text.prompt_tokens("What is 1 + 1?", tokenizer)))
    assert turn == f"\x01<user>What is 1 + 1?\n\n{INSTRUCTION}<assistant>"
    assert r"\boxed{}" in INSTRUCTION
