r"""Find the answer in a text: the last box, else the text behind `####`, in `<answer>` or behind an answer phrase, else
the last number. What a formula does to its box belongs to the answer: `-\boxed{6}` is -6, `\boxed{6}\pi` is 6 pi.
"""

import re
from collections import deque
from dataclasses import dataclass

from stepspec.evaluation.grade.latex import cleaned
from stepspec.evaluation.grade.number import CALCULATION, DENIES, SCALES, last_number, named_number, read_number
from stepspec.evaluation.grade.words import FoundBy


@dataclass(frozen=True)
class Found:
    """An answer as written in the text. `others` are the boxes that the text joins to it, `box` its box's content."""

    text: str
    by: FoundBy
    others: tuple[str, ...] = ()
    denied: bool = False
    """Whether the text plainly says that this is not the answer, or gives a second one."""


MAX_TOGETHER = 20
"""Maximum number of boxes that can form one answer."""
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_NEAR = 200
_FAR = 2_000


def find_answer(text: str, *, numbers: bool, cut_short: bool) -> Found | None:
    """Return the answer in a text without thinking, or None. Takes time linear in the length of the text.

    Args:
        text: the text.
        numbers: whether the last number is taken if there is no box, `####`, `<answer>` or answer phrase.
        cut_short: whether the text ends because its token budget ran out. Its last words are then not an answer.
    """
    text = CALCULATION.sub("", text)
    found = _boxed(text) or _behind_hashes(text, cut_short) or _tagged(text) or _stated(text, cut_short)
    if found or cut_short or not numbers:
        return found
    last = last_number(text)
    if last is None:
        return None
    clause, number = last
    behind = text[text.rfind(clause) + len(clause) :]
    return Found(number, "last number", denied=_is_taken_back(behind, number))


