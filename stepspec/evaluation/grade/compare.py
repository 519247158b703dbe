"""Compare two answers as text, numbers, words and parts. Formulas that are left go to computer algebra."""

import re
from collections.abc import Callable
from typing import Literal

from stepspec.evaluation.grade.latex import WORDS, cleaned, text_key
from stepspec.evaluation.grade.number import is_unit, read_number
from stepspec.evaluation.grade.prose import named_number
from stepspec.evaluation.grade.structure import BRACKETED, Structure, structure_of, value_of

DecidedBy = Literal["number", "text", "symbolic"]
Algebra = Callable[[str, str], bool]
"""Whether two formulas are equal. It raises where it cannot tell."""

MAX_PARTS = 20
"""Maximum number of parts whose order is free, because each is compared with every other."""
MAX_NESTING = 3


def compare(gold: str, found: str, algebra: Algebra) -> tuple[bool, DecidedBy]:
    """Return whether an answer is the gold answer, and what has decided it."""
    comparison = _Comparison(algebra)
    return comparison.equal(cleaned(gold), cleaned(found), 0), comparison.by


class _Comparison:
    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra
        self.by: DecidedBy = "text"

    def equal(self, gold: str, found: str, nesting: int) -> bool:
        """Return what the first rule that applies says."""
        if text_key(gold) == text_key(found):
            return True
        if "=" not in gold:
            found = value_of(found)
        elif "=" not in found and re.fullmatch(_HEAD, gold.partition("=")[0].strip()):
            gold = value_of(gold)
        for rule in (_times, _choices, _in_bases, _units):
            if (decided := rule(gold, found)) is not None:
                return decided
        expected, number = read_number(gold), read_number(found)
        if expected and not number and re.search(r"(?<!\\)\b[a-zA-Z]{3,}|\\text", found):
            number = named_number(found)
        if expected and number:
            self.by = "number"
            return expected.equals(number)
        gold, found = without_unit(gold), without_unit(found)
        words, others = _words_of(gold), _words_of(found)
        if words is not None or others is not None:
            return words == others
        left, right = structure_of(gold), structure_of(found)
        shapes = {left.shape, right.shape}
        if nesting < MAX_NESTING and "one" not in shapes and (shapes == {"union"} or "union" not in shapes):
            return self._parts_equal(left, right, nesting)
        if not _may_be_equal(gold, found, left, right):
            return False
        self.by = "symbolic"
        return text_key(gold) == text_key(found) or self._algebra(_in_radians(gold), _in_radians(found))

    def _parts_equal(self, gold: Structure, found: Structure, nesting: int) -> bool:
        shapes = {gold.shape, found.shape}
        named = _has_names(gold) != _has_names(found)
        if (gold.shape, gold.ends) != (found.shape, found.ends) and shapes != {"list", "set"}:
            if shapes != {"list", "tuple"} or not named:
                return False
        ordered = named or gold.shape in ("tuple", "matrix", "ratio") or found.shape == "tuple"
        left, right = (_by_name(each) if named else [*each.parts] for each in (gold, found))
        if not ordered:
            left, right = (list({text_key(part): part for part in parts}.values()) for parts in (left, right))
        if len(left) != len(right) or (not ordered and len(left) > MAX_PARTS):
            return False
        for part in left:
            others = right[:1] if ordered else right
            match = next((other for other in others if self.equal(part, other, nesting + 1)), None)
            if match is None:
                return False
            right.remove(match)
        return True


def _in_radians(clean: str) -> str:
    return re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\\frac{\1\\pi}{180})", clean)


def _has_names(structure: Structure) -> bool:
    return len({part.partition("=")[0].strip() for part in structure.parts if "=" in part}) > 1


def _by_name(structure: Structure) -> list[str]:
    """Return values in the order of their unknowns, if they have names."""
    parts = structure.parts
    return [part.partition("=")[2].strip() for part in sorted(parts)] if _has_names(structure) else [*parts]


