"""When two answers are the same: ways of writing, and the 500 answers of MATH-500."""

import json
import os
import sys
from pathlib import Path

import pytest

from moonopt.bench.text import answers
from moonopt.bench.text.answers import JUDGES, LONGEST, is_readable, normalised, same_answer, verified_answer
from moonopt.bench.text.rewards import last_box
from moonopt.errors import UserError

SAME = [
    # fractions and numbers
    (r"\frac12", r"\frac{1}{2}"),
    (r"\dfrac{1}{2}", r"\tfrac 1 2"),
    ("1/2", r"\frac{1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    (".5", "0.50"),
    ("18.00", "18"),
    ("5.", "5"),
    ("+7", "7"),
    (r"\frac9{19}", r"\frac{9}{19}"),
    (r"\frac{-35}{9}", r"-\frac{35}{9}"),
    (r"\frac{2}{4}", "0.5"),
    (r"1\frac{4}{5}", r"\frac{9}{5}"),
    ("2 1/2", "2.5"),
    (r"2\ 1/2", "2.5"),
    ("-2 1/2", r"-\frac{5}{2}"),
    ("\N{MINUS SIGN}5", "-5"),
    (r"\varnothing", r"\emptyset"),
    ("x=5 or x=-2", "-2, 5"),
    (r"-1 \frac{4}{5}", "-1.8"),
    (r"6.72 \times 10^{-5}", ".0000672"),
    (r"\frac{-\pi}{6}", r"-\frac{\pi}{6}"),
    (r"\pi/2", r"\frac{\pi}{2}"),
    (r"3\sqrt{3}/4", r"\frac{3\sqrt{3}}{4}"),
    # thousands
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    ("58,500", "58500"),
    ("10{,}080", r"10,\!080"),
    ("$1,234.50", "1234.5"),
    # roots, powers and other ways of writing
    (r"11\sqrt2", r"11 \sqrt{2}"),
    (r"\sqrt[3]{2}", r"\sqrt[3] 2"),
    ("x^{2}", "x^2"),
    ("52_{8}", "52_8"),
    (r"3\cdot\sqrt{2}", r"3\sqrt{2}"),
    (r"2\pi r", r"2 \pi  r"),
    (r"x \leq 3", r"x\le 3"),
    (r"\displaystyle\frac{1}{3}", r"\frac13"),
    (r"$\frac{1}{3}$", r"\(\frac13\)"),
    ("42.", "42"),
    # what is said about the answer, and units
    ("x = 5", "5"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("f(x) = 2x+1", "2x + 1"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90°"),
    ("90 degrees", r"90\text{ degrees}"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"),
    (r"864 \mbox{ inches}^2", "864"),
    ("864 square inches", r"864 \text{ in}^{2}"),
    (r"15\,\mathrm{cm}^2", "15"),
    (r"5.4 \text{ cents}", "5.4 cents"),
    (r"50\%", "50"),
    ("50 percent", "50%"),
    (r"\$32,\!348", "32348"),
    # words
    (r"\text{Evelyn}", "Evelyn"),
    (r"\textbf{East}", "east"),
    (r"\text{(C)}", "C"),
    ("(C)", r"\textbf{(C)}"),
    # tuples, intervals, sets, lists and matrices
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}2)"),
    (r"\left(\frac{3}{5},\frac{8}{3}\right]", "(3/5, 8/3]"),
    (r"(-\infty, 2) \cup (3, +\infty)", r"(-\infty,2)\cup(3,\infty)"),
    ("1,-2", "-2, 1"),
    (r"-2 \text{ and } 1", r"1 \text{ or } -2"),
    (r"-2 and 1", "1, -2"),
    (r"\{1\pm\sqrt{5},-2\}", r"-2, 1-\sqrt5, 1+\sqrt5"),
    (r"\pm 3", "-3, 3"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{bmatrix} -\frac13 \\ \frac{2}{3} \end{bmatrix}"),
    (r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}"),
    ("(5)", "5"),
    (r"\overline{AB}", r"\overline {AB}"),
]
OTHER = [
    ("2 1/2", r"\frac{21}{2}"),
    ("1 000/3", "1"),
    ("x=5, y=-2", "5, -2"),
    ("1", "2"),
    (r"\frac12", r"\frac21"),
    ("0.333", r"\frac13"),
    ("1.5", "15"),
    (".5", "5"),
    ("-3", "3"),
    ("(2,4)", "[2,4]"),
    ("(2,4)", "(4,2)"),
    ("(1,200)", "1200"),
    ("1, 200", "1200"),
    ("52_8", "52"),
    ("x^2", "x2"),
    (r"\sqrt{13}", r"\sqrt{1}3"),
    (r"\pm 3", "3"),
    (r"(0,9) \cup (9,36)", "(0,36)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    (r"\begin{vmatrix} 1 \end{vmatrix}", r"\begin{pmatrix} 1 \end{pmatrix}"),
    (r"\text{even}", r"\text{odd}"),
    ("AB", "ab"),
    (r"x \in [0,1)", r"x \in [0,1]"),
    ("5m", "5"),
    (r"\frac10", "1"),
    ("", "0"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_answer_in_two_ways_of_writing(one, other):
    assert normalised(one) == normalised(other)
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_answers_that_differ(one, other):
    assert not same_answer(one, other)


@pytest.mark.parametrize(
    ("answer", "readable"),
    [(r"\frac{1", False), ("}{", False), (r"\text{}", False), ("$", False), (r"\{1\}", True), (r"\left\{1", True), ("0", True)],
)
def test_answers_whose_braces_do_not_close_or_that_hold_nothing_cannot_be_read(answer, readable):
    assert is_readable(answer) == readable


@pytest.mark.parametrize("text", sorted({text for pair in SAME + OTHER for text in pair}))
def test_what_is_normalised_already_stays_as_it_is(text):
    once = normalised(text)
    if "matrix[" not in once and "det[" not in once:
        assert normalised(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "{" * 200,
        "(" * LONGEST,
        "((((1,2",
        r"\frac",
        r"\frac{1",
        r"\sqrt[3",
        "^",
        "_{",
        "\\",
        ",,,",
        "1,,2",
        r"\begin{pmatrix}",
        "9" * 10_000,
        r"1\times10^{999999}",
    ],
)
def test_what_cannot_be_read_is_compared_as_it_is_written(text):
    assert same_answer(text, text)
    assert not same_answer(text, "17")


def math500():
    path = Path(os.environ.get("MOONOPT_DATA", "nowhere"), "math500", "test.jsonl")
    if not path.exists():
        pytest.skip("needs MATH-500 in $MOONOPT_DATA")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_solution_of_math_500_ends_in_its_answer_and_a_third_of_the_answers_change():
    problems = math500()
    right = [same_answer(last_box(each["solution"]), each["answer"]) for each in problems]
    changed = [each["answer"] for each in problems if normalised(each["answer"]) != each["answer"]]
    assert (len(right), sum(right), len(changed)) == (500, 500, 149)


def test_only_ways_of_writing_units_and_orders_of_math_500_become_one():
    merged = {}
    for answer in {each["answer"] for each in math500()}:
        merged.setdefault(normalised(answer), set()).add(answer)
    assert {frozenset(each) for each in merged.values() if len(each) > 1} == {
        frozenset(each)
        for each in (
            {"30", r"30^\circ"},
            {"90", r"90^\circ"},
            {"120", r"120^\circ"},
            {"36", r"36^\circ", r"\$36"},
            {"15", r"15\mbox{ cm}^2"},
            {"5", "x=5"},
            {"-2,1", "1,-2"},
            {r"\frac14", r"\frac{1}{4}"},
            {"10080", r"10,\!080"},
            {r"2\sqrt{5}", r"2 \sqrt{5}"},
        )
    }


def test_math_verify_knows_what_normalisation_does_not():
    pytest.importorskip("math_verify")
    pair = r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"
    assert not same_answer(*pair)
    assert verified_answer(*pair)
    assert not verified_answer("2", "3")
    assert JUDGES["math-verify"] is verified_answer


def test_plain_cases_need_no_math_verify(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert answers.verified_answer("0.5", r"\frac12")
    with pytest.raises(UserError, match=r"moonopt\[llm\]"):
        answers.verified_answer("2", "3")
