"""Types of the graders: the grade of one text, and the limits that protect a grader from hostile text."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["correct", "incorrect", "no_answer", "parse_error", "timeout"]
GraderKind = Literal["integer", "number", "math"]
FoundBy = Literal["box", "hashes", "phrase", "last number"]
DecidedBy = Literal["number", "text", "symbolic"]

MAX_ANSWER_CHARS = 200
"""Maximum length of a stored answer. The full answer is graded."""


@dataclass(frozen=True)
class Grade:
    """The answer found in a text and its verdict."""

    status: Status
    answer: str | None = None
    """The answer found, cut off at `MAX_ANSWER_CHARS` characters."""
    found_by: FoundBy | None = None
    decided_by: DecidedBy | None = None
    why: str | None = None
    """The reason, as one sentence; None if the status is "correct"."""


@dataclass(frozen=True)
class GradingLimits:
    """Limits for grading one answer. An answer above them is a `parse_error` or a `timeout`, never a hang."""

    seconds: float = 2.0
    """Processor seconds for a symbolic comparison. All those of an answer take at most twice as
    many seconds on the clock."""
    memory_bytes: int = 2**30
    """Address space of a worker beyond its imports, in bytes. Enforced only on systems with `/proc`."""
    max_text_chars: int = 250_000
    """Longer texts are read from their end only, about 60,000 tokens, so that a thread blocks for at most 0.1 s."""
    max_chars: int = 1_000
    """Maximum length of an answer. Longer answers are not read."""
    max_formula_chars: int = 400
    """Maximum length of a formula in a symbolic comparison."""


def shortened(text: str, max_chars: int = MAX_ANSWER_CHARS) -> str:
    """Return a text, cut off with an ellipsis at `max_chars` characters."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
