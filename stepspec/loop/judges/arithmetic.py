"""The arithmetic judge: it rejects a step with a false equality, such as `3 + 4 = 8`. It accepts nothing.

It reads plain numbers with + - * / and their typographic forms, in chains of equal signs. It leaves alone what it may
misread: parentheses, powers, LaTeX, names, percentages, units of time, and what continues before or after the chain. A
result with decimals may be rounded.
"""

import re
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar, Literal

from stepspec.loop.judge import Decision, Evidence, Judge

_SPACE = r"[^\S\n]*"
_NUMBER = r"[-−]?[$€£]?\d+(?:,\d{3})*(?:\.\d+)?"
_OPERATOR = rf"{_SPACE}[-+*/−×·÷]{_SPACE}|[^\S\n]+x[^\S\n]+"
_SIDE = rf"{_NUMBER}(?:(?:{_OPERATOR}){_NUMBER})*"
_CHAIN = re.compile(rf"(?<![^\s(\[\"'*=]){_SIDE}(?:{_SPACE}={_SPACE}{_SIDE})+(?![\w%\\^°!:/]|[.,]\d)")
_TOKEN = re.compile(rf"({_NUMBER})({_OPERATOR})?")
_SIGNS = str.maketrans({"−": "-", "×": "*", "x": "*", "·": "*", "÷": "/"})

_BEFORE = re.compile(
    r"(?:^|\n)\s*(?:[-*+•]|\*\*)?\s*\Z"  # the start of a line or of a list item
    r"|[.,;:=!?([\"'][^\S\n]*\Z"
    r"|(?<![\\\w])(?!(?:of|x|times|plus|minus|by|over|log|ln|sqrt|twice|half|double)\b)(?:[^\W\d_]{2,}|[Ia])[^\S\n]*\Z",
    re.IGNORECASE,
)
"""What may stand before a chain: nothing, punctuation, or a word that is no operator."""

_AFTER = re.compile(
    r"[^\S\n]*(?:\Z|\n|[,;?)\]\"'$]|\*\*|\.(?![\d.])"
    r"|\((?=[^\W\d_])"
    r"|(?!(?:x|times|plus|minus|over|mod|modulo|remainder|r|percent|dozen|hundred|thousand|million|billion"
    r"|seconds?|minutes?|hours?|days?|weeks?|months?|years?)\b)(?:[^\W\d_]{2,}|a)\b)",
    re.IGNORECASE,
)
"""What may follow a chain: nothing, punctuation, or a word that cannot change the number."""

_MAX_LENGTH, _AROUND = 400, 24
"""Characters of a chain and before it that are read."""


class ArithmeticJudge(Judge):
    """Rejects a step with a false equality between numbers, and decides nothing about other steps."""

    asks_target: ClassVar[bool] = False
    can_accept: ClassVar[bool] = False

    kind: Literal["arithmetic"]
    """Selects this judge."""

    async def score(self, evidence: Evidence) -> float:
        """Return 0 if the step has a false equality, else 1."""
        return float(not false_equalities(evidence.step))

    def decide(self, score: float) -> Decision:
        return "undecided" if score else "reject"


def false_equalities(text: str) -> list[str]:
    """Return the equalities of a text whose two sides differ by more than rounding.

    >>> false_equalities("She has 3 + 4 = 8 apples, and 10 / 4 = 2.5.")
    ['3 + 4 = 8']
    """
    found: list[str] = []
    for match in _CHAIN.finditer(text):
        chain, before = match[0], text[max(0, match.start() - _AROUND) : match.start()]
        signed_word = chain[0] in "-−" and before.rstrip(" ")[-1:].isalnum()  # as in `12 eggs -3 + 1 = 10`
        whole = _BEFORE.search(before) is not None and _AFTER.match(text, match.end()) is not None
        sides = re.split(rf"{_SPACE}={_SPACE}", chain)
        # `3 = 5` by itself may be anything.
        if (
            len(chain) <= _MAX_LENGTH
            and whole
            and not signed_word
            and any(not _TOKEN.fullmatch(side) for side in sides)
        ):
            found += [f"{a} = {b}" for a, b in pairwise(sides) if not _equal(a, b)]
    return found


def _equal(first: str, second: str) -> bool:
    one, other = _value(first), _value(second)
    if one is None or other is None:  # a division by zero
        return False
    return abs(one - other) <= max(_rounding(first), _rounding(second))


def _rounding(side: str) -> Fraction:
    """Return half a unit of the last decimal place of a single number with decimals, else 0."""
    decimals = side.partition(".")[2] if _TOKEN.fullmatch(side) else ""
    return Fraction(1, 2 * 10 ** len(decimals)) if decimals else Fraction(0)


def _value(side: str) -> Fraction | None:
    """Return the value of a side, products before sums; None if it divides by zero."""
    terms: list[Fraction] = []
    operator = "+"
    for number, following in _TOKEN.findall(side):
        value = Fraction(re.sub(r"[$€£,]", "", number).translate(_SIGNS))
        match operator:
            case "*":
                terms[-1] *= value
            case "/":
                if value == 0:
                    return None
                terms[-1] /= value
            case _:
                terms.append(value if operator == "+" else -value)
        operator = following.strip().translate(_SIGNS)
    return sum(terms, Fraction(0))
