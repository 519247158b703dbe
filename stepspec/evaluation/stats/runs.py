"""The values of several runs of each problem as one array. Problems may have different numbers of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Scores = Sequence[float] | Sequence[Sequence[float]] | Floats
"""By problem, the score of its single run or the scores of its runs. An array is [problems] or [problems, runs]."""


@dataclass(frozen=True)
class Runs:
    """The runs of problem 0, then those of problem 1, and so on."""

    values: Floats  # [runs]
    counts: NDArray[np.int64]  # [problems], each at least 1

    @classmethod
    def of(cls, scores: Scores) -> "Runs":
        """Build from scores by problem."""
        assert len(scores) > 0
        if isinstance(scores, np.ndarray):
            num_runs = scores.size // len(scores)
            return cls(scores.ravel().astype(np.float64), np.full(len(scores), num_runs, dtype=np.int64))
        by_problem = [score if isinstance(score, Sequence) else (score,) for score in scores]
        counts = np.array([len(each) for each in by_problem], dtype=np.int64)
        assert counts.min() > 0, "a problem without a run"
        return cls(np.fromiter(chain.from_iterable(by_problem), dtype=np.float64, count=int(counts.sum())), counts)

    def means(self) -> Floats:
        """Return the mean of each problem's runs, [problems]."""
        starts = np.concatenate(([0], np.cumsum(self.counts)[:-1]))
        return np.add.reduceat(self.values, starts) / self.counts
