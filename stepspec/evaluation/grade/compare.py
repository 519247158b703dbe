"""Compare two answers as text, choices, times, numbers and words. What is left goes to computer algebra by its form."""

import re
from collections.abc import Callable
from typing import Literal

from stepspec.evaluation.grade.latex import WORDS, cleaned, listed, text_key
from stepspec.evaluation.grade.number import VALUES, in_digits, is_unit, read_number
from stepspec.evaluation.grade.prose import DENIES, PART, named_number

DecidedBy = Literal["number", "text", "symbolic"]
Algebra = Callable[[str, str], bool]
"""Whether two formulas are equal. It raises where it cannot tell."""


def compare(gold: str, found: str, algebra: Algebra) -> tuple[bool, DecidedBy]:
    """Return whether an answer is the gold answer, and what has decided it."""
    gold, found = cleaned(gold), cleaned(found)
    if text_key(gold) == text_key(found):
        return True, "text"
    if "=" not in gold:
        gold, found = value_of(gold), value_of(found)
    elif "=" not in found and re.fullmatch(rf"{_LETTER}(?:\([^()]*\))?", gold.partition("=")[0].strip()):
        gold = value_of(gold)
    bases = [match and (match[1], str(VALUES.get(match[2], match[2]))) for match in map(_BASE.fullmatch, (gold, found))]
    if any(bases):
        return bases[0] == bases[1], "text"
    for read in (_time, _choice):
        if wanted := read(gold):
            return wanted == read(found), "text"
    if len({split_unit(gold)[1], split_unit(found)[1]} - {None}) > 1:
        return False, "text"
    expected, number = read_number(gold), read_number(found)
    if expected and not number and re.search(r"(?<!\\)\b[a-zA-Z]{3,}|\\text|\d \(", found):
        number = named_number(found)
    if expected and number:
        return expected.equals(number), "number"
    gold, found = split_unit(gold)[0], split_unit(found)[0]
    words, others = _words_of(gold), _words_of(found)
    if words is not None or others is not None:
        return words == others, "text"
    gold = _rewritten(gold)
    found = _rewritten(found if "=" in gold else value_of(found))
    if not _may_be_equal(gold, found):
        return False, "text"
    return text_key(gold) == text_key(found) or algebra(gold, found), "symbolic"


_LETTER = r"\\?[a-zA-Z]+(?:_\{?\w{1,3}\}?)?'{0,2}"
_MEMBER = re.compile(rf"(?:{_LETTER}|\(\s*[a-z](?:\s*,\s*[a-z])+\s*\))\s*\\in(?![a-zA-Z])\s*")
# Left out of a name: what stands in brackets or below, and commands without arithmetic.
_WITHIN = re.compile(r"_\{[^{}]*\}|_\w|\([^()]*\)|\|[^|]*\||\[[^\]]*\]|\\(?:text|over\w+|vec|mathbf)\s*\{[^{}]*\}")
_ARITHMETIC = re.compile(r"\d|[-/^*!]|\\(?:frac|sqrt|cdot|log|ln|sin|cos|tan|pm|binom|sum|int|lim)(?![a-z])")


def value_of(clean: str) -> str:
    r"""Return the value that an answer names: `5` for `x = 5` and `5 = x`, `18` for `x = 9 + 9 = 18`, `[1,2)` for
    `x \in [1,2)`, `\pi` for `\pi \approx 3.14`. An equation that is not solved stays as it is, as in `2x = 12`."""
    clean = _MEMBER.sub("", clean, count=1) if _MEMBER.match(clean) else clean
    exact, about, decimal = clean.partition(r"\approx")
    clean = exact.strip() if about and read_number(decimal.strip()) else clean
    if "=" not in clean or len(_split(in_digits(clean))) > 1 or re.search(r"\\(?:neq|approx)|[<>]", clean):
        return clean
    *firsts, last = (part.strip() for part in clean.split("="))
    name = WORDS.sub(r" \1 ", firsts[0])
    if DENIES.search(name) or re.search(rf"\b(?:{PART})\b", name):
        return clean
    if not _ARITHMETIC.search(_WITHIN.sub("", firsts[0])):
        return last
    if re.fullmatch(_LETTER, last):
        return firsts[0] if len(firsts) == 1 else clean
    first, second = read_number(firsts[0]), read_number(last)
    if first and second and not first.equals(second) and re.fullmatch(r"[\d.,]+", firsts[0]):
        return clean
    bare = (re.sub(r"\\[a-zA-Z]+", "", part) for part in firsts)
    return clean if any(re.search(r"(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])", part) for part in bare) else last


