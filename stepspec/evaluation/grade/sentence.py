"""Read the number that a sentence names as its answer: "The largest n is 34." names 34, "half of 34" does not.

The rules are strict: nothing around the number may change it, deny it or name a second number.
"""

import re
from itertools import pairwise

from stepspec.evaluation.grade.latex import cleaned, value_named
from stepspec.evaluation.grade.number import Number, has_digit, number_of
from stepspec.evaluation.grade.vocabulary import (
    CANONICAL_UNIT,
    CHANGES_BEFORE,
    CHANGES_IN_SENTENCE,
    CHANGES_SUBJECT,
    COPULA,
    DENIES,
    HEDGES,
    HYPERBOLIC,
    LABELS,
    NUMBER_WORDS,
    OF_TOTAL,
    SHORT_WORDS,
    is_long_word,
)

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?!,?\d))"
# A standalone number: not the digits of a name (`x2`), a version (`1.2.3`), a power or an argument.
_NUMBER = re.compile(
    rf"(?<![\w.\\^_{{}}/+*)\]-])-?(?:\d+\s*\\frac\{{\d+\}}\{{\d+\}}|\\frac\{{-?\d+\}}\{{\d+\}}"
    rf"|\d*\.\d*\\overline\{{\d+\}}|(?:{_DIGITS}(?:\.\d+)?(?:/\d+)?|\.\d+)"
    r"(?:\s(?:hundred|thousand|million|billion|trillion)\b)?(?:\s?%)?)"
)
# What may follow a number in a sentence: the end, punctuation, a word or a unit.
_GOES_ON = re.compile(
    r"\s*$|[.,;:)\"]+(?:\s|$)|\s?\\text\{|\s+\(?(?:a\s+)?([a-zA-Z]{2,})|(?:cm|mm|km|kg|ft|mph|st|nd|rd|th)(?![a-zA-Z])"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORD_BEFORE_OF = re.compile(r"\bof\b\W*(?:the\s+|exactly\s+|only\s+)?\W*$", re.IGNORECASE)
_NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(sorted(NUMBER_WORDS - {'one'}))})\b", re.IGNORECASE)
_OPERATOR = re.compile(r"[+*/^<>|]|(?<!\w)-|-(?!\w)|\\(?!text)[a-zA-Z]+")
_UNKNOWN = re.compile(r"(?<![a-zA-Z'])[b-zB-HJ-Z](?![a-zA-Z])")
_JOINED_CHOICE = re.compile(r"\b(?:or|nor|either)\b", re.IGNORECASE)


def number_named(clean: str) -> str | None:
    """Return the number that a cleaned sentence names, with its unknown and unit; None for no or several numbers."""
    text = _with_one_number(" ".join(_TEXT.sub(r" \1 ", clean).split()))
    if DENIES.search(text):
        return None
    before, equals, after = text.rpartition("=")
    if equals:
        formula = _last_formula(before)
        if _OTHER_EQUATION.search(before) or CHANGES_SUBJECT.search(before):
            return None
        if value_named(formula + "= 0") != "0":
            return None
        text, subject = after.strip(), before
        name = f"{formula} = " if len(formula) == 1 else ""
    else:
        subject = name = ""
    found = list(_NUMBER.finditer(text))
    if len(found) != 1 or (equals and found[0].start() > 1):
        return None
    match = found[0]
    left, right = text[: match.start()], text[match.end() :]
    if "," in match.group() and left.rstrip().endswith(("(", "[", "{")):
        return None  # a pair
    right = _without_comparison(left, right)
    if has_digit(left) or has_digit(right) or not _may_follow(right) or not _may_lead(left, subject):
        return None
    unit = _UNIT.match(right)
    return f"{name}{match.group()}{unit.group() if unit and unit[1] in CANONICAL_UNIT else ''}"


