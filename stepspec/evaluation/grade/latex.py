r"""Normalize the LaTeX of an answer, so that answers that look the same become the same text.

The functions expect answers of at most a few thousand characters and evaluate nothing. The rules follow the graders of
MATH (D. Hendrycks et al., arXiv:2103.03874, appendix) and Minerva (A. Lewkowycz et al., arXiv:2206.14858, appendix D).
They ignore spacing, bracket sizes, styles, currency signs and degrees.
"""

import re
from functools import lru_cache

from stepspec.evaluation.grade.vocabulary import CANONICAL_UNIT, CHANGES_SUBJECT, DENIES, is_unit_text, unit_in

_UNICODE = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-", "\ufe63": "-", "\uff0d": "-",
        "\u00a0": "\u2009", "\u202f": "\u2009", "\u2007": "\u2009", "\u200a": "\u2009",
        "\u200b": "", "\ufeff": "", "\u2060": "", "\u200e": "", "\u200f": "",
        "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/",
        "π": r"\pi ", "∞": r"\infty ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ",
        "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "±": r"\pm ", "√": r"\sqrt ",
        "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ",
        "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
        "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "％": "%", "“": '"', "”": '"', "‘": "'", "’": "'", "（": "(", "）": ")", "，": ", ", "。": ".", "＝": "=",
    }
)  # fmt: skip

# The rules, in order of application. Each takes one pass, and none can backtrack over more than a command.
# `1{,}234` and `1,\!234` are always one number; `1,\,234` and `1,\ 234` are two.
_DIGIT_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,?\\!\s*|\\[,;: ]\s*|\u2009|')(?=\d{3}(?!\d))")
_SIZES = re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?")
_STYLES = re.compile(r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|strut|rm|bf|it)(?![a-zA-Z])")
_NO_SPACE = re.compile(r"(\\\\)|\\!")
_SPACES = re.compile(r"(\\\\)|\\[,;:> ]|\\(?:q?quad|thinspace|enspace|medspace)(?![a-zA-Z])|~|\u2009")
_SKIPS = re.compile(r"\\(?:hspace|vspace|hskip|phantom|hphantom|vphantom|label|tag)\*?\s*\{[^{}]*\}")
_WORDS = re.compile(r"\\(?:text|textrm|textnormal|textsf|textit|mbox|hbox|mathrm|operatorname)\s*\{([^{}]*)\}")
_FACES = re.compile(
    r"\\(?:textbf|mathbf|mathit|boldsymbol|bm|mathsf|pmb|underline|emph|boxed|fbox|mathord)\s*\{([^{}]*)\}"
)
_DEGREES = re.compile(
    r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![a-zA-Z]))(?:\s*[CF](?![a-zA-Z]))?|\\degree"
)
_CURRENCY = re.compile(r"\\?\$|\\(?:euro|pounds)(?![a-zA-Z])|[€£¥₹]")
_DELIMITERS = re.compile(r"\\[()\[\]]|\*\*(?=\s*$)|^\s*\*\*|__(?=\s*$)|^\s*__|`")
_FRACTION_DIGITS = re.compile(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
_FRACTION_FIRST = re.compile(r"\\frac\s*([0-9a-zA-Z])\s*\{")
_FRACTION_SECOND = re.compile(r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])")
_FRACTION_SPACE = re.compile(r"\\frac\s+\{|\\frac(\{[^{}]*\})\s+\{")
_ROOT = re.compile(r"\\sqrt\s*([0-9]+|[a-zA-Z])")
_ROOT_OF_PARENTHESES = re.compile(r"(?<![a-zA-Z])\\?sqrt\s*\(([^()]*)\)")
_BARE_NAMES = re.compile(
    r"(?<![\\a-zA-Z])(pi|infty|infinity|alpha|beta|theta|sqrt|sin|cos|tan|cot|sec(?=\s*[(a-zA-Z\\{])|(?<!\d)(?<!\d\s)sec|csc|ln|log|arcsin|arccos|arctan)"
    r"(?![a-zA-Z])"
)  # fmt: skip
_SYNONYMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![a-zA-Z])"), r"\\binom"),
    (re.compile(r"\\(?:le|leqslant|leqq)(?![a-zA-Z])|<="), r"\\leq "),
    (re.compile(r"\\(?:ge|geqslant|geqq)(?![a-zA-Z])|>="), r"\\geq "),
    (re.compile(r"\\(?:ne|not\s*=)(?![a-zA-Z])|!="), r"\\neq "),
    (re.compile(r"\\(?:times|ast)(?![a-zA-Z])"), r"\\cdot "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\*"), r"\\cdot "),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\(?:lbrace|lcurly)(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace|rcurly)(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\(?:lbrack)(?![a-zA-Z])"), "["),
    (re.compile(r"\\(?:rbrack)(?![a-zA-Z])"), "]"),
    (re.compile(r"\\(?:[lr]vert|vert|mid)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\(?:varnothing)(?![a-zA-Z])"), r"\\emptyset "),
    (re.compile(r"\\%|(?<=[\d}])\s*\bper\s?cent\b"), "%"),
    (re.compile(r"\\(?:ldots|dots|cdots)(?![a-zA-Z])"), "..."),
    (re.compile(r"\\_"), "_"),
    (re.compile(r"\\&"), "and"),
)
_WRAPPERS = ((r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("$$", "$$"), ("$", "$"))
_LETTER = re.compile(r"[a-zA-Z]")


@lru_cache(maxsize=4096)
def cleaned(answer: str) -> str:
    r"""Return the answer in normalized LaTeX, with single spaces and words as `\text{...}`.

    >>> cleaned(r"$\left( \dfrac12,\; 3{,}000 \text{ cm} \right)$.")
    '( \\frac{1}{2}, 3000 \\text{cm} )'
    """
    text = _unwrapped(answer.translate(_UNICODE))
    text = _DIGIT_GROUPS.sub("", text)
    for pattern in (_SIZES, _STYLES, _SKIPS):
        text = pattern.sub("", text)
    text = _NO_SPACE.sub(lambda match: match.group(1) or "", text)
    text = _SPACES.sub(lambda match: match.group(1) or " ", text)
    text = _FACES.sub(r"\1", _FACES.sub(r"\1", text))
    text = _WORDS.sub(_as_words, text)
    for pattern in (_DEGREES, _CURRENCY, _DELIMITERS):
        text = pattern.sub("", text)
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    return " ".join(_with_braces(_with_names(text)).split()).lstrip(" ,;:").rstrip(" .,;:")


def _unwrapped(text: str) -> str:
    """Remove the final period and the math or bold delimiters around the whole text."""
    while True:
        text = text.strip().rstrip(".,;:").rstrip()
        inner = next(
            (
                text[len(left) : -len(right)]
                for left, right in _WRAPPERS
                if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right)
            ),
            None,
        )
        if inner is None or inner.endswith("\\"):
            return text
        text = inner