def closed_boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Return every outermost box whose braces balance: where it and its content start and end."""
    open_braces: list[tuple[int, int] | None] = []
    found: list[tuple[int, int, int, int]] = []
    for match in _BRACE.finditer(text):
        brace = match[0]
        if brace in (r"\{", r"\}"):
            continue
        if brace != "}":
            open_braces.append(None if brace == "{" else (match.start(), match.end()))
        elif open_braces and (box := open_braces.pop()):
            while found and found[-1][0] > box[0]:
                found.pop()
            found.append((*box, match.start(), match.end()))
    return found


def _boxed(text: str) -> Found | None:
    boxes = [box for box in closed_boxes(text) if text[box[1] : box[2]].strip(" \t\r\n$.\\,;~")]
    if not boxes:
        return None
    start, first, last, end = boxes[-1]
    joined = [boxes[-1]]
    for box in reversed(boxes[-MAX_TOGETHER:-1]):
        between = text[box[3] : joined[-1][0]]
        if len(between) > _NEAR or not (
            _JOINS.fullmatch(between) or (_JOINED.search(between) and not _INFERS.search(between))
        ):
            break
        joined.append(box)
    contents = tuple(text[box[1] : box[2]].strip() for box in reversed(joined))
    before = text[max(0, start - _NEAR) : start] if len(joined) == 1 else ""
    behind = text[end : end + _NEAR]
    content = text[first:last].strip()
    whole = _in_formula(before, content, behind)
    another = read_number(cleaned(content[:_NEAR])) is not None and bool(_OTHER_BEFORE.search(before))
    denied = (
        another
        or _is_denied_before(before)
        or _is_changed_behind(behind, content)
        or _is_taken_back(text[end : end + _FAR], content)
    )
    return Found(whole, "box", contents[:-1], denied)


# Boxes with nothing but these between them are one answer.
_JOINS = re.compile(
    r"(?i:[\s$,;&.()\[\]|/]|\\[\[\]()\\,;:! ]|\\q?quad|\\(?:text|mbox)\s*\{[\s,]*(?:and|or|to)?\s*\}|\\l(?:or|and)|\b(?:and|or|to|through)\b"
    r"|\b(?:either|alternatively|maybe|perhaps|possibly)\b|[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
_JOINED = re.compile(r"[,;/]|\b(?:and|or|to)\b|^\s*(?:feet|ft|hours?|pounds?|minutes?|dollars?|yards?)\s*$")
_INFERS = re.compile(
    r"[.!?]\s|\n\s*\n|\b(?:wrong|not|no|but|so|then|hence|thus|therefore|which|gives?|get|actually|correct\w*|instead|because|since|implies"
    r"|means|yields?|wait|simplif\w+|becomes)\b|\\(?:implies|therefore|Rightarrow|to)(?![a-zA-Z])",
    re.IGNORECASE,
)
_CUT = (
    r"\n|(?<!\\)\$|\\[\[\]()]|</?[a-zA-Z][^<>]{0,20}>|[=<>≤≥≠≈;&]|:(?!\d)|\\\\|\\(?:begin|end)\{[a-z*]+\}|\\(?:leq?|geq?|neq?|approx|equiv|sim|lt|gt|implies|therefore|because|Rightarrow|Longrightarrow|rightarrow|to|in|pmod|q?quad|blacksquare|square|qed)(?![a-zA-Z])"
    r"|\\(?:text|mbox|mathrm|textbf)\s*\{[^{}]*\}|,(?!\d{3}|\})|\.(?!\d)|\*\*|__|`|[✅🎉]"
)
_WORD = r"(?<![\\a-zA-Z])(?:[a-zA-Z][a-z'’]+|[aAI](?=\s))(?![a-zA-Z])|[\u0400-\u04ff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]"
_LEFT_CUT = re.compile(
    rf"{_CUT}|{_WORD}|\\(?:text|textbf|mathbf|mathrm|boldsymbol|mbox)\s*\{{|[!?]\s|^\s*(?:[-*•–]\s|\(?\w{{1,2}}[.)]\s)",
    re.MULTILINE,
)
_RIGHT_CUT = re.compile(rf"{_CUT}|{_WORD}|(?<=\s)[mgshLCF](?=\s|[.,]|$)|[!?](?=\s|$)|[!?.]*$")
_NOTHING = re.compile(
    r"\\[!,;: ]|\\(?:left|right|displaystyle|textstyle)(?![a-zA-Z])|\\?\$|\^\s*\{?\s*\\circ\s*\}?|[\s{}~*#€£¥₹✅🎉—]|US(?=\s*\\?\$?$)"
)
_SIGN = re.compile(r"(?:^|[\s(=:])[-−–](?:\\?\$|\\[(\[]|\{)*\Z")
_RELATIONS = re.compile(r"[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt)$")
_GOES_ON = re.compile(
    r"\\?%|\^?\\circ|\d|,\d{3}(?!\d)|\{,\}\d|\\(?:pi|sqrt|[dt]?frac|cdot|times|e)(?![a-zA-Z])[^$\n.,;]*|\^[^\s.,;]+"
)


def _in_formula(before: str, content: str, behind: str) -> str:
    """Return what the box's side of its equation says, with the content in the place of the box."""
    cuts = list(_LEFT_CUT.finditer(before))
    left = before[cuts[-1].end() :] if cuts else before
    cut = cuts[-1][0] if cuts else ""
    right_cut = _RIGHT_CUT.search(behind)
    right = behind[: right_cut.start()] if right_cut else behind
    if right_cut and right_cut[0] in ("$", r"\)", r"\]"):
        more = _GOES_ON.match(behind[right_cut.end() :].lstrip())
        right += more[0] if more else ""
    right = re.sub(r"[(\[–—-]\s*$", "", right) if right_cut else right
    if right_cut and _RELATIONS.fullmatch(right_cut[0]):
        return f"{left}{content}{right_cut[0]} x"
    if right_cut and right_cut[0] in (",", ":", ";"):
        closer = re.match(r"[,;:]\s*[^()\[\]\n$]{1,40}[)\]]", behind)
        opener = re.search(r"[(\[]\s*$", left)
        if closer and opener and not re.search(r"[a-z]{2,}", closer[0]):
            return f"{left}{content}{closer[0]}"
    if cut == "," and right.lstrip().startswith((")", "]", r"\right")):
        opener = re.search(r"[(\[](?:[^()\[\]\n$a-zA-Z]|(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])|\\[a-z]+){1,60}$", before)
        if opener:
            return f"{opener[0]}{content}{right}"
    left, right = _without_brackets(left, right)
    sign = (
        "-"
        if not _NOTHING.sub("", left) and _SIGN.search(before) and not re.search(r"(?:^|\n)\s*[-–]\s+\S{0,3}$", before)
        else ""
    )
    relation = f"{cut} " if _RELATIONS.fullmatch(cut) else ""
    bare_left, bare_right = _NOTHING.sub("", left), _NOTHING.sub("", right)
    fills_gap = right_cut is not None and right_cut[0] == "=" and bool(bare_left or bare_right)
    if fills_gap or not (bare_left or bare_right or sign or relation):
        return content
    if re.fullmatch(r"\\?%", bare_right) and not bare_left:
        return f"{sign}{content}\\%"
    if re.fullmatch(r"[-−–]", bare_left) and not bare_right:
        return f"-{content}"
    return f"{relation}{sign}{left.strip()}{{{content}}}{right.strip()}"


