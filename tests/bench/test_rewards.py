"""The three rewards, by tables of cases."""

import pytest

from moonopt.bench.text.rewards import REWARDS, RunningMean, accuracy, clarity, conciseness, has_steps, last_box

BOXED = r" So the answer is \boxed{2}."


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"It is \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{1 then \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{7} and \boxed{}", "7"),
        (r"\boxed{7} and \boxed{  }", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{[0, 1\}}", r"[0, 1\}"),
        (r"\boxed {4}", "4"),
        (r"\fbox{4}", "4"),
        (r"\boxed{5} and \fbox{QED}", "5"),
        (r"\boxed{5} and \box{1}", "5"),
        (r"\boxed{5} and \boxed{\,}", "5"),
        (r"\boxed{5} and \boxed{{}}", "5"),
        (r"\boxed{5} and \boxed{\text{ }}", "5"),
        (r"\boxed{5} and \boxed{$$}", "5"),
        (r"\boxed{5} and \boxed{ \boxed{} }", "5"),
        (r"\boxed{5} and \boxed{\ }", "5"),
        (r"\boxed{\text{no}}", r"\text{no}"),
        (r"\boxed{\textbf{(B)}}", r"\textbf{(B)}"),
        (r"\boxed{\emptyset}", r"\emptyset"),
        ("\\boxed{4\n}", "4"),
        (r"\boxed{}", None),
        (r"\boxed{5", None),
        (r"\boxed 5", None),
        (r"boxed{5}", None),
        ("The answer is 5.", None),
        ("", None),
        ("\\boxed{\\", None),
    ],
)
def test_the_last_valid_box(response, content):
    assert last_box(response) == content


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1),
        (r"\boxed{3} no, \boxed{4}", "4", 1),
        (r"\boxed{4} no, \boxed{3}", "4", 0),
        (r"\boxed{4} no, \boxed{3", "4", 1),
        (r"\boxed{(3,4]}", "(3,4]", 1),
        (r"\boxed{[3,4)}", "(3,4]", 0),
        (r"\boxed{\text{even}}", r"\text{even}", 1),
        (r"\boxed{15 \text{ cm}^2}", r"15\mbox{ cm}^2", 1),
        (r"\boxed{}", "", 0),
        ("4", "4", 0),
    ],
)
def test_accuracy(response, answer, reward):
    assert accuracy(response, answer) == reward


def test_accuracy_asks_the_judge_it_is_given():
    asked = []
    assert accuracy(r"\boxed{a}", "b", judge=lambda *pair: asked.append(pair) or True) == 1
    assert asked == [("a", "b")]


@pytest.mark.parametrize(
    "response",
    [
        "1. Add.\n2. Divide.",
        "1) Add.\n2) Divide.",
        "(1) Add.\n(2) Divide.",
        "  1. Add.\n  2. Divide.",
        "**1.** Add.\n**2.** Divide.",
        "**Step 1:** Add.\n**Step 2:** Divide.",
        "## Step 1\nAdd.\n## Step 2\nDivide.",
        "Step 1: add. Step 2: divide.",
        "step 1. add\nstep 2. divide",
        "1. Add 2. 2. Divide by 3.",
        "We follow Step 1: add; then Step 2: divide.",
        "First, add. Second, divide.",
        "First, we add; second, we divide.",
        "Firstly, add.\nSecondly, divide.",
        "First we add. Then we divide.",
        "First, add. Next, divide. Finally, simplify.",
        "Next, add. Then, divide.",
        "- First, add.\n- Lastly, divide.",
        "First of all, add. Then, divide.",
        "First, we add, and second, we divide.",
        "First, add 3. Then divide by 2.",
        "Firstly add. Secondly divide.",
        "Add 3. Then divide by 2. Finally simplify.",
        "Step One: add.\nStep Two: divide.",
        "Step1: add. Step2: divide.",
        "Step 1, we add. Step 2, we divide.",
        "Step 1 add. Step 2 divide.",
        "1.Add\n2.Divide",
        "1: add\n2: divide",
        "1. $x + 1$\n2. $x + 2$",
        "- 1. Add\n- 2. Divide",
        "First, we add, and then we divide.",
    ],
)
def test_steps_and_transitions_make_a_structure(response):
    assert has_steps(response)
    assert clarity(response + BOXED) == 1
    assert clarity(response) == 0
    assert clarity(response + r" \boxed{}") == 0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "Add and divide.",
        "1. Add and divide.",
        "Step 1: add.",
        "Step 1: add. Step 1: add.",
        "Step 1: First, add.",
        "1.5 is more than\n2.5 is not.",
        "1.5\n2.5",
        "Step 1.5 and\nStep 2.5",
        "x = 1. y = 2. z = 3.",
        "The first term is 3 and the second is 5.",
        "First term: 3. Second term: 5.",
        "It is 1. It is 2. It is 3.",
        "First, add.",
        "We add first, and then we divide.",
        "Then, add. Then, divide.",
        "- Add.\n- Divide.",
        "2024. 2025.",
        "3. Add.\n7. Divide.",
        "100) a\n200) b",
        "From step 1 and step 2 we see it.",
        "It costs 1. 2. 3.",
        "10:30\n11:30",
        "The points (0, 1) and (1, 2) lie on it.",
        "Equations (1) and (2) say so.",
        "The first is 3, the second is 5.",
        "If x = 2, then y = 4, and lastly z = 5.",
        "If a, then b. If c, then d.",
        "Step 1 and step 2.",
        "We use step 1, step 2, and so on.",
        "-1.\n-2.",
        "2: 3\n3: 4",
    ],
)
def test_what_is_no_structure(response):
    assert not has_steps(response)
    assert clarity(response + BOXED) == 0


def test_conciseness_is_below_the_running_mean_and_not_at_it():
    running = RunningMean().after([10, 20]).after([30])
    assert running == RunningMean(60, 3)
    assert [conciseness(length, running) for length in (19, 20, 21)] == [1, 0, 0]


def test_the_running_mean_is_exact_for_large_numbers_and_infinite_without_any():
    assert RunningMean(2**60, 2**60).after([1]).mean == 1
    assert RunningMean(2**60 + 1, 1).after([1]).total == 2**60 + 2
    assert RunningMean().mean == float("inf")
    assert conciseness(10**9, RunningMean()) == 1


def test_responses_of_one_length_are_none_of_them_concise():
    assert sum(conciseness(7, RunningMean().after([7] * 4)) for _ in range(4)) == 0


def test_the_rewards_have_the_names_of_the_paper():
    assert REWARDS == ("accuracy", "conciseness", "clarity")


def test_a_long_run_of_boxes_and_backslashes_is_read_in_time():
    assert last_box("\\boxed{" * 2000) is None
    assert last_box("\\boxed{" * 20_000 + "x" + "}" * 20_000) == "x"
    for text in ("*" * 20_000 + " " * 20_000, "." + " " * 40_000, ", and " * 8000, "step" + " " * 40_000, ". - " * 8000):
        assert not has_steps(text)
