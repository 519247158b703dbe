"""Data for the plots and the problem list, collected from rows in one pass.

Memory grows by a few bytes for each step and does not depend on the length of texts.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stepspec.evaluation.records import ResultRow

ORIGIN_LETTERS: Mapping[str, str] = {"draft": "d", "salvaged": "s", "target": "t"}
MAX_LETTERS = 400
"""Maximum steps of a request in the strip that shows which model wrote each step."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request."""

    status: str
    answer: str | None
    found_by: str | None
    decided_by: str | None
    why: str | None
    truncated: bool
    wall_s: float
    num_tokens: int
    origins: str
    """One letter for each step, from `ORIGIN_LETTERS`."""
    output_sha256: str

    @classmethod
    def of(cls, row: ResultRow) -> "Outcome":
        """Return the outcome of a row. Of its steps it contains only the origins."""
        return cls(
            status=row.status,
            answer=row.answer,
            found_by=row.found_by,
            decided_by=row.decided_by,
            why=row.why,
            truncated=row.finish_reason == "length",
            wall_s=row.wall_s,
            num_tokens=row.tokens.committed,
            origins="".join(ORIGIN_LETTERS[step.origin] for step in row.steps[:MAX_LETTERS]),
            output_sha256=row.output_sha256,
        )


@dataclass
class ProblemTally:
    """One problem, with its outcomes by policy and repeat."""

    gold: str
    level: int | None
    subject: str | None
    outcomes: dict[str, dict[int, Outcome]] = field(default_factory=dict[str, dict[int, Outcome]])


@dataclass
class ScoreTally:
    """The scores of one judge under one policy."""

    accepted: "array[float]" = field(default_factory=lambda: array("d"))
    led_to_correct: "array[int]" = field(default_factory=lambda: array("b"))
    """Whether the answer of the request of each step in `accepted` is correct, as 0 or 1."""
    refused: "array[float]" = field(default_factory=lambda: array("d"))
    lowest: "array[float]" = field(default_factory=lambda: array("d"))
    """The lowest accepted score of each request with an accepted score."""
    correct: "array[int]" = field(default_factory=lambda: array("b"))
    """Whether the answer of each request in `lowest` is correct, as 0 or 1."""
    problems: list[str] = field(default_factory=list[str])
    """The problem of each request in `lowest`."""


@dataclass
class PolicyTally:
    """The judged steps of one policy."""

    scores: dict[str, ScoreTally] = field(default_factory=dict[str, ScoreTally])

    def add(self, row: ResultRow) -> None:
        """Add the steps of a row."""
        lowest: dict[str, float] = {}
        for step in row.steps:
            for judge, score in step.scores.items():
                if score is None:
                    continue
                tally = self.scores.setdefault(judge, ScoreTally())
                if step.origin != "draft":  # rejected, as accepted steps are entirely the draft's
                    tally.refused.append(score)
                    continue
                tally.accepted.append(score)
                tally.led_to_correct.append(row.status == "correct")
                lowest[judge] = min(score, lowest.get(judge, score))
        for judge, score in lowest.items():
            self.scores[judge].lowest.append(score)
            self.scores[judge].correct.append(row.status == "correct")
            self.scores[judge].problems.append(row.problem)


@dataclass
class RunTally:
    """All data that the page needs from the rows of a run."""

    policies: dict[str, PolicyTally] = field(default_factory=dict[str, PolicyTally])
    problems: dict[str, ProblemTally] = field(default_factory=dict[str, ProblemTally])
    num_rows: int = 0

    @classmethod
    def of(cls, rows: Iterable[ResultRow]) -> "RunTally":
        """Return the tally of all rows of a run."""
        tally = cls()
        for row in rows:
            tally.add(row)
        return tally

    def add(self, row: ResultRow) -> None:
        """Add one row."""
        self.num_rows += 1
        self.policies.setdefault(row.policy, PolicyTally()).add(row)
        problem = self.problems.setdefault(row.problem, ProblemTally(row.gold, row.level, row.subject))
        problem.outcomes.setdefault(row.policy, {})[row.repeat] = Outcome.of(row)
