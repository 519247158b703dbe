"""The likelihood judge: how probable the step's tokens are under the target. It needs no probe.

A wrong number is improbable under a capable target. Wording that the target would not choose is also improbable, but
less so. The threshold on the least probable token separates the two.
"""

import math
from typing import Literal

from pydantic import Field, model_validator

from stepspec.engines.protocol import Ability
from stepspec.loop.judge import Evidence, ThresholdJudge


class LikelihoodJudge(ThresholdJudge):
    """The target's log-probability of the step's tokens, in nats."""

    kind: Literal["likelihood"]
    """Selects this judge."""
    statistic: Literal["min", "mean", "quantile", "log-ratio"] = "min"
    """Lowest log-probability of a token, mean, quantile, or mean minus the draft's."""
    quantile: float | None = Field(default=None, ge=0, le=1)
    """For `statistic = "quantile"`: 0 is the least probable token, 0.5 the lower median."""
    threshold: float
    """Lowest accepted score. At most 0, except for `log-ratio`."""

    @model_validator(mode="after")
    def _statistic_has_its_settings(self) -> "LikelihoodJudge":
        if (self.statistic == "quantile") != (self.quantile is not None):
            raise ValueError('statistic = "quantile" needs a quantile, and the other statistics take none')
        if self.statistic != "log-ratio" and self.threshold > 0:
            raise ValueError(f"threshold must be at most 0, got {self.threshold:g}")
        return self

    @property
    def name(self) -> str:
        """Key of this judge's scores in results."""
        number = "" if self.quantile is None else f"-{self.quantile:g}"
        return f"likelihood.{self.statistic}{number}"

    @property
    def needs(self) -> frozenset[Ability]:
        """Abilities that the target needs for this judge."""
        return frozenset({"scores"})

    @property
    def draft_needs(self) -> frozenset[Ability]:
        """Abilities that the draft needs for this judge."""
        return frozenset({"logprobs"}) if self.statistic == "log-ratio" else frozenset()

    async def score(self, evidence: Evidence) -> float | None:
        """Return the statistic over the step's tokens; None for a step without tokens."""
        assert evidence.verification is not None
        logprobs = evidence.verification.logprobs
        if not logprobs:
            return None
        if self.statistic == "mean":
            return sum(logprobs) / len(logprobs)
        if self.statistic == "log-ratio":  # of the whole step, since the draft's tokens may be others
            ratio = (sum(logprobs) - sum(evidence.draft_logprobs or (math.nan,))) / len(logprobs)
            return ratio if math.isfinite(ratio) else None
        return sorted(logprobs)[math.floor((self.quantile or 0.0) * (len(logprobs) - 1) + 1e-9)]
