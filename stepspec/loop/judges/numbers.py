"""The numbers judge: it rejects a step that states a number which is not known. It accepts nothing.

A number is known if it is in the question or in an earlier step, in digits or in words, or if it is a usual constant
such as the 60 minutes of an hour. A step that calculates, in signs or in words, may have any numbers; see the
arithmetic judge. Numbers of list items and steps are ignored.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import ClassVar, Literal

from stepspec.loop.judging import Decision, Evidence, Judge

_NUMBER = re.compile(r"(?<![\w.])[$€£]?(\d{1,3}(?:,\d{3}){1,5}|\d{1,18})(\.\d{1,18})?(?![\d,]*\d)")
_LABEL = re.compile(r"(?:^|\n)\s*\(?\d+[.):](?=\s)|\bstep \d+\b", re.IGNORECASE)
_CALCULATES = re.compile(
    r"[=+*/×÷·−^\\%]|\d\s*[-–]\s*\d|\d\s+x\s+\d"
    r"|\b(?:times|plus|minus|half|twice|double|triple|third|quarter|percent|per|each|every|total|sum|difference|together|altogether"
    r"|left|remain\w*|more|less|fewer|add\w*|subtract\w*|multipl\w*|divid\w*)\b",
    re.IGNORECASE,
)
_ONE_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TEN_WORDS = "ten twenty thirty forty fifty sixty seventy eighty ninety"
_ONES = {word: Fraction(value) for value, word in enumerate(_ONE_WORDS.split())}
_TENS = {word: Fraction(10 * value) for value, word in enumerate(_TEN_WORDS.split(), 1)}
_WORD = re.compile(rf"\b(?:({'|'.join(_TENS)})(?:[- ]({'|'.join(_ONES)}))?|({'|'.join(_ONES)}))\b", re.IGNORECASE)
_CONSTANTS = frozenset(map(Fraction, (0, 1, 2, 7, 10, 12, 24, 30, 52, 60, 100, 365, 1000)))


class NumbersJudge(Judge):
    """Rejects a step with an unknown number, and decides nothing about other steps."""

    asks_target: ClassVar[bool] = False
    can_accept: ClassVar[bool] = False

    kind: Literal["numbers"]
    """Selects this judge."""

    async def score(self, evidence: Evidence) -> float:
        """Return 0 if the step states an unknown number, else 1."""
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
    for tens, ones, alone in _WORD.findall(text.lower()):
        yield (_TENS[tens] if tens else 0) + _ONES.get(ones or alone, Fraction(0))


def _digits(text: str) -> Iterator[Fraction]:
    for whole, decimals in _NUMBER.findall(_LABEL.sub(" ", text)):
        yield Fraction(whole.replace(",", "") + decimals)
