"""The draft-confidence judge: how sure the draft was of what it wrote. It needs no pass of the target."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import Field

from stepspec.engines.protocol import Ability
from stepspec.loop.judge import Evidence, ThresholdJudge

STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min-logprob": min,
    "mean-logprob": fmean,
    "first-logprob": lambda values: values[0],
}


class DraftConfidenceJudge(ThresholdJudge):
    """The draft's own certainty about the step."""

    asks_target: ClassVar[bool] = False

    kind: Literal["draft-confidence"]
    """Selects this judge."""
    signal: Literal["min-logprob", "mean-logprob", "first-logprob"] = "mean-logprob"
    """The score of a step: the draft's log-probability of the least probable token, the mean over the tokens, or that
    of the first one."""
    threshold: float = Field(le=0)
    """Lowest score that accepts a step."""

    @property
    def name(self) -> str:
        """Key of this judge's scores in results."""
        return f"draft-confidence.{self.signal}"

    @property
    def draft_needs(self) -> frozenset[Ability]:
        """Abilities that the draft needs for this judge."""
        return frozenset({"logprobs"})

    async def score(self, evidence: Evidence) -> float | None:
        """Return the signal; None for a step without tokens."""
        found = evidence.draft_logprobs
        if not found or not all(map(math.isfinite, found)):
            return None
        return STATISTICS[self.signal](found)