def _without_brackets(left: str, right: str) -> tuple[str, str]:
    """Leave out brackets directly around a box, unless something is done to them."""
    for _ in range(3):
        opener, closer = re.search(r"(?:\\left\s*)?[(\[]\s*$", left), re.match(r"\s*(?:\\right\s*)?[)\]]", right)
        if not opener:
            return left, right if right.count(")") <= right.count("(") else right[: right.index(")")]
        if not closer:
            return left[: opener.start()] + left[opener.end() :], right
        left, right = left[: opener.start()], right[closer.end() :]
    return left, right


_NO_VERB = r"(?:\s+(?!(?:is|are|was|equals|gives|makes|get|leaves|but|so|then)\b)[\w']+){0,3}"
_DENIED_BEFORE = re.compile(
    rf"(?:\b(?:not|never|neither|nor|cannot|no\s+longer|instead\s+of|rather\s+than|other\s+than|except|unlike|anything\s+but|(?:less|more|fewer|greater)\s+than)\b|n['’]t\b){_NO_VERB}(?:\s|[$(*:]|\\[(\[])*$"
    r"|\b(?:half|twice|thrice|double|triple|minus|negative|(?:half|third|quarter|multiple|factor|square|cube|root|power|opposite|negation)s?\s+of)\s+(?:of\s+)?(?:\s|[$(*]|\\[(\[])*$"
    r"|\b(?:half|twice|double|triple|(?:third|quarter|opposite|negative|reciprocal|square)\s+of)\s+(?:of\s+)?(?:the\s+|my\s+|our\s+)?(?:final\s+|correct\s+)?(?:answer|it|this|that|value)\s+(?:is|equals)(?:\s|[$(*:]|\\[(\[])*$"
    r"|(?<!only\s)\b(?:if|suppose|assume|assuming|unless|whether)\s(?!and\s+only\b)(?:(?!\bthen\b|\banswer\b|[,.;:]\s).){0,40}(?:\b(?:is|are|was|were|be|equals)|=)(?:\s|[$(*]|\\[(\[])*$"
    r"|\b(?:do|does|did|would|can)(?:n['’]t|\s+not)\s+(?:think|believe|say|know)\b[^.;]{0,60}$|\bdoubt\b[^.;]{0,60}$",
    re.IGNORECASE,
)
_OTHER = r"(?:\\?\$|\\[(\[]|\s|\*)*(-?\d[\d,]*(?:\.\d+)?(?:/\d+)?)"
_OTHER_BEFORE = re.compile(
    r"(?<![\w.,/^*+-])-?\d[\d,]*(?:\.\d+)?(?:\$|\s|\\[)\]])*\s*,?\s*\b(?:or|and|to|through)\b(?:\s|[$(*]|\\[(\[])*$"
    r"|\d\$?\s*[–—-]\s*[\\$]*$|\d[.,:]\Z|\d\s*(?:feet|ft|hours?|pounds?|minutes?|dollars?|yards?)\s*(?:and\s+)?[\\$(]*$"
    r"|(?:^|\bare|\bis|[:=,])\s*[\\$(]*-?\d[\d.]*\$?\s*,\s*[\\$(]*$"
)
_CLOSES = r"(?:\$|\\[)\]]|\*\*|__|\s|\})*"
_CHANGED_BEHIND = re.compile(
    rf"{_CLOSES}(?:per\s?cent|\\?%)[\s$]*of\b|{_CLOSES}\\text\s*\{{\s*[kKMB]\s*\}}|{_CLOSES}(?:\\!)?,(?:\\!)?\d{{3}}(?!\d)"
    rf"|{_CLOSES},\s*[\\$(]*-?\d[\d.]*\$?\s*(?:[,.)]|$)"
    rf"|{_CLOSES}(?:\\text\s*\{{\s*)?(?:bn|thirds|halves|quarters|{'|'.join(f'{scale}s?' for scale in SCALES if len(scale) > 1)}|squared|cubed|factorial|mod|over|plus|times\s+(?:as|the|that|\d)"
    r"|(?:and|plus)\s+(?:a|one|two|three)\s+(?:half|third|quarter|fourth|fifth|thirds|quarters)|or\s+(?:so|more|less|fewer)\b(?!\s+than))\b"
    rf"|{_CLOSES}(?:,\s*)?\(?(?:is|was|are)?\s*(?:wrong|incorrect|false|mistaken|not\s+(?:the\s+)?(?:right|correct|final|true|answer|it)|n['’]t\s+(?:the\s+)?(?:right|correct|true))\b(?!\s+if)"
    rf"|{_CLOSES}(?:isn|wasn)['’]t\s+(?:the\s+)?(?:right|correct|true|answer)|{_CLOSES}\?"
    rf"|{_CLOSES}(?:if|for|when)\s[^.\n]{{0,60}}?(?:,|;|\band\b|\bor\b|\bbut\b)\s*[\\$]*-?\d+\$?\s*(?:if|for|when|otherwise)\b",
    re.IGNORECASE,
)
_OTHER_BEHIND = re.compile(
    rf"{_CLOSES}(?:[a-zA-Z]+{_CLOSES})?(?:,\s*)?\(?\s*(?:(?:or|to|through)(?:\s+(?:possibly|maybe|perhaps|even))?|[–—-]){_OTHER}(?![\w.,/^*+-]*[\w/^*])",
    re.IGNORECASE,
)
_SECOND = re.compile(
    rf"{_CLOSES}(?:\\text\s*\{{)?\s*(feet|foot|ft|hours?|hrs?|pounds?|lbs?|minutes?|mins?|dollars?|yards?|meters?|m|km|kg|days?|weeks?|years?)\b\s*\}}?,?\s*(?:and\s+)?[\\$]*\d+\$?\s*(?:\\text\s*\{{)?\s*(inch(?:es)?|in|minutes?|mins?|seconds?|secs?|ounces?|oz|cents?|feet|cm|m|g|hours?|days?|months?)\b"
)


