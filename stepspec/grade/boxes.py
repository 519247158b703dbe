r"""Finds the `\boxed{...}` of a text in one pass, whatever they hold and however they are nested.

A box is an answer only as it stands: `-\boxed{12}`, `\boxed{6}\pi`, `not \boxed{12}` and `\boxed{12} or 13` do not
answer 12.
"""

import re
from dataclasses import dataclass

from stepspec.grade.vocabulary import NUMBER_WORDS

# Escaped braces are matched so that they are passed over: they are typeset and do not group.
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
MAX_TOGETHER = 20
"""More boxes than this are no one answer."""
_MAX_BETWEEN_CHARS = 200
# Boxes of one sentence are said at once if these are between them and nothing there infers or corrects.
_JOINS = re.compile(
    r"[,;&/]|\\(?:q?quad|lor|land|text\s*\{\s*(?:and|or)\b)|\b(?:and|or|alternatively)\b", re.IGNORECASE
)
_INFERS = re.compile(
    r"\b(?:wrong|not|no|but|so|then|hence|thus|therefore|which|gives?|get|actually|corrected|instead|because|since"
    r"|implies|means|yields?|wait|simplif\w+|becomes|i\.e\.)\b|\\(?:implies|therefore|Rightarrow|to)(?![a-zA-Z])",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=[\s$*]|$)(?!\W*\b(?:or|alternatively|and)\b)|\n\s*\n", re.IGNORECASE)
_NAMES_AND_MARKS = re.compile(r"(?:[\s$,;&.()\[\]|/]|\\[\[\]()\\,;:! ]|\\q?quad|\\text\s*\{\s*(?:and|or)?\s*\}"
    r"|\\lor|\b(?:and|or)\b|[a-zA-Z](?:_\{?\w\}?)?\s*=)*")  # fmt: skip


@dataclass(frozen=True)
class Box:
    """Where a closed box stands: from `start` to `end`, its content from `inner_start` to `inner_end`."""

    start: int
    inner_start: int
    inner_end: int

    @property
    def end(self) -> int:
        """Behind the closing brace."""
        return self.inner_end + 1


@dataclass(frozen=True)
class LastBoxes:
    """The last box of a text with something in it, and those that lead up to it."""

    contents: tuple[str, ...]
    """Of boxes with nothing but separators and names between them, in order; the last box is the last."""
    num_joined: int = 1
    """How many of the last boxes are said at once, by a comma, "and" or "or"; 1 if the last stands alone."""
    joined: tuple[str, ...] = ()
    """What is in those."""
    changed: bool = False
    """Whether what stands beside the last box denies it or makes another value of it."""


def closed_boxes(text: str) -> list[Box]:
    """Every box whose braces balance, in the order in which they open."""
    open_braces: list[tuple[int, int] | None] = []  # start and start of the content; None for what is no box
    found: list[Box] = []
    for match in _BRACE.finditer(text):
        brace = match.group()
        if brace in (r"\{", r"\}"):
            continue
        if brace != "}":
            open_braces.append(None if brace == "{" else (match.start(), match.end()))
        elif open_braces and (box := open_braces.pop()):
            found.append(Box(box[0], box[1], match.start()))
    return sorted(found, key=lambda box: box.start)


def last_boxes(text: str) -> LastBoxes | None:
    """The last box that is not empty with what belongs to it; None if there is none."""
    boxes = closed_boxes(text)
    while boxes and _is_empty(text, boxes[-1]):
        boxes.pop()
    if not boxes:
        return None
    recent = boxes[-MAX_TOGETHER:]
    together = [recent[-1]]
    for box in reversed(recent[:-1]):
        if not _only_marks_between(text, box, together[-1]):
            break
        together.append(box)
    joined = [recent[-1]]
    for box in reversed(recent[:-1]):
        if not _are_joined(text, box, joined[-1]):
            break
        joined.append(box)
    return LastBoxes(
        tuple(_content(text, box) for box in reversed(together)),
        len(joined),
        tuple(_content(text, box) for box in reversed(joined)),
        _is_changed(text, boxes[-1]),
    )


def _content(text: str, box: Box) -> str:
    return text[box.inner_start : box.inner_end].strip()


def _is_empty(text: str, box: Box) -> bool:
    return not text[box.inner_start : box.inner_end].strip(" \t\r\n$.\\,;~")


def _only_marks_between(text: str, left: Box, right: Box) -> bool:
    return 0 <= right.start - left.end <= _MAX_BETWEEN_CHARS and bool(
        _NAMES_AND_MARKS.fullmatch(text, left.end, right.start)
    )


def _are_joined(text: str, left: Box, right: Box) -> bool:
    if not 0 <= right.start - left.end <= _MAX_BETWEEN_CHARS:
        return False
    between = text[left.end : right.start]
    return bool(_JOINS.search(between)) and not (_INFERS.search(between) or _SENTENCE_END.search(between))


