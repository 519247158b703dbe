"""A share with Wilson's interval that accounts for dependent runs or steps of one problem."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from stepspec.evaluation.stats.intervals import Interval, spread_known, wilson
from stepspec.evaluation.stats.runs import Runs, Scores


@dataclass(frozen=True)
class Share:
    """A share, and the number of independent problems that would carry as much information (`effective_n`).

    `effective_n` is p(1-p) divided by the variance of the estimate between problems (L. Kish, Survey Sampling, 1965,
    chapter 8; for use in a score interval E. L. Korn, B. I. Graubard, Survey Methodology 24, 1998, 193-201, with their
    correction for the degrees of freedom). It is clamped between the values for fully dependent (`least_n`) and for
    independent runs. If all runs agree, their dependence cannot be estimated. They then count as fully dependent, and
    the interval is wider than necessary.
    """

    value: float
    num_problems: int
    effective_n: float
    least_n: float

    @classmethod
    def of(cls, scores: Scores) -> "Share":
        """Return the mean over problems of each problem's mean score from 0 to 1, such as an accuracy.

        With one run per problem, `effective_n` is the number of problems, and the interval is plain Wilson.
        """
        runs = Runs.of(scores)
        means, n = runs.means(), len(runs.counts)
        p = float(means.mean())
        variance = float(means.var(ddof=1)) / n if n > 1 else 0.0
        most = n * n / float((1 / runs.counts).sum())
        return cls(p, n, _effective_n(p, variance, least=n, most=most), n)

    @classmethod
    def pooled(cls, hits: ArrayLike, trials: ArrayLike) -> "Share":
        """Return the sum of hits over the sum of trials, such as accepted over judged steps; both are [problems].

        Raises:
            ZeroDivisionError: there are no trials.
        """
        hit, tried = np.asarray(hits, dtype=np.float64), np.asarray(trials, dtype=np.float64)
        hit, tried = hit[tried > 0], tried[tried > 0]
        if not (n := len(tried)):
            raise ZeroDivisionError("A share of no trials.")
        total = float(tried.sum())
        p = float(hit.sum()) / total
        variance = float(((hit - p * tried) ** 2).sum()) * n / (n - 1) / total**2 if n > 1 else 0.0
        least = total**2 / float((tried**2).sum())
        return cls(p, n, _effective_n(p, variance, least=least, most=total), least)

    def interval(self, confidence: float = 0.95) -> Interval:
        """Return Wilson's interval for the effective number of problems."""
        n = max(self.least_n, self.effective_n * spread_known(confidence, self.num_problems))
        return wilson(self.value * n, n, confidence)


def _effective_n(p: float, variance: float, least: float, most: float) -> float:
    if variance <= 0:
        return most if 0 < p < 1 else least
    return min(max(p * (1 - p) / variance, least), most)
