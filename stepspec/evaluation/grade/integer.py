r"""Grading of whole numbers in the last closed `\boxed{...}` of a text, for the benchmark gsm-mini."""

import re
from typing import Literal

from stepspec.errors import UsageError
from stepspec.evaluation.grade.boxes import closed_boxes, last_boxes
from stepspec.evaluation.grade.latex import cleaned
from stepspec.evaluation.grade.number import digits_of
from stepspec.evaluation.grade.sentence import number_named
from stepspec.evaluation.grade.thinking import without_thinking
from stepspec.evaluation.grade.words import MAX_ANSWER_CHARS, GradingLimits

IntegerStatus = Literal["correct", "incorrect", "no_answer"]

# LaTeX markup that does not change a number: grouping braces, negative and thin spaces, dollar signs.
_NOTHING = re.compile(r"\\!\s*|[{}]")
_SPACE = re.compile(r"\\[,;: ]|\\?\$|[~\s]")
_PLAIN = re.compile(r"([+-]?) *(\d+)(?:\.0*)?")
_GROUPED = re.compile(r"([+-]?) *(\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+)(?:\.0*)?")


def extract_answer(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}`; None if there is none.

    >>> extract_answer(r"\boxed{1} or \boxed{\frac{1}{2}} or \boxed{3")
    '\\frac{1}{2}'
    """
    boxes = closed_boxes(text)
    return text[boxes[-1].inner_start : boxes[-1].inner_end].strip() if boxes else None


def canonical_integer(text: str) -> str | None:
    """Return a whole number as plain digits (`1,234.0` as `1234`, `-03` as `-3`); None if it is not a whole number.

    The digits stay a string, because `int` takes time quadratic in the number of digits.
    """
    return _canonical(text) or _canonical_of_answer(text)


def _canonical(text: str) -> str | None:
    bare = _SPACE.sub(" ", _NOTHING.sub("", text)).strip().replace("\u2212", "-").removesuffix(".")
    if not bare.isascii():
        return None
    match = _PLAIN.fullmatch(bare) or _GROUPED.fullmatch(bare)
    if match is None:
        return None
    digits = match[2].replace(",", "").replace(" ", "").lstrip("0") or "0"
    return f"-{digits}" if match[1] == "-" and digits != "0" else digits


def _canonical_of_answer(text: str) -> str | None:
    """Return the digits of a whole number that has a unit, a name, a style or words around it."""
    if len(text) > GradingLimits().max_chars:
        return None
    clean = cleaned(text)
    digits = digits_of(clean) or digits_of(number_named(clean) or "")
    return _canonical(digits) if digits else None


def grade_integer(text: str, gold: str) -> tuple[IntegerStatus, str | None]:
    r"""Return whether the text's last box holds the whole number `gold`, and the content of the box.

    >>> grade_integer(r"So it costs \boxed{\$1,234.00}.", "1234")
    ('correct', '1234')

    Raises:
        UsageError: `gold` is not a whole number.
    """
    expected = canonical_integer(gold)
    if expected is None:
        raise UsageError(f"The gold answer {gold[:MAX_ANSWER_CHARS]!r} is not a whole number.")
    boxes = last_boxes(without_thinking(text, GradingLimits().max_text_chars))
    if boxes is None:
        return "no_answer", None
    found = [canonical_integer(box) for box in boxes.joined]
    shown = found[-1] if len(set(found)) == 1 and found[-1] else ", ".join(boxes.joined)
    is_right = set(found) == {expected} and not boxes.changed
    return "correct" if is_right else "incorrect", shown[:MAX_ANSWER_CHARS]
