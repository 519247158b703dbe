"""What grading talks about: the grade of one text, and the limits that keep a grader safe."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["correct", "incorrect", "no_answer", "parse_error", "timeout"]
GraderKind = Literal["integer", "number", "math"]
FoundBy = Literal["box", "hashes", "phrase", "last number"]
DecidedBy = Literal["number", "text", "symbolic"]

MAX_ANSWER_CHARS = 200
"""More of an answer than this is not kept in results; it is graded whole."""


@dataclass(frozen=True)
class Grade:
    """What was found in a text, and whether it is right."""

    status: Status
    answer: str | None = None
    """What was found, at most `MAX_ANSWER_CHARS` of it."""
    found_by: FoundBy | None = None
    decided_by: DecidedBy | None = None
    why: str | None = None
    """One sentence for everything but "correct"."""


@dataclass(frozen=True)
class Limits:
    """What one answer may cost. An answer beyond them is a `parse_error` or a `timeout`, never a hang."""

    seconds: float = 2.0
    """Wall seconds of symbolic comparison, measured from outside the process that compares."""
    memory_bytes: int = 2**30
    """Address space of a worker above what its imports need; kept where the system has `/proc`."""
    max_text_chars: int = 250_000
    """Of a longer text only the end is read, some 60,000 tokens, so that a thread is held up for 0.1 s and no more."""
    max_chars: int = 1_000
    """Longer answers are not read."""
    max_formula_chars: int = 400
    """Of a formula that is compared symbolically, and so are the next ones."""
    max_depth: int = 8
    """Brackets of any kind within brackets."""
    max_digits_in_a_row: int = 100
    max_digits_of_a_value: int = 10_000
    """Digits that a power, factorial or binomial of the answer may come to."""


def shortened(text: str, max_chars: int = MAX_ANSWER_CHARS) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
