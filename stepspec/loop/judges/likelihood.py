"""The likelihood judge: how probable the step's tokens are under the target; free with the verifying pass.

A wrong number is improbable under a target that knows better. So is a wording it would not choose, though less so:
the threshold for the least probable token decides between the two.
"""

from stepspec.engines.protocol import Probe, Verification
from stepspec.loop.policy import LikelihoodSpec


class LikelihoodJudge:
    """Its score is the least or the mean log-probability of the step's tokens, in nats."""

    probe: Probe | None = None

    def __init__(self, spec: LikelihoodSpec) -> None:
        self.name = spec.name
        self._spec = spec

    def score(self, verification: Verification, probe_index: int) -> float | None:
        """The statistic over the step; None for a step of no tokens."""
        logprobs = verification.logprobs
        assert logprobs is not None, "the policy is refused where the target gives no scores"
        if not logprobs:
            return None
        return min(logprobs) if self._spec.statistic == "min" else sum(logprobs) / len(logprobs)

    def accepts(self, score: float) -> bool:
        return score >= self._spec.threshold
