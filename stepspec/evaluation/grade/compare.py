"""Compare two answers as text, numbers, words and parts. Formulas that are left go to computer algebra."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepspec.evaluation.grade.latex import WORDS, cleaned, text_key
from stepspec.evaluation.grade.number import is_unit, read_number
from stepspec.evaluation.grade.prose import DENIES, named_number
from stepspec.evaluation.grade.words import DecidedBy

Algebra = Callable[[str, str], bool]
"""Whether two formulas are equal. It raises where it cannot tell."""

MAX_PARTS = 20
"""Maximum number of parts whose order is free, because each is compared with every other."""


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
        if _names_differ(gold, found):
            return False
        if text_key(gold) == text_key(found):
            return True
        if "=" not in gold:
            found = value_of(found)
        elif "=" not in found and re.fullmatch(_HEAD, gold.partition("=")[0].strip()):
            gold = value_of(gold)
        for rule in (_times, _choices, _in_bases):
            if (decided := rule(gold, found)) is not None:
                return decided
        if units_differ(gold, found):
            return False
        expected, number = read_number(gold), read_number(found)
        if expected and not number and re.search(r"(?<!\\)\b[a-zA-Z]{3,}|\\text", found):
            number = named_number(found)
        if expected and number:
            self.by = "number"
            return expected.equals(number)
        gold, found = without_unit(gold), without_unit(found)
        words, others = words_of(gold), words_of(found)
        if words is not None or others is not None:
            return words == others
        left, right = structure_of(gold), structure_of(found)
        if (
            nesting < 3 and left.shape != "one" and right.shape != "one" and "union" not in (left.shape, right.shape)
        ) or left.shape == right.shape == "union":
            return self._parts_equal(left, right, nesting)
        if not _may_be_equal(gold, found, left, right):
            return False
        if text_key(gold) == text_key(found):
            return True
        self.by = "symbolic"
        return self._algebra(_in_radians(gold), _in_radians(found))

    def _parts_equal(self, gold: "Structure", found: "Structure", nesting: int) -> bool:
        if (gold.shape, gold.ends) != (found.shape, found.ends) and {gold.shape, found.shape} != {"list", "set"}:
            if {gold.shape, found.shape} != {"list", "tuple"} or not _named(gold.parts) ^ _named(found.parts):
                return False
        left, right = list(gold.parts), list(found.parts)
        ordered = gold.shape in ("tuple", "matrix", "ratio") or found.shape == "tuple"
        if _named(left) != _named(right):
            left, right, ordered = _by_name(left), _by_name(right), True
        if not ordered:
            left, right = _distinct(left), _distinct(right)
        if len(left) != len(right) or (not ordered and len(left) > MAX_PARTS):
            return False
        if ordered:
            return all(self.equal(each, other, nesting + 1) for each, other in zip(left, right, strict=True))
        for part in left:
            match = next((index for index, other in enumerate(right) if self.equal(part, other, nesting + 1)), None)
            if match is None:
                return False
            del right[match]
        return True


def _in_radians(clean: str) -> str:
    return re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\\frac{\1\\pi}{180})", clean)


def _distinct(parts: Sequence[str]) -> list[str]:
    return list({text_key(part): part for part in parts}.values())


def _named(parts: Sequence[str]) -> bool:
    return len(parts) > 1 and len({part.partition("=")[0].strip() for part in parts if "=" in part}) > 1


def _by_name(parts: Sequence[str]) -> list[str]:
    """Return values in the order of their unknowns, if they have names."""
    return [part.partition("=")[2].strip() for part in sorted(parts)] if _named(parts) else list(parts)


_LETTER = r"\\?[a-zA-Z]+(?:_\{?\w{1,3}\}?)?'{0,2}"
_HEAD = _LETTER + r"(?:\([^()]*\))?"
_NAME = re.compile(
    r"(?:(?:[a-zA-Z](?:_\{?\w{1,3}\}?)?'{0,2}|\\[a-z]+(?:_\{?\w\}?)?)(?:\(\s*[^()=]{1,20}\s*\))?|[A-Z]{2,4}|[a-zA-Z]{3,20}(?:\s+[a-zA-Z]+){0,5}"
    r"|m?\s*\\(?:measured)?angle\s*\{?[A-Z]{1,3}\}?|\\(?:overline|overrightarrow|vec|mathbf|text)\s*\{[^{}=]{1,60}\}(?:\s*[A-Za-z])?|\|[^|=]{1,10}\||\[[A-Z]{3,6}\]"
    r"|[a-zA-Z](?:_\w)?(?:\s*\+\s*[a-zA-Z](?:_\w)?){1,4}|\(\s*\\?[a-z]{1,6}(?:_\w)?(?:\s*,\s*\\?[a-z]{1,6}(?:_\w)?){1,4}\s*\))"
)
_MEMBER = re.compile(rf"(?:{_LETTER}|\(\s*[a-z](?:\s*,\s*[a-z])+\s*\))\s*\\in(?![a-zA-Z])\s*")
_LETTERS = re.compile(r"(?<!\\)(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def value_of(clean: str) -> str:
    r"""Return the value that an answer names: `5` for `x = 5` and `5 = x`, `18` for `x = 9 + 9 = 18`, `[1,2)` for
    `x \in [1,2)`. An equation that is not solved stays as it is, as in `2x = 12`."""
    clean = _MEMBER.sub("", clean, count=1) if _MEMBER.match(clean) else clean
    if "=" not in clean or len(_split(clean, _SEPARATORS)) > 1 or re.search(r"\\(?:neq|approx)|[<>]", clean):
        return clean
    *firsts, last = (part.strip() for part in clean.split("="))
    if DENIES.search(firsts[0]) or re.search(
        r"\b(?:twice|half|double|minus|opposite|negative)\b", WORDS.sub(r" \1 ", firsts[0])
    ):
        return clean
    if _NAME.fullmatch(firsts[0]):
        return last
    first, second = read_number(firsts[0]), read_number(last)
    if len(firsts) == 1 and first and second and not first.equals(second) and re.fullmatch(r"[\d.,]+", firsts[0]):
        return clean
    if re.fullmatch(_LETTER, last):
        return firsts[0] if len(firsts) == 1 else clean
    return clean if any(_LETTERS.search(_COMMAND.sub("", part)) for part in firsts) else last


def _names_differ(gold: str, found: str) -> bool:
    """Return whether both answers name an unknown, and not the same: `x = 5` and `y = 5`. `y` may be `f(x)`."""
    heads = [text_key(each.partition("=")[0]) if "=" in each else "" for each in (gold, found)]
    if not all(re.fullmatch(_HEAD, head) for head in heads) or heads[0] == heads[1]:
        return False
    return not ("y" in heads and any("(" in head for head in heads))


_TIME = re.compile(r"(\d{1,2})(?:\s?:\s?(\d{2}))?\s*(?:([ap])\s*\.?\s*m\.?)?", re.IGNORECASE)


def _times(gold: str, found: str) -> bool | None:
    """Compare times of a day. The answer has its half of the day if the gold answer has it."""
    matches = [_TIME.fullmatch(WORDS.sub(r" \1", each).strip()) for each in (gold, found)]
    if not matches[0] or not (matches[0][2] and (matches[0][3] or (matches[1] and matches[1][3]))):
        return None
    if not matches[1]:
        return False
    (hour, half), (other, given) = (
        (int(each[1]) * 60 + int(each[2] or 0), (each[3] or "").lower()) for each in matches if each
    )
    if half and not given:
        return other >= 12 * 60 and other == hour % 720 + 720 * (half == "p")
    return other == hour and (not half or given == half)


_BASES = {
    word: str(base)
    for base, word in enumerate(["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"], 2)
}
_IN_BASE = re.compile(r"\(?\s*([0-9A-F]+)\s*\)?\s*_\s*\{?\s*(?:\\text\{\s*(?:base\s*)?)?(\d{1,2}|[a-z]+)\s*\}*")


def _in_bases(gold: str, found: str) -> bool | None:
    """Compare numbers of other bases, by their digits."""
    matches = [_IN_BASE.fullmatch(each) for each in (gold, found)]
    if not any(matches):
        return None
    digits = [match and (match[1], _BASES.get(match[2], match[2])) for match in matches]
    return digits[0] == digits[1]


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
    given = _CHOICE.fullmatch(other) or _CHOICE_AND_TEXT.fullmatch(other)
    if given is None or (given.re is _CHOICE_AND_TEXT and _OTHER_CHOICE.search(given[3])):
        return False
    return choice[1] == (given[1] or given[2])


_UNITS = {
    way: ways.split()[0]
    for ways in [
        "mm millimeter millimeters",
        " cm centimeter centimeters",
        " m meter meters metres",
        " km kilometer kilometers",
        " inch in inches",
        "feet ft foot",
        " yard yd yards",
        " mile mi miles",
        " mg",
        " g gram grams",
        " kg kilogram kilograms",
        " ounce oz ounces",
        " pound lb lbs pounds",
        "ml mL milliliters",
        " liter l L liters",
        " gallon gallons",
        " second s sec seconds",
        " minute min minutes",
        " hour h hr hours",
        " day days",
        "week weeks",
        " month months",
        " year years",
        " mph",
        " cent cents",
        " dollar dollars USD",
        " degree degrees deg circ",
        " radian rad radians",
    ]
    for way in ways.split()
}
_UNIT_AT_END = re.compile(
    r"(?<=[\da-z}) ])\s*(?:\^?\\(circ)|\\text\{\s*([a-zA-Z]+)[^{}]*\}|\s([a-zA-Z]+)|(?<=\d)([a-z]{2}))\s*(?:\^\s*\{?\s*-?\d\s*\}?)?$"
)


def units_differ(gold: str, found: str) -> bool:
    """Return whether both answers have a unit, and not the same."""
    matches = [_UNIT_AT_END.search(each) for each in (gold, found)]
    units = {_UNITS.get(next(filter(None, match.groups()), "")) if match else None for match in matches}
    return len(units - {None}) > 1


_TRAILING = re.compile(r"(?<=[0-9a-zA-Z})!])((?:\s*\\text\{[^{}]*\})+\s*(?:\^\s*\{?\s*-?\d\s*\}?)?|\s*\^\\circ)\s*$")
_TRAILING_WORDS = re.compile(
    r"(?<=[0-9})])((?:\s(?:square|cubic|units?|sq|[a-z]{2,12}))+)(?:\s*\^\s*\{?\s*-?\d\s*\}?)?$"
)


def without_unit(clean: str) -> str:
    r"""Return a formula without its trailing unit: `10\sqrt{3}` for `10\sqrt{3} \text{ cm}^2`."""
    match = _TRAILING.search(clean)
    if (
        match
        and is_unit(WORDS.sub(r" \1 ", match[1]))
        and not re.search(r"\d", WORDS.sub(r"\1", re.sub(r"\^.*", "", match[1])))
        and (r"\circ" not in match[1] or not re.search(r"\\(?:sin|cos|tan)", clean))
    ):
        return clean[: match.start()].strip() or clean
    match = _TRAILING_WORDS.search(clean)
    return (
        clean[: match.start()]
        if match
        and all(each in _UNITS or each in ("square", "cubic", "unit", "units", "sq") for each in match[1].split())
        else clean
    )


_WORDS_ONLY = re.compile(r"[A-Za-z][A-Za-z0-9 .,'\"\-/()?!:]*")
_LEFT_OUT = frozenset({"the", "a", "an", "on", "in", "at", "is", "it", "s"})


def words_of(clean: str) -> tuple[str, ...] | None:
    r"""Return the words of an answer in alphabetical order; None if the answer is not in words.

    >>> words_of(r"\text{Bob and Alice}")
    ('alice', 'bob')
    """
    bare = WORDS.sub(r" \1 ", clean).strip()
    if not _WORDS_ONLY.fullmatch(re.sub(r"^\d{1,2} (?=[A-Z])", r"A", bare)):
        return None
    if r"\text{" not in clean and not re.search(r"[A-Za-z]{4,}", bare) and bare.casefold() not in ("yes", "no", "odd"):
        return None
    words = re.sub(r"[^a-z0-9]+", " ", bare.casefold()).split()
    return tuple(sorted(word for word in words if word not in _LEFT_OUT and word != "and")) or None


class Structure(NamedTuple):
    """The parts of an answer: "one", a "list", "set", "tuple" (a point or an interval), "matrix", "union" or "ratio"."""

    shape: str
    parts: Sequence[str]
    ends: str = ""


_TOKEN = re.compile(r"\\(?:begin|end)\{[a-zA-Z]*\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|\band\b|\bor\b|.", re.DOTALL)
_OPENING = frozenset({"(", "[", "{", r"\{", r"\langle"})
_CLOSING = frozenset({")", "]", "}", r"\}", r"\rangle"})
_SEPARATORS = frozenset({",", ";", "and", "or"})
_MATRIX = re.compile(
    r"\\begin\{([pbBvV]?)(?:small)?(?:matrix|array)\}\s*(?:\{[lcr|\s]*\})?(.*)\\end\{[a-zA-Z]*\}", re.DOTALL
)
_BELOW = r"(?:<|\\leq)"
_REL = r"\s*(<|>|\\leq|\\geq)\s*"
_BOUND = r"((?:(?!\\[lgn]eq|\\text)[^<>=])+?)"
_BETWEEN = re.compile(rf"{_BOUND}{_REL}[a-zA-Z]{_REL}{_BOUND}")
_ONE_SIDED = re.compile(rf"[a-zA-Z]{_REL}{_BOUND}|{_BOUND}{_REL}[a-zA-Z]")
_SUCH_THAT = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?[|:]\s*(.+)\\\}")


def structure_of(clean: str) -> Structure:
    r"""Return the parts of a cleaned answer.

    >>> structure_of(r"x \in (-\infty, 3]")
    Structure(shape='tuple', parts=['-\\infty', '3'], ends='(]')
    """
    text = _interval(value_of(_SUCH_THAT.sub(r"\1", clean)))
    if re.search(r",\s", text):  # `1,000, 2,000`
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    matrix = _MATRIX.fullmatch(text.strip("[]() ") if text.startswith(("[", "(")) else text)
    if matrix:
        rows = [_split(row, frozenset({"&"})) for row in _split(matrix[2], frozenset({r"\\"})) if row.strip()]
        kind = "v" if matrix[1] in ("v", "V") else ""
        return Structure(
            "matrix", [cell for row in rows for cell in row], kind + "x".join(str(len(row)) for row in rows)
        )
    union = _split(text, frozenset({r"\cup"}))
    if (
        len(union) == 1
        and len(either := _split(text, frozenset({"or"}))) > 1
        and all("<" in each or ">" in each or r"\leq" in each or r"\geq" in each for each in either)
    ):
        union = [_interval(each) for each in either]
    if len(union) > 1:
        return Structure("union", union)
    tokens = _TOKEN.findall(text)
    if len(tokens) > 2 and tokens[0] in {*_OPENING, "]"} and tokens[-1] in {*_CLOSING, "["} and _depths(tokens[1:-1]):
        parts = _plus_and_minus(_split("".join(tokens[1:-1]), _SEPARATORS))
        if tokens[0] == r"\{":
            return Structure("one" if "|" in text or ":" in text else "set", parts)
        if len(parts) > 1 and tokens[0] != "{":
            ends = ("(" if tokens[0] in ("]", r"\langle") else tokens[0]) + (
                ")" if tokens[-1] in ("[", r"\rangle") else tokens[-1]
            )
            return Structure("tuple", [part.replace("+\\infty", "\\infty") for part in parts], ends)
    parts = _plus_and_minus(_split(text, _SEPARATORS))
    if len(parts) > 1:
        return Structure("list", parts)
    ratio = text.split(":")
    return (
        Structure("ratio", ratio)
        if len(ratio) > 1 and all(part.strip() for part in ratio)
        else Structure("one", [text])
    )


def _depths(inner: Sequence[str]) -> bool:
    """Return whether brackets balance, so that the one before and the one behind belong together."""
    depth = 0
    for token in inner:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth < 0:
            return False
    return depth == 0


def _split(text: str, separators: frozenset[str]) -> list[str]:
    """Return the parts between separators that are outside of brackets."""
    parts, part, depth = list[str](), list[str](), 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING)
        depth += token.startswith(r"\begin") - token.startswith(r"\end")
        if depth == 0 and (
            token in separators or (token.startswith(r"\text{") and token[6:-1].strip(" ,") in separators)
        ):
            parts.append("".join(part).strip())
            part = []
        else:
            part.append(token)
    parts.append("".join(part).strip())
    return [part for part in parts if part] if separators is _SEPARATORS else parts


def _plus_and_minus(parts: Sequence[str]) -> list[str]:
    found = list[str]()
    for part in parts:
        if len(re.findall(r"\\[pm]{2}(?![a-zA-Z])", part)) == 1:
            before, after = re.split(r"\\[pm]{2}(?![a-zA-Z])", part)
            before = value_of(f"{before}0").removesuffix("0") if "=" in before else before
            found += [f"{before}+{after}" if before.strip() else after.strip(), f"{before}-{after}"]
        else:
            found.append(part)
    return found


def _interval(text: str) -> str:
    """Return the interval that an inequality for one unknown describes; other text as it is."""
    between = _BETWEEN.fullmatch(text)
    if between and (between[2] in ("<", r"\leq")) == (between[3] in ("<", r"\leq")):
        low, first, second, high = between.groups()
        if first in (">", r"\geq"):
            low, first, second, high = high, second, first, low
        return f"{'[' if 'eq' in first else '('}{low},{high}{']' if 'eq' in second else ')'}"
    one = _ONE_SIDED.fullmatch(text)
    if not one:
        return text
    relation, bound = (one[1], one[2]) if one[1] else (one[4], one[3])
    below = (relation in ("<", r"\leq")) == bool(one[1])
    if below:
        return rf"(-\infty,{bound}{']' if 'eq' in relation else ')'}"
    return rf"{'[' if 'eq' in relation else '('}{bound},\infty)"


_RELATION = re.compile(r"\\(?:approx|neq|equiv|pm|mp|notin|leq|geq|forall|exists|subset)(?![a-zA-Z])|[<>]")
_SET_LIKE = re.compile(r"[<>]|\\(?:leq|geq|in|mathbb|setminus|cap|emptyset|notin|cup)(?![a-zA-Z])")


def _may_be_equal(gold: str, found: str, expected: Structure, answer: Structure) -> bool:
    """Return whether computer algebra may compare the answers. It takes points for intervals and sets, `2x = 12` for 12,
    small letters for capitals, and leaves out words."""
    if ("=" in gold) != ("=" in found) or gold.count("'") != found.count("'"):
        return False
    if re.search(r"\d\s*\\frac", found) and not re.search(r"\d\s*\\frac", gold):
        return False  # a mixed number or a product
    if {each.swapcase() for each in _LETTERS.findall(_COMMAND.sub("", found))} & (
        {*_LETTERS.findall(_COMMAND.sub("", gold))} - {*_LETTERS.findall(_COMMAND.sub("", found))}
    ):
        return False
    if sorted(map(str.casefold, WORDS.findall(gold))) != sorted(map(str.casefold, WORDS.findall(found))):
        return False
    shapes = {expected.shape, answer.shape}
    if shapes == {"one"}:
        return {*_RELATION.findall(gold)} == {*_RELATION.findall(found)} or bool(
            _SET_LIKE.search(gold) and _SET_LIKE.search(found)
        )
    if "one" in shapes:
        single, other = (gold, answer) if expected.shape == "one" else (found, expected)
        if other.shape == "matrix":
            return r"\begin" in single
        return (other.shape == "set" and len(other.parts) == 1) or (
            other.shape in ("tuple", "union", "set") and bool(_SET_LIKE.search(single))
        )
    return "union" in shapes and shapes <= {"union", "tuple", "set"}
