r"""When two answers to a problem of MATH are the same: after normalisation, or, where it is installed, by math-verify.

MATH's normalisation (Hendrycks and others, 2021) takes away how an answer is written: ``\dfrac``, ``\frac12`` and ``1/2``,
``\left(``, units, degrees, percent and dollar signs, ``x =``. This one does so too, and further knows numbers by their value,
thousands, the elements of tuples, intervals and matrices, sets and lists in any order, and both signs of ``\pm``.
"""

import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction

from moonopt.errors import UserError

Judge = Callable[[str, str], bool]

#: Longer answers are compared as they are written: nothing of MATH's is nearly as long, and a rambling model's may be.
LONGEST = 300  # characters
#: Larger exponents of ten are left as they are written.
LARGEST_EXPONENT = 100
VERIFY_SECONDS = 5

_UNITS = (
    "degrees?|radians?|inch(?:es)?|in|feet|foot|ft|yards?|miles?|mph|mm|cm|km|(?:milli|centi|kilo)?met(?:er|re)s?|"
    "(?:kilo|milli)?grams?|kg|pounds?|lbs?|ounces?|lit(?:er|re)s?|gallons?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|"
    "dollars?|cents?|units?|points?|percent"
)
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mbox|hbox|mathrm|mathbf|mathit|operatorname)\s*"

#: What is written in several ways, in the order in which it is replaced.
_SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("\N{MINUS SIGN}", "-"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])", ""),
        (r",\s*\\!\s*(?=\d{3})|\{,\}\s*(?=\d{3})", ""),  # thousands
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])|\s+", " "),
        (r"(?<![\d.^_/])(\d+) +([1-9]\d*) */ *([1-9]\d*)(?![\d/])", r"\1\\frac{\2}{\3}"),  # mixed numbers
        (r"(?<!\\)\\[()\[\]]|\\[$%]|[$%]", ""),
        (r"\^\s*(?:\{\s*)?\\circ(?:\s*\})?|\\degree(?![a-zA-Z])|°", ""),
        (r"\\(le|ge|ne)q(?![a-zA-Z])", r"\\\1"),
        (rf"{_TEXT}\{{\s*(?:or|and)\s*\}}|(?<=[\s\d}}])(?:or|and)(?=\s)", ","),
        (rf"(?<=[^\s{{(,])\s*{_TEXT}\{{[^{{}}]*\}}\s*(?:\^\s*\{{?\s*\d\s*\}}?)?[\s.]*$", ""),  # units
        (rf"(?<=[\d}})])\s*(?:(?:square|cubic|sq\.?)\s+)?(?:{_UNITS})(?:\s*\^\s*\{{?\d\}}?)?[\s.]*$", ""),
        (rf"{_TEXT}\{{([^{{}}]*)\}}", r"\1"),
        (r"^\s*[a-zA-Z](?:_\{?\w+\}?)?(?:\([a-z]\))?\s*(?:=|\\in(?![a-z]))(?!.*=)", ""),  # x =
        (r"(?:\\(?:cdot|times)(?![a-zA-Z])|\*)\s*(?=[\\a-zA-Z(])", " "),
    )
)
#: How many arguments a command or sign has. Only these need braces around them.
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "^": 1, "_": 1}
_OPENING, _CLOSING = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")

_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_WHOLE = re.compile(rf"(-?)({_NUMBER})")
_MIXED = re.compile(r"(-?)(\d*)\\frac\{(-?\d+)\}\{(-?\d+)\}")
_RATIO = re.compile(rf"(-?)({_NUMBER})/({_NUMBER})")
_POWER = re.compile(rf"(-?)({_NUMBER})\\(?:times|cdot)10\^\{{(-?\d+)\}}")


def same_answer(given: str, expected: str) -> bool:
    r"""Whether two answers are the same after normalisation.

    >>> same_answer(r"\dfrac{1}{2}", "0.5"), same_answer("(3,4]", "(3,4)")
    (True, False)
    """
    return normalised(given) == normalised(expected)


def verified_answer(given: str, expected: str) -> bool:
    """The same, and where the normalised forms differ, what math-verify says of the two as expressions."""
    if same_answer(given, expected):
        return True
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UserError("The judge math-verify needs the package of that name: pip install 'moonopt[llm]'.") from error
    # Its limits of time are signals, which only the main thread has.
    seconds = VERIFY_SECONDS if threading.current_thread() is threading.main_thread() else None
    wanted, found = (parse(rf"\boxed{{{text}}}", parsing_timeout=seconds) for text in (expected, given))
    return bool(verify(wanted, found, timeout_seconds=seconds))


#: Who says whether an answer is right. The first needs nothing else, and is what the paper describes.
JUDGES: dict[str, Judge] = {"normalised": same_answer, "math-verify": verified_answer}


def normalised(answer: str) -> str:
    r"""One way of writing for every answer that means the same.

    >>> normalised(r"x = \left(\frac12, 3\right)"), normalised(r"11,\!100 \text{ inches}^2")
    ('(1/2,3)', '11100')
    """
    if len(answer) > LONGEST:
        return answer.strip()
    text = answer
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _without_name(text.strip().rstrip(" .,;:"))
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    return _structured(_braced(_tokens(text)))


def is_readable(answer: str) -> bool:
    r"""Whether an answer can be right at all: its braces close, and something is left of it after normalisation.

    >>> is_readable(r"\frac{1}{2}"), is_readable(r"\frac{1"), is_readable(r"\text{}")
    (True, False, False)
    """
    depth = 0
    for token in _tokens(answer):
        depth += (token == "{") - (token == "}")
        if depth < 0:
            return False
    return depth == 0 and normalised(answer) != ""


