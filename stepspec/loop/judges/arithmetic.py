"""The arithmetic judge: it rejects a step with a false equality, such as `3 + 4 = 8`. It accepts nothing.

It reads plain numbers with + - * / and their typographic forms, in chains of equal signs. It leaves alone what it
cannot read: parentheses, powers, names and percentages. A result with decimals may be rounded.
"""

import re
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar, Literal

from stepspec.loop.judging import Decision, Evidence, Judge

_NUMBER = r"[-−]?[$€£]?\d+(?:,\d{3})*(?:\.\d+)?"
_OPERATOR = r"\s*[-+*/−×·÷]\s*|\s+x\s+"
_SIDE = rf"{_NUMBER}(?:(?:{_OPERATOR}){_NUMBER})*"
_CHAIN = re.compile(rf"(?<![\w.,$€£])(?<![-+*/−×·÷] ){_SIDE}(?:\s*=\s*{_SIDE})+(?!\w|[.,]?\d|%|\s*[-+*/−×·÷^(=])")
_TOKEN = re.compile(rf"({_NUMBER})({_OPERATOR})?")
_BEFORE = re.compile(r"(?:[-+*/−×·÷^=(%]|\bof)\s*\Z")
"""What makes a chain the end of a longer expression."""
_SIGNS = str.maketrans({"−": "-", "×": "*", "x": "*", "·": "*", "÷": "/"})


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
    for chain in _CHAIN.finditer(text):
        if _BEFORE.search(text, max(0, chain.start() - 20), chain.start()):
            continue
        sides = re.split(r"\s*=\s*", chain[0])
        if any(_TOKEN.fullmatch(side) is None for side in sides):  # `3 = 5` by itself may be anything
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
