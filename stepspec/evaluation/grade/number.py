r"""Read numbers exactly, in the forms that people and models write."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from stepspec.evaluation.grade.latex import WORDS

MAX_EXPONENT = 400
"""Largest exponent that is read. Larger numbers are not plausible answers and cost memory."""


def listed(text: str) -> frozenset[str]:
    """Return the words of a list."""
    return frozenset(text.split())


SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "k": 10**3, "K": 10**3, "lakh": 10**5, "million": 10**6}
SCALES |= {"crore": 10**7, "billion": 10**9, "bn": 10**9, "trillion": 10**12}
SCALE = "|".join(f"{scale}s?" for scale in SCALES if len(scale) > 1)
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: value for value, word in enumerate(f"{_ONES} eighteen nineteen".split())}
_VALUES |= {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
PARTS = "(?:half|halves|thirds?|fourths?|quarters?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?)"
CHANGES = listed(
    """and or over nor but to mod modulo plus minus times less more fewer than divided multiplied halved doubled tripled
    pair pairs couple score gross factorial squared cubed not never point remainder root negative infinity pi sqrt sin
    cos tan sinh cosh tanh log ln base if unless otherwise wrong incorrect false short below above under beyond about approximately roughly twice"""
)
"""Words behind a number that deny it or make another number of it, beside those of `AMOUNT`."""
AMOUNT = rf"(?:{SCALE}|{PARTS}|{'|'.join([*_VALUES][2:])}|zero)"
GLUED = listed(
    """mm cm m km kg g mg ml mL L ft in lb lbs oz h hr hrs s min mins sec mph kph kWh kW W V cent cents dollars hours
    minutes days am pm AM PM st nd rd th"""
) - {"m", "s", "h", "g", "L", "in", "W", "V"}
"""Units that may stand behind a number without a space."""
SHORT = GLUED | listed("m g s h l L W V in a an per of kW Hz rpm km2 cm2 m2 sq cu cc hp on at yd yrs yr pts")
"""Short words and words without a vowel that are words behind a number. Others are products of unknowns: `7 xy`."""


@dataclass(frozen=True)
class Number:
    """A number as written. With `percent`, the value is the number before the sign."""

    value: Fraction
    percent: bool = False
    whole: bool = False
    """Whether it is written as the digits of a whole number."""

    def equals(self, other: "Number") -> bool:
        r"""Return whether two numbers are equal. A percentage is also its number without the sign, and a fraction or
        decimal what it means: `12\%` is `12` and `0.12`, but `1200\%` is not `12`."""
        if self.percent == other.percent:
            return self.value == other.value
        share, plain = (self.value, other.value) if self.percent else (other.value, self.value)
        if plain.denominator > 1 and plain == share / 100:
            return True
        return plain == share and (abs(plain) >= 1 or plain == 0)


_GROUPED = re.compile(
    r"(?<![\d.(\[])(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d\d)+,\d{3}|\d{1,3}(?: \d{3})+|\d{1,3}(?:_\d{3})+|\d{1,3}(?:\.\d{3}){2,})"
    r"(?![\d,]\d)"
)
_DECIMAL_COMMA = re.compile(r"(?<![\d.])(\d{1,3}(?:\.\d{3})+),(\d{1,2})(?!\d)")
_FRACTION = re.compile(r"\\frac\{\s*([+-]?[\d., ]+)\s*\}\{\s*([\d., ]+)\s*\}")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?")
_POWER_OF_TEN = re.compile(r"\s*\\cdot\s*10\s*\^\s*\{?\s*([+-]?)\s*(\d{1,5})\s*\}?")
_POWER = re.compile(r"\^\s*\{\s*([+-]?)\s*(\d{1,5})\s*\}")
UNSIGNED = r"(?:\d+\.?\d*|\.\d+)"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?:(?P<mixed>\d+)\s(?:and\s)?(?=\d+\s?/))?(?P<above>[+-]?{UNSIGNED})
    (?:\s*/\s*(?P<below>{UNSIGNED})|[eE](?P<exponent>[+-]?\d{{1,5}})|\^(?P<power>[+-]?\d{{1,5}}))?
    (?:\s*(?P<scale>{SCALE}|[kK])\b(?:\s+of\b)?)?(?P<percent>\s*%)?(?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)


def in_digits(clean: str) -> str:
    """Return the text with the marks of LaTeX and of grouping left out of its numbers: `1234 1/2` for `1,234\\frac{1}{2}`."""
    text = _DECIMAL_COMMA.sub(lambda match: f"{match[1].replace('.', '')}.{match[2]}", clean)
    text = _GROUPED.sub(lambda match: re.sub(r"[,._ ]", "", match[0]), text)
    text = _REPEATING.sub(_repeating, text)
    text = _POWER.sub(r"^\1\2", _POWER_OF_TEN.sub(r"e\1\2", text))
    return _FRACTION.sub(lambda match: f" {match[1].strip()}/{match[2].strip()} ", text)


def _repeating(match: re.Match[str]) -> str:
    first, once, repeated = match.groups()
    below = (10 ** len(repeated) - 1) * 10 ** len(once)
    return f"{int(first + once + repeated) - int(first + once or '0')}/{below}"


_IN_WORDS = re.compile(rf"(?:\b(?:{'|'.join(_VALUES)}|hundred|thousand|million)\b[\s-]*(?:and\s+)?)+", re.IGNORECASE)


def _words_in_digits(text: str) -> str:
    """Return a text with the number words at its start as digits: `-4` for `negative four`, `4 1/2 h` for `4 and a half h`."""
    text = re.sub(r"^(?:negative|minus)\s+", "-", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<=\d) and (?:a|one)[ -]half\b", " 1/2", text)
    text = re.sub(r"^an?\s+(?=dozen|hundred|thousand|million)", "one ", text, flags=re.IGNORECASE)
    sign, text = ("-", text[1:]) if text[:1] == "-" else ("", text)
    match = _IN_WORDS.match(text)
    if match:
        total = part = 0
        for word in re.findall(r"[a-z]+", match[0].lower()):
            if word in ("thousand", "million"):
                total, part = total + (part or 1) * SCALES[word], 0
            else:
                part = (part or 1) * 100 if word == "hundred" else part + _VALUES.get(word, 0)
        text = f"{total + part} {text[match.end() :]}".strip()
    return sign + text


@lru_cache(maxsize=4096)
def read_number(clean: str) -> Number | None:
    """Return the number that a whole cleaned answer stands for, unit included; None if it is not a number."""
    text = clean[1:-1] if clean.startswith("(") and clean.endswith(")") and "," not in clean else clean
    text = " ".join(WORDS.sub(r" \1 ", in_digits(text)).split())
    match = _NUMBER.fullmatch(_words_in_digits(re.sub(r"^(?:USD|US|Rs\.)\s*", "", text)))
    if match is None or not is_unit(match["rest"]) or _splits_formula(clean):
        return None
    value, below, exponent = Fraction(match["above"]), Fraction(match["below"] or 1), int(match["exponent"] or 0)
    power = int(match["power"] or 1)
    if not below or max(abs(exponent), abs(power)) > MAX_EXPONENT or (value == 0 and power < 1):
        return None
    if power != 1 and len(match["above"]) > 9:
        return None
    value = value**power * Fraction(10) ** exponent / below
    if match["mixed"]:
        if value >= 1:
            return None  # `2\frac{5}{3}` is a product
        value += int(match["mixed"])
    if match["scale"]:
        value *= SCALES[match["scale"]] if match["scale"] in SCALES else SCALES[match["scale"][:-1]]
    if match["sign"] == "-":
        value = -value
    digits = not any(match[name] for name in ("mixed", "below", "exponent", "power", "scale", "percent"))
    return Number(value, bool(match["percent"]), digits and value.denominator == 1)


def _splits_formula(clean: str) -> bool:
    r"""Return whether a unit in a formula has a digit behind it: `5 \text{ feet } 3`."""
    return bool(re.search(r"\\text\{[^{}]*\d", clean))


_UNIT = re.compile(
    r"(\s*)(?:([a-zA-Z][a-zA-Z'’.-]*)|[/(){}])(?:\s*\^\s*(?:\{\s*)?(?:-?\d|\\circ)(?:\s*\})?|[23](?!\d))?|\s*\^\s*\\circ|\s*,(?=\s)"
)


def is_unit(rest: str) -> bool:
    """Return whether the text behind a number leaves its value unchanged, as units and other words do."""
    rest = rest.rstrip(" .}")
    if rest.lstrip()[:1] in ("/", "(") and not re.match(r"\s*/ ?[a-zA-Z{]|\s*\(\w+\)", rest):
        return False
    position = 0
    while position < len(rest):
        token = _UNIT.match(rest, position)
        if token is None:
            return False
        space, word = token.groups()
        if word and not _is_word(word.rstrip("."), glued=position == 0 and not space):
            return False
        position = token.end()
    return True


def _is_word(word: str, *, glued: bool) -> bool:
    parts = re.split("[-'’.]", word.casefold())
    if any(part in CHANGES or re.fullmatch(AMOUNT, part) for part in parts):
        return False
    if glued:
        return word in GLUED
    return word.replace(".", "") in SHORT or (len(word) > 2 and bool(re.search("[aeiouAEIOU]", word)))