def _as_words(match: re.Match[str]) -> str:
    words = match.group(1).strip()
    return rf" \text{{{words}}} " if _LETTER.search(words) else f" {words} "


def _with_names(text: str) -> str:
    """Turn names such as `sqrt(2)` and `pi` into commands. Text with `\\text` stays unchanged."""
    if "\\text{" in text:
        return text
    text = _ROOT_OF_PARENTHESES.sub(r"\\sqrt{\1}", text)
    return _BARE_NAMES.sub(lambda match: "\\" + match.group(1).replace("infinity", "infty"), text)


def _with_braces(text: str) -> str:
    r"""Add braces around the arguments of fractions and roots: `\frac12` becomes `\frac{1}{2}`."""
    text = _FRACTION_DIGITS.sub(r"\\frac{\1}{\2}", text)
    text = _FRACTION_FIRST.sub(r"\\frac{\1}{", text)
    text = _FRACTION_SPACE.sub(lambda match: rf"\frac{match.group(1) or ''}{{", text)
    text = _FRACTION_SECOND.sub(r"\1{\2}", text)
    return _ROOT.sub(r"\\sqrt{\1}", text)


_ONE_IN_BRACES = re.compile(r"([\^_])\s*\{\s*([0-9a-zA-Z])\s*\}")
_WORD_COMMAND = re.compile(r"\\text\{([^{}]*)\}")
# A space between digits separates numbers: `1 2` is not `12`.
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")


