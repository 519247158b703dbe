"""Whether a policy's speed counts: only texts that were written to their end, with an answer in them, are any speed."""

from dataclasses import dataclass
from typing import Any

from stepspec.evaluation.stats.untyped import scipy_stats

FEW_LOST = 0.01
"""A share of the requests that may go without an answer, more than the target's, whatever the cause."""
MANY_LOST = 0.1
"""A share that chance never excuses, however few the requests are."""
CHANCE = 0.05
"""Below this probability chance excuses nothing."""


@dataclass(frozen=True)
class Answered:
    """Requests under a policy beside the same ones under the target, by which of them gave an answer.

    A request gives none where the token limit cut its text off, where no answer was found in it, or where it failed.
    """

    both: int
    only_target: int
    only_policy: int
    neither: int

    def why_no_speed(self, target: str = "the target") -> str | None:
        """Why the policy's speed does not count, as words that end a sentence; None where it does.

        A text that ends too soon takes little time, and one that is cut off would have taken more, so neither tells
        how fast answers come. What is cut off under the target as well counts on both sides alike. The policy may lack
        a few answers more than the target (`FEW_LOST`), or as many as chance explains: of the requests that only one
        of the two answered, each falls to either side with the same probability. Few requests excuse nothing of size
        (`MANY_LOST`).
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
        """The target beside the policy."""
        return Answered(self.both, self.only_policy, self.only_target, self.neither)

    def _chance(self) -> float:
        """The probability of so many lost answers if either side were as likely."""
        discordant = self.only_target + self.only_policy
        tested: Any = scipy_stats.binomtest(self.only_target, discordant, alternative="greater")
        return float(tested.pvalue)