_UNIT = re.compile(r"\s?([a-zA-Z/]+)")
# An equation for one unknown, followed by another equation.
_OTHER_EQUATION = re.compile(r"=[^=]*(?:[,;]\s|\b(?:and|or)\b|\\(?:text|quad|qquad|land|lor)\b)[^=]*$")
CALCULATION = re.compile(r"<<[^<>\n]{0,200}>>")
_DENIED_OTHER = re.compile(
    r"(?<=\d)((?:\s[a-z]{2,20})?),?\s+\(?(?:and\s+)?not\s+\\?\$?-?\d[\d.,]*(?:\s[a-z]+)?\)?[.\s]*$"
)
_COMPUTED = re.compile(
    r"^(?:\W|so\b|thus\b|then\b|hence\b|therefore\b|the\b|and\b)*(?:(?:half|a\s+(?:third|quarter|fifth|tenth)|double|the\s+double"
    r"|sum|product|difference|square|square\s+root)\s+of|twice|thrice|double|triple)\s+\d[\d,]*(?:\.\d+)?"
    r"(?:\s+and\s+\d[\d,]*(?:\.\d+)?)?(?=\s+(?:is|equals|gives|makes)\b)",
    re.IGNORECASE,
)
_WORD_AND_DIGITS = re.compile(
    r"\b([a-z]+(?:-[a-z]+)?)\s+\((\d+)\)|(?<![\d.,-])(\d+)\s+\(([a-z]+(?:-[a-z]+)?)\)", re.IGNORECASE
)
_ONES = tuple(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen""".split()  # noqa: SIM905
)
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES = {word: value for value, word in enumerate(_ONES)} | {
    f"{ten}-{one}" if digit else ten: value * 10 + digit
    for value, ten in enumerate(_TENS, 2)
    for digit, one in enumerate(_ONES[:10])
}


def _with_one_number(text: str) -> str:
    """Remove numbers that repeat, rule out or derive the answer: `twelve (12)`, `12, not 13`, `half of 24 is 12`."""
    text = _WORD_AND_DIGITS.sub(_digits_of_both, CALCULATION.sub("", text))
    return _COMPUTED.sub("it", _DENIED_OTHER.sub(r"\1", text))


def _digits_of_both(match: re.Match[str]) -> str:
    word, digits = match[1] or match[4], match[2] or match[3]
    return digits if str(_VALUES.get(word.casefold())) == digits else match[0]


_COMPARISON = re.compile(r"\s+(?:more|fewer|less)(?=\s+(?!than\b)[a-z]{3,}(?!.*\bthan\b))", re.IGNORECASE)
_COMPARISON_WITH = re.compile(r"\s+(?:more|fewer|less)\b((?:\s+[a-z]+){0,2})\s+than\b", re.IGNORECASE)
_HAS = re.compile(
    r"\b(?:reads?|has|have|had|gets?|got|needs?|buys?|bought|sells?|sold|makes?|made|earns?|earned|pays?|paid|spends?|spent|eats?"
    r"|ate|runs?|ran|costs?|saves?|saved|scores?|scored|owns?|owned)\s+\\?\$?$",
    re.IGNORECASE,
)


def _without_comparison(left: str, right: str) -> str:
    """Remove the comparison after a number, if the number stays the answer.

    `12 more eggs` after a verb such as "has" means 12 eggs, and "has 12 more than Ben" answers how many more.
    """
    if not _HAS.search(left) or CHANGES_SUBJECT.search(right):
        return right
    return _COMPARISON.sub("", _COMPARISON_WITH.sub(r"\1 with", right, count=1), count=1)


def _last_formula(text: str) -> str:
    """Return the formula before the `=`, without the sentence around it."""
    words = re.split(r"(?<![\w\\])(?!(?:max|min|gcd|lcm)\b)[a-zA-Z]{2,}(?:,|:)?\s+(?=\S)|[,;:]\s", text)
    return words[-1].strip()


def _may_follow(right: str) -> bool:
    goes_on = _GOES_ON.match(right)
    if goes_on is None or (goes_on[1] and not _is_word(goes_on[1])):
        return False
    return not (
        CHANGES_IN_SENTENCE.search(right)
        or _JOINED_CHOICE.search(right)
        or _OPERATOR.search(right)
        or _UNKNOWN.search(right)
    )


def _is_word(letters: str) -> bool:
    """Return whether the letters are a word, and not a product of unknowns or a function."""
    return letters in SHORT_WORDS or (is_long_word(letters) and letters not in _FUNCTIONS)


_FUNCTIONS = frozenset({"arcsin", "arccos", "arctan", "sqrt", *HYPERBOLIC})


def _may_lead(left: str, subject: str) -> bool:
    if CHANGES_SUBJECT.search(left) or CHANGES_SUBJECT.search(subject) or _JOINED_CHOICE.search(left):
        return False
    between = left[max((verb.end() for verb in COPULA.finditer(left)), default=0) :]
    if CHANGES_BEFORE.search(between) or LABELS.search(left) or _NUMBER_WORD.search(between):
        return False
    if _WORD_BEFORE_OF.search(left) and not OF_TOTAL.search(left):
        return False
    return not _OPERATOR.search(left.replace("*", "")) and not re.search(
        r"[a-zA-Z]\($|(?<![a-zA-Z'])[b-zB-HJ-Z]\s*$", left
    )


_TAIL_CHARS = 2_000
_SENTENCE_END = re.compile(r"(?<!\b[A-Za-z])[.!?](?=[\s*$\"')\]}]|\\[)\]]|$)|\n")
_CLAUSE_END = re.compile(
    r"[,;:]\s+(?:so|thus|then|hence|therefore|and\s+so|giving|which\s+(?:gives|means|is|equals)|for\s+a\s+total\s+of"
    r"|leaving|making|meaning)?\b|\b(?:so|thus|hence|therefore)\b,?\s+|[;:]\s",
    re.IGNORECASE,
)
_TAKES_BACK = re.compile(
    r"\b(?:wait|but|however|actually|oops|sorry|correction|recheck|check|unless|or)\b", re.IGNORECASE
)
_SENTENCE_START = r"(?:^|[.!?\n])[\s\W]*"
_NO_ANSWER_AT_ALL = (
    r"(?:(?:quite|clearly|obviously|actually|just|also|still)\s+)?(?:wrong|incorrect|false|mistaken|impossible|a\s+mistake|an\s+error"
    r"|not\s+(?:quite\s+)?(?:right|correct|true|possible|it\b|the\s+(?:right\s+|correct\s+|final\s+)?answer))"
)
_DENIES_ANSWER = re.compile(
    rf"^[\s\W]*(?:which|and\s+that|but\s+(?:that|this|it))\s+(?:is|was|seems|looks|must\s+be)\s+{_NO_ANSWER_AT_ALL}"
    rf"|(?:{_SENTENCE_START}|\b(?:but|wait|hmm+|no|actually|sorry|oops|however|so)\b\W*)(?:(?:that|this|it|(?:the|my|this|that)\s+answer)"
    rf"\s*(?:(?:is|was|seems|looks|must\s+be|['’]s)\s+{_NO_ANSWER_AT_ALL}|(?:isn|wasn|can)['’]t\s+(?:be|right|correct|true|it)"
    r"|cannot\s+be)|(?:wrong|incorrect)\b)"
    r"|\bI\s+(?:have\s+|['’]ve\s+)?(?:made\s+(?:a|an|some)\s+(?:\w+\s+)?(?:mistake|error|slip)s?|was\s+wrong|am\s+wrong|misread|miscounted"
    r"|miscalculated|misunderstood|take\s+(?:it|that)\s+back)|\b(?:scratch|strike|forget|ignore)\s+that\b|\bnever\s?mind\b"
    r"|\bmy\s+(?:mistake|bad|error)\b",
    re.IGNORECASE,
)
_DOUBTS = re.compile(
    r"(?:^|[.!?\n])[\s\W]*(?:(?:but|no|oh|and)\W+)?(?:wait|hmm+|oops|hold\s+on)\b[^.!?\n]*[.!?\n]", re.IGNORECASE
)
_CONFIRMS = re.compile(
    r"\b(?:yes|correct|right|confirm\w*|indeed|checks\s+out|holds|matches|fine|good|same)\b", re.IGNORECASE
)
_OTHER_NUMBER = (
    r"[\\$*(\s]*(?P<{0}>-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?(?!\s*(?:[-+*/=^×÷(%]|\\(?!text|[)\]]))|[.,:]?\d)"
    rf"|{_NUMBER_WORD.pattern})"
)
_IT_IS = (
    r"\b(?:it|that|this|the\s+(?:\w+\s+)?answer)\s*(?:is|['’]s|(?:should|must|could|may|might|ought\s+to|has\s+to)\s+(?:also\s+)?"
    r"(?:be|have\s+been|read)|was|=|equals)\s*(?:actually\s+|really\s+)?"
)
_OTHER_ANSWER = re.compile(
    r"(?:(?:^|[.!?\n,;])[\s\W]*(?:(?:no|wait|oops|hmm+|actually|sorry|correction|rather|but|or|instead)\b[\s\W]*)+"
    rf"(?:{_IT_IS}|make\s+(?:it|that)\s+)"
    r"|\b(?:it|that|answer)\s+(?:should|ought\s+to|could|may|might)\s+(?:also\s+)?(?:be|have\s+been|read)\s+"
    r"|\b(?:final|correct|right|real|true|actual)\s+answer\s+is:?\s+|\bthe\s+answer\s+is:?\s+)"
    + _OTHER_NUMBER.format("named")
    + r"|(?:(?:^|[.!?\n])[\s\W]*(?:(?:no|wait|oops|hmm+|actually|sorry|correction|rather)\b[\s\W]*)+|^[\s\W]*or\s+)"
    + _OTHER_NUMBER.format("bare")
    + r"(?:\s+[a-z]+)?(?=\W*(?:[.!?\n]|$))",
    re.IGNORECASE,
)
_MAX_BEHIND_CHARS = 2_000
_MAX_NUMBER_CHARS = 100


def taken_back(rest: str, answer: str = "") -> bool:
    """Return whether the text after an answer denies it, doubts it without confirming it, or gives another number.

    >>> taken_back(". No wait, it is 13.", "12")
    True
    """
    rest = rest[:_MAX_BEHIND_CHARS]
    if _DENIES_ANSWER.search(rest):
        return True
    doubt = _DOUBTS.search(rest)
    if doubt and not _CONFIRMS.search(rest, doubt.end()):
        return True
    number = number_of(cleaned(answer)) if 0 < len(answer) <= _MAX_NUMBER_CHARS else None
    return number is not None and any(_is_other(match, number) for match in _OTHER_ANSWER.finditer(rest))


def _is_other(match: re.Match[str], number: Number) -> bool:
    written = (match["named"] or match["bare"]).rstrip(",").casefold()
    other = number_of(str(_VALUES.get(written, written))) if len(written) <= _MAX_NUMBER_CHARS else None
    return other is None or not other.equals(number)


_LIST_START = re.compile(r"\W*(?:(?:and|or|but|plus|minus|then)\b\W*)?-?\\?\$?-?\.?\d")
_PERCENT_WORD = re.compile(r"\bper\s?cent\b", re.IGNORECASE)


def has_number_word(text: str) -> bool:
    """Return whether a text has a number word. "one" does not count, because it is rarely a number."""
    return bool(_NUMBER_WORD.search(text))


def last_number_in(text: str) -> str | None:
    """Return the number that the last clause with a digit names; None for several numbers or a changed number."""
    tail = text[-_TAIL_CHARS:]
    ends = [0, *(end.end() for end in _SENTENCE_END.finditer(tail)), len(tail)]
    sentences = [tail[start:end] for start, end in pairwise(ends)]
    while sentences and not has_digit(sentences[-1]):
        behind = sentences.pop()
        if taken_back(behind) or DENIES.search(behind) or _TAKES_BACK.search(behind) or _NUMBER_WORD.search(behind):
            return None
    if not sentences:
        return None
    sentence = _with_one_number(sentences[-1].strip())
    if "?" in sentence or DENIES.search(sentence) or HEDGES.search(sentence) or _PERCENT_WORD.search(sentence):
        return None
    return _named_in_last_clause(sentence)


# "x = 3, y = 12" gives two answers.
_OTHER_UNKNOWN_BEFORE = re.compile(r"(?<![a-zA-Z])[a-zA-Z](?:_\w)?\s*=\s*[-\d.,]+\W*$")
_UNKNOWN_FIRST = re.compile(r"\W*(?:and\s+)?[a-zA-Z](?:_\w)?\s*=")


def _named_in_last_clause(sentence: str) -> str | None:
    starts = [0, *(end.end() for end in _CLAUSE_END.finditer(sentence))]
    start = next((start for start in reversed(starts) if has_digit(sentence[start:])), 0)
    clause = sentence[start:]
    # "12, 13 and 14" is a list, and its last item is not the answer.
    if start and has_digit(sentence[:start]) and _LIST_START.match(clause) and "=" not in sentence[start - 3 : start]:
        return None
    if _OTHER_UNKNOWN_BEFORE.search(sentence[:start]) and _UNKNOWN_FIRST.match(clause):
        return None
    if sentence.endswith("!") and re.search(r"\d\W?!$", sentence):
        return None
    named = number_named(cleaned(clause.rstrip("!")))
    return named if named is not None and number_of(named) is not None else None