_BEHIND_CHARS, _BEFORE_CHARS = 80, 80
# Behind a box: what multiplies it, raises it, names a base, a scale or a second answer, or denies it.
_CLOSES_MATH = r"(?:\s|\$|\\[)\],;:! ]|\}|\*\*|\\q?quad)*"
_MULTIPLIES_BEHIND = re.compile(
    r"\d|[a-zA-Z(]|!(?=\s*(?:\$|\\|[-+*/=^]))|_|\s*\^(?!\s*\{?\s*\\(?:circ|degree|prime))"
    r"|\s*\\(?:pi|sqrt|frac|[dt]frac|cdot|times|div|pm|mp|infty|theta|alpha|beta|gamma|lambda|binom|sin|cos|tan|ln|log"
    r"|overline|bmod|e|i)(?![a-zA-Z])"
    r"|\s*[-+*/](?=\s*(?:[\d(]|\\(?!text|boxed|[)\],;! ]|q?quad)|[b-hj-zB-HJ-Z](?![a-zA-Z])))"
)
_UNIT_BEHIND = re.compile(
    r"(?:[mck]m|m?kg|ft|mph|cm|st|nd|rd|th)(?![a-zA-Z])|\(\s*\\?[a-z]{3}|and\b|or\b|is\b|[A-Z]?[a-z]{3,}\b"
)
_CHANGES_BEHIND = re.compile(
    rf"{_CLOSES_MATH}(?:\\text\s*\{{\s*)?(?:and\s+(?:a|one|{'|'.join(sorted(NUMBER_WORDS))})\b|dozens?\b|hundreds?\b"
    r"|thousands?\b|millions?\b|billions?\b|trillions?\b|squared\b|cubed\b|factorial\b|times\b|pairs?\b|score\b"
    r"|(?:less|more|fewer)\s+than\b|(?:plus|minus|over|mod)\b|below\s+zero|(?:per\s?cent|\\?%)[\s$]+(?:of|more|less)\b"
    rf"|(?:[,;]\s*)?(?:or|and)\s+(?:\w+\s+){{0,3}}[\\$]*(?:\d|(?:{'|'.join(sorted(NUMBER_WORDS))})\b)"
    r"|(?:[a-z]+\s+){0,2}(?:is|are|was|were|be|would\s+be|seems|looks|does|can)(?:\s+\w+){0,2}?"
    r"(?:\s+(?:not|wrong|incorrect|false|impossible|never)\b|n['’]t\b)|(?:isn|wasn|cannot|can)['’]?t?\s+(?:be|right)"
    r"|\(?\s*(?:wrong|incorrect|false|not\s+(?:correct|right|the))\b|\?)",
    re.IGNORECASE,
)
_SIGN_BEFORE = re.compile(
    r"(?:^|[^\w\s]|\\[(\[]|[=($&\[{]\s*)[-\u2212\u2013](?:\s*\\?\$)?$|(?:^|[=(&\[{,]|[$]|\\[(\[])\s*[-\u2212\u2013]\s*$"
    r"|\s[-\u2212\u2013]$|[a-zA-Z]\s+[-\u2212]\s*$"
)
_BULLET = re.compile(r"\s*[-\u2013]\s+(?:\*\*|\$|\\[(\[]|\s)*")
# `9 + \boxed{12} = 21` fills a gap; without the rest it is one term of an answer.
_OPERATOR_BEFORE = re.compile(r"(?:[\d)}\]a-zA-Z]\s*[-+/]|[\d)}\]]\s*\*|\\(?:cdot|times|div|bmod))\s*$")
_FILLS_GAP = re.compile(r"\s*\$?\s*=")
_MULTIPLIES_BEFORE = re.compile(
    r"\d$|(?<![a-zA-Z\\])[a-zA-Z]$|\\(?:pi|sqrt|sin|cos|tan|ln|log|pm|mp|neq?|not\s*=|theta|alpha|beta|infty)\s*$"
    r"|[_^]\s*\{?\s*$|\\(?:[dt]?frac|sqrt|binom|log|overline)\s*(?:\[[^\]]*\])?(?:\{[^{}]*\})?\s*\{\s*-?\s*$"
    r"|\\(?:[dt]?frac|sqrt|binom)(?:\[[^\]]*\])?(?:\{[^{}]*\})+$|!=\s*$|[≠√±]\s*$"
)
_CHANGES_BEFORE = re.compile(
    r"(?:\b(?:not|never|cannot|negative|minus|twice|double|triple|times|neither|nor)\b|n['’]t\b|\b(?:half|third"
    r"|quarter|multiple|factor|power)\s+of\b|\b(?:instead\s+of|rather\s+than|other\s+than|except|unlike|less\s+than"
    r"|more\s+than|fewer\s+than|between)\b)"
    r"(?:\s+(?!but\b|so\b|then\b|is\b)\w+){0,3}(?:\s|[$(*]|\\[(\[]|\\text\s*\{)*$"
    r"|\d(?:\s|\$|\\[)\]])*(?:,\s*)?\b(?:or|and)\b(?:\s|[$(*]|\\[(\[])*$",
    re.IGNORECASE,
)
# "It is not 5, so ..." denies what came before.
_CLAUSE_END = re.compile(r"[,;](?=\s)|[.!?](?=\s)|\n")


def _is_changed(text: str, box: Box) -> bool:
    before = text[max(0, box.start - _BEFORE_CHARS) : box.start]
    if _OPERATOR_BEFORE.search(before) and not _FILLS_GAP.match(text, box.end):
        return not _BULLET.fullmatch(before.rpartition("\n")[2])
    return _is_changed_behind(text[box.end : box.end + _BEHIND_CHARS]) or _is_changed_before(before)


def _is_changed_behind(behind: str) -> bool:
    if _CHANGES_BEHIND.match(behind):
        return True
    return bool(_MULTIPLIES_BEHIND.match(behind)) and not _UNIT_BEHIND.match(behind)


def _is_changed_before(before: str) -> bool:
    line = before.rpartition("\n")[2]
    if _SIGN_BEFORE.search(line) and not _BULLET.fullmatch(line):
        return True
    if _MULTIPLIES_BEFORE.search(before):
        return True
    *_, clause = _CLAUSE_END.split(before)
    return bool(_CHANGES_BEFORE.search(clause)) or ("or" in clause.split() and bool(_CHANGES_BEFORE.search(before)))
