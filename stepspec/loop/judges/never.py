"""The judge that rejects every step, as a bound for the others."""

from typing import ClassVar, Literal

from stepspec.loop.judge import Decision, Evidence, Judge


class NeverJudge(Judge):
    """Rejects every step."""

    asks_target: ClassVar[bool] = False
    families = ("score", "compare")

    kind: Literal["never"]
    """Selects this judge."""

    async def score(self, evidence: Evidence) -> float:
        return 0.0

    def decide(self, score: float) -> Decision:
        return "reject"
