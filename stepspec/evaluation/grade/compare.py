"""Compare two answers by their text, and return the formulas that computer algebra must still compare."""

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
    """Formulas to compare pairwise: position by position if `ordered`, else in any order."""

    gold: tuple[str, ...]
    found: tuple[str, ...]
    ordered: bool = True


@dataclass(frozen=True)
class AnswerComparison:
    """The result of comparing two answers by text. `question` is set exactly if the verdict is "unknown"."""

    verdict: Verdict
    by: Way
    question: Question | None = None


_SAME_TEXT = AnswerComparison("same", "text")
_DIFFERENT_TEXT = AnswerComparison("different", "text")


def compare(gold: str, found: str) -> AnswerComparison:
    """Compare two answers as times, choices and numbers, then as normalized text, then part by part.

    Args:
        gold: the gold answer.
        found: the answer found in the model's text.
    """
    return _compare(cleaned(gold), cleaned(found), 0)


_MAX_NESTING = 3


def _compare(gold: str, found: str, nesting: int) -> AnswerComparison:
    """Return the result of the first rule that applies."""
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


def _unknown(question: Question) -> AnswerComparison:
    return AnswerComparison("unknown", "text", question)


_TIME = re.compile(r"(\d{1,2})(?:\s?:\s?(\d{2}))?\s*(?:([ap])\s*\.?\s*m\.?)?", re.IGNORECASE)
_TEXT_COMMAND = re.compile(r"\\text\{([^{}]*)\}")


def _as_times(gold: str, found: str) -> AnswerComparison | None:
    """Compare times: `5:30 p.m.` is not `5:30 a.m.`.

    An answer may add a.m. or p.m. if the gold answer has none, but must not omit it if the gold answer has it.
    """
    expected, time = _time_of(gold), _time_of(found)
    if expected is None:
        return None
    if time is None or (expected[1] and not time[1]):
        # Without a.m. or p.m., only a 24-hour time such as `17:30` determines the half of the day.
        return _SAME_TEXT if time and time[0] == expected[2] and time[0] >= 12 * 60 else _DIFFERENT_TEXT
    same = time[0] == expected[0] and (not expected[1] or time[1] == expected[1])
    return _SAME_TEXT if same else _DIFFERENT_TEXT


def _time_of(clean: str) -> tuple[int, str, int] | None:
    """Return minutes as written, `a`, `p` or an empty string, and minutes since midnight; None if not a time."""
    match = _TIME.fullmatch(_TEXT_COMMAND.sub(r" \1", clean).strip())
    if match is None or not (match[2] or match[3]):
        return None
    hours, half = int(match[1]), (match[3] or "").lower()
    written = hours * 60 + int(match[2] or 0)
    return written, half, written % 720 + 720 * (half == "p") if half else written


def _as_choices(gold: str, found: str) -> AnswerComparison | None:
    choice = choice_of(gold)
    if choice is None:
        return None
    if choice_of(found, with_text=True) == choice:
        return _SAME_TEXT
    return None if text_key(gold) == text_key(without_name(found)) else _DIFFERENT_TEXT


def _as_numbers(gold: str, found: str) -> AnswerComparison | None:
    expected, number = _number(gold), _number(found)
    if expected is None or number is None:
        return None
    if not _names_agree(gold, found):
        return None
    same = expected.equals(number) and not _units_differ(gold, found)
    return AnswerComparison("same" if same else "different", "number")


def _number(clean: str) -> Number | None:
    """Return the number of an answer; None for an unsolved equation such as `x + y = 5`, which is a line."""
    return number_of(clean) if "=" not in clean or "=" not in without_name(clean) else None


def _as_other_units(gold: str, found: str) -> AnswerComparison | None:
    """Reject different units: `5\\pi` meters are not `5\\pi` centimeters. A missing unit matches every unit."""
    return _DIFFERENT_TEXT if _units_differ(gold, found) else None


def _units_differ(gold: str, found: str) -> bool:
    units = {unit_of(gold), unit_of(found)} - {None, "unit"}
    return len(units) > 1


def _as_text(gold: str, found: str) -> AnswerComparison | None:
    same = text_key(gold) == text_key(found) or text_key(without_name(gold)) == text_key(without_name(found))
    if same and _names_agree(gold, found):
        return _SAME_TEXT
    return None


def _names_agree(gold: str, found: str) -> bool:
    """Return whether the names before `=` are compatible.

    `x = 5` does not match `y = 5`, but both match `5` and `slope = 5`. `y = 2x` matches `f(x) = 2x`.
    """
    names = [clean[: len(clean) - len(without_name(clean))] for clean in (gold, found)]
    heads = [text_key(name.rstrip("= ").removesuffix(r"\in").strip()) for name in names]
    if heads[0] == heads[1] or not all(map(_UNKNOWN.fullmatch, heads)):
        return True
    return "y" in heads and any("(" in head for head in heads)


