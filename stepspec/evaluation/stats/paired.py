"""Two accuracies on the same problems: the difference, its interval, its p value, what could have been lost."""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepspec.evaluation.stats.intervals import Interval, least_n, spread_known, tango, tango_lower, z_value
from stepspec.evaluation.stats.runs import Floats, Runs, Scores
from stepspec.evaluation.stats.untyped import scipy_stats

_NUM_FLIPS = 9_999
_AT_ONCE = 1_000_000  # signs drawn at a time, which bounds the memory to some 30 MB
_UNSEEN = 0.4
"""Of a problem lost in all repeats: what each bound adds to what was seen, as such problems are rare and decide."""


@dataclass(frozen=True)
class Paired:
    """How many problems only the first, and only the second, got right; fractions where there are repeats.

    With k repeats the counts are means over the repeats, and `worth` says how many problems of one repeat each
    problem is worth, from 1 to k: the variance of a single repeat's difference over that of the problems' mean
    differences. It multiplies all three counts in Tango's formula.
    """

    only_first: float
    only_second: float
    n: float
    worth: float = 1.0
    gains: tuple[float, ...] = field(default=(), repr=False)  # of problems, those that are not 0

    @classmethod
    def of(cls, first: Scores, second: Scores) -> "Paired":
        """From the problems' scores in the same order, the runs of a problem in the order of their seeds.

        Both have the same number of runs of each problem. A score between 0 and 1 counts as that part of a
        problem; one such score per problem, a mean of runs for instance, makes the interval wider than need be.
        """
        one, other = Runs.of(first), Runs.of(second)
        assert np.array_equal(one.counts, other.counts), "not the same problems with the same repeats"
        gain = Runs(one.values - other.values, one.counts)
        by_problem, n = gain.means(), len(gain.counts)
        won = float(Runs(np.maximum(gain.values, 0), gain.counts).means().sum())
        lost = float(Runs(np.maximum(-gain.values, 0), gain.counts).means().sum())
        most = n / float((1 / gain.counts).sum())
        gains = tuple(by_problem[by_problem != 0].tolist())
        return cls(won, lost, n, _worth(won, lost, by_problem, most), gains)

    @property
    def difference(self) -> float:
        """The first accuracy minus the second."""
        return (self.only_first - self.only_second) / self.n

    def interval(self, confidence: float = 0.95) -> Interval:
        """The interval of the difference, of which either end holds with half of what the confidence leaves."""
        return self._lower(confidence), -self._opposite()._lower(confidence)

    def loss_upper(self, confidence: float = 0.95) -> float:
        """One-sided bound of the accuracy that the first loses against the second; a gain is below 0."""
        return -self._lower(2 * confidence - 1)

    def _opposite(self) -> "Paired":
        return Paired(self.only_second, self.only_first, self.n, self.worth, tuple(-gain for gain in self.gains))

    def _lower(self, confidence: float) -> float:
        """The lower of two bounds that fail in different places.

        Tango's, with each problem counted as `worth` says, holds where a problem's repeats differ by chance alone. It
        is too high where a few problems are lost in all their repeats, because `worth` is then overestimated until
        one of them is seen. Johnson's (N. J. Johnson, JASA 73, 1978, 536-544) is a t bound over the problems' mean
        differences, corrected for their skewness; `_UNSEEN` of a lost problem is added to what it is computed from.
        `python -m stepspec.bench.loss_coverage` simulates how often the two together hold.
        """
        n, worth = self.n, max(1.0, self.worth * spread_known(confidence, round(self.n)))
        score_bound = tango_lower(self.only_first * worth, self.only_second * worth, n * worth, confidence)
        if n < 2:
            return score_bound
        total, squares, cubes = self._power_sums()
        mean = total / n
        spread = (squares - n * mean * mean) * n / (n - 1) + _UNSEEN
        skewness = _UNSEEN - (cubes - 3 * mean * squares + 2 * n * mean**3)
        t = z_value(confidence) / sqrt(spread_known(confidence, round(n)))
        below = t * sqrt(spread) + (1 + 2 * t * t) / 6 * max(skewness, 0.0) / spread
        return max(-1.0, min(score_bound, mean - below / n))

    def _power_sums(self) -> tuple[float, float, float]:
        """The sums of the problems' mean differences, of their squares and of their cubes."""
        won, lost = self.only_first, self.only_second
        if not self.gains:
            return won - lost, won + lost, won - lost
        gains = np.array(self.gains)
        return won - lost, float((gains**2).sum()), float((gains**3).sum())

    def p_value(self, rng: np.random.Generator) -> float:
        """Two-sided p of both being alike on every problem.

        For one run of each problem McNemar's exact test. With repeats the problems' mean differences have their
        signs flipped, in all ways if those are few and else in 9,999 random ones (E. J. G. Pitman, JRSS
        Supplement 4, 1937, 119-130), because if both are alike either could have been the first on any problem.
        """
        if not self.gains:
            assert self.only_first == self.only_second or (self.only_first % 1 == self.only_second % 1 == 0)
            return mcnemar_p(round(self.only_first), round(self.only_second))
        if len({abs(gain) for gain in self.gains}) == 1:
            won = sum(gain > 0 for gain in self.gains)
            return mcnemar_p(won, len(self.gains) - won)
        tested = scipy_stats.permutation_test(
            (np.array(self.gains),),
            _sum,
            permutation_type="samples",
            vectorized=True,
            n_resamples=_NUM_FLIPS,
            batch=max(1, _AT_ONCE // len(self.gains)),
            rng=rng,
        )
        return float(tested.pvalue)

    def n_for_half_width(self, half_width: float, confidence: float = 0.95) -> int:
        """How many problems, with as many repeats, would give an interval of that half-width.

        Each kind of discordance is planned for with z²/4, about one, problem more than was seen among z² more
        (D. G. Bonett, R. M. Price, Journal of Educational and Behavioral Statistics 37, 2012, 479-488), so that
        no discordance among few problems is not taken at its word.
        """
        assert 0 < half_width < 1
        extra = z_value(confidence) ** 2 / 4
        seen = self.n * self.worth + 4 * extra
        won, lost = (self.only_first * self.worth + extra) / seen, (self.only_second * self.worth + extra) / seen

        def narrow_enough(n: int) -> bool:
            low, high = tango(won * n * self.worth, lost * n * self.worth, n * self.worth, confidence)
            return high - low <= 2 * half_width

        return least_n(narrow_enough)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """The exact two-sided p of discordant problems falling to either side by a fair coin.

    Q. McNemar, Psychometrika 12, 1947, 153-157. Conservative where few problems are discordant.
    """
    if only_first + only_second == 0:
        return 1.0
    tested = scipy_stats.binomtest(only_first, only_first + only_second, 0.5)
    return float(tested.pvalue)


def _worth(won: float, lost: float, gains: Floats, most: float) -> float:
    n = len(gains)
    single = (won + lost) / n - ((won - lost) / n) ** 2
    variance = float(gains.var())
    if won + lost == 0:
        return 1.0
    return most if variance * most <= single else max(1.0, single / variance)


def _sum(values: NDArray[np.float64], axis: int) -> Any:
    return values.sum(axis=axis)
