r"""Grades answers: finds the last `\boxed{...}` of a text and compares it with the gold answer.

Knows nothing of models. Texts come from models and may be hostile: every function takes time linear in its
input, and nothing in a text is ever executed.
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal

from stepspec.errors import UsageError

Status = Literal["correct", "incorrect", "no_answer"]
Grader = Callable[[str, str], tuple[Status, str | None]]
"""Takes a text and the gold answer; gives the status and the answer found."""

MAX_ANSWER_CHARS = 200
"""More of an answer than this is not kept in results; it is graded whole."""

# Escaped braces are matched so that they are passed over: they are typeset and do not group.
_BRACE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
# What LaTeX writes around a number without changing it: spaces, thin spaces, dollar signs and grouping
# braces.
_DECORATION = re.compile(r"\\[,!;: ]|\\?\$|[{}\s~]")
_PLAIN = re.compile(r"([+-]?)(\d+)(?:\.0*)?")
_GROUPED = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+)(?:\.0*)?")


def extract_answer(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` that is closed; None if there is none.

    >>> extract_answer(r"\boxed{1} or \boxed{\frac{1}{2}} or \boxed{3")
    '\\frac{1}{2}'
    """
    open_braces: list[tuple[int, bool]] = []  # where the content begins, and whether it is a box's
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        brace = match.group()
        if brace in (r"\{", r"\}"):
            continue
        if brace != "}":
            open_braces.append((match.end(), brace != "{"))
        elif open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = start, match.start()
    return None if last is None else text[last[0] : last[1]].strip()


def canonical_integer(text: str) -> str | None:
    """A whole number as plain digits (`1,234.0` as `1234`, `-03` as `-3`); None if the text is none.

    Digits stay a string, because `int` takes time quadratic in their number.
    """
    bare = _DECORATION.sub("", text).replace("\u2212", "-").removesuffix(".")
    if not bare.isascii():
        return None
    match = _PLAIN.fullmatch(bare) or _GROUPED.fullmatch(bare)
    if match is None:
        return None
    digits = match.group(2).replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if match.group(1) == "-" and digits != "0" else digits


def grade_integer(text: str, gold: str) -> tuple[Status, str | None]:
    r"""Whether the text's last box holds the whole number `gold`, and what it holds.

    >>> grade_integer(r"So it costs \boxed{\$1,234.00}.", "1234")
    ('correct', '1234')

    Raises:
        UsageError: the gold answer is not a whole number.
    """
    expected = canonical_integer(gold)
    if expected is None:
        raise UsageError(f"The gold answer {gold[:MAX_ANSWER_CHARS]!r} is not a whole number.")
    boxed = extract_answer(text)
    if not boxed:
        return "no_answer", None
    found = canonical_integer(boxed)
    status: Status = "correct" if found == expected else "incorrect"
    return status, (found or boxed)[:MAX_ANSWER_CHARS]


GRADERS: Mapping[str, Grader] = {"integer": grade_integer}
