"""A bound of the mean loss that holds for any number of problems and wherever the run stops, by betting.

A gambler bets against the claim that a policy loses at least `limit` of accuracy on average. If the claim is true, no
way of betting makes the wealth grow in expectation, so it ever reaches 1 / (1 - confidence) with at most the remaining
probability (Ville's inequality; I. Waudby-Smith and A. Ramdas, arXiv:2010.09686, sections 3 and 4). A problem's loss is
the target's score minus the policy's, between -1 and 1; with repeats, its mean over them. Problems come in an order
that does not depend on their losses.
"""

from math import log

import numpy as np

from stepspec.evaluation.stats.runs import Floats

MAX_BET = 0.5
"""Largest share of the wealth that the loss of a whole problem can cost. It does not depend on the limit, so that the
wealth grows with it and the bound is where the wealth is just enough."""

PRIOR_VARIANCE, PRIOR_WEIGHT = 0.05, 20
"""The variance of a problem's loss before any was seen, and the number of problems that it is worth."""

_STEPS = 40  # of the bisection, which leave an error of 2e-12


def log_wealth(losses: Floats, limit: float, planned: int, confidence: float = 0.95) -> Floats:
    """Return the logarithm of the wealth after each problem, [N], for bets against a mean loss of at least `limit`.

    Args:
        losses: losses of the problems in the order of the run, [N].
        limit: the claimed mean loss, from -1 to 1.
        planned: number of problems that the bets are tuned for. The bound holds for any other number too.
        confidence: probability of the bound that the bets are tuned for.
    """
    return _log_wealth(_bets(losses, planned, confidence), losses, limit)


def certified_after(losses: Floats, limit: float, planned: int, confidence: float = 0.95) -> int | None:
    """Return the number of problems after which the mean loss is known to be below `limit`; None if it is not."""
    (reached,) = np.nonzero(log_wealth(losses, limit, planned, confidence) >= _enough(confidence))
    return int(reached[0]) + 1 if len(reached) else None


def loss_upper_by_betting(losses: Floats, planned: int, confidence: float = 0.95) -> float:
    """Return the upper bound of the mean loss: the lowest limit that the problems rule out, 1 if they rule out none."""
    bets, enough = _bets(losses, planned, confidence), _enough(confidence)
    low, high = -1.0, 1.0
    for _ in range(_STEPS):
        limit = (low + high) / 2
        low, high = (low, limit) if _log_wealth(bets, losses, limit).max(initial=0.0) >= enough else (limit, high)
    return high


def _log_wealth(bets: Floats, losses: Floats, limit: float) -> Floats:
    return np.cumsum(np.log1p(bets * (limit - losses)))


def _bets(losses: Floats, planned: int, confidence: float) -> Floats:
    """Return the bet on each problem, from what was seen before it: larger if losses vary less (section 4.3)."""
    before = np.arange(len(losses))
    means: Floats = np.concatenate([[0.0], np.cumsum(losses)[:-1]]) / np.maximum(before, 1)
    squares: Floats = np.concatenate([[0.0], np.cumsum((losses - means) ** 2)[:-1]]) if len(losses) else losses
    variances = (PRIOR_VARIANCE * PRIOR_WEIGHT + squares) / (PRIOR_WEIGHT + before)
    return np.minimum(MAX_BET, np.sqrt(2 * _enough(confidence) / (planned * variances)))


def _enough(confidence: float) -> float:
    return -log(1 - confidence)
