"""The draft-confidence judge: how sure the draft was of what it wrote. It needs no pass of the target.

The entropy of a step's first token is the signal of GlimpRouter (arXiv:2601.05110).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import model_validator

from stepspec.engines.protocol import Ability
from stepspec.loop.judge import Evidence, ThresholdJudge

Signal = Literal[
    "min-logprob",
    "mean-logprob",
    "first-logprob",
    "mean-entropy",
    "first-entropy",
    "min-margin",
    "mean-margin",
    "first-margin",
]
STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": fmean,
    "first": lambda values: values[0],
}


class DraftConfidenceJudge(ThresholdJudge):
    """The draft's own certainty about the step."""

    asks_target: ClassVar[bool] = False

    kind: Literal["draft-confidence"]
    """Selects this judge."""
    signal: Signal = "mean-logprob"
    """The score of a step. `min-logprob`, `mean-logprob`, `first-logprob`: the draft's log-probability of the least
    probable token, the mean over the tokens, or that of the first one. `mean-entropy`, `first-entropy`: the negated
    entropy of the draft's distributions. `min-margin`, `mean-margin`, `first-margin`: by how much their most probable
    token leads, from 0 to 1."""
    threshold: float
    """Lowest score that accepts a step."""

    @model_validator(mode="after")
    def _in_range(self) -> "DraftConfidenceJudge":
        low, high = (0.0, 1.0) if self.signal.endswith("margin") else (-math.inf, 0.0)
        if not low <= self.threshold <= high:
            bounds = "from 0 to 1" if low == 0 else "at most 0"
            raise ValueError(f"with the signal {self.signal} the threshold is {bounds}, not {self.threshold:g}")
        return self

    @property
    def name(self) -> str:
        """Key of this judge's scores in results."""
        return f"draft-confidence.{self.signal}"

    @property
    def draft_needs(self) -> frozenset[Ability]:
        """Abilities that the draft needs for this judge."""
        return frozenset({"logprobs" if self.signal.endswith("logprob") else "entropies"})

    async def score(self, evidence: Evidence) -> float | None:
        """Return the signal; None for a step without tokens."""
        statistic, _, what = self.signal.partition("-")
        values: Mapping[str, Sequence[float] | None] = {
            "logprob": evidence.draft_logprobs,
            "entropy": [-each for each in evidence.draft_entropies or ()],
            "margin": evidence.draft_margins,
        }
        found = values[what]
        if not found or not all(map(math.isfinite, found)):
            return None
        return STATISTICS[statistic](found)
