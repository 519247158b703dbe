"""The likelihood judge: how probable the step's tokens are under the target. It needs no probe.

A wrong number is improbable under a capable target. Wording that the target would not choose is also improbable, but
less so. The threshold on the least probable token separates the two.
"""

from stepspec.engines.protocol import Probe, Verification
from stepspec.loop.policy import LikelihoodSpec


class LikelihoodJudge:
    """Scores a step by the minimum or the mean log-probability of its tokens under the target, in nats."""

    probe: Probe | None = None

    def __init__(self, spec: LikelihoodSpec) -> None:
        self.name = spec.name
        self._spec = spec

    def score(self, verification: Verification, probe_index: int) -> float | None:
        """Return the statistic over the step's tokens; None for a step without tokens."""
        logprobs = verification.logprobs
        assert logprobs is not None, "the policy is rejected if the target returns no log-probs"
        if not logprobs:
            return None
        return min(logprobs) if self._spec.statistic == "min" else sum(logprobs) / len(logprobs)

    def accepts(self, score: float) -> bool:
        return score >= self._spec.threshold
