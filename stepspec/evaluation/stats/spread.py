"""A distribution-free interval for a quantile."""

from collections.abc import Sequence
from functools import lru_cache
from math import isnan

import numpy as np
from numpy.typing import NDArray

from stepspec.evaluation.stats.intervals import Interval
from stepspec.evaluation.stats.untyped import scipy_stats


def quantile_interval(
    values: Sequence[float] | NDArray[np.float64], quantile: float, confidence: float = 0.95
) -> Interval | None:
    """Return two of the values between which a quantile lies, from the binomial distribution of how many are below.

    Use one value per problem (W. J. Conover, Practical Nonparametric Statistics, 1999, section 3.2). Coverage is at
    least nominal, and slightly higher because bounds can only be values. None if there are too few: a median at 95%
    needs 6, the 0.9 quantile 36 and the 0.99 quantile 368.
    """
    low, high = _indices(len(values), quantile, confidence)
    if isnan(low) or isnan(high):
        return None
    ordered = np.sort(values)
    return float(ordered[int(low)]), float(ordered[int(high)])


@lru_cache(maxsize=64)
def _indices(n: int, quantile: float, confidence: float) -> tuple[float, float]:
    """Return the indices of the interval's ends among n sorted values; NaN if there is none."""
    interval = scipy_stats.quantile_test(np.arange(n), q=0, p=quantile).confidence_interval(confidence)
    return float(interval.low), float(interval.high)
