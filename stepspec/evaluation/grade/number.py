r"""Read numbers exactly, in the forms that people and models write, and the number that a sentence names."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from stepspec.evaluation.grade.latex import WORDS, cleaned

MAX_EXPONENT = 400
"""Largest exponent that is read. Larger numbers are not plausible answers and cost memory."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "k": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "trillion": 10**12,
}
NUMBER_WORDS = _words(
    """two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
    nineteen twenty thirty forty fifty sixty seventy eighty ninety half halves third thirds quarter quarters fifth fifths
    sixth sixths eighth eighths tenth tenths hundredth hundredths thousandth thousandths zero"""
) | frozenset(f"{scale}{end}" for scale in SCALES if scale != "k" for end in ("", "s"))
CHANGES = NUMBER_WORDS | _words(
    """and or over nor but to mod modulo plus minus times less more fewer than divided multiplied halved doubled tripled
    pair pairs couple score gross factorial squared cubed not never point remainder root negative infinity pi sqrt sin
    cos tan log ln base if unless otherwise wrong incorrect false short below above under beyond sinh cosh tanh
    approximately roughly about twice"""
)
"""Words behind a number that deny it or make another number of it."""
IN_PROSE = _words("and to but less more fewer short below above under over")
"""Those of them that in a sentence usually begin another phrase."""
GLUED = _words(
    "mm cm km kg mg ml mL ft lb lbs oz hr hrs min mins sec mph kph kWh cent cents dollars hours minutes days am pm AM PM st nd rd th"
)
"""Units that may stand behind a number without a space."""
SHORT = GLUED | _words(
    """m g s h l L in a an per of the all kW Hz rpm mol cat dog cow pig hen egg cup can car bus man men boy pen bag box toy
    cap hat pie bar jar way pts km2 cm2 m2 fox ant bee bat kid day cds map net ton tie tub tip for big red old new sq cu
    cups cans cars boys pens bags toys caps hats pies bars jars ways eggs cats dogs cows pigs hens ants bees kids maps
    tons tips each left cc hp on at now USD row rows gems yrs yr deg rad feet foot inch sees gets"""
)
"""Words of up to three letters that are words behind a number. Others are products of unknowns, as in `7 xy`."""
DENIES = re.compile(
    r"\b(?:not|never|neither|nor|cannot|no\s+longer|nobody|wrong|incorrect|false|different\s+from)\b|n['’]t\b|\b(?:anything\s+but|far\s+from)\b",
    re.I,
)


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
        return (
            (plain == share and abs(plain) >= 1)
            or plain == share == 0
            or (plain.denominator > 1 and plain == share / 100)
        )


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?:[ ]\d{3})+|\d{1,3}(?:_\d{3})+|\d{1,3}(?:\.\d{3})+(?=,\d{1,2}(?!\d))|\d{1,3}(?:\.\d{3}){2,}|\d+)(?!\d)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d*|(?<=\.\d\d\d),\d{{1,2}}(?!\d))?|\.\d+)"
_SIGNED = rf"[+-]?\s*{_UNSIGNED}"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?:
      (?P<mixed>\d+)\s*(?:\\frac\{{\s*(?P<above>\d+)\s*\}}\{{\s*(?P<below>\d+)\s*\}}
        |(?:\s|and\s)\s*(?P<above2>\d+)\s*/\s*(?P<below2>\d+))
    | \\frac\{{\s*(?P<upper>{_SIGNED})\s*\}}\{{\s*(?P<lower>{_SIGNED})\s*\}}
    | (?P<top>{_UNSIGNED})\s*/\s*(?P<bottom>{_UNSIGNED})
    | (?P<before>\d*)\.(?P<once>\d*)\\(?:overline|bar|dot)\s*\{{?\s*(?P<repeated>\d+)(?:\s*\}})?
    | (?P<base>\d+)\s*\^\s*\{{?\s*(?P<power>[+-]?\s*\d{{1,5}})(?:\s*\}})?
    | (?P<decimal>{_UNSIGNED})
        (?:(?:[eE]|\s*\\cdot\s*10\s*\^)\s*\{{?\s*(?P<exponent>[+-]?\s*\d{{1,5}})(?:\s*\}})?)?
    )(?:\s*(?:\\text\{{\s*)?(?P<scale>{"|".join(SCALES)}|K)s?\b(?:\s+of\b)?)?(?P<percent>\s*%)?(?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)
_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_VALUES = {word: value for value, word in enumerate(_ONES.split())} | {
    word: 10 * value
    for value, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)
}
_IN_WORDS = re.compile(
    rf"(?:\b(?:{'|'.join((*_VALUES, 'hundred', 'thousand', 'million'))})\b[\s-]*(?:and\s+)?)+", re.IGNORECASE
)


def _in_digits(clean: str) -> str:
    r"""Return a number with its words as digits: `-4` for `\text{negative } 4`, `4 1/2 hours` for `4 and a half hours`."""
    plain = " ".join(WORDS.sub(r" \1 ", clean).split())
    text = re.sub(r"^(?:negative|minus)\s+(?=[\d\\])", "-", plain, flags=re.IGNORECASE)
    text = re.sub(r"(?<=\d) and (?:a|one)[ -]half\b", " 1/2", text)
    text = re.sub(r"^an?\s+(?=dozen|hundred|thousand|million)", "one ", text, flags=re.IGNORECASE)
    match = _IN_WORDS.match(text)
    if match:
        total = part = 0
        for word in re.findall(r"[a-z]+", match[0].lower()):
            if word == "hundred":
                part = (part or 1) * 100
            elif word in ("thousand", "million"):
                total, part = total + (part or 1) * SCALES[word], 0
            else:
                part += _VALUES.get(word, 0)
        text = f"{total + part} {text[match.end() :]}".strip()
    return clean if text == plain else text


_UNIT = re.compile(
    r"(\s*)(?:\\text\{([^{}]*)\}|([a-zA-Z][a-zA-Z'’.-]*)|[/()}])(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\\circ|\d)|(?<!\})[23](?!\d))?|\s*\^\\circ"
)


@lru_cache(maxsize=4096)
def read_number(clean: str) -> Number | None:
    """Return the number that a whole cleaned answer stands for, unit included; None if it is not a number."""
    clean = _in_digits(clean)
    if clean.startswith("(") and clean.endswith(")") and "," not in clean:
        clean = clean[1:-1].strip()
    match = _NUMBER.fullmatch(clean.removeprefix("US").removeprefix("USD").removeprefix("Rs.").strip())
    if match is None or not is_unit(match["rest"]):
        return None
    value = _value(match)
    if value is None:
        return None
    scale = SCALES[(match["scale"] or "").lower()] if match["scale"] else 1
    value = (-value if match["sign"] == "-" else value) * scale
    plain = match["decimal"] is not None and match["exponent"] is None and scale == 1 and not match["percent"]
    return Number(value, bool(match["percent"]), plain and value.denominator == 1)


def _value(match: re.Match[str]) -> Fraction | None:
    if match["mixed"]:
        above, below = int(match["above"] or match["above2"]), int(match["below"] or match["below2"])
        return int(match["mixed"]) + Fraction(above, below) if above < below else None  # `2\frac{5}{3}` is a product
    if match["repeated"]:
        start = Fraction(int(f"{match['before']}{match['once']}" or "0"))
        repeated = Fraction(int(match["repeated"]), 10 ** len(match["repeated"]) - 1)
        return (start + repeated) / 10 ** len(match["once"])
    if match["upper"] or match["top"]:
        above, below = _fraction(match["upper"] or match["top"]), _fraction(match["lower"] or match["bottom"])
        return above / below if below else None
    exponent = int((match["exponent"] or match["power"] or "0").replace(" ", ""))
    if abs(exponent) > MAX_EXPONENT or len(match["base"] or "") > 9:
        return None
    if match["base"]:
        base = Fraction(match["base"])
        return base**exponent if base or exponent > 0 else None
    return _fraction(match["decimal"]) * Fraction(10) ** exponent


def _fraction(decimal: str) -> Fraction:
    if "." in decimal and "," in decimal[decimal.rindex(".") :]:
        decimal = decimal.replace(".", "").replace(",", ".")  # `1.234,56`
    bare = decimal.replace(",", "").replace(" ", "").replace("_", "")
    bare = bare.replace(".", "") if bare.count(".") > 1 else bare
    return Fraction(f"{bare}0" if bare[-1] == "." else bare)


def is_unit(rest: str) -> bool:
    """Return whether the text behind a number leaves its value unchanged, as units and other words do."""
    if not rest.strip(" }"):
        return True
    if rest.lstrip()[0] in "/(" and not rest.lstrip().startswith(("/ ", "(s)")):
        return bool(re.fullmatch(r"\s*/\s*(?:\\text\{)?[a-zA-Z]+\}?", rest))
    position = 0
    while position < len(rest.rstrip(" .")):
        token = _UNIT.match(rest, position)
        if token is None or not _is_unit_token(*token.groups(), glued=position == 0 and not token[1]):
            return False
        position = token.end()
    return True


def _is_unit_token(space: str, text: str | None, word: str | None, *, glued: bool) -> bool:
    words = re.findall(r"[a-zA-Z]+", text if text is not None else word or "")
    if any(each.casefold() in CHANGES for each in words) or (
        text and (DENIES.search(text) or re.search(r"\d\d|\d\b", text))
    ):
        return False
    if word is None:
        return True
    bare = word.rstrip(".")
    if glued:
        return bare in GLUED
    return bare in SHORT or (len(bare) > 3 and bool(re.search("[aeiouAEIOU]", bare)))


_IN_SENTENCE = re.compile(
    rf"(?<![\w.\\^_{{}}/+*)\]])-?(?<![\w)\]]-)(?:\d+\s*\\frac\{{\d+\}}\{{\d+\}}|\d+ \d+/\d+|\\frac\{{-?\d+\}}\{{\d+\}}|{_UNSIGNED}(?:/\d+)?)"
    rf"(?:\s+(?:{'|'.join(scale for scale in SCALES if len(scale) > 1)})\b)?(?:\s?%)?"
)
_CHANGED_BEFORE = re.compile(
    r"\b(?:half|twice|thrice|double|triple|minus|negative|plus|times|(?:third|quarter|multiple|factor|square|cube|root|power|reciprocal|opposite|inverse)s?\s+of|or|nor|out\s+of|by|base|mod|modulo|page|option|at\s+(?:least|most)|nearly|almost"
    r"|(?:less|more|fewer|greater|other|rather|higher|lower)\s+than|between|either|instead\s+of|step|equation|case|problem)\W*(?:of\s+)?$",
    re.IGNORECASE,
)
_CHANGED_BEHIND = re.compile(
    rf"^[\s$]*(?:(?:{'|'.join(sorted(CHANGES - IN_PROSE - frozenset(SCALES)))})\b"
    r"|(?:and|but)\s+(?:a|an|some|not)\b|(?:to|through|over)\s+[\\$]*\d|out\s+of\b|[-+*/<>=!_]|\^(?!\s*\\circ)|\\(?!text\{|circ|\)|\]|%)|[a-zA-Z](?![a-zA-Z'’. ])|\()"
)
_COMPARED = re.compile(r"^\s*(?:less|more|fewer)\b")
_IS = re.compile(r"\b(?:is|are|was|were|be|equals)\b(?:\s*[\\$*]*$)?", re.IGNORECASE)
_CONDITION = re.compile(r"^\W*(?:if|suppose|assume|assuming|unless|whether|let)\b", re.IGNORECASE)
CALCULATION = re.compile(r"<<[^<>\n]{0,200}>>")
_OTHER_DENIED = re.compile(r",?\s+\(?(?:and\s+)?not\s+\\?\$?-?\d[\d.,]*\)?")


def named_number(sentence: str) -> Number | None:
    """Return the number that a sentence names as its answer; None if it names none or several, or changes it."""
    text = " ".join(WORDS.sub(r" \1 ", sentence).replace("**", "").replace("__", "").split())
    text = re.sub(r"(?<=\d) \([a-z-]+\)", "", _OTHER_DENIED.sub("", text))
    if re.search(
        r"\b(?:half|third|quarter|multiple|factor|square|double|twice)\b(?:\s+of)?\s+(?:it|this|that|the\s+answer)\b",
        text,
        re.IGNORECASE,
    ):
        return None
    if text.endswith("?") or DENIES.search(text) or _CONDITION.search(text):
        return None
    before, _, behind = text.rpartition("=")
    if before:
        if _UNSOLVED.search(before) or not _IN_SENTENCE.match(behind.strip()):
            return None
        text = behind
    if len(_values(text)) > 1 and (verb := list(_IS.finditer(text))) and re.search(r"\d", text[: verb[-1].start()]):
        text = text[verb[-1].start() :]  # "half of 24 is 12"
    if len(_values(text)) != 1:
        return None
    last = list(_IN_SENTENCE.finditer(text))[-1]
    left, right = text[: last.start()], text[last.end() :]
    word = re.match(r"\s*([a-zA-Z]+)", right)
    if word and word[1] not in SHORT and (word.start(1) == 0 or not re.search("[aeiouAEIOU]", word[1])):
        return None  # a product of unknowns
    if "," in last[0] and left.rstrip().endswith(("(", "[", "{")):
        return None  # a pair
    if (
        _CHANGED_BEFORE.search(left)
        or _CHANGED_BEHIND.search(right)
        or re.search(r"[-+*/^<>_\\]\s*$|\w\($|\\(?:[lgn]?eq|approx)\s*$|[(\[{][^()\[\]{}]*,\s*$", left)
    ):
        return None
    if _COMPARED.search(right) and (not left.strip() or re.search(r"\b(?:is|are|was|be)\W*$", left)):
        return None
    if any(word.casefold() in NUMBER_WORDS for word in re.findall(r"[a-z]+", right)[:4]):
        return None
    return read_number(cleaned(last[0]))


# `2x = 12`, `-x = 12`, `twice n = 12`, `x = 3, y = 12`
_UNSOLVED = re.compile(
    r"(?:\d\s*[a-zA-Z]|[a-zA-Z]\s*\^\s*\{?\d\}?|(?:^|\s)-\s*[a-zA-Z])\s*$|\b(?:half|twice|double|triple|minus)\b|=[^=]*(?:[,;]|\band\b|\bor\b)"
)


def _values(text: str) -> set[Fraction | None]:
    numbers = [read_number(cleaned(each[0])) for each in _IN_SENTENCE.finditer(text)]
    return {number and number.value for number in numbers}


_SENTENCE_END = re.compile(r"(?<!\b[A-Za-z])[.!?](?=[\s*$\"')\]}]|\\[)\]]|$)|\n")
_CLAUSE_END = re.compile(
    r"[,;:]\s+(?:so|thus|then|hence|therefore|which|giving|leaving|making|for\s+a\s+total)\b|[;:]\s"
    r"|\b(?:so|thus|hence|therefore|then)\b,?\s+|,\s",
    re.IGNORECASE,
)


def last_number(text: str) -> tuple[str, str] | None:
    """Return the last clause of a text that has a number, and the number that it names."""
    tail = text[-2_000:]
    ends = [0, *(end.end() for end in _SENTENCE_END.finditer(tail)), len(tail)]
    sentence = next(
        (each for start, end in reversed(list(pairwise(ends))) if re.search(r"\d", each := tail[start:end])), ""
    )
    starts = [0, *(end.end() for end in _CLAUSE_END.finditer(sentence))]
    start = next((start for start in reversed(starts) if re.search(r"\d", sentence[start:])), 0)
    clause = sentence[start:].strip().lstrip("> ")
    if (
        start
        and re.match(r"\W*(?:(?:and|or)\s+)?-?[\\$]*\d", clause)
        and re.search(r"\d\W*$", sentence[:start].rstrip(", "))
    ):
        return None  # the last of a list
    if re.search(r"[a-zA-Z]\s*=\s*-?[\d.]+\W*$", sentence[:start]) and re.match(r"\W*[a-zA-Z]\s*=", clause):
        return None  # two unknowns
    number = None if _CONDITION.search(sentence) or sentence.rstrip().endswith("?") else named_number(cleaned(clause))
    return None if number is None else (clause, list(_IN_SENTENCE.finditer(cleaned(clause)))[-1][0])
