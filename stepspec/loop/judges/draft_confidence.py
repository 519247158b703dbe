"""The draft-confidence judge: how sure the draft was of what it wrote. It needs no pass of the target."""

import math
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import Field

from stepspec.engines.protocol import Ability
from stepspec.loop.judge import Evidence, ThresholdJudge


class DraftConfidenceJudge(ThresholdJudge):
    """The mean of the draft's log-probabilities of the step's tokens."""

    asks_target: ClassVar[bool] = False

    kind: Literal["draft-confidence"]
    """Selects this judge."""
    threshold: float = Field(le=0)
    """Lowest accepted score."""

    @property
    def draft_needs(self) -> frozenset[Ability]:
        """Abilities that the draft needs for this judge."""
        return frozenset({"logprobs"})

    async def score(self, evidence: Evidence) -> float | None:
        """Return the mean; None for a step without tokens."""
        found = evidence.draft_logprobs
        return fmean(found) if found and all(map(math.isfinite, found)) else None