def _time(clean: str) -> tuple[int, str] | None:
    time = re.fullmatch(
        r"(\d{1,2})(?:\s?:\s?(\d{2}))?\s*([ap])\s?\.?\s?m\.?", WORDS.sub(r" \1", clean).strip(), re.IGNORECASE
    )
    return (int(time[1]) * 60 + int(time[2] or 0), time[3].lower()) if time else None


_SECOND = r"\([A-J]\)|\b(?:and|or|n?not?|wrong|incorrect|false)\b|[&?]|(?<![A-Za-z])[B-HJ](?![A-Za-z'])"
_CHOICE = re.compile(rf"(?i:option|choice|answer)?\s*\(?\s*([A-J])\s*(?:\)?|[).:](?!.*(?:{_SECOND})).+)")


def _choice(clean: str) -> str | None:
    choice = _CHOICE.fullmatch(WORDS.sub(r"\1", clean).strip())
    return choice and choice[1]


_BASE = re.compile(r"\(?\s*([0-9A-F]+)\s*\)?\s*_\s*\{?\s*(?:\\text\{\s*(?:base\s*)?)?(\d{1,2}|[a-z]+)\s*\}*")


# The units that are compared, each with its abbreviation.
_PAIRS = """millimeter/mm centimeter/cm meter/m kilometer/km inch/in feet/ft foot/ft yard/yd mile/mi gram/g kilogram/kg
ounce/oz pound/lb liter/L second/s minute/min hour/h day/d week/wk month/mo year/yr cent/cent dollar/USD degree/circ
radian/rad"""
_UNITS = dict(each.split("/") for each in listed(_PAIRS))
_WORDS_AFTER = r"(?:\s*\\text\{[^{}]*\})+|(?:\s[a-z]{2,12})+|(?<=\d)[a-z]{2}"
_UNIT = re.compile(rf"(?<=[\da-zA-Z}})!])\s*(?:\^?\\circ|({_WORDS_AFTER})(?:\s*\^\s*\{{?-?\d\}}?)?)$")


def split_unit(clean: str) -> tuple[str, str | None]:
    r"""Return a formula without its unit, and the unit if it is known: `2\pi` and `cm` for `2\pi\text{ cm}^2`."""
    match = _UNIT.search(clean)
    words = WORDS.sub(r" \1 ", match[1] or " circ") if match else ""
    names = (_UNITS.get(each, each) for word in words.split() for each in (word, word[:-1], word[:-2]))
    unit = next((name for name in names if name in _UNITS.values()), None)
    is_angle = unit == "circ" and re.search(r"\\(?:sin|cos|tan)", clean)
    if not match or is_angle or not is_unit(words) or not (unit or r"\text" in match[0] or "unit" in words):
        return clean, None
    return clean[: match.start()].strip() or clean, unit


_WORDS_ONLY = re.compile(r"(?:\d{1,2}(?:st|nd|rd|th)? (?=[A-Z]))?[A-Za-z][A-Za-z0-9 .,'\"\-/()?!:]*")
_LEFT_OUT = listed("the a an on in at is it s and")


def _words_of(clean: str) -> list[str] | None:
    """Return the words of an answer in alphabetical order; None if the answer is not in words."""
    bare = WORDS.sub(r" \1 ", clean).strip()
    if not _WORDS_ONLY.fullmatch(bare) or (
        r"\text{" not in clean and not re.search(r"[A-Za-z]{4,}", bare) and bare.casefold() not in ("yes", "no", "odd")
    ):
        return None
    words = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|[^a-z0-9]+", " ", bare.casefold()).split()
    return sorted(word for word in words if word not in _LEFT_OUT) or None


_TOKEN = re.compile(r"\\(?:begin|end)\{[a-zA-Z]*\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|\band\b|\bor\b|.", re.DOTALL)
_OPENING, _CLOSING = ("(", "[", "{", r"\{", r"\langle"), (")", "]", "}", r"\}", r"\rangle")


def _split(text: str, separators: str = ", ; and or") -> list[str]:
    """Return the parts between separators that are outside of brackets."""
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        word = token[6:-1].strip(" ,") if token.startswith(r"\text{") else token
        if depth == 0 and word in separators.split():
            parts.append("")
            continue
        depth += (token in _OPENING or token.startswith(r"\begin")) - (token in _CLOSING or token.startswith(r"\end"))
        parts[-1] += token
    return [part.strip() for part in parts]


_SUCH_THAT = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?[|:]\s*(.+)\\\}")
_INEQUALITY = re.compile(r"([^,=<>\\]+?)\s*(<|>|\\[lg]eq)\s*([^,=<>\\]+)")
_SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_RATIO = re.compile(r"\s*(?::|\\text\{\s*to\s*\}|(?<=\d)\sto\s(?=\d))\s*")


