r"""Find the answer in a text: the last box, else the text behind `####`, in `<answer>` or behind an answer phrase, else
the last number. What a formula does to its box belongs to the answer. Nothing in the thinking is an answer."""

import re
from collections import deque
from dataclasses import dataclass
from typing import Literal

from stepspec.evaluation.grade import prose
from stepspec.evaluation.grade.latex import cleaned

FoundBy = Literal["box", "hashes", "phrase", "last number"]
MAX_TOGETHER = 20  # boxes that can form one answer
_NEAR, _FAR = 200, 2_000
MAX_CHARS = 1_000  # of an answer


@dataclass(frozen=True)
class Found:
    """An answer as written. `others` are boxes that are joined to it; if `denied`, the text says that it is wrong."""

    text: str
    by: FoundBy
    others: tuple[str, ...] = ()
    denied: bool = False


def find_answer(text: str, *, numbers: bool, cut_short: bool) -> Found | None:
    """Return the answer in a text without thinking, or None. Takes time linear in the length of the text.

    With `numbers`, this is the last number if there is no other. Of a text that was cut short, the last words are none.
    """
    text = re.sub(r"<<[^<>\n]{0,200}>>|<\|\w{1,30}\|>|</?s>|<eos>", "", text)  # GSM8K's calculations, special tokens
    found = _boxed(text) or _stated(text, cut_short)
    if found or cut_short or not numbers or not (last := prose.last_number(text)):
        return found
    return Found(last[0], "last number", denied=prose.is_taken_back(last[1], last[0]))


_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")


def closed_boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Return every outermost box whose braces balance: where it and its content start and end."""
    open_braces: list[tuple[int, int] | None] = []
    found: list[tuple[int, int, int, int]] = []
    for match in _BRACE.finditer(text):
        if match[0] in (r"\{", r"\}"):
            continue
        if match[0] != "}":
            open_braces.append(None if match[0] == "{" else (match.start(), match.end()))
        elif open_braces and (box := open_braces.pop()):
            while found and found[-1][0] > box[0]:
                found.pop()
            found.append((*box, match.start(), match.end()))
    return found


_JOINS = re.compile(r"(?i:[\s.,;/&()\[\]|]|\b(?:and|or|to|through|either|maybe)\b|\\l(?:and|or)\b|[a-z](?:_\w)? ?=)*")


def _boxed(text: str) -> Found | None:
    boxes = [box for box in closed_boxes(text) if text[box[1] : box[2]].strip(" \t\r\n$.\\,;~")]
    if not boxes:
        return None
    start, first, last, end = boxes[-1]
    joined = [boxes[-1]]
    for box in reversed(boxes[-MAX_TOGETHER:-1]):
        between = text[box[3] : joined[-1][0]]
        bare = prose.plain(between[:_NEAR]).strip()
        if len(between) > _NEAR or not _JOINS.fullmatch(bare):
            break
        joined.append(box)
    others = tuple(text[box[1] : box[2]].strip() for box in joined[:0:-1])
    before = "" if others else text[max(0, start - _NEAR) : start]
    behind, content = text[end : end + _NEAR], text[first:last].strip()
    denied = prose.is_denied(before) or prose.is_changed(behind, content)
    denied = denied or prose.is_taken_back(text[end : end + _FAR], content)
    formula = _in_formula(before, content, behind)
    return Found(formula or content, "box", others, denied or not formula)


_RELATION = r"[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt)(?![a-zA-Z])"
# Where a formula ends: delimiters, words, list items, relations, separators, and units of one letter.
_STOP = re.compile(
    rf"\n(?:\s*(?:[-*•–>]|\(?\w{{1,2}}[.)])\s)?|(?<!\\)\$|\\[\[\]()]|</?[a-zA-Z][^<>]{{0,20}}>|[=;&]|:(?!\d)|\\\\|{_RELATION}"
    r"|\\(?:begin|end)\{[a-z*]+\}|\\(?:text|mbox|mathrm|textbf|mathbf|boldsymbol)\s*\{|,(?!\d{3}|\})|\.(?!\d)|[!?](?=\s|$)"
    r"|\\(?:approx|equiv|sim|implies|therefore|because|to|in|pmod|q?quad|(?:black)?square|qed|[RLrl]\w*arrow)(?![a-zA-Z])"
    r"|\*\*|__|[`✅🎉≈→À-ÿ\u0400-\u04ff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]|(?<=\s)[mgshLCF](?=[\s.,²³]|$)"
    r"|(?<![\\a-zA-Z])(?:[a-zA-Z][a-z'’]+|[aAI](?=\s))(?![a-zA-Z])"
)
_LAYOUT = re.compile(r"(?<!\\)\\[!,;: ]|\\(?:left|right|displaystyle|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])")
_NO_FORMULA = re.compile(r"\\?\$|\^\s*\{?\s*\\circ\s*\}?|US|[^\w\\^!%/+*()\[\]|−–-]|_")


def _in_formula(before: str, content: str, behind: str) -> str | None:
    """Return what the box's side of its equation says, with the content as the box; None of an inequality or a pair."""
    before, behind = _LAYOUT.sub(" ", f"\n{before}"), _LAYOUT.sub(" ", behind)
    *_, stop = _STOP.finditer(before)
    left, cut, end = before[stop.end() :], stop[0], _STOP.search(behind)
    right, next_cut = (behind[: end.start()], end[0]) if end else (behind.rstrip("!?."), "")
    if next_cut in ("$", r"\)", r"\]") and end:  # what goes on behind `$`, as in `$\boxed{6}$%`
        right += (re.match(r"\\?%|\^?\\circ|\d|\\pi|\\sqrt\S*", behind[end.end() :]) or [""])[0]
    left, right = left.strip(), right.strip()
    paired = cut in (",", ";") and right[:1] in (")", "]")
    if paired or re.fullmatch(_RELATION, cut) or re.fullmatch(_RELATION, next_cut):
        return None
    while left[-1:] in ("(", "["):
        left, right = left[:-1].rstrip(), right[1:].lstrip() if right[:1] in (")", "]") else right
    if right.count(")") > right.count("("):
        right = right[: right.index(")")]
    if cut in ("$", r"\(") and not left and re.search(r"[\s(=:][-−–]$", before[: stop.start()]):
        left = "-"
    bare_left, bare_right = _NO_FORMULA.sub("", left), _NO_FORMULA.sub("", right).rstrip("([–—-/")
    if (next_cut == "=" and (bare_left or bare_right)) or not (bare_left or bare_right):
        return content  # also a gap that was filled: `3 + \boxed{5} = 8`
    if bare_left in ("", "-", "−", "–") and bare_right in ("", "%", r"\%"):
        return f"{'-' if bare_left else ''}{content}{bare_right}"
    return f"{left}{{{content}}}{right}"


