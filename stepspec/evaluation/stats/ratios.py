"""Ratios of two policies' costs on the same problems: of sums, such as a speedup, and per problem."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepspec.evaluation.stats.intervals import Interval
from stepspec.evaluation.stats.products import products_of_sums
from stepspec.evaluation.stats.runs import Floats
from stepspec.evaluation.stats.spread import quantile_interval

Values = Sequence[float] | NDArray[np.float64]


def ratio_of_sums(
    above: Values, below: Values, rng: np.random.Generator, confidence: float = 0.95
) -> tuple[float, Interval | None]:
    """Return sum(above) / sum(below) over the same problems, or the same blocks of a load, with a bootstrap interval.

    Problems are sampled with replacement, each with both its values. There is no interval for fewer than
    `MIN_FOR_BOOTSTRAP` problems. For several figures over the same problems, call `products_of_sums` once.
    """
    pairs = _pairs(above, below)
    columns = {"above": pairs[:, 0], "below": pairs[:, 1]}
    found = products_of_sums(columns, {"ratio": {"above": 1, "below": -1}}, rng, confidence)["ratio"]
    return found.value, found.interval


def ratio_of_rates(
    first: tuple[Values, Values], second: tuple[Values, Values], rng: np.random.Generator, confidence: float = 0.95
) -> tuple[float, Interval | None]:
    """Return a ratio of two rates over the same problems, with an interval as in `ratio_of_sums`.

    Each rate is a pair: what is counted, such as tokens, and the seconds, by problem.
    """
    columns = {"counts": first[0], "seconds": first[1], "other counts": second[0], "other seconds": second[1]}
    powers = {"counts": 1, "seconds": -1, "other counts": -1, "other seconds": 1}
    found = products_of_sums(columns, {"ratio": powers}, rng, confidence)["ratio"]
    return found.value, found.interval


def median_of_ratios(above: Values, below: Values, confidence: float = 0.95) -> tuple[float, Interval | None]:
    """Return the median over problems of above / below, and an interval between two of the ratios."""
    pairs = _pairs(above, below)
    assert (pairs[:, 1] > 0).all()
    ratios = pairs[:, 0] / pairs[:, 1]
    return float(np.median(ratios)), quantile_interval(ratios, 0.5, confidence)


def _pairs(above: Values, below: Values) -> Floats:
    assert len(above) == len(below) > 0, (len(above), len(below))
    pairs = np.column_stack([above, below]).astype(np.float64)  # [problems, 2]
    assert (pairs >= 0).all()
    assert pairs[:, 1].sum() > 0
    return pairs