def _as_words(gold: str, found: str) -> AnswerComparison | None:
    """Compare answers in words. Words never match a formula."""
    words, other_words = words_of(gold), words_of(found)
    if words is None:
        return None if other_words is None else _DIFFERENT_TEXT
    return _SAME_TEXT if words == other_words else _DIFFERENT_TEXT


_UNKNOWN = re.compile(r"\\?[a-zA-Z](?:_\w|_\{\w+\}|'|\(.*\))?")
_INEQUALITY = re.compile(r"[<>]|\\(?:leq|geq|neq|lt|gt)(?![a-zA-Z])")
_SET_LIKE = re.compile(r"[<>]|\\(?:leq|geq|neq|lt|gt|in|mathbb|setminus|cap|emptyset|notin)(?![a-zA-Z])")
_OTHER_RELATION = re.compile(r"\\(?:approx|neq|equiv|pm|mp|notin)(?![a-zA-Z])")
# Ambiguous notation that computer algebra reads anyway: adjacent numbers, mixed numbers, `1/2x`, primes, two signs.
_SIDE_BY_SIDE = re.compile(
    r"\d\s+\d|\d\s*\\frac\{\d+\}\{\d+\}\s*[\\a-zA-Z(]|\d\s*_|[-+]\s*[-+]|['?%]"
    r"|/\s*(?:\d+|[a-zA-Z])\s*(?:[a-zA-Z(]|\\(?:pi|sqrt|frac|alpha|beta|theta)(?![a-zA-Z]))"
)
_BARE_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}(?![a-zA-Z])|(?<![\\a-zA-Z])(?:or|of|is|to|if|no|by)(?![a-zA-Z])")


def _may_be_equal(gold: str, found: str, expected: Structure, answer: Structure) -> bool:
    """Return whether computer algebra should compare the answers.

    It must not see some pairs, because it treats points as equal to intervals and sets, and `2x = 12` as equal to 12.
    """
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
    """Return why the notation is too ambiguous for computer algebra; None if it is not ambiguous."""
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
    """Return the words of an answer. Computer algebra skips words in `\\text` and reads others as unknowns."""
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


def _as_parts(gold: Structure, found: Structure, nesting: int) -> AnswerComparison | None:
    """Compare structured answers part by part; None if only computer algebra can compare the two structures."""
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
    """Return whether exactly one of two lists names its parts, as `x = 1, y = 2` does."""
    named, other = ({part.partition("=")[0].strip() for part in parts if "=" in part} for parts in (gold, found))
    return (len(named) > 1 and not other) or (len(other) > 1 and not named)


def _comparable(gold: Structure, found: Structure) -> bool:
    if {gold.shape, found.shape} == {"list", "set"}:
        # A set without brackets still lists its elements. A point or interval without brackets is ambiguous.
        return True
    return gold.shape == found.shape and gold.ends == found.ends


def _in_order(
    gold: Sequence[str], found: Sequence[str], compare_two: Callable[[str, str], AnswerComparison]
) -> AnswerComparison:
    compared = [compare_two(left, right) for left, right in zip(gold, found, strict=True)]
    different = next((each for each in compared if each.verdict == "different"), None)
    if different:
        return different
    open_pairs = [pair for pair, each in zip(zip(gold, found, strict=True), compared, strict=True) if each.question]
    if open_pairs:
        return _unknown(Question(tuple(left for left, _ in open_pairs), tuple(right for _, right in open_pairs)))
    return AnswerComparison("same", "text" if any(each.by == "text" for each in compared) else "number")


def _in_any_order(
    gold: Sequence[str], found: Sequence[str], compare_two: Callable[[str, str], AnswerComparison]
) -> AnswerComparison:
    """Match equal parts first. The remaining parts decide the verdict or go to computer algebra."""
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
    return AnswerComparison("same", "text" if "text" in by else "number")


_MAX_UNSORTED = 20
"""Maximum number of unmatched parts, because each is compared with every other."""


def _without_equal_parts(gold: Sequence[str], found: Sequence[str]) -> tuple[list[str], list[str], set[Way]]:
    """Return the found and gold parts that have no equal number or text on the other side, and how parts matched."""
    positions = defaultdict[Number | str, list[int]](list)
    for index, part in enumerate(found):
        positions[_key(part)].append(index)
    matched, unmatched, by = set[int](), list[str](), set[Way]()
    for part in gold:
        key = _key(part)
        if positions[key]:
            matched.add(positions[key].pop())
            by.add("text" if isinstance(key, str) else "number")
        else:
            unmatched.append(part)
    return [part for index, part in enumerate(found) if index not in matched], unmatched, by


def _key(part: str) -> Number | str:
    """Return the number of a part without name or unit, else its text. Names and units are compared separately."""
    number = None if "=" in part or any(map(str.isalpha, part)) else number_of(part)
    return number or text_key(part)
