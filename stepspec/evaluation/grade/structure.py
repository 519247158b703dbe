r"""Split answers with several parts: tuples, intervals, sets, lists, matrices, unions and `\pm`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepspec.evaluation.grade.latex import without_name

Shape = Literal["one", "list", "set", "bracket", "matrix", "determinant", "union"]


@dataclass(frozen=True)
class Structure:
    """The parts of an answer. `ends` holds its brackets, or the column count of each matrix row."""

    shape: Shape
    parts: tuple[str, ...]
    ends: str = ""

    @property
    def ordered(self) -> bool:
        """Whether the order of the parts matters."""
        return self.shape in ("bracket", "matrix", "determinant")


_TOKEN = re.compile(
    r"\\(?:begin|end)\{[a-zA-Z]*\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|\band\b|\bor\b|.",
    re.DOTALL,
)
_OPENING = frozenset({"(", "[", "{", r"\{", r"\langle"})
_CLOSING = frozenset({")", "]", "}", r"\}", r"\rangle"})
_SEPARATORS = frozenset(
    {",", ";", "and", "or", r"\text{and}", r"\text{or}", r"\text{, and}", r"\text{,}", r"\lor", r"\land"}
)
_CELLS = frozenset({"&"})
_ROWS = frozenset({r"\\"})
_UNIONS = frozenset({r"\cup"})
_MATRIX = re.compile(
    r"\\begin\{([pbBvV]?)(?:small)?(matrix|array)\}\s*(?:\{[lcr|\s]*\})?(.*)\\end\{\1(?:small)?\2\}", re.DOTALL
)
# `1,000, 2,000`: if a comma with a space separates parts, a comma without one groups digits.
_SPACED_COMMA = re.compile(r",\s")
_GROUPING_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def structure_of(clean: str) -> Structure:
    r"""Return the parts of a cleaned answer. The shape of a single answer is `one`.

    >>> structure_of(r"x \in (-\infty, 3]")
    Structure(shape='bracket', parts=('-\\infty', '3'), ends='(]')
    """
    text = _without_grouping(without_name(clean).strip())
    return _matrix(text) or _union(text) or _bracket(text) or _list(text) or Structure("one", (text,))


def _without_grouping(text: str) -> str:
    return _GROUPING_COMMA.sub("", text) if _SPACED_COMMA.search(text) else text


def _matrix(text: str) -> Structure | None:
    match = _MATRIX.fullmatch(text.strip("[]() ") if text.startswith(("[", "(")) else text)
    if not match:
        return None
    rows = [_split(row, _CELLS) for row in _split(match[3], _ROWS) if row.strip()]
    shape = "determinant" if match[1] in ("v", "V") else "matrix"
    return Structure(shape, tuple(cell for row in rows for cell in row), "x".join(str(len(row)) for row in rows))


def _union(text: str) -> Structure | None:
    parts = _split(text, _UNIONS)
    return Structure("union", tuple(parts)) if len(parts) > 1 else None


def _bracket(text: str) -> Structure | None:
    tokens = _TOKEN.findall(text)
    if len(tokens) < 3 or tokens[0] not in _OPENING or tokens[-1] not in _CLOSING:
        return None
    if _closes_at(tokens) != len(tokens) - 1:
        return None
    inner = "".join(tokens[1:-1])
    parts = _plus_and_minus(_split(inner, _SEPARATORS))
    if tokens[0] in ("{", r"\{") or tokens[-1] in ("}", r"\}"):
        is_set = tokens[0] == tokens[-1].replace("}", "{") and "|" not in inner and (tokens[0] != "{" or len(parts) > 1)
        return Structure("set", tuple(parts)) if is_set else None
    opening, closing = tokens[0].replace(r"\langle", "("), tokens[-1].replace(r"\rangle", ")")
    return Structure("bracket", tuple(parts), opening + closing) if len(parts) > 1 else None


def _list(text: str) -> Structure | None:
    parts = _plus_and_minus(_split(text, _SEPARATORS))
    return Structure("list", tuple(parts)) if len(parts) > 1 else None


def _closes_at(tokens: Sequence[str]) -> int:
    """Return the index of the bracket that closes the first token. Any brackets match, for half-open intervals."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0:
            return index
    return -1


def _split(text: str, separators: frozenset[str]) -> list[str]:
    """Return the parts between separators that are outside brackets."""
    parts, part, depth = list[str](), list[str](), 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING)
        if token.startswith((r"\begin", r"\end")):
            depth += 1 if token.startswith(r"\begin") else -1
        if token in separators and depth == 0:
            parts.append("".join(part).strip())
            part = []
        else:
            part.append(token)
    parts.append("".join(part).strip())
    # `1, 2, and 3` has an empty part between its last comma and the word.
    return [part for part in parts if part] if separators is _SEPARATORS else parts


def _plus_and_minus(parts: Sequence[str]) -> list[str]:
    r"""Replace `1 \pm \sqrt{2}` with the two parts `1 + \sqrt{2}` and `1 - \sqrt{2}`."""
    found = list[str]()
    for part in parts:
        if part.count(r"\pm") == 1 and part.count(r"\mp") == 0:
            before, _, after = part.partition(r"\pm")
            before = without_name(before + "\0").replace("\0", "")
            found += [f"{before}+{after}" if before.strip() else after.strip(), f"{before}-{after}"]
        else:
            found.append(part)
    return found
