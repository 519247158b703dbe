"""The judge that accepts every step, as a bound for the others."""

from typing import ClassVar, Literal

from stepspec.loop.judge import Decision, Evidence, Judge


class AlwaysJudge(Judge):
    """Accepts every step."""

    asks_target: ClassVar[bool] = False
    families = ("score", "compare")

    kind: Literal["always"]
    """Selects this judge."""

    async def score(self, evidence: Evidence) -> float:
        return 1.0

    def decide(self, score: float) -> Decision:
        return "accept"
