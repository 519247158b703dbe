"""How well a judge's score separates good steps from bad ones: the area under the curve, and the outcome by score.

All arrays are [steps]. `outcomes` are 1 for a good step, 0 for a bad one, or the probability of a good one. `problems`
gives the problem of each step as an arbitrary number.
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


def area_alone(scores: ArrayLike, outcomes: ArrayLike) -> float | None:
    """Return the probability that a good step scores above a bad one, with ties as half; None without both kinds."""
    score, good, _ = _aligned(scores, outcomes, scores)
    return float(good @ _beaten(score, good)[0] / good.sum()) if 0 < good.sum() < len(good) else None


def auc(scores: ArrayLike, outcomes: ArrayLike, problems: ArrayLike, min_class: int = MIN_CLASS) -> Area:
    """Return the probability that a good step scores above a bad one, with ties as half, if there are enough problems.

    The variance is DeLong's, summed by problem (N. A. Obuchowski, Biometrics 53, 1997, 567-578). The interval is
    symmetric in the log odds and uses Student's t of the smaller class. A step whose outcome is a probability belongs
    to both classes, in these shares, and a problem counts in a class as their sum, at most once.
    """
    score, good, problem = _aligned(scores, outcomes, problems)
    counts = (np.bincount(problem, weights=each) for each in (good, 1 - good))
    sizes = dict(zip(("good", "bad"), (float(np.minimum(each, 1).sum()) for each in counts), strict=True))
    smaller = min(sizes, key=lambda name: sizes[name])
    if (n := sizes[smaller]) < min_class:
        return Area(why=f"{n:.4g} of the problems have a {smaller} outcome, and an interval needs at least {min_class}")
    beats, loses = _beaten(score, good)
    area = float(good @ beats / good.sum())
    if not 0 < area < 1:
        return Area(why="the scores separate all outcomes, which leaves nothing to compute an interval from")
    parts: Floats = good * (beats - area) / good.sum() + (1 - good) * (loses - area) / (1 - good).sum()
    by_problem: Floats = np.bincount(problem, weights=parts).astype(np.float64)
    error = sqrt(n / (n - 1) * float((by_problem**2).sum())) / (area * (1 - area))
    half = z_value(0.95) / sqrt(spread_known(0.95, n)) * error
    low, high = scipy_special.expit(scipy_special.logit(area) + np.array([-half, half])).tolist()
    return Area(area, (low, high))


def risks(scores: ArrayLike, outcomes: ArrayLike) -> Floats:
    """Return the share of bad steps among the k with the highest scores for each k from 1, [steps].

    It is the mean over all orders of equal scores. The mean over k is the area under the curve of risk by coverage (Y.
    Geifman, R. El-Yaniv, arXiv:1705.08500).
    """
    score, good, _ = _aligned(scores, outcomes, scores)
    _, place, counts = np.unique(-score, return_inverse=True, return_counts=True)
    bad = np.bincount(place, weights=1 - good) / counts
    return np.cumsum(np.repeat(bad, counts)) / np.arange(1, len(score) + 1)


def _beaten(score: Floats, good: Floats) -> tuple[Floats, Floats]:
    """Return for each step the share of bad steps below it, and the share of good steps above it."""
    _, place = np.unique(score, return_inverse=True)

    def below(shares: Floats) -> Floats:
        by_score = np.bincount(place, weights=shares).astype(np.float64)
        return (np.cumsum(by_score) - by_score / 2)[place] / shares.sum()

    return below(1 - good), 1 - below(good)


def _bin(score: Floats, outcome: Floats, problem: NDArray[np.intp]) -> Bin:
    share = Share.pooled(np.bincount(problem, weights=outcome), np.bincount(problem))
    return Bin(float(score.min()), float(score.max()), float(score.mean()), len(score), share)


def _aligned(scores: ArrayLike, outcomes: ArrayLike, problems: ArrayLike) -> tuple[Floats, Floats, NDArray[np.intp]]:
    """Return the values as arrays, with the problems numbered from 0 without gaps."""
    score, outcome = np.asarray(scores, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    _, numbered = np.unique(np.asarray(problems), return_inverse=True)
    assert score.shape == outcome.shape == numbered.shape, (score.shape, outcome.shape, numbered.shape)
    assert np.isfinite(score).all(), "filter out steps without a score first"
    assert ((outcome >= 0) & (outcome <= 1)).all()
    return score, outcome, numbered