def _is_denied_before(before: str) -> bool:
    sentence = re.split(r"[.!?]\s|\n\s*\n|,\s+so\b|;\s", before)[-1]
    clause = re.split(r",\s", sentence)[-1]
    return bool(_DENIED_BEFORE.search(clause))


def _is_changed_behind(behind: str, content: str) -> bool:
    behind = behind.partition("\n")[0]
    if _CHANGED_BEHIND.match(behind) or _SECOND.match(behind):
        return True
    other = _OTHER_BEHIND.match(behind)
    return bool(other) and not _is_same(content, other[1])


def _is_same(content: str, other: str) -> bool:
    first, second = (
        read_number(cleaned(content[:100])) or named_number(cleaned(content[:100])),
        read_number(cleaned(other)),
    )
    return first is not None and second is not None and first.equals(second)


_START = r"(?:^|[.!?…\n])[\s\W]*"
_REGRET = r"(?:(?:no|wait|actually|oops|sorry|hmm+|correction|hold\s+on|nope|but|oh)\b[\s,:.!…—-]*)+"
_WRONG = r"(?:\w+ly\s+|quite\s+)?(?:wrong|incorrect|false|mistaken|a\s+mistake|an\s+error|not\s+(?:quite\s+)?(?:right|correct|true|it\b|the\s+(?:\w+\s+)?answer))(?!\s+(?:if|when|unless|only)\b)"
_TAKEN_BACK = re.compile(
    rf"(?:{_START}|\b(?:but|which|and|so)\s+)(?:{_REGRET})?(?:(?:which|that|this|it|(?:the|my|this|that)\s+(?:answer|result|value))\s*(?:(?:is|was|seems|must\s+be|['’]s)\s+{_WRONG}"
    r"|(?:isn|wasn|can)['’]t\s+(?:be\s+)?(?:right|correct|true|it\b)|can\s?not\s+be\s+(?:right|correct|true))|(?:is|was)\s+"
    + _WRONG
    + ")"
    rf"|{_START}{_REGRET}(?:that|this|it)?\s*(?:is|was|['’]s)?\s*(?:wrong|incorrect|not\s+right)\b"
    r"|\bI\s+(?:have\s+|['’]ve\s+)?(?:made\s+(?:a|an)\s+(?:\w+\s+)?(?:mistake|error|slip)|was\s+wrong|am\s+wrong|misread|miscounted|miscalculated|take\s+(?:it|that)\s+back)"
    r"|\b(?:scratch|strike|forget|ignore)\s+that\b|\bnever\s?mind\b|\bmy\s+(?:mistake|bad|error)\b",
    re.IGNORECASE,
)
_INSTEAD = re.compile(
    rf"(?:{_START}|[,;]\s*|\s)(?<![\w'])(?:no|wait|actually|oops|correction)\b[\s,:.!…—-]*(?:{_REGRET})?(?:(?:it|that|this|the\s+answer)\s*(?:should\s+be|must\s+be|is|['’]s)\s*(?:really|actually|rather)?\s*)?{_OTHER}(?!\s*[-+*/=×])|{_START}(?:it|that|the\s+answer)\s+should\s+be{_OTHER}",
    re.IGNORECASE,
)


