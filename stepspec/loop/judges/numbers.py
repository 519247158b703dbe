"""The numbers judge: it rejects a step that states a number from nowhere. It accepts nothing.

A number is known if it is in the question or in an earlier step, as digits or as a word, or if it is a usual constant
such as the 60 minutes of an hour. A step that calculates may have any numbers; see the arithmetic judge.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import ClassVar, Literal

from stepspec.loop.judging import Decision, Evidence, Judge

_NUMBER = re.compile(r"(?<![\w.])[$€£]?(\d+(?:,\d{3})+|\d+)(\.\d+)?")
_CALCULATES = re.compile(
    r"[=+*/×÷·−^\\%]|\d\s*[-–]\s*\d|\b(?:times|plus|minus|divided|half|twice|double|percent)\b", re.I
)
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
_TENS = "ten twenty thirty forty fifty sixty seventy eighty ninety"
_NAMED = {
    **{word: Fraction(value) for value, word in enumerate(f"{_ONES} eighteen nineteen".split())},
    **{word: Fraction(10 * value) for value, word in enumerate(_TENS.split(), 1)},
    "dozen": Fraction(12),
    "hundred": Fraction(100),
    "thousand": Fraction(1000),
}
_CONSTANTS = frozenset(map(Fraction, (0, 1, 2, 7, 10, 12, 24, 30, 52, 60, 100, 365, 1000)))


class NumbersJudge(Judge):
    """Rejects a step with a number from nowhere, and decides nothing about other steps."""

    asks_target: ClassVar[bool] = False
    can_accept: ClassVar[bool] = False

    kind: Literal["numbers"]
    """Selects this judge."""

    async def score(self, evidence: Evidence) -> float:
        """Return 0 if the step states a number from nowhere, else 1."""
        if _CALCULATES.search(evidence.step):
            return 1.0
        unknown = {*_digits(evidence.step)} - _CONSTANTS - {*_numbers(evidence.question)}
        for step in reversed(evidence.committed):
            if not unknown:
                break
            unknown.difference_update(_numbers(step.text))
        return float(not unknown)

    def decide(self, score: float) -> Decision:
        return "undecided" if score else "reject"


def _numbers(text: str) -> Iterator[Fraction]:
    yield from _digits(text)
    yield from (_NAMED[word] for word in re.findall(r"[a-z]+", text.lower()) if word in _NAMED)


def _digits(text: str) -> Iterator[Fraction]:
    for whole, decimals in _NUMBER.findall(text):
        yield Fraction(whole.replace(",", "") + decimals)
