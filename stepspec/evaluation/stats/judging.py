"""How well a judge's score tells good steps from bad ones: the area under the curve, and the outcome by score.

All arrays are [steps]; `problems` says which problem each step is of, in any numbers.
"""

from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stepspec.evaluation.stats.intervals import Interval, spread_known, z_value
from stepspec.evaluation.stats.runs import Floats
from stepspec.evaluation.stats.shares import Share
from stepspec.evaluation.stats.untyped import scipy_stats


@dataclass(frozen=True)
class Bin:
    """Steps of about the same score, and the share of them with a good outcome."""

    lowest: float
    highest: float
    mean_score: float
    num_steps: int
    outcome: Share


MIN_CLASS = 50
"""Problems with a good outcome, and with a bad one, from which on the interval covers at least 93% of areas up to 0.95.

`python -m stepspec.bench.coverage` simulates it. With 20 and 30 it covers 92% at an area of 0.95, and with 40 just 93%.
"""


@dataclass(frozen=True)
class Area:
    """An area under the curve with its interval, or why there is none."""

    value: float | None = None
    interval: Interval | None = None
    why: str | None = None
    """Words that end a sentence."""


def reliability(scores: ArrayLike, outcomes: ArrayLike, problems: ArrayLike, num_bins: int = 10) -> tuple[Bin, ...]:
    """The outcome by score, in bins of about equal count, lowest scores first.

    Equal scores share a bin, so there are fewer bins than asked for where a judge gives few different scores.
    """
    score, outcome, problem = _aligned(scores, outcomes, problems)
    if not len(score):
        return ()
    ranks = scipy_stats.rankdata(score)
    place = np.floor((ranks - 0.5) / len(score) * num_bins).astype(np.int64)
    return tuple(
        _bin(score[here], outcome[here], problem[here]) for each in np.unique(place) for here in [place == each]
    )


def auc(scores: ArrayLike, outcomes: ArrayLike, problems: ArrayLike, confidence: float = 0.95) -> Area:
    """The chance that a good step scores above a bad one, ties as half, where that can be known from so many problems.

    The variance is DeLong's, summed by problem (N. A. Obuchowski, Biometrics 53, 1997, 567-578), the interval
    symmetric in the log odds, with Student's t of the smaller class.
    """
    score, outcome, problem = _aligned(scores, outcomes, problems)
    good = outcome == 1
    sizes = {"good": len(np.unique(problem[good])), "bad": len(np.unique(problem[~good]))}
    smaller = min(sizes, key=lambda name: sizes[name])
    if (n := sizes[smaller]) < MIN_CLASS:
        return Area(why=f"{n} of the problems have a {smaller} outcome, and an area needs at least {MIN_CLASS}")
    beaten = _beaten(score, good)
    area = float(beaten[good].mean())
    if not 0 < area < 1:
        return Area(why="the scores separate all outcomes, which leaves nothing to compute an interval from")
    parts: Floats = (beaten - area) / np.where(good, int(good.sum()), int((~good).sum()))
    by_problem: Floats = np.bincount(problem, weights=parts).astype(np.float64)
    error = sqrt(n / (n - 1) * float((by_problem**2).sum())) / (area * (1 - area))
    return Area(area, _around(log(area / (1 - area)), z_value(confidence) / sqrt(spread_known(confidence, n)) * error))


def _beaten(score: Floats, good: NDArray[np.bool_]) -> Floats:
    """For a good step the share of bad ones below it, for a bad one the share of good ones above it."""
    _, place = np.unique(score, return_inverse=True)
    good_at, bad_at = np.bincount(place[good], minlength=len(score)), np.bincount(place[~good], minlength=len(score))
    bad_below: Floats = (np.cumsum(bad_at) - bad_at / 2) / bad_at.sum()
    good_above: Floats = 1 - (np.cumsum(good_at) - good_at / 2) / good_at.sum()
    return np.where(good, bad_below[place], good_above[place])


def _around(log_odds: float, half: float) -> Interval:
    low, high = (1 / (1 + exp(-each)) for each in (log_odds - half, log_odds + half))
    return low, high


def _bin(score: Floats, outcome: Floats, problem: NDArray[np.intp]) -> Bin:
    share = Share.pooled(np.bincount(problem, weights=outcome), np.bincount(problem))
    return Bin(float(score.min()), float(score.max()), float(score.mean()), len(score), share)


def _aligned(scores: ArrayLike, outcomes: ArrayLike, problems: ArrayLike) -> tuple[Floats, Floats, NDArray[np.intp]]:
    """As arrays, the problems numbered from 0 without a gap."""
    score, outcome = np.asarray(scores, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    _, numbered = np.unique(np.asarray(problems), return_inverse=True)
    assert score.shape == outcome.shape == numbered.shape, (score.shape, outcome.shape, numbered.shape)
    assert np.isfinite(score).all(), "steps without a score are left out before"
    assert np.isin(outcome, (0, 1)).all()
    return score, outcome, numbered