_REGRETS = re.compile(
    rf"{_START}(?:wait|hmm+|oops|sorry|correction|hold\s+on|on\s+second\s+thought|I\s+(?:forgot|missed|overlooked))\b",
    re.IGNORECASE,
)
_COMES_TO = re.compile(rf"(?:\bis|\bbe|\bequals|=|\bget|\bgives|\bto){_OTHER}", re.IGNORECASE)


def _is_taken_back(behind: str, content: str) -> bool:
    """Return whether the text says later that the answer is wrong, or states another one."""
    if _TAKEN_BACK.search(behind):
        return True
    if any(not _is_same(content, match[1] or match[2]) for match in _INSTEAD.finditer(behind)):
        return True
    regret = _REGRETS.search(behind)
    later = list(_COMES_TO.finditer(behind[regret.end() :])) if regret else []
    if later and not _is_same(content, later[-1][1]):
        return True
    stated = list(_PHRASE.finditer(behind))
    if not stated:
        return False
    later = _OTHER_STATED.match(behind[stated[-1].end() :])
    return (
        bool(later)
        and not _is_denied_before(behind[: stated[-1].start()])
        and not _is_same(content, later[1])
        and bool(named_number(cleaned(content)) or read_number(cleaned(content)))
    )


_OTHER_STATED = re.compile(_OTHER)
_LINE = re.compile(r"^[ \t]*####(?!#)[ \t]*(\S[^\n]*)$", re.MULTILINE)


