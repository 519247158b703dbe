r"""Read numbers exactly, in the forms that people and models write."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from stepspec.evaluation.grade.latex import WORDS, listed

MAX_EXPONENT = 400
"""Largest exponent that is read. Larger numbers are not plausible answers and cost memory."""
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "k": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7}
SCALES |= {"billion": 10**9, "bn": 10**9, "trillion": 10**12}
SCALE = rf"(?:{'|'.join(scale for scale in SCALES if scale != 'k')})s?"
_TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_ONES = listed(f"zero one two three four five six seven eight nine ten eleven twelve {_TEENS}")
VALUES = {word: value for value, word in enumerate(_ONES)}
VALUES |= {f"{word}ty": 10 * value for value, word in enumerate(listed("twen thir for fif six seven eigh nine"), 2)}
PARTS = r"(?:hal(?:f|ves)|(?:third|fourth|quarter|fifth|sixth|seventh|eighth|ninth|tenth|(?:hundred|thousand)th)s?)"
AMOUNT = rf"(?:{SCALE}|{PARTS}|{'|'.join([*VALUES][2:])}|zero)"
CHANGES = listed(
    """or nor mod modulo plus minus times than divided multiplied halved doubled tripled pair pairs couple score gross
    factorial squared cubed not never point remainder root negative infinity pi sqrt sin cos tan sinh cosh tanh log ln
    base if unless otherwise wrong incorrect false beyond about approximately roughly twice"""
)
"""Words behind a number that deny it or make another number of it."""
LINKS = listed("and to but short below above under over")  # so do these in a box; in prose they begin another phrase
SHORT = listed(
    """m s g h l L W V in a an of on at mm cm km kg mg ml mL ft yd lb lbs oz hr hrs min mins sec mph kph kW kWh Hz rpm
    sq cu cc hp am pm AM PM st nd rd th yr yrs pts"""
)
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
        return plain == share and not 0 < abs(plain) < 1


_COMMA = re.compile(r"(?<![\d.])(\d{1,3}(?:\.\d{3})+),(\d{1,2})(?!\d)")  # 1.234,56
_GROUPED = re.compile(
    r"(?<![\d.(\[])(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d\d)+,\d{3}|\d{1,3}([ _])\d{3}(?:\1\d{3})*|\d{1,3}(?:\.\d{3}){2,})"
    r"(?!\d|,\d)"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?")
_REWRITTEN = [
    (re.compile(r"\s*\\cdot\s*10\s*\^\s*\{?\s*([+-]?)\s*(\d{1,5})\s*\}?"), r"e\1\2"),
    (re.compile(r"\^\s*\{\s*([+-]?)\s*(\d{1,5})\s*\}"), r"^\1\2"),
    (re.compile(r"\\frac\{\s*([+-]?[\d., ]+)\s*\}\{\s*([\d., ]+)\s*\}"), r" \1/\2 "),
]
UNSIGNED = r"(?:\d+\.?\d*|\.\d+)"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?:(?P<mixed>\d+)\s(?:and\s)?(?=\d+\s?/))?(?P<above>[+-]?{UNSIGNED})
    (?:\s*/\s*(?P<below>{UNSIGNED})|[eE](?P<exponent>[+-]?\d{{1,5}})|\^(?P<power>[+-]?\d{{1,5}}))?
    (?:\s*(?P<scale>{SCALE}|[kK])\b(?:\s+of\b)?)?(?P<percent>\s*%)?(?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)


def in_digits(clean: str) -> str:
    r"""Return a text without the marks of LaTeX and of grouping in its numbers: `1234 1/2` for `1,234\frac{1}{2}`."""
    text = _COMMA.sub(lambda match: f"{match[1].replace('.', '')}.{match[2]}", clean)
    text = _GROUPED.sub(lambda match: re.sub(r"[,._ ]", "", match[0]), text)
    text = _REPEATING.sub(
        lambda m: f"{int(m[1] + m[2] + m[3]) - int(m[1] + m[2] or '0')}/{10 ** len(m[2] + m[3]) - 10 ** len(m[2])}",
        text,
    )
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return text


_IN_WORDS = re.compile(rf"^(-?)((?:\w+ty[ -])?(?:{'|'.join(VALUES)})|an?(?= (?:{SCALE})))\b", re.IGNORECASE)


def _words_in_digits(text: str) -> str:
    """Return a text with the number word at its start as digits: `-4` for `negative four`, `15 hundred`."""
    text = re.sub(r"^(?:negative|minus) ", "-", text, flags=re.IGNORECASE)
    return _IN_WORDS.sub(
        lambda word: f"{word[1]}{sum(VALUES.get(each, 0) for each in re.split('[ -]', word[2].lower())) or 1}", text
    )


@lru_cache(maxsize=4096)
def read_number(clean: str) -> Number | None:
    """Return the number that a whole cleaned answer stands for, unit included; None if it is not a number."""
    text = clean[1:-1] if clean.startswith("(") and clean.endswith(")") and "," not in clean else clean
    text = " ".join(WORDS.sub(r" \1 ", in_digits(text)).split())
    text = re.sub(r"(?<=\d) and an? half\b", " 1/2", re.sub(r"^(?:USD|US|Rs\.)\s*", "", text))
    match = _NUMBER.fullmatch(_words_in_digits(text))
    if match is None or not is_unit(match["rest"]) or re.search(r"\\text\{[^{}]*\d", clean):
        return None
    value, below = Fraction(match["above"]), Fraction(match["below"] or 1)
    exponent, power = int(match["exponent"] or 0), int(match["power"] or 1)
    too_large = max(abs(exponent), abs(power)) > MAX_EXPONENT or (power != 1 and len(match["above"]) > 9)
    if too_large or not below or (value == 0 and power < 1):
        return None
    value = value**power * Fraction(10) ** exponent / below
    if match["mixed"] and value >= 1:
        return None  # `2\frac{5}{3}` is a product
    scale = (match["scale"] or "").lower()
    value = (value + int(match["mixed"] or 0)) * (SCALES.get(scale) or SCALES.get(scale[:-1], 1))
    in_words = text[:1].isalpha()
    digits = not any(in_words or match[name] for name in ("mixed", "below", "exponent", "power", "scale", "percent"))
    return Number(-value if match["sign"] == "-" else value, bool(match["percent"]), digits and value.denominator == 1)


_UNIT = re.compile(
    r"(\s*)(?:([a-zA-Z][a-zA-Z'’.-]*)|[/(){}])(?:\s*\^\s*\{?\s*(?:-?\d|\\circ)\s*\}?|[23](?!\d))?|\s*\^\s*\\circ|\s*,(?=\s)"
)


def is_unit(rest: str) -> bool:
    """Return whether the text behind a number leaves its value unchanged, as units and other words do."""
    rest = rest.rstrip(" .}")
    if rest.lstrip()[:1] in ("/", "(") and not re.match(r"\s*/ ?[a-zA-Z{]|\s*\(\w+\)", rest):
        return False
    position = 0
    while position < len(rest):
        token = _UNIT.match(rest, position)
        if token is None or (token[2] and not _is_word(token[2].rstrip("."), glued=position == 0 and not token[1])):
            return False
        position = token.end()
    return True


def _is_word(word: str, *, glued: bool) -> bool:
    if any(
        part in CHANGES or part in LINKS or re.fullmatch(AMOUNT, part) for part in re.split("[-'’.]", word.casefold())
    ):
        return False
    if word.replace(".", "") in SHORT:
        return not glued or len(word) > 1
    return not glued and len(word) > 2 and bool(re.search("[aeiouAEIOU]", word))
