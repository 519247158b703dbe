"""A judge that tosses a coin: tests need steps that are accepted and rejected independently of their text."""

import random
from typing import ClassVar, Literal

from pydantic import Field

from stepspec.loop.judge import Decision, Evidence, Judge


class RandomJudge(Judge):
    """Accepts a share of the steps at random."""

    asks_target: ClassVar[bool] = False
    families = ("score", "compare")

    kind: Literal["random"] = "random"
    """Selects this judge."""
    share: float = Field(ge=0, le=1)
    """The probability with which a step is accepted."""
    seed: int = 0
    """The same seed accepts the same steps of the same text."""

    async def score(self, evidence: Evidence) -> float:
        """Return a number from 0 to 1 that depends only on the seed, the place of the step and its text."""
        return random.Random(f"{self.seed}/{len(evidence.committed)}/{evidence.step}").random()

    def decide(self, score: float) -> Decision:
        return "accept" if score < self.share else "reject"
