"""Find the answer in a text: the last box, else the text after `####`, an answer phrase, or the last number."""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stepspec.evaluation.grade.boxes import LastBoxes, last_boxes
from stepspec.evaluation.grade.number import has_digit, read_number
from stepspec.evaluation.grade.sentence import has_number_word, last_number_in, taken_back
from stepspec.evaluation.grade.vocabulary import CHANGES_SUBJECT, DENIES
from stepspec.evaluation.grade.words import FoundBy


@dataclass(frozen=True)
class Found:
    """An answer as written in the text. `boxes` is set if the answer is in a box."""

    text: str
    by: FoundBy
    boxes: LastBoxes | None = None


def find_answer(text: str, *, last_number: bool, cut_short: bool) -> Found | None:
    """Return the answer in a text without thinking, or None. Takes time linear in the text length.

    Args:
        text: the model's text, with the thinking removed.
        last_number: whether to use the last number if the text has no box, `####` or answer phrase.
        cut_short: whether the text ends because its token budget ran out. Its last words are then not an answer.
    """
    boxes = last_boxes(text)
    if boxes:
        return Found(boxes.contents[-1], "box", boxes)
    for find, by in _FINDERS:
        found = find(text, cut_short)
        if found:
            return Found(found, by)
    number = last_number_in(text) if last_number and not cut_short else None
    return Found(number, "last number") if number else None


_HASHES = re.compile(r"^[ \t]*####(?!#)[ \t]*(\S[^\n]*)$", re.MULTILINE)
_MAX_LINES_TRIED = 20


def _after_hashes(text: str, cut_short: bool) -> str | None:
    """Return the answer after `####`, the marker of GSM8K (K. Cobbe et al., arXiv:2110.14168).

    Markdown headings use the same marker and are not answers.
    """
    end = len(text.rstrip())
    for match in reversed(deque(_HASHES.finditer(text), maxlen=_MAX_LINES_TRIED)):
        line = match.group(1).strip()
        is_last = match.end() >= end
        if not (is_last and cut_short) and (is_last or _is_number(line)):
            return None if taken_back(text[match.end() : match.end() + _MAX_PHRASE_CHARS], line) else line
    return None


# Possessive quantifiers, because backtracking could split a megabyte of spaces between two runs in a million ways.
_PHRASE = re.compile(
    r"\b(?:final\s+)?answers?\b(?:\s+(?:to|of|for)\s+(?:the|this)\s+(?:\w{1,20}\s+)?(?:question|problem)\b)?[*_\s]*+"
    r"(?:(?:is|are|would\s+be|will\s+be|should\s+be|must\s+be|equals)\b|(?:is|are)(?=n['’]t\b)|[:=：])[*_\s:=]*+"
    r"|^[ \t]*+[#*_]*+[ \t]*+final\s+answer[ \t]*+[*_]*+[ \t]*+$\s*+",
    re.IGNORECASE | re.MULTILINE,
)
_MAX_PHRASE_CHARS = 2_000
_PAIRS = (("$$", "$$"), (r"\[", r"\]"), (r"\(", r"\)"), ("$", "$"))
_SENTENCE_END = re.compile(r"(?<!\b[ap])(?<!\b[ap]\.m)\.(?=\s|$)|\n|(?<![\\\d])!(?=\s|$)|\?(?=\s|$)")
_REASON = re.compile(r"[,;]?\s+(?:because|since|as(?!\s+long)|and\s+(?:he|she|it|they))\s.*", re.DOTALL)
_CONNECTIVE = re.compile(
    r"[,;]?\s+(?:as\s+long|which|where|when|so|but(?!\s+[\\$]*\d)|for|after)\s.*",
    re.DOTALL,
)


def _after_phrase(text: str, cut_short: bool) -> str | None:
    matches = deque(_PHRASE.finditer(text), maxlen=1)
    if not matches:
        return None
    last = matches[0]
    if _is_denied(text[max(0, last.start() - _BEFORE_CHARS) : last.start()]):
        return None
    rest = text[last.end() : last.end() + _MAX_PHRASE_CHARS]
    answer, ended = _formula_at_start(rest) or _sentence_at_start(rest)
    if not answer or taken_back(rest.partition(answer)[2], answer):
        return None
    return None if cut_short and not ended else answer


_BEFORE_CHARS = 120
_CLAUSE_END = re.compile(r"[,;:](?=\s)|[.!?](?=\s)|\n|\b(?:so|but|then|therefore|thus|hence)\b")
_HYPOTHETICAL = re.compile(
    r"\b(?:if|whether|suppose|assum\w+|unless|why|doubt|claim\w*|pretend|other|their|his|her|intermediate|guess\w*)\b"
    r"(?:\s+\w+){0,3}\W*$",
    re.IGNORECASE,
)
# "Half of the answer is 12."
_CHANGED = re.compile(rf"(?:{CHANGES_SUBJECT.pattern})\W*(?:of\s+)?(?:the|my|our|this)?\s*$", re.IGNORECASE)


def _is_denied(before: str) -> bool:
    """Return whether the sentence denies or only supposes the answer: "I do not think that the answer is 12"."""
    *_, clause = _CLAUSE_END.split(before)
    return bool(DENIES.search(clause) or _CHANGED.search(clause) or _HYPOTHETICAL.search(clause))


def _formula_at_start(rest: str) -> tuple[str, bool] | None:
    """Return the formula directly after the phrase; None for prices such as `$12 and $13`, which are not formulas."""
    for left, right in _PAIRS:
        end = rest.find(right, len(left)) if rest.startswith(left) else -1
        if end > 0 and not _is_price(rest, left, end):
            behind = rest[end + len(right) :]
            # If a unit or a second formula follows, the whole sentence is the answer.
            if _SENTENCE_END.match(behind.lstrip(" *")) or not behind.strip(" *"):
                return rest[len(left) : end].strip(), True
            return None
    return None


def _is_price(rest: str, left: str, end: int) -> bool:
    return left == "$" and (rest[end - 1].isspace() or rest[end + 1 : end + 2].isdigit())


def _sentence_at_start(rest: str) -> tuple[str | None, bool]:
    """Return the text up to the end of the sentence or line, without explanations, and whether an end was found.

    The text is None for a question, which is not an answer.
    """
    end = _SENTENCE_END.search(rest)
    if end and end.group() == "?":
        return None, True
    sentence = _REASON.sub("", rest[: end.start()] if end else rest)
    return _without_explanation(sentence).strip(" *_\t\r"), end is not None


_FOR_SO_MANY = re.compile(r"\s+(?:for|after)\s+\\?\$?\d[\d,]*\s+(?:(?!and\b|or\b|but\b)[a-z]+[\s.]*)+", re.IGNORECASE)


def _without_explanation(sentence: str) -> str:
    """Remove the clause that explains the answer.

    Keep the whole sentence if the clause names another number or a condition, or denies the answer.
    """
    match = _CONNECTIVE.search(sentence)
    if match is None:
        return sentence
    rest, has_answer = match.group(), has_digit(sentence[: match.start()])
    if (
        has_answer
        and not _FOR_SO_MANY.fullmatch(rest)
        and (has_digit(rest) or has_number_word(rest) or DENIES.search(rest))
    ):
        return sentence
    return sentence[: match.start()]


_FINDERS: tuple[tuple[Callable[[str, bool], str | None], FoundBy], ...] = (
    (_after_hashes, "hashes"),
    (_after_phrase, "phrase"),
)


def _is_number(line: str) -> bool:
    return len(line) < _MAX_PHRASE_CHARS and read_number(line) is not None
