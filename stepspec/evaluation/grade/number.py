r"""Read numbers exactly, in the forms that people and models write.

Two numbers are equal if their values are equal as fractions. The comparison ignores three things:

- units and currencies: `\$18`, `18 dollars` and `18` are equal, and so are `5 cm` and `5 m`;
- the percent sign, if only one number has it: `50\%` is equal to `50` and to `0.5`, because questions rarely say which
  form they ask for;
- the base, if only one number has it: `1234_5` is equal to `1234` and to `194`.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from stepspec.evaluation.grade.latex import cleaned, value_named
from stepspec.evaluation.grade.vocabulary import CANONICAL_UNIT as NAMES_OF_UNITS
from stepspec.evaluation.grade.vocabulary import (
    CHANGES_BEHIND,
    DENIES,
    GLUED_UNITS,
    LETTER_UNITS,
    SHORT_UNITS,
    is_long_word,
    is_unit_text,
)

MAX_EXPONENT = 400
"""Largest exponent of scientific notation that is read. Larger numbers are not plausible answers and cost memory."""


@dataclass(frozen=True)
class Number:
    """A number as written: its `value`, and its value without the mark, `plain`."""

    value: Fraction
    plain: Fraction | None = None
    """None without a mark, or if the digits are not decimal without their base."""
    mark: Literal["percent", "base"] | None = None

    def equals(self, other: "Number") -> bool:
        """Return whether two numbers are equal. The module docstring has the rules for marks."""
        if self.mark == other.mark:
            return self.value == other.value
        return bool({self.value, self.plain} & {other.value, other.plain} - {None})

    def __str__(self) -> str:
        shown = self.value * 100 if self.mark == "percent" else self.value
        sign = "%" if self.mark == "percent" else ""
        return f"{_decimal(shown) or shown}{sign}"


_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_SIGNED = rf"[+-]?\s*(?:{_UNSIGNED})"
_WHOLE = re.compile(
    rf"""(?:US|Rs\.?|USD|EUR|GBP)?\s*(?P<sign>[+-]?)\s*(?:
      (?P<mixed>\d+)\s*(?:\\frac\s*\{{\s*(?P<above>\d+)\s*\}}\s*\{{\s*(?P<below>\d+)\s*\}}
        |(?:\s|and\s)\s*(?P<above2>\d+)\s*/\s*(?P<below2>\d+))
    | \\frac\s*\{{\s*(?P<upper>{_SIGNED})\s*\}}\s*\{{\s*(?P<lower>{_SIGNED})\s*\}}
    | (?P<top>{_UNSIGNED})\s*/\s*(?P<bottom>{_UNSIGNED})
    | (?P<digits>[0-9A-F]*[0-9][0-9A-F]*+)\s*_\s*\{{?\s*(?:\\text\{{\s*(?:base)?\s*)?
        (?P<base>\d{{1,2}}|two|eight|ten|sixteen)\s*\}}?(?:\s*\}})?
    | 10\s*\^\s*\{{?\s*(?P<power>[+-]?\s*\d{{1,5}})(?:\s*\}})?
    | (?P<before>\d*)\.(?P<once>\d*)\\(?:overline|bar|dot)\s*\{{?\s*(?P<repeated>\d+)(?:\s*\}})?
    | (?P<decimal>{_UNSIGNED})
        (?:(?:[eE]|\s*(?:\\cdot|x)\s*10\s*\^)\s*\{{?\s*(?P<exponent>[+-]?\s*\d{{1,5}})(?:\s*\}})?)?
    )(?P<scale>\s*(?:hundred|thousand|million|billion|trillion)\b)?(?P<unit>.*)""",
    re.VERBOSE | re.DOTALL,
)
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE_IN_TEXT = re.compile(rf"\\text\{{\s*((?:{'|'.join(_SCALES)})\b[^{{}}]*)\}}")
_TEXT_WITH_NUMBER = re.compile(r"\\text\{([^{}]*\d[^{}]*)\}")
_DENIED_OTHER = re.compile(r"(?<=\S) \(not\b[^()]*\)$")
_BASES = {"two": 2, "eight": 8, "ten": 10, "sixteen": 16}

_UNIT_TOKEN = re.compile(
    r"(\s*)(?:\\text\{([^{}]*)\}|((?:AM|PM|USD|kWh|kW|mL|Hz|[a-zA-Z][a-z'’]*)(?:\.[a-z](?![a-z]))*\.?(?:-[a-z]+)*)|([/()%]))"
    r"(?:\s*\^\s*\{?\s*-?\d\s*\}?|\d(?!\d))?"
)
_IN_PARENTHESES = re.compile(r"\(([^(),]*)\)")
_DIGIT = re.compile(r"\d")


@lru_cache(maxsize=4096)
def read_number(answer: str) -> Number | None:
    r"""Return the number that the whole answer, unit included, stands for; None if it is not a number.

    >>> str(read_number(r"$\$1{,}234.50$ per week"))
    '1234.5'
    """
    plain = _PLAIN.fullmatch(answer)
    if plain:
        return Number(Fraction(plain[1] + plain[2].replace(",", "") + (plain[3] or "")))
    return number_of(cleaned(answer))


# Fast path: most answers match this and need no cleaning.
_PLAIN = re.compile(r"\s*\\?\$?(-?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?\s*", re.ASCII)


@lru_cache(maxsize=4096)
def number_of(clean: str) -> Number | None:
    """Return the number of a cleaned answer; None if it is not a number."""
    match = _number_match(clean)
    value = _value(match) if match else None
    if match is None or value is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if match["base"]:
        return Number(sign * value, _plain_digits(match["digits"], sign), "base")
    if "%" in match["unit"]:
        return Number(sign * value / 100, sign * value, "percent")
    return Number(sign * value * _SCALES.get((match["scale"] or "").strip(), 1))


def digits_of(clean: str) -> str | None:
    """Return the digits of a cleaned answer as written; None if it is a fraction, a power or the like."""
    match = _number_match(clean)
    if match is None or match["decimal"] is None or match["exponent"] or match["scale"] or "%" in match["unit"]:
        return None
    return match["sign"] + match["decimal"].replace(" ", "")


def _number_match(clean: str) -> re.Match[str] | None:
    text = _TEXT_WITH_NUMBER.sub(r" \1 ", _SCALE_IN_TEXT.sub(r"\1", value_named(clean)))
    text = _DENIED_OTHER.sub("", " ".join(text.split()))
    text = (_IN_PARENTHESES.fullmatch(text) or [text, text])[1].strip()
    match = _WHOLE.fullmatch(text)
    return match if match and is_unit(match["unit"]) else None


def is_unit(text: str) -> bool:
    r"""Return whether the text after a number leaves its value unchanged.

    Known units do, and so do words after a space or in `\text`.
    """
    if not text or text.isspace():
        return True
    if text.lstrip()[0] in "/(" or text.count("%") > 1 or DENIES.search(text):
        return False
    position = 0
    while position < len(text.rstrip(" .")):
        token = _UNIT_TOKEN.match(text, position)
        if token is None or not _leaves_value(token, text):
            return False
        position = token.end()
    return True


def _leaves_value(token: re.Match[str], text: str) -> bool:
    space, words, word, _ = token.groups()
    if words is not None:
        return is_unit_text(words)
    if word is None:
        return True
    before = text[token.start() - 1 : token.start()]
    bare = word.rstrip(".")
    if not space and before not in ("/", "("):
        return bare in GLUED_UNITS or word in GLUED_UNITS
    if bare.casefold() in CHANGES_BEHIND:
        return False
    return (
        is_long_word(bare) or bare in SHORT_UNITS or bare in NAMES_OF_UNITS or (before == "/" and bare in LETTER_UNITS)
    )


def _value(match: re.Match[str]) -> Fraction | None:
    if match["base"]:
        return _in_base(match["digits"], _BASES.get(match["base"]) or int(match["base"]))
    if match["mixed"]:
        above, below = int(match["above"] or match["above2"]), int(match["below"] or match["below2"])
        # `2\\frac{5}{3}` is a product, not a mixed number.
        return int(match["mixed"]) + Fraction(above, below) if above < below else None
    if match["repeated"]:
        return _repeating(match["before"], match["once"], match["repeated"])
    if match["upper"] or match["top"]:
        above, below = (
            _fraction(match[name] or match[other]) for name, other in (("upper", "top"), ("lower", "bottom"))
        )
        return above / below if below else None
    exponent = int((match["exponent"] or match["power"] or "0").replace(" ", ""))
    if abs(exponent) > MAX_EXPONENT:
        return None
    digits = _fraction(match["decimal"] or "1")
    return digits * Fraction(10) ** exponent if exponent else digits


def _fraction(decimal: str) -> Fraction:
    bare = decimal.replace(",", "").replace(" ", "")
    return Fraction(f"{bare}0" if bare[-1] == "." else bare)


def _repeating(before: str, once: str, repeated: str) -> Fraction:
    r"""Return the value of a repeating decimal: 1/6 for `0.1\overline{6}`."""
    leading = Fraction(int(f"{before}{once}" or "0"))
    return (leading + Fraction(int(repeated), 10 ** len(repeated) - 1)) / 10 ** len(once)


def _in_base(digits: str, base: int) -> Fraction | None:
    try:
        return Fraction(int(digits, base))
    except ValueError:
        return None


def _plain_digits(digits: str, sign: int) -> Fraction | None:
    return Fraction(sign * int(digits)) if digits.isdecimal() else None


def _decimal(value: Fraction) -> str | None:
    """Return a finite decimal in plain digits; None if it has more than 12 decimal places or does not end."""
    if value.denominator == 1:
        return str(value.numerator)
    places = next((places for places in range(1, 13) if (value * 10**places).denominator == 1), None)
    if places is None:
        return None
    digits = str(abs(value * 10**places).numerator).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}"


def has_digit(text: str) -> bool:
    """Return whether a text contains a digit."""
    return bool(_DIGIT.search(text))
