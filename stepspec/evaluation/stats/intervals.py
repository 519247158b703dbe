"""Score intervals of counts: Wilson's for a share, Tango's for the difference of two shares of the same problems.

Both accept fractional counts, which represent several runs of a problem. A bootstrap or Wald's formula would wrongly
give an interval of width 0 if all problems agree, which is the common case here.
"""

from bisect import bisect_left
from collections.abc import Callable
from math import inf, sqrt
from statistics import NormalDist

from stepspec.evaluation.stats.untyped import scipy_optimize, scipy_special

Interval = tuple[float, float]

_MAX_PROBLEMS = 10**12
_ROUNDING = 1e-13  # of a bound


def z_value(confidence: float) -> float:
    """Return the normal quantile of a two-sided interval: 1.96 for 0.95."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Return Wilson's score interval for a proportion (E. B. Wilson, JASA 22, 1927, 209-212).

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n). It also covers at p = 0 and p = 1, where Wald's interval has
    no width. Averaged over p, coverage is nominal. Near 0 and 1 it varies between 93% and 99%.
    """
    assert n > 0
    assert 0 <= successes <= n, (successes, n)
    p, z = successes / n, z_value(confidence)
    centre = p + z * z / (2 * n)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At p = 0 and p = 1 rounding can move a bound slightly past p.
    return max(0.0, min(p, (centre - half) / scale)), min(1.0, max(p, (centre + half) / scale))


def tango(only_first: float, only_second: float, n: float, confidence: float = 0.95) -> Interval:
    """Return Tango's score interval for a paired difference (T. Tango, Statistics in Medicine 17, 1998, 891-908).

    It contains all d with |(b - c - n d) / sqrt(n (2q + d(1 - d)))| <= z. Here b and c count the problems that only
    the first and only the second got right, and q is the most likely share of the latter if the difference is d. With
    b = c = 0 it is ±z²/(n + z²), which is conservative.
    """
    lower = tango_lower(only_first, only_second, n, confidence)
    return lower, -tango_lower(only_second, only_first, n, confidence)


def tango_lower(only_first: float, only_second: float, n: float, confidence: float = 0.95) -> float:
    """Return the lower end of `tango`. The upper end is the negated lower end of the opposite difference."""
    z, difference = z_value(confidence), (only_first - only_second) / n
    if difference <= -1 + _ROUNDING:
        return -1.0
    table = only_first, only_second, n, z
    return float(scipy_optimize.brentq(_tango_excess, -1, difference, args=table, xtol=_ROUNDING))


def spread_known(confidence: float, num_problems: float) -> float:
    """Return the discount for a variance estimated from n problems: (z / t)² with n - 1 degrees of freedom."""
    if num_problems < 2:
        return 0.0
    return (z_value(confidence) / float(scipy_special.stdtrit(num_problems - 1, (1 + confidence) / 2))) ** 2


def least_n(narrow_enough: Callable[[int], bool]) -> int:
    """Return the smallest number of problems, at least 1, from which on the intervals are narrow enough."""
    return 1 + bisect_left(range(1, _MAX_PROBLEMS), True, key=narrow_enough)


def _tango_excess(d: float, b: float, c: float, n: float, z: float) -> float:
    """Return Tango's statistic, 0 if it is 0/0, minus `z`. It falls as `d` rises."""
    linear = (2 * n - b + c) * d - b - c
    q = (sqrt(max(linear * linear + 8 * n * c * d * (1 - d), 0.0)) - linear) / (4 * n)
    variance = n * (2 * q + d * (1 - d))
    distance = b - c - n * d
    if variance > 0:
        return distance / sqrt(variance) - z
    return -z if distance == 0 else inf if distance > 0 else -inf
