"""The bootstrap over problems, sampled once for all figures, so that figures derived from them are consistent."""

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

from stepspec.evaluation.stats.intervals import Interval, spread_known, z_value
from stepspec.evaluation.stats.runs import Floats

NUM_RESAMPLES = 10_000
MIN_FOR_BOOTSTRAP = 10
"""Minimum number of problems for an interval. Fewer say too little about their spread."""

_BATCH_SIZE = 1_000_000  # problems sampled at a time, which limits memory to about 30 MB


@dataclass(frozen=True)
class Resamples:
    """Problems sampled with replacement. Every call uses the same samples.

    All sums over one object's samples are consistent: a figure computed from the columns of `sums` is that figure in
    each resample (B. Efron, R. Tibshirani, An Introduction to the Bootstrap, 1993). For products and quotients of sums,
    `products_of_sums` gives better intervals.

        resamples = Resamples.drawn_by(rng, num_problems)
        sums = resamples.sums(np.column_stack([own_wall_s, target_wall_s, own_load_s, target_load_s]))
        saved = resamples.interval(1 - (sums[:, 0] + sums[:, 2]) / (sums[:, 1] + sums[:, 3]))
    """

    num_problems: int
    seed: int
    num_resamples: int = NUM_RESAMPLES

    @classmethod
    def drawn_by(cls, rng: np.random.Generator, num_problems: int, num_resamples: int = NUM_RESAMPLES) -> "Resamples":
        """Create resamples with a seed from the generator. It takes one number, however the resamples are used."""
        return cls(num_problems, int(rng.integers(2**63)), num_resamples)

    def sums(self, values: Floats) -> Floats:
        """Return the sums of each resample, [num_resamples, figures], of values [num_problems, figures].

        One figure takes as long as dozens, so pass all figures in one call.
        """
        n = self.num_problems
        assert values.ndim == 2, values.shape
        assert len(values) == n, values.shape
        rng, rows = np.random.default_rng(self.seed), max(1, _BATCH_SIZE // n)
        sums = np.empty((self.num_resamples, values.shape[1]))
        for start in range(0, self.num_resamples, rows):
            part = sums[start : start + rows]
            np.matmul(_counts(rng, len(part), n), values, out=part)
        return sums

    def interval(self, figures: Floats, confidence: float = 0.95) -> Interval | None:
        """Return the interval of a figure from its value in each resample, [num_resamples].

        None for fewer than `MIN_FOR_BOOTSTRAP` problems, or if a value is not finite, which happens if almost all
        problems are 0 in a denominator.
        """
        if self.num_problems < MIN_FOR_BOOTSTRAP or not np.isfinite(figures).all():
            return None
        low, high = self.bounds(figures[:, None], confidence)[:, 0]
        return float(low), float(high)

    def bounds(self, figures: Floats, confidence: float = 0.95) -> Floats:
        """Return lower and upper bounds, [2, figures], of figures [num_resamples, figures].

        These are percentiles, moved outwards because a bootstrap of n problems underestimates the spread. The tails
        are those of the normal distribution at Student's t of n - 1 degrees of freedom, times sqrt(n / (n - 1)) (T.
        Hesterberg, The American Statistician 69, 2015, 371-386, the expanded percentile interval). Coverage is far too
        low if hardly any problem differs from the rest: 47% for an accuracy difference of 20 problems of which one is
        discordant.
        """
        n = self.num_problems
        quantile = z_value(confidence) * sqrt(n / (n - 1) / spread_known(confidence, n))
        tail = NormalDist().cdf(-quantile)
        return np.quantile(figures, [tail, 1 - tail], axis=0)


def _counts(rng: np.random.Generator, num_rows: int, num_problems: int) -> Floats:
    """Return how often each problem is in each resample, [num_rows, num_problems]; 6 times as fast as `multinomial`."""
    sampled = rng.integers(num_problems, size=(num_rows, num_problems))
    sampled += np.arange(num_rows)[:, None] * num_problems
    counts = np.bincount(sampled.ravel(), minlength=sampled.size)
    return counts.reshape(sampled.shape).astype(np.float64)