_HEAD = r"\\?[a-zA-Z]+(?:_\{?\w{1,3}\}?)?'{0,2}(?:\([^()]*\))?"


_TIME = re.compile(r"(\d{1,2})(?:\s?:\s?(\d{2}))?\s*(?:([ap])\s*\.?\s*m\.?)?", re.IGNORECASE)


def _times(gold: str, found: str) -> bool | None:
    """Compare times of a day. The answer has its half of the day if the gold answer has it."""
    time, other = (_TIME.fullmatch(WORDS.sub(r" \1", each).strip()) for each in (gold, found))
    if not time or not (time[3] or (time[2] and other and other[3])):
        return None
    if not other:
        return False
    minutes, given = (int(each[1]) * 60 + int(each[2] or 0) for each in (time, other))
    half, given_half = ((each[3] or "").lower() for each in (time, other))
    if half and not given_half:
        return given >= 12 * 60 and given == minutes % 720 + 720 * (half == "p")
    return given == minutes and half in ("", given_half)


_BASES = {word: str(base) for base, word in enumerate("two three four five six seven eight nine ten".split(), 2)}
_IN_BASE = re.compile(r"\(?\s*([0-9A-F]+)\s*\)?\s*_\s*\{?\s*(?:\\text\{\s*(?:base\s*)?)?(\d{1,2}|[a-z]+)\s*\}*")


def _in_bases(gold: str, found: str) -> bool | None:
    """Compare numbers of other bases, by their digits."""
    matches = [_IN_BASE.fullmatch(each) for each in (gold, found)]
    digits = [match and (match[1], _BASES.get(match[2], match[2])) for match in matches]
    return digits[0] == digits[1] if any(matches) else None


_CHOICE = re.compile(r"(?i:option|choice|answer)?\s*\(?\s*([A-J])\s*\)?")
_CHOICE_AND_TEXT = re.compile(r"(?:\(\s*([A-J])\s*\)|([A-J])\s*[).:])\s*(\S.*)")
_OTHER_CHOICE = re.compile(
    r"\([A-J]\)|\b(?:and|or|nor|not|wrong|incorrect|false)\b|&|\?|(?<![A-Za-z])[B-HJ](?![A-Za-z'])"
)


def _choices(gold: str, found: str) -> bool | None:
    bare, other = (WORDS.sub(r"\1", each).strip() for each in (gold, found))
    choice = _CHOICE.fullmatch(bare)
    if not choice:
        return None
    if given := _CHOICE.fullmatch(other):
        return choice[1] == given[1]
    given = _CHOICE_AND_TEXT.fullmatch(other)
    return given is not None and not _OTHER_CHOICE.search(given[3]) and choice[1] == (given[1] or given[2])


# Each line has the units that are compared, with every way to write them.
_UNITS = {
    way: ways.split()[0]
    for ways in (
        "mm millimeter millimeters", "cm centimeter centimeters", "m meter meters metres", "km kilometer kilometers",
        "in inch inches", "ft feet foot", "yd yard yards", "mi mile miles", "mg", "g gram grams", "kg kilogram kilograms",
        "oz ounce ounces", "lb lbs pound pounds", "mL ml milliliters", "L l liter liters", "gallon gallons", "mph",
        "s sec second seconds", "min minute minutes", "h hr hour hours", "day days", "week weeks", "month months",
        "year years", "cent cents", "USD dollar dollars", "circ deg degree degrees", "rad radian radians",
    )
    for way in ways.split()
}  # fmt: skip
_UNIT_AT_END = re.compile(
    r"(?<=[\da-z}) ])\s*(?:\^?\\(circ)|\\text\{\s*([a-zA-Z]+)[^{}]*\}|\s([a-zA-Z]+)|(?<=\d)([a-z]{2}))"
    r"\s*(?:\^\s*\{?\s*-?\d\s*\}?)?$"
)


