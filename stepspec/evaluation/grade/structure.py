"""The parts of an answer: the value that it names, and the elements of a list, set, point, interval or matrix."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from stepspec.evaluation.grade.latex import WORDS
from stepspec.evaluation.grade.number import read_number
from stepspec.evaluation.grade.prose import DENIES


class Structure(NamedTuple):
    """The parts of an answer: "one", a "list", "set", "tuple" (a point or an interval), "matrix", "union" or "ratio"."""

    shape: str
    parts: Sequence[str]
    ends: str = ""


BRACKETED = r"\begin"
_LETTER = r"\\?[a-zA-Z]+(?:_\{?\w{1,3}\}?)?'{0,2}"
_MEMBER = re.compile(rf"(?:{_LETTER}|\(\s*[a-z](?:\s*,\s*[a-z])+\s*\))\s*\\in(?![a-zA-Z])\s*")
# Left out of a name: what stands in brackets or below, and commands without arithmetic.
_WITHIN = re.compile(
    r"_\{[^{}]*\}|_\w|\([^()]*\)|\|[^|]*\||\[[^\]]*\]|\\(?:text|overline|overrightarrow|vec|mathbf)\s*\{[^{}]*\}"
)
_ARITHMETIC = re.compile(r"\d|[-/^*!]|\\(?:frac|sqrt|cdot|log|ln|sin|cos|tan|pm|binom|sum|int|lim)(?![a-z])")
_CHANGED = re.compile(r"\b(?:twice|half|double|minus|opposite|negative)\b")


def value_of(clean: str) -> str:
    r"""Return the value that an answer names: `5` for `x = 5` and `5 = x`, `18` for `x = 9 + 9 = 18`, `[1,2)` for
    `x \in [1,2)`, `\pi` for `\pi \approx 3.14`. An equation that is not solved stays as it is, as in `2x = 12`."""
    clean = _MEMBER.sub("", clean, count=1) if _MEMBER.match(clean) else clean
    exact, about, decimal = clean.partition(r"\approx")
    if about and read_number(decimal.strip()):
        clean = exact.strip()
    if "=" not in clean or len(split(clean, SEPARATORS)) > 1 or re.search(r"\\(?:neq|approx)|[<>]", clean):
        return clean
    *firsts, last = (part.strip() for part in clean.split("="))
    name = WORDS.sub(r" \1 ", firsts[0])
    if DENIES.search(name) or _CHANGED.search(name):
        return clean
    if not _ARITHMETIC.search(_WITHIN.sub("", firsts[0])):
        return last
    first, second = read_number(firsts[0]), read_number(last)
    if len(firsts) == 1 and first and second and not first.equals(second) and re.fullmatch(r"[\d.,]+", firsts[0]):
        return clean
    if re.fullmatch(_LETTER, last):
        return firsts[0] if len(firsts) == 1 else clean
    bare = (re.sub(r"\\[a-zA-Z]+", "", part) for part in firsts)
    return clean if any(re.search(r"(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])", part) for part in bare) else last


_TOKEN = re.compile(r"\\(?:begin|end)\{[a-zA-Z]*\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|\band\b|\bor\b|.", re.DOTALL)
_OPENING = frozenset({"(", "[", "{", r"\{", r"\langle"})
_CLOSING = frozenset({")", "]", "}", r"\}", r"\rangle"})
SEPARATORS = frozenset({",", ";", "and", "or"})
_MATRIX = re.compile(
    r"\\begin\{([pbBvV]?)(?:small)?(?:matrix|array)\}\s*(?:\{[lcr|\s]*\})?(.*)\\end\{[a-zA-Z]*\}", re.DOTALL
)
_SUCH_THAT = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?[|:]\s*(.+)\\\}")
_RATIO = re.compile(r"\s*(?::|\\text\{\s*to\s*\}|(?<=\d)\sto\s(?=\d))\s*")


def structure_of(clean: str) -> Structure:
    r"""Return the parts of a cleaned answer.

    >>> structure_of(r"x \in (-\infty, 3]")
    Structure(shape='tuple', parts=['-\\infty', '3'], ends='(]')
    """
    text = _interval(value_of(_SUCH_THAT.sub(r"\1", clean)))
    if re.search(r",\s", text):  # `1,000, 2,000`
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    matrix = _MATRIX.fullmatch(text.strip("[]() ") if text.startswith(("[", "(")) else text)
    if matrix:
        rows = [split(row, frozenset({"&"})) for row in split(matrix[2], frozenset({r"\\"})) if row.strip()]
        kind = "v" if matrix[1] in ("v", "V") else ""
        return Structure(
            "matrix", [cell for row in rows for cell in row], kind + "x".join(str(len(row)) for row in rows)
        )
    union = split(text, frozenset({r"\cup"}))
    either = [_interval(each) for each in split(text, frozenset({"or"}))]
    if len(either) > 1 and all(each[:1] in ("(", "[") for each in either):
        union = either
    if len(union) > 1:
        return Structure("union", union)
    inner = _bracketed(text)
    if inner is not None:
        parts = _plus_and_minus(split(inner[1], SEPARATORS))
        if inner[0] == r"\{":
            return Structure("one" if "|" in text or ":" in text else "set", parts)
        if len(parts) > 1 and inner[0] != "{":
            ends = f"{inner[0]}{inner[2]}".replace(r"\langle", "(").replace(r"\rangle", ")")
            ends = {"][": "()", "[[": "[)", "]]": "(]"}.get(ends, ends)  # French intervals
            return Structure("tuple", [part.replace("+\\infty", "\\infty") for part in parts], ends)
    parts = _plus_and_minus(split(text, SEPARATORS))
    if len(parts) > 1:
        return Structure("list", parts)
    ratio = _RATIO.split(text)
    return Structure("ratio", ratio) if len(ratio) > 1 and all(ratio) else Structure("one", [text])


def _bracketed(text: str) -> tuple[str, str, str] | None:
    """Return the first bracket, what is in it, and the last one, if they belong together."""
    tokens = _TOKEN.findall(text)
    if len(tokens) < 3 or tokens[0] not in {*_OPENING, "]"} or tokens[-1] not in {*_CLOSING, "["}:
        return None
    depth = 0
    for token in tokens[1:-1]:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth < 0:
            return None
    return (tokens[0], "".join(tokens[1:-1]), tokens[-1]) if depth == 0 else None


def split(text: str, separators: frozenset[str]) -> list[str]:
    """Return the parts between separators that are outside of brackets."""
    parts, part, depth = list[str](), list[str](), 0
    for token in [*_TOKEN.findall(text), None]:
        word = token[6:-1].strip(" ,") if token and token.startswith(r"\text{") else token
        if token is None or (depth == 0 and word in separators):
            parts.append("".join(part).strip())
            part = []
            continue
        depth += (token in _OPENING or token.startswith(BRACKETED)) - (token in _CLOSING or token.startswith(r"\end"))
        part.append(token)
    return [part for part in parts if part] if separators is SEPARATORS else parts


def _plus_and_minus(parts: Sequence[str]) -> list[str]:
    found = list[str]()
    for part in parts:
        before, sign, after = re.split(r"(\\(?:pm|mp)(?![a-zA-Z])|$)", part, maxsplit=1)
        before = value_of(f"{before}0").removesuffix("0") if sign and "=" in before else before
        found += [f"{before}+{after}" if before.strip() else after.strip(), f"{before}-{after}"] if sign else [part]
    return found


_BELOW = re.compile(r"[a-zA-Z]\s*(<|\\leq)\s*([^,=<>\\]+)|([^,=<>\\]+)(>|\\geq)\s*[a-zA-Z]")
_ABOVE = re.compile(r"[a-zA-Z]\s*(>|\\geq)\s*([^,=<>\\]+)|([^,=<>\\]+)(<|\\leq)\s*[a-zA-Z]")
_EXCEPT = re.compile(r"[a-zA-Z]\s*\\neq\s*([^,=<>]+)")


def _interval(text: str) -> str:
    """Return the interval that an inequality of an unknown and a value describes; other text as it is."""
    if other := _EXCEPT.fullmatch(text):
        return rf"(-\infty,{other[1]})\cup({other[1]},\infty)"
    if below := _BELOW.fullmatch(text):
        return rf"(-\infty,{below[2] or below[3]}{']' if 'eq' in (below[1] or below[4]) else ')'}"
    if above := _ABOVE.fullmatch(text):
        return rf"{'[' if 'eq' in (above[1] or above[4]) else '('}{above[2] or above[3]},\infty)"
    return text
