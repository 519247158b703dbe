"""Compares two answers as far as reading them is enough, and says what is left for a computer algebra system."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from stepspec.evaluation.grade.latex import (
    choice_of,
    cleaned,
    text_key,
    unit_of,
    value_named,
    without_name,
    without_unit,
    words_of,
)
from stepspec.evaluation.grade.number import Number, number_of
from stepspec.evaluation.grade.structure import Structure, structure_of

Verdict = Literal["same", "different", "unknown"]
Way = Literal["number", "text"]


@dataclass(frozen=True)
class Question:
    """Formulas that must be equal one by one; in any order unless `ordered`."""

    gold: tuple[str, ...]
    found: tuple[str, ...]
    ordered: bool = True


@dataclass(frozen=True)
class Comparison:
    """What reading says of two answers. There is a `question` exactly if the verdict is "unknown"."""

    verdict: Verdict
    by: Way
    question: Question | None = None


_SAME_TEXT = Comparison("same", "text")
_DIFFERENT_TEXT = Comparison("different", "text")


def compare(gold: str, found: str) -> Comparison:
    """Times, choices and numbers exactly, then texts in one way of writing, then the parts of what has several."""
    return _compare(cleaned(gold), cleaned(found), 0)


_MAX_NESTING = 3


def _compare(gold: str, found: str, nesting: int) -> Comparison:
    """The first rule that knows."""
    if "=" not in gold:
        found = value_named(found)
    for rule in (_as_times, _as_choices, _as_numbers, _as_other_units):
        comparison = rule(gold, found)
        if comparison is not None:
            return comparison
    gold, found = without_unit(gold), without_unit(found)
    for rule in (_as_text, _as_words):
        comparison = rule(gold, found)
        if comparison is not None:
            return comparison
    left, right = structure_of(gold), structure_of(found)
    parts = _as_parts(left, right, nesting) if nesting < _MAX_NESTING else None
    if parts:
        return parts
    if not _may_be_equal(gold, found, left, right):
        return _DIFFERENT_TEXT
    return _unknown(Question((gold,), (found,)))


def _unknown(question: Question) -> Comparison:
    return Comparison("unknown", "text", question)


_TIME = re.compile(r"(\d{1,2})(?:\s?:\s?(\d{2}))?\s*(?:([ap])\s*\.?\s*m\.?)?", re.IGNORECASE)
_TEXT_COMMAND = re.compile(r"\\text\{([^{}]*)\}")


def _as_times(gold: str, found: str) -> Comparison | None:
    """`5:30 p.m.` is not `5:30 a.m.`; an answer may say which where the gold answer does not, but not the other way."""
    expected, time = _time_of(gold), _time_of(found)
    if expected is None:
        return None
    if time is None or (expected[1] and not time[1]):
        # By its minutes alone only `17:30` says which half of the day it is.
        return _SAME_TEXT if time and time[0] == expected[2] and time[0] >= 12 * 60 else _DIFFERENT_TEXT
    same = time[0] == expected[0] and (not expected[1] or time[1] == expected[1])
    return _SAME_TEXT if same else _DIFFERENT_TEXT


def _time_of(clean: str) -> tuple[int, str, int] | None:
    """Minutes as written, `a`, `p` or nothing, and minutes since midnight; None if it is no time."""
    match = _TIME.fullmatch(_TEXT_COMMAND.sub(r" \1", clean).strip())
    if match is None or not (match[2] or match[3]):
        return None
    hours, half = int(match[1]), (match[3] or "").lower()
    written = hours * 60 + int(match[2] or 0)
    return written, half, written % 720 + 720 * (half == "p") if half else written


def _as_choices(gold: str, found: str) -> Comparison | None:
    choice = choice_of(gold)
    if choice is None:
        return None
    if choice_of(found, with_text=True) == choice:
        return _SAME_TEXT
    return None if text_key(gold) == text_key(without_name(found)) else _DIFFERENT_TEXT


def _as_numbers(gold: str, found: str) -> Comparison | None:
    expected, number = _number(gold), _number(found)
    if expected is None or number is None:
        return None
    if not _names_agree(gold, found):
        return None
    same = expected.equals(number) and not _units_differ(gold, found)
    return Comparison("same" if same else "different", "number")


def _number(clean: str) -> Number | None:
    """`x + y = 5` is a line, and no number, where it is compared with another equation."""
    return number_of(clean) if "=" not in clean or "=" not in without_name(clean) else None


def _as_other_units(gold: str, found: str) -> Comparison | None:
    """`5\\pi` meters are not `5\\pi` centimeters; a missing unit is not compared."""
    return _DIFFERENT_TEXT if _units_differ(gold, found) else None


def _units_differ(gold: str, found: str) -> bool:
    units = {unit_of(gold), unit_of(found)} - {None, "unit"}
    return len(units) > 1


def _as_text(gold: str, found: str) -> Comparison | None:
    same = text_key(gold) == text_key(found) or text_key(without_name(gold)) == text_key(without_name(found))
    if same and _names_agree(gold, found):
        return _SAME_TEXT
    return None


def _names_agree(gold: str, found: str) -> bool:
    """`x = 5` is not `y = 5`, but either is `5`, and so is `slope = 5`; `y = 2x` may be `f(x) = 2x`."""
    names = [clean[: len(clean) - len(without_name(clean))] for clean in (gold, found)]
    heads = [text_key(name.rstrip("= ").removesuffix(r"\in").strip()) for name in names]
    if heads[0] == heads[1] or not all(map(_UNKNOWN.fullmatch, heads)):
        return True
    return "y" in heads and any("(" in head for head in heads)


def _as_words(gold: str, found: str) -> Comparison | None:
    """Words. A formula is no word, and a word no formula."""
    words, other_words = words_of(gold), words_of(found)
    if words is None:
        return None if other_words is None else _DIFFERENT_TEXT
    return _SAME_TEXT if words == other_words else _DIFFERENT_TEXT


_UNKNOWN = re.compile(r"\\?[a-zA-Z](?:_\w|_\{\w+\}|'|\(.*\))?")
_INEQUALITY = re.compile(r"[<>]|\\(?:leq|geq|neq|lt|gt)(?![a-zA-Z])")
_SET_LIKE = re.compile(r"[<>]|\\(?:leq|geq|neq|lt|gt|in|mathbb|setminus|cap|emptyset|notin)(?![a-zA-Z])")
_OTHER_RELATION = re.compile(r"\\(?:approx|neq|equiv|pm|mp|notin)(?![a-zA-Z])")
# What computer algebra would read as something: two numbers side by side, a mixed number, `1/2x`, primes, two signs.
_SIDE_BY_SIDE = re.compile(
    r"\d\s+\d|\d\s*\\frac\{\d+\}\{\d+\}\s*[\\a-zA-Z(]|\d\s*_|[-+]\s*[-+]|['?%]"
    r"|/\s*(?:\d+|[a-zA-Z])\s*(?:[a-zA-Z(]|\\(?:pi|sqrt|frac|alpha|beta|theta)(?![a-zA-Z]))"
)
_BARE_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}(?![a-zA-Z])|(?<![\\a-zA-Z])(?:or|of|is|to|if|no|by)(?![a-zA-Z])")


def _may_be_equal(gold: str, found: str, expected: Structure, answer: Structure) -> bool:
    """Whether a computer algebra system is asked: it equates points with intervals and sets, and `2x = 12` with 12."""
    if _is_equation(without_name(gold)) != _is_equation(without_name(found)) and (
        _is_equation(without_name(gold)) or not _is_equation(gold)
    ):
        return False
    if _letters(found) & {letter.swapcase() for letter in _letters(gold)} - _letters(gold):
        return False
    if (":" in gold) != (":" in found) or not set(_OTHER_RELATION.findall(found)) <= set(_OTHER_RELATION.findall(gold)):
        return False
    shapes = {expected.shape, answer.shape}
    if shapes == {"one"}:
        return bool(_INEQUALITY.search(gold)) == bool(_INEQUALITY.search(found)) or _are_set_like(gold, found)
    if len(shapes) == 1:
        return True
    if "one" in shapes:
        single = gold if expected.shape == "one" else found
        other = answer if expected.shape == "one" else expected
        if other.shape == "set" and len(other.parts) == 1:
            return True
        return other.shape in ("bracket", "union", "set") and bool(_SET_LIKE.search(single))
    return shapes == {"list", "set"} or (shapes <= {"union", "bracket", "set"} and "union" in shapes)


def ambiguity(question: Question) -> str | None:
    """Why a computer algebra system is not asked: it reads something where a reader could not; None if it may be."""
    gold = " ".join(question.gold)
    for found in question.found:
        if not set(_SIDE_BY_SIDE.findall(found)) <= set(_SIDE_BY_SIDE.findall(gold)):
            return "It can be read in several ways."
        if not _words_in(found) <= _words_in(gold):
            return "It has words that the gold answer does not have."
    if not _words_in(gold) <= _words_in(" ".join(question.found)):
        return "It lacks words that the gold answer has."
    return None


def _words_in(clean: str) -> set[str]:
    """Words, which the system passes over where they are set as text and else takes for unknowns."""
    texts = map(str.casefold, _TEXT_COMMAND.findall(clean))
    return {*texts, *_BARE_WORD.findall(_WITHOUT_ENVIRONMENT.sub("", clean))}


_WITHOUT_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-zA-Z]*\}(?:\{[lcr|\s]*\})?|\\text\{[^{}]*\}")


_EQUALS = re.compile(r"(?<![<>!])=")
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def _is_equation(clean: str) -> bool:
    return bool(_EQUALS.search(clean))


def _letters(clean: str) -> set[str]:
    return {sign for sign in _COMMAND.sub("", clean) if sign.isalpha()}


def _are_set_like(gold: str, found: str) -> bool:
    return bool(_SET_LIKE.search(gold) and _SET_LIKE.search(found))


def _as_parts(gold: Structure, found: Structure, nesting: int) -> Comparison | None:
    """None where the two are not of the same make, and only a computer algebra system may know."""
    if gold.shape == "one" or found.shape == "one":
        return None
    if not _comparable(gold, found):
        return None if "union" in (gold.shape, found.shape) else _DIFFERENT_TEXT
    if len(gold.parts) != len(found.parts):
        return _DIFFERENT_TEXT
    ordered = gold.ordered or found.ordered or _names_order(gold.parts, found.parts)
    compare_parts = _in_order if ordered else _in_any_order
    return compare_parts(gold.parts, found.parts, lambda left, right: _compare(left, right, nesting + 1))


def _names_order(gold: Sequence[str], found: Sequence[str]) -> bool:
    """Whether one of two lists names its parts, as `x = 1, y = 2` does, and the other does not."""
    named, other = ({part.partition("=")[0].strip() for part in parts if "=" in part} for parts in (gold, found))
    return (len(named) > 1 and not other) or (len(other) > 1 and not named)


def _comparable(gold: Structure, found: Structure) -> bool:
    if {gold.shape, found.shape} == {"list", "set"}:
        # Who leaves the brackets of a set away has still said what is in it; of a point or an interval nobody has.
        return True
    return gold.shape == found.shape and gold.ends == found.ends


def _in_order(gold: Sequence[str], found: Sequence[str], compare_two: Callable[[str, str], Comparison]) -> Comparison:
    compared = [compare_two(left, right) for left, right in zip(gold, found, strict=True)]
    different = next((each for each in compared if each.verdict == "different"), None)
    if different:
        return different
    open_pairs = [pair for pair, each in zip(zip(gold, found, strict=True), compared, strict=True) if each.question]
    if open_pairs:
        return _unknown(Question(tuple(left for left, _ in open_pairs), tuple(right for _, right in open_pairs)))
    return Comparison("same", "text" if any(each.by == "text" for each in compared) else "number")


def _in_any_order(
    gold: Sequence[str], found: Sequence[str], compare_two: Callable[[str, str], Comparison]
) -> Comparison:
    """Sorts out the parts that are the same; what is left decides, or is asked about."""
    left_over, unmatched, by = _without_equal_parts(gold, found)
    if len(unmatched) > _MAX_UNSORTED:
        return _DIFFERENT_TEXT
    undecided = list[str]()
    for part in unmatched:
        compared = [compare_two(part, other) for other in left_over]
        match = next((index for index, each in enumerate(compared) if each.verdict == "same"), None)
        if match is not None:
            by.add(compared[match].by)
            del left_over[match]
        elif all(each.verdict == "different" for each in compared):
            return next(iter(compared), _DIFFERENT_TEXT)
        else:
            undecided.append(part)
    if undecided:
        return _unknown(Question(tuple(undecided), tuple(left_over), ordered=False))
    return Comparison("same", "text" if "text" in by else "number")


_MAX_UNSORTED = 20
"""Parts that differ in how they are written; every one is compared with every other."""


def _without_equal_parts(gold: Sequence[str], found: Sequence[str]) -> tuple[list[str], list[str], set[Way]]:
    """What is left of the found and of the gold parts without those that are the same number or text in both."""
    places = defaultdict[Number | str, list[int]](list)
    for index, part in enumerate(found):
        places[_key(part)].append(index)
    matched, unmatched, by = set[int](), list[str](), set[Way]()
    for part in gold:
        key = _key(part)
        if places[key]:
            matched.add(places[key].pop())
            by.add("text" if isinstance(key, str) else "number")
        else:
            unmatched.append(part)
    return [part for index, part in enumerate(found) if index not in matched], unmatched, by


def _key(part: str) -> Number | str:
    """The number of a part without name and unit, which are compared apart, else its text."""
    number = None if "=" in part or any(map(str.isalpha, part)) else number_of(part)
    return number or text_key(part)