def _units(gold: str, found: str) -> bool | None:
    matches = [_UNIT_AT_END.search(each) for each in (gold, found)]
    units = {_UNITS.get(next(filter(None, match.groups()), "")) if match else None for match in matches}
    return False if len(units - {None}) > 1 else None


_POWER = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
_TRAILING = re.compile(rf"(?<=[0-9a-zA-Z}})!])((?:\s*\\text\{{[^{{}}]*\}})+){_POWER}\s*$|\s*\^\\circ\s*$")
_TRAILING_WORDS = re.compile(rf"(?<=[0-9}})])((?:\s[a-z]{{2,12}})+){_POWER}$")


def without_unit(clean: str) -> str:
    r"""Return a formula without its trailing unit: `10\sqrt{3}` for `10\sqrt{3} \text{ cm}^2`."""
    if match := _TRAILING.search(clean):
        unit = WORDS.sub(r" \1 ", match[1] or "")
        is_angle = match[1] is None and re.search(r"\\(?:sin|cos|tan)", clean)
        return clean if is_angle or not is_unit(unit) else clean[: match.start()].strip() or clean
    if match := _TRAILING_WORDS.search(clean):
        if all(word in _UNITS or word in ("square", "cubic", "unit", "units", "sq") for word in match[1].split()):
            return clean[: match.start()]
    return clean


_WORDS_ONLY = re.compile(r"(?:\d{1,2} (?=[A-Z]))?[A-Za-z][A-Za-z0-9 .,'\"\-/()?!:]*")
_LEFT_OUT = frozenset("the a an on in at is it s and".split())


def _words_of(clean: str) -> list[str] | None:
    """Return the words of an answer in alphabetical order; None if the answer is not in words."""
    bare = WORDS.sub(r" \1 ", clean).strip()
    if not _WORDS_ONLY.fullmatch(bare):
        return None
    if r"\text{" not in clean and not re.search(r"[A-Za-z]{4,}", bare) and bare.casefold() not in ("yes", "no", "odd"):
        return None
    words = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|[^a-z0-9]+", " ", bare.casefold()).split()
    return sorted(word for word in words if word not in _LEFT_OUT) or None


_LETTERS = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_RELATION = re.compile(r"\\(?:approx|neq|equiv|pm|mp|notin|leq|geq|forall|exists|subset)(?![a-zA-Z])|[<>]")
_SET_LIKE = re.compile(r"[<>]|\\(?:leq|geq|in|mathbb|setminus|cap|emptyset|notin|cup)(?![a-zA-Z])")


def _may_be_equal(gold: str, found: str, expected: Structure, answer: Structure) -> bool:
    """Return whether computer algebra may compare the answers. It takes points for intervals and sets, `2x = 12` for 12,
    small letters for capitals, and leaves out words."""
    if ("=" in gold) != ("=" in found) or gold.count("'") != found.count("'"):
        return False
    if re.search(r"\d\s*\\frac", found) and not re.search(r"\d\s*\\frac", gold):
        return False  # a mixed number or a product
    letters, others = ({*_LETTERS.findall(_COMMAND.sub("", each))} for each in (gold, found))
    if {letter.swapcase() for letter in others} & (letters - others):
        return False
    if sorted(map(str.casefold, WORDS.findall(gold))) != sorted(map(str.casefold, WORDS.findall(found))):
        return False
    shapes = {expected.shape, answer.shape}
    if shapes == {"one"}:
        same = {*_RELATION.findall(gold)} == {*_RELATION.findall(found)}
        return same or bool(_SET_LIKE.search(gold) and _SET_LIKE.search(found))
    if "one" not in shapes:
        return "union" in shapes and shapes <= {"union", "tuple", "set"}
    single, other = (gold, answer) if expected.shape == "one" else (found, expected)
    if other.shape == "matrix":
        return BRACKETED in single
    return (other.shape == "set" and len(other.parts) == 1) or (
        other.shape in ("tuple", "union", "set") and bool(_SET_LIKE.search(single))
    )
