"""Decides whether a policy's speed counts: only complete texts with an answer say how fast a policy is."""

from dataclasses import dataclass

from stepspec.evaluation.stats.untyped import scipy_stats

FEW_LOST = 0.01
"""Share of the requests by which a policy may lack more answers than the target, for any cause."""
MANY_LOST = 0.1
"""Share of lost answers above which chance is no excuse, however few the requests are."""
CHANCE = 0.05
"""Probability below which chance is no excuse."""


@dataclass(frozen=True)
class Answered:
    """Counts of requests by whether the policy and the target answered them.

    A request has no answer if the token limit cut it off, if no answer was found in its text, or if it failed.
    """

    both: int
    only_target: int
    only_policy: int
    neither: int

    def why_no_speed(self, target: str = "the target") -> str | None:
        """Return why the policy's speed does not count, as a clause that ends a sentence; None if it counts.

        A text that ends too soon takes little time, and one that is cut off would have taken more. Neither says how
        fast answers come. Texts that are also cut off under the target affect both sides equally.

        The policy may lack a few answers more than the target (`FEW_LOST`), or as many as chance explains: of the
        requests that only one of the two answered, each falls to either side with the same probability. A large share
        of lost answers (`MANY_LOST`) is never excused by a small number of requests.
        """
        requests = self.both + self.only_target + self.only_policy + self.neither
        if not self.both + self.only_policy:
            return f"it answered none of the {requests:,} requests" if requests > 1 else "it did not answer the request"
        if not self.both + self.only_target:
            return f"{target} answered none of the requests"
        lost = self.only_target - self.only_policy
        if lost <= FEW_LOST * requests or (lost <= MANY_LOST * requests and self._chance() >= CHANCE):
            return None
        others = f", and it answered {self.only_policy:,} that {target} did not" if self.only_policy else ""
        return f"{target} answered {self.only_target:,} of the {requests:,} requests that it did not{others}"

    def mirrored(self) -> "Answered":
        """Return the same counts with policy and target swapped."""
        return Answered(self.both, self.only_policy, self.only_target, self.neither)

    def _chance(self) -> float:
        """Return the probability of at least this many lost answers if both sides were equally likely."""
        discordant = self.only_target + self.only_policy
        return float(scipy_stats.binomtest(self.only_target, discordant, alternative="greater").pvalue)
