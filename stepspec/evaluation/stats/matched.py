"""The one rule by which a policy is called the fastest: it is faster, and it is known to keep the accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepspec.evaluation.stats.intervals import Interval


@dataclass(frozen=True)
class Candidate:
    """A policy beside the target. An exact one gives the target's own distribution, so that it has nothing to show."""

    name: str
    speedup: float | None
    interval: Interval | None
    loss_upper: float | None = None
    """The bound of the accuracy that it loses, at `corrected_confidence`; None where it is not known."""
    exact: bool = False
    why_no_speed: str | None = None
    """See `stepspec.evaluation.stats.Answered`."""
    throughput: float | None = None
    """Of all requests together, over the target's; None where they ran one at a time."""

    def pays(self) -> bool:
        """Whether it is faster than the target for all that is known, and gets no less done in all."""
        if self.interval is None or self.why_no_speed is not None:
            return False
        return self.interval[0] > 1 and (self.throughput is None or self.throughput >= 1)

    def keeps(self, loss: float) -> bool:
        """Whether it is known not to lose more accuracy than that."""
        return self.exact or (self.loss_upper is not None and self.loss_upper <= loss)


def fastest(candidates: Sequence[Candidate], loss: float) -> Candidate | None:
    """The fastest candidate that pays and keeps the accuracy to within `loss`; None if there is none.

    With bounds at `corrected_confidence` the chance that any candidate which loses more qualifies is at most what the
    confidence leaves, however many were tried. Having been picked as the fastest, its speedup is a little flattered;
    measure it once more on other problems.
    """
    qualified = [each for each in candidates if each.pays() and each.keeps(loss)]
    return max(qualified, key=lambda each: (each.speedup or 0.0, each.exact), default=None)


def corrected_confidence(num_inexact: int, confidence: float = 0.95) -> float:
    """The confidence at which each inexact candidate's loss is bounded so that all bounds hold (Bonferroni)."""
    return 1 - (1 - confidence) / max(num_inexact, 1)