def text_key(clean: str) -> str:
    """Return a comparison key for a cleaned answer, without spaces and braces around single characters."""
    return _SPACE.sub("", _ONE_IN_BRACES.sub(r"\1\2", _WORD_COMMAND.sub(r"\1", clean)))


_TRAILING_TEXT = re.compile(r"(?<=[0-9a-zA-Z})!])\s*\\text\{([^{}]*)\}\s*(?:\^\s*\{?\s*-?\d\s*\}?)?\s*$")
_TRAILING_WORDS = re.compile(r"(?<=[0-9a-zA-Z})])((?:\s(?:[a-zA-Z]{2,12}))+)(?:\s*\^\s*\{?\s*-?\d\s*\}?)?$")
_GENERIC = frozenset({"square", "cubic", "units", "unit", "sq"})


def without_unit(clean: str) -> str:
    r"""Return a formula without its trailing unit: `10\sqrt{3}` for `10\sqrt{3} \text{cm}^2`."""
    match = _TRAILING_TEXT.search(clean)
    if match:
        words = match[1]
        keeps = not is_unit_text(words) or _has_digit(words) or _AM_PM.search(words)
    else:
        match = _TRAILING_WORDS.search(clean)
        keeps = match is None or not all(each in CANONICAL_UNIT or each in _GENERIC for each in match[1].split())
    if match is None or keeps:
        return clean
    return clean[: match.start()] if clean[: match.start()].strip() else clean


def _has_digit(text: str) -> bool:
    return any(sign.isdigit() for sign in text)


_AM_PM = re.compile(r"\b[ap]\.?\s?m\b", re.IGNORECASE)
_UNIT_AT_END = re.compile(
    r"(?:\\text\{([^{}]*)\}|\s([a-zA-Z/ ]+)|(?<=\d)([a-z/]{2,4}))\s*(?:\^\s*\{?\s*-?\d\s*\}?|\d)?$"
)


def unit_of(clean: str) -> str | None:
    """Return the canonical name of the unit after a value; None if there is no known unit."""
    match = _UNIT_AT_END.search(clean)
    return unit_in(next(filter(None, match.groups()), "")) if match else None


_UNKNOWN = r"\\?[a-zA-Z](?:_\{?\w{1,3}\}?)?'{0,2}"
_NAME = re.compile(
    rf"(?:{_UNKNOWN}(?:\(\s*[^()=]{{1,12}}\s*\))?|[A-Z]{{2,4}}|[a-zA-Z]{{3,12}}|\\(?:alpha|beta|gamma|theta|lambda|mu|phi"
    r"|omega|pi|delta|epsilon|sigma|tau|rho|eta|psi)(?:_\{?\w\}?)?"
    r"|\(\s*\\?[a-z]{1,6}(?:_\w)?(?:\s*,\s*\\?[a-z]{1,6}(?:_\w)?){1,4}\s*\))\s*(?:=|\\in(?![a-zA-Z]))\s*"
)
# Other quantities that an answer may name before its value: an angle, a length, an area, a sum of unknowns, words.
_QUANTITY = re.compile(
    r"(?:m?\s*\\(?:measured)?angle\s*\{?[A-Z]{1,3}\}?|\\(?:overline|overrightarrow)\s*\{[A-Z]{2}\}|\|[A-Z]{2}\||\[[A-Z]{3,6}\]"
    r"|[a-zA-Z](?:_\w)?(?:\s*\+\s*[a-zA-Z](?:_\w)?){1,4}|\\text\{[^{}=]{1,60}\}(?:\s*[A-Za-z])?"
    r"|\\(?:max|min|gcd|lcm|deg)\s*\(?[a-zA-Z]?[^=()]{0,20}\)?)\s*=\s*"
)
_SUM_OF_NUMBERS = re.compile(
    r"(?:[\d\s.,+\-/()%!{}^]|\\(?:cdot|frac|binom|text\{[^{}]*\})|(?<![a-zA-Z\\])[a-zA-Z]{3,}(?![a-zA-Z]))+"
)


