"""The draft-confidence judge: how sure the draft was of what it wrote. It needs no pass of the target.

The entropy of a step's first token is the signal of GlimpRouter (arXiv:2601.05110).
"""

import math
from typing import ClassVar, Literal

from pydantic import Field

from stepspec.engines.protocol import Ability
from stepspec.loop.judging import Evidence, ThresholdJudge


class DraftConfidenceJudge(ThresholdJudge):
    """The draft's own certainty about the step."""

    asks_target: ClassVar[bool] = False

    kind: Literal["draft-confidence"]
    """Selects this judge."""
    signal: Literal["min-logprob", "mean-logprob", "mean-entropy", "first-entropy"] = "mean-logprob"
    """The score of a step. `min-logprob`, `mean-logprob`: the draft's log-probability of the least probable token, or
    the mean over the tokens. `mean-entropy`, `first-entropy`: the negated entropy of the draft's distributions, as the
    mean over the tokens, or at the first one."""
    threshold: float = Field(le=0)
    """Lowest score that accepts a step."""

    @property
    def name(self) -> str:
        """Key of this judge's scores in results."""
        return f"draft-confidence.{self.signal}"

    @property
    def draft_needs(self) -> frozenset[Ability]:
        """Abilities that the draft needs for this judge."""
        return frozenset({"entropies" if self.signal.endswith("entropy") else "logprobs"})

    async def score(self, evidence: Evidence) -> float | None:
        """Return the signal; None for a step without tokens."""
        by_entropy = self.signal.endswith("entropy")
        values = [-each for each in evidence.draft_entropies or ()] if by_entropy else evidence.draft_logprobs
        if not values or not all(map(math.isfinite, values)):
            return None
        match self.signal:
            case "first-entropy":
                return values[0]
            case "min-logprob":
                return min(values)
            case _:
                return sum(values) / len(values)
