r"""Find every `\boxed{...}` of a text in one pass, with any content and nesting.

The text around a box can change the answer: `-\boxed{12}`, `\boxed{6}\pi`, `not \boxed{12}` and `\boxed{12} or 13` do
not count as the answer in the box.
"""

import re
from dataclasses import dataclass

from stepspec.evaluation.grade.number import read_number
from stepspec.evaluation.grade.sentence import CALCULATION, taken_back
from stepspec.evaluation.grade.vocabulary import NUMBER_WORDS, same_quantity, unit_in

# The pattern matches escaped braces so that the scan can skip them: they are typeset and do not group.
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
MAX_TOGETHER = 20
"""Maximum number of boxes that can form one answer."""
_MAX_BETWEEN_CHARS = 200
# Boxes in one sentence form one answer if one of these joins them and the text between neither infers nor corrects.
_JOINS = re.compile(
    r"[,;&/]|\\(?:q?quad|lor|land|text\s*\{\s*(?:and|or)\b)|\b(?:and|or|to|through|alternatively)\b", re.IGNORECASE
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
    """Character offsets of a closed box: the box is `start:end`, its content `inner_start:inner_end`."""

    start: int
    inner_start: int
    inner_end: int

    @property
    def end(self) -> int:
        """The offset after the closing brace."""
        return self.inner_end + 1


@dataclass(frozen=True)
class LastBoxes:
    """The last non-empty box of a text and the boxes that belong to it."""

    contents: tuple[str, ...]
    """Contents of the trailing boxes with only separators and names between them, in text order."""
    num_joined: int = 1
    """How many trailing boxes a comma, "and" or "or" joins into one answer; 1 if the last box stands alone."""
    joined: tuple[str, ...] = ()
    """Contents of the joined boxes, in text order."""
    changed: bool = False
    """Whether the text around the last box denies it or changes its value."""


def closed_boxes(text: str) -> list[Box]:
    """Return every box whose braces balance, ordered by opening brace."""
    open_braces: list[tuple[int, int] | None] = []  # box start and content start; None for a brace that is not a box
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
    """Return the last non-empty box and the boxes that belong to it; None if there is none."""
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
    if not between.strip(" $"):
        return True
    return bool(_JOINS.search(between)) and not (_INFERS.search(between) or _SENTENCE_END.search(between))


_BEHIND_CHARS, _BEFORE_CHARS = 80, 80
# After a box: text that multiplies it, raises it, names a base, a scale or a second answer, or denies it.
_CLOSES_MATH = r"(?:\s|\$|\\[)\],;:! ]|\}|\*\*|\\q?quad)*"
_MULTIPLIES_BEHIND = re.compile(
    r"\d|[a-zA-Z(]|!(?=\s*(?:\$|\\|[-+*/=^]))|_|\s*\^(?!\s*\{?\s*\\(?:circ|degree|prime))"
    r"|\s*\\(?:pi|sqrt|frac|[dt]frac|cdot|times|div|pm|mp|infty|theta|alpha|beta|gamma|lambda|binom|sin|cos|tan|ln|log"
    r"|overline|bmod|e|i)(?![a-zA-Z])"
    r"|\s*[-+*/](?=\s*(?:[\d(]|\\(?!text|boxed|[)\],;! ]|q?quad)|[b-hj-zB-HJ-Z](?![a-zA-Z])))"
)
_UNIT_BEHIND = re.compile(
    r"(?:[mck]m|m?kg|m[lL]|ft|lbs?|oz|hrs?|mins?|mph|cm|st|nd|rd|th)(?![a-zA-Z])|\(\s*\\?[a-z]{3}|and\b|or\b|is\b|[A-Z]?[a-z]{3,}\b"
)
_CHANGES_BEHIND = re.compile(
    rf"{_CLOSES_MATH}(?:\\text\s*\{{\s*)?(?:and\s+(?:a|one|{'|'.join(sorted(NUMBER_WORDS))})\b|dozens?\b|hundreds?\b"
    r"|thousands?\b|millions?\b|billions?\b|trillions?\b|squared\b|cubed\b|factorial\b|times\s+(?:as|more|less|fewer|greater|larger|bigger|the|that|what|a|[\d\\$(])|pairs?\b|score\b"
    r"|(?:less|more|fewer)\s+than\b|(?:plus|minus|over|mod)\b|below\s+zero|(?:per\s?cent|\\?%)[\s$]+(?:of|more|less)\b"
    rf"|(?:[,;]\s*)?(?:or|and)\s+(?:\w+\s+){{0,3}}[\\$]*(?:\d|(?:{'|'.join(sorted(NUMBER_WORDS))})\b)"
    r"|(?:[a-z]+\s+){0,2}(?:is|are|was|were|be|would\s+be|seems|looks|does|can)(?:\s+\w+){0,2}?"
    r"(?:\s+(?:not(?=\s+(?:the|right|correct|true|it|what|possible|valid|an?|our|my|equal|quite|so)\b|\s*[.,;!]|\s*$)"
    r"|wrong|incorrect|false|impossible|never)\b|n['’]t\b)|(?:isn|wasn|cannot|can)['’]?t?\s+(?:be|right)"
    r"|\(?\s*(?:wrong|incorrect|false|not\s+(?:correct|right|the))\b|\?)",
    re.IGNORECASE,
)
_SIGN_BEFORE = re.compile(
    r"(?:^|[^\w\s]|\\[(\[]|[=($&\[{]\s*)[-\u2212\u2013](?:\s*\\?\$)?$|(?:^|[=(&\[{,]|[$]|\\[(\[])\s*[-\u2212\u2013]\s*$"
    r"|\s[-\u2212\u2013]$|[a-zA-Z]\s+[-\u2212]\s*$"
)
_BULLET = re.compile(r"\s*[-\u2013]\s+(?:\*\*|\$|\\[(\[]|\s)*")
# `9 + \boxed{12} = 21` fills a gap; without `= 21` the box is only one term of an answer.
_OPERATOR_BEFORE = re.compile(r"(?:[\d)}\]a-zA-Z]\s*[-+/]|[\d)}\]]\s*\*|\\(?:cdot|times|div|bmod))\s*$")
_FILLS_GAP = re.compile(r"\s*\$?\s*=")
_MULTIPLIES_BEFORE = re.compile(
    r"\d$|(?<![a-zA-Z\\])[a-zA-Z]$|\\(?:pi|sqrt|sin|cos|tan|ln|log|pm|mp|neq?|not\s*=|theta|alpha|beta|infty)\s*$"
    r"|[_^]\s*\{?\s*$|\\(?:[dt]?frac|sqrt|binom|log|overline)\s*(?:\[[^\]]*\])?(?:\{[^{}]*\})?\s*\{\s*-?\s*$"
    r"|\\(?:[dt]?frac|sqrt|binom)(?:\[[^\]]*\])?(?:\{[^{}]*\})+$|!=\s*$|[≠√±]\s*$"
)
_CHANGES_BEFORE = re.compile(
    r"(?:\b(?:not|no\s+longer|never|cannot|negative|minus|twice|double|triple|times|neither|nor)\b|n['’]t\b|\b(?:half|third"
    r"|quarter|multiple|factor|power)\s+of\b|\b(?:instead\s+of|rather\s+than|other\s+than|except|unlike|less\s+than"
    r"|more\s+than|fewer\s+than|between)\b)"
    r"(?:\s+(?!(?:but|so|then|is|are|was|equals|gives|makes|get|leaves)\b)\w+){0,3}(?:\s|[$(*]|\\[(\[]|\\text\s*\{)*$"
    r"|\d(?:\s|\$|\\[)\]])*(?:,\s*)?\b(?:or|and)\b(?:\s|[$(*]|\\[(\[])*$",
    re.IGNORECASE,
)
# In "It is not 5, so ...", the denial applies only to the clause before the comma.
_CLAUSE_END = re.compile(r"[,;](?=\s)|[.!?](?=\s)|\n")


def _is_changed(text: str, box: Box) -> bool:
    """Return whether the surrounding text changes or retracts the box.

    Only text on the line of the box can change its value. Later text can also retract it.
    """
    content = _content(text, box)
    if taken_back(text[box.end : box.end + _TAKEN_BACK_CHARS], content):
        return True
    before = text[max(0, box.start - _BEFORE_CHARS) : box.start]
    line = CALCULATION.sub("", before.rpartition("\n")[2])
    behind = text[box.end : box.end + _BEHIND_CHARS].partition("\n")[0]
    if line.rstrip().endswith(_OPENS) and behind.lstrip().startswith(_CLOSES):
        line, behind = _without_brackets(line, behind)
    if _OPERATOR_BEFORE.search(line) and not _FILLS_GAP.match(behind):
        return not _BULLET.fullmatch(line)
    return (
        _is_changed_behind(behind, content)
        or _is_changed_before(line, before)
        or (behind.startswith("!") and not _WORD.search(line))
        or _is_unsolved(line)
        or _has_second_unit(line, content, behind)
    )


_TAKEN_BACK_CHARS = 2_000
_MAX_NUMBER_CHARS = 100
_OPENS = ("(", "{", "[")
_CLOSES = (")", "}", "]", r"\right")
_BRACKETS_BEFORE = re.compile(r"(?:\\left\s*)?[({\[]\s*$")
_BRACKETS_BEHIND = re.compile(r"\s*(?:\\right\s*)?[)}\]]")
# A word that a brace may belong to. In `{\boxed{12}}` alone, the braces only group.
_WORD = re.compile(r"[a-zA-Z]{2,}")


def _without_brackets(line: str, behind: str) -> tuple[str, str]:
    r"""Remove the brackets directly around a box, as in `(\boxed{12})^2`. Keep the brackets of arguments."""
    for _ in range(3):
        left, right = _BRACKETS_BEFORE.search(line), _BRACKETS_BEHIND.match(behind)
        if not left or not right or line[: left.start()].rstrip().endswith("\\") or _ARGUMENT.search(line):
            break
        line, behind = line[: left.start()], behind[right.end() :]
    return line, behind


_ARGUMENT = re.compile(r"(?:\\[a-zA-Z]+(?:\s*\[[^\]]*\])?(?:\s*\{[^{}]*\})*|[_^])\s*\{\s*$")


def _is_changed_behind(behind: str, content: str) -> bool:
    other = _OR_NUMBER.match(behind)
    if other and _is_same_number(content, other[1]):
        return False
    if _CHANGES_BEHIND.match(behind) or _GOES_ON_BEHIND.match(behind):
        return True
    return bool(_MULTIPLIES_BEHIND.match(behind)) and not _UNIT_BEHIND.match(behind)


_OR_NUMBER = re.compile(
    rf"{_CLOSES_MATH},?\s*\(?\s*(?:or|=)\s+[\\$]*(-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?)(?![\w.,/^*+\-]*[\w/^*+\-])"
)


def _is_same_number(content: str, other: str) -> bool:
    if len(content) > _MAX_NUMBER_CHARS:
        return False
    number, second = read_number(content), read_number(other)
    return number is not None and second is not None and number.equals(second)


# More digits, a list, a time, a relation, a scale, or a power after a bracket.
_GOES_ON_BEHIND = re.compile(
    rf"(?:\$|\s|\\!)*(?:[.,:'](?:\\!)?|\{{[.,]\}})\d|{_CLOSES_MATH}(?:\d|\.\d)|{_CLOSES_MATH}\(\s*or\s+[\\$]*[-\d]"
    rf"|{_CLOSES_MATH}[,;]\s*[\\$(]*-?\d[\d,.]*\d*(?!\d|\s*(?:[-+*/=×÷]|\\(?:times|cdot|div|frac)))"
    rf"|{_CLOSES_MATH}(?:<(?![a-zA-Z/|][^<>]*>)|>|\\(?:lt|gt|leq?|geq?|leqslant|geqslant|neq?)(?![a-zA-Z])|[≤≥≠])"
    rf"|{_CLOSES_MATH}(?:[xX×·–—−]\s*\d|(?i:to|through)\s+[\\$]*\d|(?:\\(?:text|mathrm)\s*\{{\s*)?(?i:lakhs?|crores?|bn|mn|mil|tn|grand|gross|{'|'.join(sorted(NUMBER_WORDS))})\b|(?:\\(?:text|mathrm)\s*\{{\s*)?[kKMB]\b(?![&'’]))|\s*[½¼¾²³]"
    rf"|{_CLOSES_MATH}(?:if|for|when|in\s+case)\s[^.\n]{{0,60}}?(?:,|;|\band\b|\bor\b|\bbut\b)\s*[\\$]*-?\d+\$?\s*(?:if|for|when|otherwise)\b"
    r"|(?:\s|\$)*[)\]}](?:\s|\$|[)\]}])*(?:\^(?!\s*\{?\s*\\(?:circ|degree|prime))|!)|(?:\s|\\right)*[)\]]\s*[*/]\s*\d"
)


_THINKS_NOT = re.compile(
    r"\b(?:do|does|did|would|can|could|should)(?:n['’]t|\s+not)\s+(?:\w+\s+)?(?:think|believe|expect|agree|say|suppose|know|claim|trust|accept)\b"
    r"|\b(?:doubt|disagree|deny|cannot\s+(?:believe|agree|say))\b",
    re.IGNORECASE,
)
_CONDITION = re.compile(
    r"(?:\b(?:if|whether|unless|suppose|supposing|assume|assuming|pretend|imagine|were)\s+(?:that\s+)?"
    r"(?:it|this|that|he|she|they|we|there|\$?\\?[a-z]\$?|(?:the|my|our|his|her)\s+\w+)\s*(?:is|are|was|were|be|had|has|=|equals)"
    r"|\b(?:suppose|let|try|let['’]s\s+try|let\s+us\s+try|assume|pretend|imagine)(?:\s+\$?[a-zA-Z]\$?\s*(?:=|be))?)(?:\s|\$|\\[(\[])*$",
    re.IGNORECASE,
)
# Directly before a box, except for an article.
_BOUNDS_BEFORE = re.compile(
    r"(?:\b(?:at\s+(?:most|least)|about|around|roughly|nearly|almost|close\s+to|near|up\s+to|(?:more|less|fewer|greater|larger|smaller"
    r"|higher|lower|other|rather)\s+than|beyond|within|every|anything\s+but|far\s+from|nothing\s+like|different\s+from|divisible\s+by)"
    r"|\b(?:half|third|quarter|multiple|factor|divisor|power|square|cube|root|opposite|reciprocal|inverse|negation|negative|logarithm)s?\s+of"
    r"|[<>≤≥≠]=?|\\(?:lt|gt|leq?|geq?|leqslant|geqslant|neq?)(?![a-zA-Z])|\d(?:\s|\$)*(?:to|through|[-–:])"
    r"|(?:^|[,(\[{:;])\s*\$*-?\d[\d.]*\s*,(?:\s*(?:and|or)\b)?|\bare\s+\$?-?\d[\d.]*\s*,|[(\[]\s*\$?[^()\[\]\s,=]{1,8}\s*,"
    r")"
    r"(?:\s+(?:the|a|an|that|exactly|number|value|answer))*(?:\s|\$|\\[(\[]|\\text\s*\{|\*\*)*$"
    r"|\d\$?(?:[.,]|\{,\})\$?$",
    re.IGNORECASE,
)
_ENUMERATION = re.compile(r"\s*(?:\*\*|\$)?\d{1,2}[.)](?:\*\*)?\s+(?:\*\*|\$|\\[(\[]|\s)*")


def _is_changed_before(line: str, before: str) -> bool:
    if _SIGN_BEFORE.search(line) and not _BULLET.fullmatch(line):
        return True
    if _MULTIPLIES_BEFORE.search(line):
        return True
    if not _MATH_OPENS.sub("", line):
        # A displayed formula continues the sentence before it.
        line = " ".join(before.split("\n")[-3:])
        line = line if _GOES_ON_IN_NEXT_LINE.search(line) else ""
    *_, clause = _CLAUSE_END.split(line)
    if _BOUNDS_BEFORE.search(line) and not _ENUMERATION.fullmatch(line):
        return True
    if _THINKS_NOT.search(clause) or _CONDITION.search(clause) or _CHANGES_VALUE.search(clause):
        return True
    return bool(_CHANGES_BEFORE.search(clause)) or ("or" in clause.split() and bool(_CHANGES_BEFORE.search(line)))


_MATH_OPENS = re.compile(r"\s+|\$\$?|\\\[|\\\(|\*\*|\\begin\{[a-z]+\*?\}|&")
_GOES_ON_IN_NEXT_LINE = re.compile(
    r"\b(?:is|are|was|be|equals|of|than|to|not|most|least|about|almost|nearly|twice|double|minus|negative|by)\W*$",
    re.IGNORECASE,
)
# Matches "the opposite of the answer is", but not "half of 24 is".
_CHANGES_VALUE = re.compile(
    r"\b(?:half|third|quarter|opposite|reciprocal|inverse|negation|negative|square|cube|(?:square|cube)\s+root)s?\s+of\s+"
    r"(?:(?:the\s+)?(?:(?:final|right|correct)\s+)?answer|it|this|that|what\s+is\s+asked|\$?[xyzn]\$?)\s+(?:is|are|equals|=)(?:\s|[$(*]|\\[(\[])*$"
    r"|\b(?:twice|double|triple|half)\s+(?:the\s+)?(?:answer|it|this|that|\$?[xyzn]\$?)\s+(?:is|equals)(?:\s|[$(*]|\\[(\[])*$",
    re.IGNORECASE,
)


_LEFT_SIDE = re.compile(
    r"(?:^|[$&,;:=]|\\[(\[]|[a-zA-Z]{2,}\s|\.\s)([^$&,;:=]{1,60}?)\s*&?\s*(?:=|\bis\b|\bequals\b)\s*(?:[$&\s{]|\\[(\[;:,])*$"
)
_PROSE = re.compile(r"(?<![\w\\])(?:[a-zA-Z]{2,}|a(?=\s+\d))\s+")
_TIMES = re.compile(r"(?<=\d)\s*[xX]\s*(?=[\d$.(])")
_COMMANDS_OF_SOLVING = re.compile(r"\\(?:[dt]?frac|cdot|times|sqrt|left|right|text|mathrm|div)(?![a-zA-Z])")
_UNKNOWN = re.compile(r"\\?[a-zA-Z](?:_\{?\w{1,3}\}?)?'{0,2}")
_LETTER = re.compile(r"[a-zA-Z](?:_\{?\w{1,3}\}?)?'{0,2}")


def _is_unsolved(line: str) -> bool:
    r"""Return whether the left side is an unsolved expression in one unknown: `2x = \boxed{12}`, `-x = \boxed{12}`.

    Left sides with several unknowns or with functions may be what the question asks for. Left sides that contain only
    numbers evaluate to the answer.
    """
    match = _LEFT_SIDE.search(line)
    if match is None:
        return False
    side = _COMMANDS_OF_SOLVING.sub(" ", _TIMES.sub("*", _PROSE.split(match[1])[-1])).strip()
    if "\\" in side or _WORD.search(side) or _UNKNOWN.fullmatch(side):
        return False
    return (
        len(set(_LETTER.findall(side))) == 1
        and bool(re.search(r"[\d^+*/|-]|sqrt|frac", match[1]))
        and not _ARGUMENTS.search(side)
    )


_ARGUMENTS = re.compile(r"^[a-zA-Z]'*\s*\([^a-zA-Z]*\)$|\d\s*\)?\s*[a-zA-Z]{2}")


_UNIT_WORD = r"(?:\\text\s*\{\s*)?\\?\s*([a-zA-Z]+)\.?\s*\}?"
_AMOUNT = rf"(?:\d+|(?:{'|'.join(sorted(NUMBER_WORDS))})\b)"
_BETWEEN_UNITS = r"(?:\s|\$|,|\\[,;: ]|and\b)*"
_SECOND_BEHIND = re.compile(rf"{_CLOSES_MATH}{_UNIT_WORD}{_BETWEEN_UNITS}{_AMOUNT}\s*{_UNIT_WORD}")
_FIRST_BEFORE = re.compile(rf"(?:{_AMOUNT}|\}})\s*\$?\s*{_UNIT_WORD}{_BETWEEN_UNITS}$")
_UNITS_BEHIND = re.compile(rf"{_CLOSES_MATH}{_UNIT_WORD}")


def _has_second_unit(line: str, content: str, behind: str) -> bool:
    r"""Return whether the box is only one part of an answer: `\boxed{12} feet 3 inches`, `5 feet \boxed{3} inches`."""
    second = _SECOND_BEHIND.match(behind)
    if second and same_quantity(second[1], second[2]):
        return True
    first, unit = _FIRST_BEFORE.search(line), _UNITS_BEHIND.match(behind)
    own = unit_in(content) or (unit[1] if unit else "")
    return first is not None and same_quantity(first[1], own)
