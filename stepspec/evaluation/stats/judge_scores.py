"""How well a judge's score separates good steps from bad ones: the area under the curve, and the outcome by score.

All arrays are [steps]. `problems` gives the problem of each step as an arbitrary number.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stepspec.evaluation.stats.intervals import Interval, spread_known, z_value
from stepspec.evaluation.stats.runs import Floats
from stepspec.evaluation.stats.shares import Share
from stepspec.evaluation.stats.untyped import scipy_special, scipy_stats


@dataclass(frozen=True)
class Bin:
    """Steps of about the same score, and the share of them with a good outcome."""

    lowest: float
    highest: float
    mean_score: float
    num_steps: int
    outcome: Share


MIN_CLASS = 50
"""Minimum number of problems with a good outcome, and with a bad one, for an area.

From this number on, the interval covers at least 93% for areas up to 0.95, as `python -m evals.bench coverage`
simulates. At an area of 0.95 it covers 92% with 20 and 30, and just 93% with 40.
"""


@dataclass(frozen=True)
class Area:
    """An area under the curve with its interval, or the reason why there is none."""

    value: float | None = None
    interval: Interval | None = None
    why: str | None = None
    """A clause that ends a sentence."""


def reliability(scores: ArrayLike, outcomes: ArrayLike, problems: ArrayLike, num_bins: int = 10) -> tuple[Bin, ...]:
    """Return the outcome by score, in bins of about equal count, lowest scores first.

    Equal scores share a bin, so there are fewer than `num_bins` bins if a judge gives few different scores.
    """
    score, outcome, problem = _aligned(scores, outcomes, problems)
    if not len(score):
        return ()
    ranks = scipy_stats.rankdata(score)
    bin_of = np.floor((ranks - 0.5) / len(score) * num_bins).astype(np.int64)
    return tuple(
        _bin(score[inside], outcome[inside], problem[inside])
        for each in np.unique(bin_of)
        for inside in [bin_of == each]
    )


def auc(scores: ArrayLike, outcomes: ArrayLike, problems: ArrayLike, confidence: float = 0.95) -> Area:
    """Return the probability that a good step scores above a bad one, with ties as half, if there are enough problems.

    The variance is DeLong's, summed by problem (N. A. Obuchowski, Biometrics 53, 1997, 567-578). The interval is
    symmetric in the log odds and uses Student's t of the smaller class.
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
    half = z_value(confidence) / sqrt(spread_known(confidence, n)) * error
    low, high = scipy_special.expit(scipy_special.logit(area) + np.array([-half, half])).tolist()
    return Area(area, (low, high))


def _beaten(score: Floats, good: NDArray[np.bool_]) -> Floats:
    """Return for each good step the share of bad ones below it, for each bad one the share of good ones above it."""
    below: Floats = scipy_stats.rankdata(score)
    for each in (good, ~good):  # leaves ranks within the other class
        below[each] -= scipy_stats.rankdata(score[each])
        below[each] /= len(score) - int(each.sum())
    return np.where(good, below, 1 - below)


def _bin(score: Floats, outcome: Floats, problem: NDArray[np.intp]) -> Bin:
    share = Share.pooled(np.bincount(problem, weights=outcome), np.bincount(problem))
    return Bin(float(score.min()), float(score.max()), float(score.mean()), len(score), share)


def _aligned(scores: ArrayLike, outcomes: ArrayLike, problems: ArrayLike) -> tuple[Floats, Floats, NDArray[np.intp]]:
    """Return the values as arrays, with the problems numbered from 0 without gaps."""
    score, outcome = np.asarray(scores, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    _, numbered = np.unique(np.asarray(problems), return_inverse=True)
    assert score.shape == outcome.shape == numbered.shape, (score.shape, outcome.shape, numbered.shape)
    assert np.isfinite(score).all(), "filter out steps without a score first"
    assert np.isin(outcome, (0, 1)).all()
    return score, outcome, numbered