def _without_name(text: str) -> str:
    """Several values of one unknown, each with its name, as the values alone."""
    names = re.findall(r"(?:^|,)\s*([a-zA-Z])\s*=", text)
    if len(names) < 2 or len(set(names)) > 1 or text.count("=") > len(names):
        return text
    return re.sub(r"(^|,)\s*[a-zA-Z]\s*=", r"\1", text)


def _tokens(text: str) -> list[str]:
    """Commands, escaped signs and single signs; spaces have no meaning by now."""
    return re.findall(r"\\[a-zA-Z]+|\\.|[^\s\\]", text)


def _braced(tokens: Sequence[str]) -> str:
    r"""The tokens as text, in which arguments have braces and nothing else does: ``\frac12`` is ``\frac{1}{2}``."""
    parts: list[str] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token == "{":
            inner, position = _argument(tokens, position - 1)
            is_argument = parts and re.fullmatch(r"\\[a-zA-Z]+", parts[-1])
            parts.append(f"{{{inner}}}" if is_argument else inner)
            continue
        if token == "\\sqrt" and tokens[position : position + 1] == ["["] and "]" in tokens[position:]:
            end = tokens.index("]", position)
            token += f"[{_braced(tokens[position + 1 : end])}]"
            position = end + 1
            count = 1
        else:
            count = _ARGUMENTS.get(token, 0)
        for _ in range(count):
            inner, position = _argument(tokens, position)
            token += f"{{{inner}}}"
        parts.append(token)
    return _joined(parts)


def _argument(tokens: Sequence[str], position: int) -> tuple[str, int]:
    """What a command takes from a position: a group, or one token; and where it ends."""
    if position >= len(tokens):
        return "", position
    if tokens[position] != "{":
        end = position + 1 + _ARGUMENTS.get(tokens[position], 0)
        return _braced(tokens[position:end]), end
    depth = 0
    for end in range(position, len(tokens)):
        depth += (tokens[end] == "{") - (tokens[end] == "}")
        if depth == 0:
            return _braced(tokens[position + 1 : end]), end + 1
    return _braced(tokens[position + 1 :]), len(tokens)


def _joined(parts: Sequence[str]) -> str:
    """With a space where a command would otherwise take the letter after it for its own."""
    text = ""
    for part in parts:
        apart = part[:1].isalpha() and re.search(r"\\[a-zA-Z]+$", text)
        text += f" {part}" if apart else part
    return text


def _structured(text: str) -> str:
    """A union, matrix, set, tuple or interval by its elements; anything else is one value."""
    if len(pieces := _split(text, "\\cup")) > 1:
        return "\\cup".join(map(_structured, pieces))
    if (matrix := re.fullmatch(r"\\begin\{([pbv])matrix\}(.*)\\end\{\1matrix\}", text)) is not None:
        rows = [",".join(map(_structured, row.split("&"))) for row in re.split(r"\\\\", matrix[2])]
        return f"{'det' if matrix[1] == 'v' else 'matrix'}[{';'.join(rows)}]"
    if text.startswith("\\{") and _closes_at_the_end(text):
        return _set(_split(text[2:-2], ","))
    elements = _split(text, ",")
    if len(elements) > 1 or "\\pm" in text:
        return _set(elements) if "" not in elements else text
    if text[:1] in ("(", "[") and _closes_at_the_end(text):
        elements = _split(text[1:-1], ",")
        if len(elements) > 1:
            return text[0] + ",".join(map(_structured, elements)) + text[-1]
        if text[0] + text[-1] == "()" and elements != [""]:
            return _structured(elements[0])
    return _value(text)


def _set(elements: Sequence[str]) -> str:
    """The elements in one order. One with both signs is two."""
    single = [each.replace("\\pm", sign) for each in elements for sign in ("+-" if "\\pm" in each else "+")]
    return "\\{" + ",".join(sorted(set(map(_structured, single)))) + "\\}"


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that are in no brackets."""
    parts, depth = [""], 0
    for token in re.findall(r"\\[a-zA-Z]+|\\.|.", text):
        depth += (token in _OPENING) - (token in _CLOSING)
        if token == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def _closes_at_the_end(text: str) -> bool:
    """Whether the bracket that a text begins with is closed by the last one, of whatever kind, and not before."""
    depth = 0
    tokens = re.findall(r"\\[a-zA-Z]+|\\.|.", text)
    for number, token in enumerate(tokens):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0:
            return number == len(tokens) - 1
    return False


def _value(text: str) -> str:
    """A number by its value; otherwise the text, a division as a fraction with its sign in front, a word in small letters."""
    text = text.removeprefix("+")
    if (number := _number(text)) is not None:
        return str(number)
    text = re.sub(r"^(-?)([^/+-]+)/([^/+-]+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"^\\frac\{-((?:[^{}+-]|\{[^{}]*\})*)\}", r"-\\frac{\1}", text)
    return text.lower() if re.fullmatch(r"[a-zA-Z]{3,}", text) else text


def _number(text: str) -> Fraction | None:
    try:
        if (found := _WHOLE.fullmatch(text)) is not None:
            value = Fraction(found[2])
        elif (found := _MIXED.fullmatch(text)) is not None:
            value = int(found[2] or 0) + Fraction(int(found[3]), int(found[4]))
        elif (found := _RATIO.fullmatch(text)) is not None:
            value = Fraction(found[2]) / Fraction(found[3])
        elif (found := _POWER.fullmatch(text)) is not None and abs(int(found[3])) <= LARGEST_EXPONENT:
            value = Fraction(found[2]) * Fraction(10) ** int(found[3])
        else:
            return None
    except ZeroDivisionError:
        return None
    return -value if found[1] else value