def _behind_hashes(text: str, cut_short: bool) -> Found | None:
    """Return the answer behind `####`, the marker of GSM8K (K. Cobbe et al., arXiv:2110.14168). Headings are none."""
    end = len(text.rstrip())
    for match in reversed(deque(_LINE.finditer(text), maxlen=20)):
        line, is_last = match[1].strip(), match.end() >= end
        if (is_last and cut_short) or not (is_last or named_number(cleaned(line))):
            continue
        return Found(line, "hashes", denied=_is_taken_back(text[match.end() :][:_FAR], line))
    return None


def _tagged(text: str) -> Found | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", max(0, end - _FAR), end) if end >= 0 else -1
    if start < 0:
        return None
    answer = text[start + len("<answer>") : end].strip()
    return Found(answer, "phrase", denied=_is_taken_back(text[end:][:_FAR], answer)) if answer else None


# Possessive quantifiers, because backtracking could split a megabyte of spaces between two runs in a million ways.
_PHRASE = re.compile(
    r"\b(?:final\s+)?answers?\b(?:\s+(?:to|of|for)\s+(?:the|this)\s+(?:\w{1,20}\s+)?(?:question|problem)\b)?[*_\s]*+"
    r"(?:(?:is|are|would\s+be|will\s+be|should\s+be|must\s+be|equals)\b|(?:is|are)(?=n['’]t\b)|[:=：])[*_\s:=]*+"
    r"|^[ \t]*+[#*_]*+[ \t]*+(?:final\s+)?answer[ \t]*+[*_]*+[ \t]*+$\s*+(?:>\s*+)?",
    re.IGNORECASE | re.MULTILINE,
)
_STATED_END = re.compile(r"(?<!\b[ap])(?<!\b[ap]\.m)\.(?=\s|$)|\n|(?<![\\\d])!(?=\s|$)|\?(?=\s|$)")
_WRONG_BEFORE = re.compile(r"\b(?:wrong|incorrect|false|nobody|not\s+true|impossible)\b[^.;]*$", re.IGNORECASE)
_EXPLAINED = re.compile(
    r"\s+(?:for|after)\s+\d+\s+[a-z]+\W*$|[,;]?\s+(?:because|since|which|where|as\s+(?!long)|so|and\s+(?:he|she|it|they))\b.*",
    re.DOTALL,
)


def _stated(text: str, cut_short: bool) -> Found | None:
    matches = deque(_PHRASE.finditer(text), maxlen=1)
    if not matches:
        return None
    phrase = matches[0]
    rest = text[phrase.end() : phrase.end() + _FAR]
    math = re.match(
        r"(\$\$|\\\[|\\\(|\$)(?!\s*-?\d[\d,.]*\s+[a-z])(.+?)(?<!\\)(\$\$|\\\]|\\\)|\$)(?!\d)", rest, re.DOTALL
    )
    end = _STATED_END.search(rest, math.end() if math else 0)
    if cut_short and end is None:
        return None
    answer = _EXPLAINED.sub("", rest[: end.start()] if end else rest).strip(" \t\r")
    answer = answer if answer.count("**") % 2 == 0 else answer.replace("**", "")
    before = text[max(0, phrase.start() - _NEAR) : phrase.start()]
    behind = rest[rest.find(answer) + len(answer) :] if end else ""
    denied = (
        bool(DENIES.match(answer) or re.match(r"n['’]t\b", rest))
        or bool(end and end[0] == "?")
        or bool(_WRONG_BEFORE.search(before))
        or _is_denied_before(f"{before} it is ")
    )
    return Found(answer, "phrase", denied=denied or _is_taken_back(behind, answer)) if answer else None