def without_name(clean: str) -> str:
    r"""Return the value without the unknown before it: `5` for `x = 5`, `[1,2)` for `x \in [1,2)`."""
    match = _NAME.match(clean)
    if match and (CHANGES_SUBJECT.search(match.group()) or DENIES.search(match.group())):
        return clean
    rest = clean[match.end() :] if match else ""
    return rest if rest and "=" not in rest else clean


def value_named(clean: str) -> str:
    r"""Return the final value of an answer: `74` for `\angle A = 74`, `18` for `x = 9 + 9 = 18`.

    Unsolved equations stay unchanged: `2x = 12`, `x^2 = 9`, `-x = 3`.
    """
    if "=" not in clean and r"\in" not in clean:
        return clean
    match = _NAME.match(clean) or _QUANTITY.match(clean)
    first, _, last = clean.rpartition("=")
    if CHANGES_SUBJECT.search(first) or DENIES.search(first):
        return clean
    if match and "=" not in clean[match.end() :]:
        return clean[match.end() :] or clean
    if _SEVERAL.search(clean):
        return clean
    is_named = match is not None or all(
        _SUM_OF_NUMBERS.fullmatch(part) and not _BARE_NUMBER.fullmatch(part) for part in first.split("=")
    )
    return last.strip() if is_named and last.strip() and not _RELATION.search(first) else clean


_BARE_NUMBER = re.compile(r"-?[\s\d.,]*%?[a-zA-Z\s]*")
_SEVERAL = re.compile(r"[,;]|\\l(?:or|and)(?![a-zA-Z])|\b(?:or|and)\b")
_RELATION = re.compile(r"[<>]|\\(?:leq|geq|neq|approx|equiv|sim|lt|gt)|!$")

_CHOICE = re.compile(r"(?:option|choice|answer)?\s*\(?\s*([A-J])\s*\)?", re.IGNORECASE)
_CHOICE_AND_TEXT = re.compile(r"(?:\(\s*([A-J])\s*\)|([A-J])\s*[).:])\s*(\S.*)")
_OTHER_CHOICE = re.compile(r"\([A-J]\)|(?<![A-Za-z])(?:[B-HJ](?![A-Za-z'])|(?:and|or|nor|&|,|/)\s*[A-J](?![A-Za-z']))")


def choice_of(clean: str, *, with_text: bool = False) -> str | None:
    r"""Return the letter of a multiple choice: `C` for `(C)` and `\text{C}`. With `with_text`, also for `(C) 12 cm`."""
    bare = _WORD_COMMAND.sub(r"\1", clean).strip()
    match = _CHOICE.fullmatch(bare)
    if match:
        return match[1] if match[1].isupper() else None
    match = _CHOICE_AND_TEXT.fullmatch(bare) if with_text else None
    if match is None or _OTHER_CHOICE.search(match[3]) or DENIES.search(match[3]) or "?" in match[3]:
        return None
    return match[1] or match[2]


_WORDS_ONLY = re.compile(r"[A-Za-z][A-Za-z0-9 .,'\"\-/()?!:]*")
_LONG_WORD = re.compile(r"[A-Za-z]{4,}")
_NO_LETTER = re.compile(r"[^a-z0-9]+")
_SHORT_WORDS = frozenset({"yes", "no", "odd", "one", "two", "six", "ten", "red", "all"})
_ARTICLES = frozenset({"the", "a", "an"})


_BETWEEN_WORDS = re.compile(r",|;|\band\b|\bor\b|&")
_OR = re.compile(r"\bor\b")


def words_of(clean: str) -> tuple[str, ...] | None:
    r"""Return the words of an answer in alphabetical order; None if the answer is not in words.

    >>> words_of(r"\text{Bob and Alice}")
    ('alice', 'bob')
    """
    bare = _WORD_COMMAND.sub(r" \1 ", clean).strip()
    if not _WORDS_ONLY.fullmatch(bare):
        return None
    if not ("\\text{" in clean or _LONG_WORD.search(bare) or bare.casefold().strip(".") in _SHORT_WORDS):
        return None
    parts = (_NO_LETTER.sub(" ", part).split() for part in _BETWEEN_WORDS.split(bare.casefold()))
    words = tuple(sorted(" ".join(word for word in part if word not in _ARTICLES) for part in parts if part))
    return ("or", *words) if len(words) > 1 and _OR.search(bare.casefold()) else words or None
