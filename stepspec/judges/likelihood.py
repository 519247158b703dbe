"""The likelihood judge: how probable the step's tokens are under the target; free with the verifying pass.

A wrong number is improbable under a target that knows better. So is a wording it would not choose, though less so:
the bound on the least probable token decides between the two.
"""

from stepspec.engine import Probe, Verification
from stepspec.policy import LikelihoodSpec


class LikelihoodJudge:
    """Its score is the least log-probability of a token in the step, in nats; the mean is bounded as well."""

    name = "likelihood"
    probe: Probe | None = None

    def __init__(self, spec: LikelihoodSpec) -> None:
        self._spec = spec

    def score(self, verification: Verification, probe_index: int) -> float | None:
        """The minimum over the step, or minus infinity if the mean is below its own bound."""
        if not verification.logprobs:
            return None
        mean = sum(verification.logprobs) / len(verification.logprobs)
        return min(verification.logprobs) if mean >= self._spec.mean_logprob else float("-inf")

    def accepts(self, score: float) -> bool:
        return score >= self._spec.min_logprob
