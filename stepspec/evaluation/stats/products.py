"""Products and quotients of sums over problems, such as a speedup, with intervals from one set of resamples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stepspec.evaluation.stats.intervals import Interval
from stepspec.evaluation.stats.resamples import MIN_FOR_BOOTSTRAP, Resamples
from stepspec.evaluation.stats.runs import Floats

Powers = Mapping[str, int]
"""The power of each column's sum: {"target_s": 1, "own_s": -1} is a speedup."""

_NO_SPREAD = 1e-6  # spread between problems, relative to the figure, below which only rounding differs


@dataclass(frozen=True)
class Ratio:
    """A figure and its interval, if there is one."""

    value: float
    interval: Interval | None


def products_of_sums(
    columns: Mapping[str, ArrayLike],
    figures: Mapping[str, Powers],
    rng: np.random.Generator,
    confidence: float = 0.95,
) -> dict[str, Ratio]:
    """Return products of powers of the columns' sums over the same problems, all from the same resamples.

    Columns are [problems] and not negative. On the log scale the interval is symmetric and studentized: as many
    standard errors as cover 95% of the resamples, each measured in its own standard error (P. Hall, JRSS B 50, 1988,
    35-45), with the linearized error of a ratio. Percentiles cover less if a few long problems dominate: 92% instead
    of 94% at 20 problems.

    There is no interval for fewer than `MIN_FOR_BOOTSTRAP` problems, nor if a figure is 0 or infinite in some resample
    because almost all problems are 0 in a column.

    Raises:
        ZeroDivisionError: a column with a negative power has only zeros.

        products_of_sums(
            {"own_s": ..., "own_tokens": ..., "target_s": ..., "target_tokens": ...},
            {
                "speedup": {"target_s": 1, "own_s": -1},
                "length ratio": {"own_tokens": 1, "target_tokens": -1},
                "ratio of tokens/s": {"own_tokens": 1, "own_s": -1, "target_tokens": -1, "target_s": 1},
            },
            rng,
        )
    """
    if not figures:
        return {}
    assert all(figure.keys() <= columns.keys() for figure in figures.values()), (list(columns), figures)
    values = np.column_stack([np.asarray(each, dtype=np.float64) for each in columns.values()])  # [problems, columns]
    assert (values >= 0).all()
    powers = np.array([[figure.get(name, 0) for name in columns] for figure in figures.values()], dtype=np.int64)
    found = [_value(values.sum(axis=0).tolist(), each) for each in powers.tolist()]
    if len(values) < MIN_FOR_BOOTSTRAP:
        return {name: Ratio(value, None) for name, value in zip(figures, found, strict=True)}
    halves = half_widths(Resamples.drawn_by(rng, len(values)), values[:, :, None], powers, confidence)[:, 0].tolist()
    return {
        name: Ratio(value, (value * exp(-half), value * exp(half)) if isfinite(half) else None)
        for name, value, half in zip(figures, found, halves, strict=True)
    }


def _value(sums: Sequence[float], powers: Sequence[int]) -> float:
    """Return the product, with a single division, so that a quotient of whole numbers is rounded only once."""
    above = prod(each**power for each, power in zip(sums, powers, strict=True) if power > 0)
    below = prod(each**-power for each, power in zip(sums, powers, strict=True) if power < 0)
    return above / below


def half_widths(resamples: Resamples, columns: Floats, powers: NDArray[np.int_], confidence: float = 0.95) -> Floats:
    """Return the half-width of each figure's interval on the log scale, [figures, evaluations]; not finite if none.

    `columns` are [problems, columns, evaluations], and `powers` [figures, columns].
    """
    num_problems, num_columns, _ = columns.shape
    used = [(i, j) for i in range(num_columns) for j in range(i + 1) if (powers[:, i] * powers[:, j]).any()]
    moments = np.concatenate([columns, *(columns[:, [i]] * columns[:, [j]] for i, j in used)], axis=1)
    sampled = resamples.sums(moments.reshape(num_problems, -1)).reshape(resamples.num_resamples, *moments.shape[1:])
    halves: list[Floats] = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for figure in powers:
            value, error = _log_and_error(moments.sum(axis=0)[None], figure, used)
            resampled, errors = _log_and_error(sampled, figure, used)
            scores = np.abs(resampled - value) / errors
            half = np.quantile(scores, confidence, axis=0) * error[0]
            halves.append(np.where(error[0] * np.sqrt(num_problems) < _NO_SPREAD, 0.0, half))
    return np.stack(halves)


def _log_and_error(sums: Floats, figure: NDArray[np.int_], used: list[tuple[int, int]]) -> tuple[Floats, Floats]:
    """Return the log of a figure and its standard error, both [resamples, evaluations], from the moments' sums."""
    value, variance = np.zeros((2, len(sums), sums.shape[2]))
    for column in np.flatnonzero(figure):
        value += figure[column] * np.log(sums[:, column])
    for column, (i, j) in enumerate(used, start=len(figure)):
        if factor := (1 if i == j else 2) * figure[i] * figure[j]:
            variance += factor * sums[:, column] / (sums[:, i] * sums[:, j])
    return value, np.sqrt(np.maximum(variance, 0))
