"""The rule for the fastest policy: it is faster than the target and known to keep its accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepspec.evaluation.stats.intervals import Interval


@dataclass(frozen=True)
class MatchedPolicy:
    """A policy compared with the target. An exact one has the target's own distribution, so it needs no loss bound."""

    name: str
    speedup: float | None
    interval: Interval | None
    loss_upper: float | None = None
    """Upper bound of the accuracy that it loses, at `corrected_confidence`; None if unknown."""
    exact: bool = False
    why_no_speed: str | None = None
    """See `stepspec.evaluation.stats.Answered`."""
    throughput: float | None = None
    """Throughput of all requests together, over the target's; None if they ran one at a time."""

    def pays(self) -> bool:
        """Return whether it is known to be faster than the target and does not reduce throughput."""
        if self.interval is None or self.why_no_speed is not None:
            return False
        return self.interval[0] > 1 and (self.throughput is None or self.throughput >= 1)

    def keeps(self, loss: float) -> bool:
        """Return whether it is known to lose at most `loss` of accuracy."""
        return self.exact or (self.loss_upper is not None and self.loss_upper <= loss)


def fastest(candidates: Sequence[MatchedPolicy], loss: float) -> MatchedPolicy | None:
    """Return the fastest candidate that pays and keeps the accuracy to within `loss`; None if there is none.

    With bounds at `corrected_confidence`, the probability that any candidate that loses more qualifies is at most 1 -
    confidence, however many were tried. Selecting the fastest biases its speedup upwards slightly. Measure it again on
    other problems.
    """
    qualified = [each for each in candidates if each.pays() and each.keeps(loss)]
    return max(qualified, key=lambda each: (each.speedup or 0.0, each.exact), default=None)


def corrected_confidence(num_inexact: int, confidence: float = 0.95) -> float:
    """Return the confidence for each inexact candidate's loss bound so that all hold together (Bonferroni)."""
    return 1 - (1 - confidence) / max(num_inexact, 1)