def _rewritten(clean: str) -> str:
    r"""Return an answer as computer algebra reads it, such as an interval for an inequality, both values for `\pm`."""
    text = _SUCH_THAT.sub(r"\1", clean)
    sides = [_interval(each) for each in _split(text, "or")]
    if len(sides) > 1 and all(side[:1] in ("(", "[") for side in sides):
        return r"\cup".join(sides)
    text = _interval(text)
    if re.fullmatch(r"\].*[\[\])]|\[.*\[", text):  # `]1,2[`
        text = text[0].replace("]", "(") + text[1:-1] + text[-1].replace("[", ")")
    text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\\frac{\1\\pi}{180})", text.replace(r"+\infty", r"\infty"))
    text = re.sub(r",\s*(?=\\text\{\s*(?:and|or)\b|(?:and|or)\b)", " ", text)
    if re.search(r",\s", text):  # `1,000, 2,000`
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    ratio = _RATIO.split(text)
    if len(ratio) > 1 and all(ratio) and "{" not in text[:2]:
        return rf"\langle {','.join(ratio)}\rangle"
    parts = [_SIGNS.sub(sign, each) for each in _split(text) for sign in ("+-" if _SIGNS.search(each) else "+")]
    names = [re.sub(r"_\{?\d+\}?", "", part.partition("=")[0].strip()) for part in parts if "=" in part]
    if len({*names}) > 1:
        return f"({','.join(part.partition('=')[2] for part in sorted(parts))})"
    if names and len(parts) > 1 and "=" in parts[0]:
        parts = [part.rpartition("=")[2] for part in parts]
    return ",".join(parts) if all(parts) else text


def _interval(text: str) -> str:
    """Return the interval that an inequality of an unknown and a value describes; other text as it is."""
    if other := re.fullmatch(r"[a-zA-Z]\s*\\neq\s*([^,=<>]+)", text):
        return rf"(-\infty,{other[1]})\cup({other[1]},\infty)"
    if not (sides := _INEQUALITY.fullmatch(text)) or not (sides[1].isalpha() or sides[3].isalpha()):
        return text
    bound = sides[3] if sides[1].isalpha() else sides[1]
    if sides[1].isalpha() == (sides[2] in ("<", r"\leq")):
        return rf"(-\infty,{bound}{']' if 'eq' in sides[2] else ')'}"
    return rf"{'[' if 'eq' in sides[2] else '('}{bound},\infty)"


_LETTERS = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")
_RELATION = re.compile(r"\\(?:approx|neq|equiv|notin|forall|exists|subset)(?![a-zA-Z])")
_SET_LIKE = re.compile(r"[<>]|\\(?:leq|geq|in|mathbb|setminus|cap|emptyset|notin|cup)(?![a-zA-Z])")


def _may_be_equal(gold: str, found: str) -> bool:
    """Return whether computer algebra may compare the answers: it takes points for intervals, and leaves out words."""
    letters, others = ({*_LETTERS.findall(re.sub(r"\\[a-zA-Z]+", "", each))} for each in (gold, found))
    signs, other_signs = (
        ("=" in each, each.count("'"), sorted(WORDS.findall(each.casefold())), *_RELATION.findall(each))
        for each in (gold, found)
    )
    is_mixed = re.search(r"\d\s*\\frac", found) and not re.search(r"\d\s*\\frac", gold)
    if is_mixed or signs != other_signs or {letter.swapcase() for letter in others} & (letters - others):
        return False
    forms = {_form(gold), _form(found)}
    return len(forms) == 1 or ("set" in forms and all(form[0] in "s{([" for form in forms))


def _form(text: str) -> str:
    """Return the form of an answer: "matrix", "set", "{" or "value"; of a point or interval, its brackets and size."""
    if r"\begin" in text:
        return "determinant" if r"\begin{v" in text else "matrix"
    if _SET_LIKE.search(text):
        return "set"
    tokens = _TOKEN.findall(text) or [""]
    inner = _split("".join(tokens[1:-1]))
    if tokens[0] == r"\{" and tokens[-1] == r"\}":
        return "set" if inner == [""] else "value" if len(inner) == 1 else "{"
    if tokens[0] in _OPENING and tokens[-1] in _CLOSING and len(inner) > 1 and len(_split(text)) == 1:
        return f"{tokens[0]}{len(inner)}{tokens[-1]}"
    return "{" if len(_split(text)) > 1 else "value"