# Possessive quantifiers, because backtracking could split a megabyte of spaces between two runs in a million ways.
_PHRASE = (
    r"\b(?:final\s+)?answers?\b(?:\s+(?:to|of|for)\s+(?:the|this)\s+(?:\w{1,20}\s+)?(?:question|problem)\b)?[*_\s]*+"
    r"(?:(?:is|are|would\s+be|will\s+be|should\s+be|must\s+be|equals)\b|(?:is|are)(?=n['’]t\b)|[:=：])[*_\s:=]*+"
    r"|^[ \t]*+[#*_]*+[ \t]*+(?:final\s+)?answer[ \t]*+[*_]*+[ \t]*+$\s*+(?:>\s*+)?"
)
# `####` is the marker of GSM8K (K. Cobbe et al., arXiv:2110.14168). Headings are none.
_SUPPOSED = re.compile(r"(?i:(?:^|[.!?\n])\W*(?:if|suppose))\b[^.!?\n]*$")
_MARKS: dict[str, tuple[FoundBy, str]] = {
    r"^[ \t]*####(?!#)[ \t]*(?=\S)": ("hashes", r"\n"),
    r"<answer>\s*(?=\S)": ("phrase", r"</answer>"),
    _PHRASE: ("phrase", r"(?<!\b[ap])(?<!\b[ap]\.m)\.(?=\s|$)|\n|(?<!\\)!(?=\s|$)|\?(?=\s|$)"),
}
# Between a phrase and its answer: the beginning of a formula, a code fence, a quote or a list item.
_LEAD = re.compile(r"(?:(?<=\n)(?:>|[-*•][ \t])|\s|\\[\[(]|\$\$?(?=\s)|```\w*\n)*+")


def _stated(text: str, cut_short: bool) -> Found | None:
    for mark, (by, stop) in _MARKS.items():
        for match in reversed(deque(re.finditer(mark, text, re.IGNORECASE | re.MULTILINE), maxlen=20)):
            lead = _LEAD.match(text, match.end()) if by == "phrase" else None
            start = (lead or match).end()
            rest = text[start : start + MAX_CHARS]
            end = re.search(stop, rest)
            answer, behind = (rest[: end.start()], text[start + end.start() :][:_FAR]) if end else (rest, "")
            answer = (answer if answer.count("**") % 2 == 0 else answer.replace("**", "")).strip()
            heading = by == "hashes" and behind.strip() and not prose.named_number(cleaned(answer))
            if answer and not heading and not (cut_short and end is None):
                before = text[max(0, match.start() - _NEAR) : match.start()] if mark == _PHRASE else ""
                unfit = bool(re.match(rf"n't|(?i:{prose.DENIES.pattern})", prose.plain(answer))) or behind[:1] == "?"
                unfit = unfit or ("would" in match[0] and bool(_SUPPOSED.search(before)))
                denied = unfit or prose.is_denied(before) or prose.is_denied(f"{before} it is ")
                return Found(answer, by, denied=denied or prose.is_taken_back(behind, answer))
            if by == "phrase":
                break
    return None


_OPEN = ["<think>", "<thinking>", "<thought>", "<reasoning>", "<seed:think>", "[THINK]", "◁think▷"]
_CLOSE = [f"{tag[0]}/{tag[1:]}" for tag in _OPEN] + ["<|end_of_thought|>", "<|channel|>final<|message|>"]
_OPEN += ["<|begin_of_thought|>", "<|channel|>analysis"]
_TAG = re.compile("|".join(map(re.escape, (*_CLOSE, *_OPEN))))


def without_thinking(text: str, max_chars: int) -> str:
    """Return the text outside think tags in the last `max_chars` characters.

    A closing tag without an opening tag ends thinking that the chat template opened before the text.
    """
    cut = max(0, len(text) - max_chars)
    # A tag that the cut splits counts as a tag before the cut.
    opened, closed = (
        max(text.rfind(tag, 0, cut + len(tag) - 1) for tag in tags) if cut else -1 for tags in (_OPEN, _CLOSE)
    )
    thinking, start = opened > closed, cut
    outside: list[str] = []
    for tag in _TAG.finditer(text, cut):
        if tag[0] in _CLOSE:
            if not thinking:
                outside.clear()
            thinking, start = False, tag.end()
        elif not thinking:
            outside.append(text[start : tag.start()])
            thinking = True
    return "\n\n".join([*outside, "" if thinking else text[start:]])
