"""Quantiles of what was measured, and an interval for one that assumes nothing about the distribution."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isnan

import numpy as np
from numpy.typing import NDArray

from stepspec.evaluation.stats.intervals import Interval
from stepspec.evaluation.stats.untyped import scipy_stats


@dataclass(frozen=True)
class Percentiles:
    """The median and the slow end of latencies, in their unit, interpolated between neighbours."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.float64]) -> "Percentiles":
        """Over all requests; with fewer than 100 the last is hardly more than the largest."""
        p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99]).tolist()
        return cls(p50, p90, p99)


def quantile_interval(
    values: Sequence[float] | NDArray[np.float64], quantile: float, confidence: float = 0.95
) -> Interval | None:
    """Two of the values between which a quantile lies, by the binomial distribution of how many are below it.

    For one value per problem (W. J. Conover, Practical Nonparametric Statistics, 1999, section 3.2). Covers at
    least what it says, a little more as it can only end at values. `None` if there are too few: a median at 95%
    needs 6, the 0.9 quantile 36 and the 0.99 quantile 368.
    """
    low, high = _places(len(values), quantile, confidence)
    if isnan(low) or isnan(high):
        return None
    ordered = np.sort(values)
    return float(ordered[int(low)]), float(ordered[int(high)])


@lru_cache(maxsize=64)
def _places(n: int, quantile: float, confidence: float) -> tuple[float, float]:
    """Which of n sorted values, counted from 0, the interval is between; not a number where there is none."""
    found = scipy_stats.quantile_test(np.arange(n), q=0, p=quantile).confidence_interval(confidence)
    return float(found.low), float(found.high)
