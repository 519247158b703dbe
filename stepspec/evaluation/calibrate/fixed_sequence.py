"""Tests the settings of a path in their order: learn then test with a fixed sequence (arXiv:2110.01052, section 3).

Each setting is tested at the full confidence, and the first one that is not certified ends the sequence. The order was
fixed before the problems were run, so that a setting which loses more than the limit is certified with at most the
remaining probability, however many settings there are and whenever the test of each one stops.
"""

from dataclasses import dataclass
from math import ceil, log

import numpy as np

from stepspec.evaluation.calibrate.records import Status
from stepspec.evaluation.stats.bets import certified_after, loss_upper_by_betting
from stepspec.evaluation.stats.runs import Floats


@dataclass(frozen=True)
class LossLimits:
    """What a setting may lose.

    Attributes:
        max_loss: the limit of the mean loss.
        confidence: probability that no setting which loses more is certified.
        num_planned: number of problems that the bets are tuned for.
    """

    max_loss: float
    confidence: float
    num_planned: int


def status_of(losses: Floats, limits: LossLimits) -> Status:
    """Return what the losses of some problems, [N], say about a setting."""
    if certified_after(losses, limits.max_loss, limits.num_planned, limits.confidence) is not None:
        return "certified"
    if certified_after(-losses, -limits.max_loss, limits.num_planned, limits.confidence) is not None:
        return "loses more"
    return "unknown"


def loss_upper(losses: Floats, limits: LossLimits) -> float:
    """Return the upper bound of the mean loss."""
    return loss_upper_by_betting(losses, limits.num_planned, limits.confidence)


def problems_needed(losses: Floats, limits: LossLimits) -> int | None:
    """Estimate how many problems would certify a setting, if its losses go on as they are; None if none would.

    With a bet b on every problem the wealth grows by about b (limit - loss) - b^2 variance / 2, which is largest with
    b = (limit - loss) / variance. A bet is at most a half.
    """
    if not len(losses):
        return None
    gain, variance = limits.max_loss - float(losses.mean()), float(losses.var())
    if gain <= 0:
        return None
    bet = min(0.5, gain / max(variance, 1e-12))
    return ceil(-log(1 - limits.confidence) / (bet * gain - bet**2 * variance / 2))


def by_problem(scores: Floats, target: Floats) -> Floats:
    """Return the loss of each problem, [N], from the scores of its repeats, both [N, repeats]."""
    return np.asarray((target - scores).mean(axis=1), dtype=np.float64)
