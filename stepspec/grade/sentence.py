"""Reads the number that a sentence names as its answer: "The largest n is 34." names 34, "half of 34" does not.

Reads less rather than more. Beside the number nothing may stand that makes another number of it, denies it or names a
second one.
"""

import re
from itertools import pairwise

from stepspec.grade.latex import cleaned, value_named
from stepspec.grade.number import has_digit, number_of
from stepspec.grade.vocabulary import (
    CANONICAL_UNIT,
    CHANGES_BEFORE,
    CHANGES_IN_SENTENCE,
    CHANGES_SUBJECT,
    COPULA,
    DENIES,
    HEDGES,
    LABELS,
    NUMBER_WORDS,
    OF_TOTAL,
    SHORT_UNITS,
)

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?!,?\d))"
# A number that nothing is glued to: not the digits of a name (`x2`), a version (`1.2.3`), a power or an argument.
_NUMBER = re.compile(
    rf"(?<![\w.\\^_{{}}/+*)\]-])-?(?:\d+\s*\\frac\{{\d+\}}\{{\d+\}}|\\frac\{{-?\d+\}}\{{\d+\}}"
    rf"|\d*\.\d*\\overline\{{\d+\}}|(?:{_DIGITS}(?:\.\d+)?(?:/\d+)?|\.\d+)"
    r"(?:\s(?:hundred|thousand|million|billion|trillion)\b)?(?:\s?%)?)"
)
# What may follow a number in a sentence: the end, a full stop, a word, a unit.
_GOES_ON = re.compile(
    r"\s*$|[.,;:)\"]+(?:\s|$)|\s?\\text\{|\s+\(?(?:[a-zA-Z]{3}|a\s+[a-zA-Z]{3})|\s+\(?([a-zA-Z]{2})(?![a-zA-Z])|(?:cm|mm|km|kg|ft|mph|st|nd|rd|th)(?![a-zA-Z])"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORD_BEFORE_OF = re.compile(r"\bof\b\W*(?:the\s+|exactly\s+|only\s+)?\W*$", re.IGNORECASE)
_NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(sorted(NUMBER_WORDS - {'one'}))})\b", re.IGNORECASE)
_OPERATOR = re.compile(r"[+*/^<>|]|(?<!\w)-|-(?!\w)|\\(?!text)[a-zA-Z]+")
_PREPOSITIONS = frozenset({"in", "of", "at", "on", "by", "as", "if", "so", "is", "he", "we", "it", "a", "to"})
_UNKNOWN = re.compile(r"(?<![a-zA-Z'])[b-zB-HJ-Z](?![a-zA-Z])")
_JOINED_CHOICE = re.compile(r"\b(?:or|nor|either)\b", re.IGNORECASE)


def number_named(clean: str) -> str | None:
    """The one number that a cleaned sentence names, with its unknown and unit; None if it names none or several."""
    text = " ".join(_TEXT.sub(r" \1 ", clean).split())
    if DENIES.search(text):
        return None
    before, equals, after = text.rpartition("=")
    if equals:
        formula = _last_formula(before)
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
    if has_digit(left) or has_digit(right) or not _may_follow(right) or not _may_lead(left, subject):
        return None
    unit = _UNIT.match(right)
    return f"{name}{match.group()}{unit.group() if unit and unit[1] in CANONICAL_UNIT else ''}"


_UNIT = re.compile(r"\s?([a-zA-Z/]+)")


def _last_formula(text: str) -> str:
    """What stands before the `=`, without the sentence that leads up to it."""
    words = re.split(r"(?<![\w\\])(?!(?:max|min|gcd|lcm)\b)[a-zA-Z]{2,}(?:,|:)?\s+(?=\S)|[,;:]\s", text)
    return words[-1].strip()


def _may_follow(right: str) -> bool:
    goes_on = _GOES_ON.match(right)
    if goes_on is None or (goes_on[1] and goes_on[1] not in SHORT_UNITS | _PREPOSITIONS):
        return False
    return not (
        CHANGES_IN_SENTENCE.search(right)
        or _JOINED_CHOICE.search(right)
        or _OPERATOR.search(right)
        or _UNKNOWN.search(right)
    )


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
_LIST_START = re.compile(r"\W*(?:(?:and|or|but|plus|minus|then)\b\W*)?-?\\?\$?-?\.?\d")
_PERCENT_WORD = re.compile(r"\bper\s?cent\b", re.IGNORECASE)


def last_number_in(text: str) -> str | None:
    """The number that the last clause with a digit names; None unless it is the only one and nothing is done to it."""
    tail = text[-_TAIL_CHARS:]
    ends = [0, *(end.end() for end in _SENTENCE_END.finditer(tail)), len(tail)]
    sentences = [tail[start:end] for start, end in pairwise(ends)]
    while sentences and not has_digit(sentences[-1]):
        behind = sentences.pop()
        if DENIES.search(behind) or _TAKES_BACK.search(behind) or _NUMBER_WORD.search(behind):
            return None
    if not sentences:
        return None
    sentence = sentences[-1].strip()
    if "?" in sentence or DENIES.search(sentence) or HEDGES.search(sentence) or _PERCENT_WORD.search(sentence):
        return None
    return _named_in_last_clause(sentence)


def _named_in_last_clause(sentence: str) -> str | None:
    starts = [0, *(end.end() for end in _CLAUSE_END.finditer(sentence))]
    start = next((start for start in reversed(starts) if has_digit(sentence[start:])), 0)
    clause = sentence[start:]
    # "12, 13 and 14" is a list, and its last item no answer.
    if start and has_digit(sentence[:start]) and _LIST_START.match(clause) and "=" not in sentence[start - 3 : start]:
        return None
    if sentence.endswith("!") and re.search(r"\d\W?!$", sentence):
        return None
    named = number_named(cleaned(clause.rstrip("!")))
    return named if named is not None and number_of(named) is not None else None
