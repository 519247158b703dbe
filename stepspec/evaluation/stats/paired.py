"""Two accuracies on the same problems: the difference, its interval, its p value, and a bound of the loss."""

from dataclasses import dataclass, field
from math import sqrt

import numpy as np

from stepspec.evaluation.stats.intervals import Interval, least_n, spread_known, tango, tango_lower, z_value
from stepspec.evaluation.stats.runs import Floats, Runs, Scores
from stepspec.evaluation.stats.untyped import scipy_stats

_NUM_FLIPS = 9_999
_BATCH_SIZE = 1_000_000  # signs sampled at a time, which limits memory to about 30 MB
_UNSEEN = 0.4
"""Fraction of a problem lost in all repeats that each bound adds to the data, because such problems are rare but
decisive."""


@dataclass(frozen=True)
class Paired:
    """How many problems only the first, and only the second, got right. The counts are fractional with repeats.

    With k repeats the counts are means over the repeats. `worth`, from 1 to k, is the number of single-repeat problems
    that each problem is worth: the variance of a single repeat's difference over that of the problems' mean
    differences. It multiplies all three counts in Tango's formula.
    """

    only_first: float
    only_second: float
    n: float
    worth: float = 1.0
    gains: tuple[float, ...] = field(default=(), repr=False)  # mean differences of problems, without zeros

    @classmethod
    def of(cls, first: Scores, second: Scores) -> "Paired":
        """Build from both sides' scores, with problems in the same order and runs in the order of their seeds.

        Both have the same number of runs of each problem. A score between 0 and 1 counts as that fraction of a problem.
        A single fractional score per problem, such as a mean of runs, makes the interval wider than necessary.
        """
        own, other = Runs.of(first), Runs.of(second)
        assert np.array_equal(own.counts, other.counts), "not the same problems with the same repeats"
        gain = Runs(own.values - other.values, own.counts)
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
        """Return the interval of the difference. Each end may fail with probability (1 - confidence) / 2."""
        return self.lower(confidence), -self._opposite().lower(confidence)

    def loss_upper(self, confidence: float = 0.95) -> float:
        """Return the one-sided upper bound of the accuracy that the first loses to the second; a gain is negative."""
        return -self.lower(2 * confidence - 1)

    def _opposite(self) -> "Paired":
        return Paired(self.only_second, self.only_first, self.n, self.worth, tuple(-gain for gain in self.gains))

    def lower(self, confidence: float) -> float:
        """Return the lower of two bounds that fail in different cases.

        Tango's bound, with each problem weighted by `worth`, holds if a problem's repeats differ only by chance. It is
        too high if a few problems are lost in all their repeats, because `worth` is then overestimated until one of
        them is seen. Johnson's bound (N. J. Johnson, JASA 73, 1978, 536-544) is a t bound over the problems' mean
        differences, corrected for their skewness, with `_UNSEEN` of a lost problem added to the data.
        `python -m evals.bench loss_coverage` simulates how often the two together hold.
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
        """Return the sums of the problems' mean differences, of their squares and of their cubes."""
        won, lost = self.only_first, self.only_second
        if not self.gains:
            return won - lost, won + lost, won - lost
        gains = np.array(self.gains)
        return won - lost, float((gains**2).sum()), float((gains**3).sum())

    def p_value(self, rng: np.random.Generator) -> float:
        """Return the two-sided p value of the hypothesis that both are equally good on every problem.

        With one run per problem this is McNemar's exact test. With repeats it is a permutation test that flips the
        signs of the problems' mean differences, in all ways if those are few, else in 9,999 random ways (E. J. G.
        Pitman, JRSS Supplement 4, 1937, 119-130). Under the hypothesis the two could be swapped on any problem.
        """
        if not self.gains:
            assert self.only_first == self.only_second or (self.only_first % 1 == self.only_second % 1 == 0)
            return mcnemar_p(round(self.only_first), round(self.only_second))
        if len({abs(gain) for gain in self.gains}) == 1:
            won = sum(gain > 0 for gain in self.gains)
            return mcnemar_p(won, len(self.gains) - won)
        tested = scipy_stats.permutation_test(
            (np.array(self.gains),),
            np.sum,
            permutation_type="samples",
            vectorized=True,
            n_resamples=_NUM_FLIPS,
            batch=max(1, _BATCH_SIZE // len(self.gains)),
            rng=rng,
        )
        return float(tested.pvalue)

    def n_for_half_width(self, half_width: float, confidence: float = 0.95) -> int:
        """Return how many problems, with as many repeats, would give an interval of that half-width.

        Each kind of discordance is planned with z²/4 problems (about one) more than observed, among z² more problems
        (D. G. Bonett, R. M. Price, Journal of Educational and Behavioral Statistics 37, 2012, 479-488). A few problems
        without discordance therefore do not imply that there is none.
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
    """Return the exact two-sided p value of discordant problems under a fair coin.

    Q. McNemar, Psychometrika 12, 1947, 153-157. Conservative if few problems are discordant.
    """
    if only_first + only_second == 0:
        return 1.0
    return float(scipy_stats.binomtest(only_first, only_first + only_second).pvalue)


def _worth(won: float, lost: float, gains: Floats, most: float) -> float:
    n = len(gains)
    single = (won + lost) / n - ((won - lost) / n) ** 2
    variance = float(gains.var())
    if won + lost == 0:
        return 1.0
    return most if variance * most <= single else max(1.0, single / variance)
