"""Evaluations sampled from known distributions, in which problems differ and the runs of a problem are correlated.

`evals.bench.coverage` computes intervals of these evaluations.
"""

from dataclasses import dataclass
from math import exp, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from stepspec.evaluation.stats.runs import Floats

_BASE_NOISE, _OWN_NOISE, _FACTOR_SPREAD, _LENGTH_SPREAD = 0.2, 0.3, 0.25, 0.3
_SPEEDUP, _LENGTH_RATIO = 1.8, 0.9
_PROBLEM_EFFECT = 0.5  # of a problem on all its scores, relative to the noise of a step
_MEAN_STEPS = 8


def correct_runs(rng: np.random.Generator, num_problems: int, num_repeats: int, accuracy: float) -> Floats:
    """Return correct runs as 0 and 1, [problems, repeats]. The repeats of a problem have correlation 0.5."""
    return _tosses(rng, _varying(rng, accuracy, num_problems), num_repeats)


def paired_runs(
    rng: np.random.Generator, num_problems: int, num_repeats: int, accuracy: float, lost: float, won: float
) -> tuple[Floats, Floats]:
    """Return the correct runs of a policy and of the target, both [problems, repeats].

    Args:
        rng: random number generator.
        num_problems: number of problems.
        num_repeats: runs of each problem.
        accuracy: the target's accuracy.
        lost: share of runs that only the target answers correctly.
        won: share of runs that only the policy answers correctly.

    The losses and wins are concentrated: most problems almost never change, and a few almost always do.
    """
    target = correct_runs(rng, num_problems, num_repeats, accuracy)
    loses = _tosses(rng, _varying(rng, lost / accuracy, num_problems), num_repeats)
    wins = _tosses(rng, _varying(rng, won / (1 - accuracy), num_problems), num_repeats)
    return np.where(target == 1, 1 - loses, wins), target


def lost_everywhere(
    rng: np.random.Generator, num_problems: int, num_repeats: int, accuracy: float, loss: float, correlation: float
) -> tuple[Floats, Floats]:
    """Return the correct runs of a policy and of the target, both [problems, repeats].

    On every problem the policy's probability of a correct answer is the target's times the same factor below 1.
    """
    chances = _varying(rng, accuracy, num_problems, correlation)
    return _tosses(rng, chances * (1 - loss / accuracy), num_repeats), _tosses(rng, chances, num_repeats)


def lost_in_some(
    rng: np.random.Generator, num_problems: int, num_repeats: int, accuracy: float, loss: float, correlation: float
) -> tuple[Floats, Floats]:
    """Like `lost_everywhere`, but the policy loses a few problems in all repeats and none of the others."""
    chances = _varying(rng, accuracy, num_problems, correlation)
    not_lost = rng.random(num_problems) >= loss / accuracy
    return _tosses(rng, chances * not_lost, num_repeats), _tosses(rng, chances, num_repeats)


def same_in_all_repeats(
    rng: np.random.Generator, num_problems: int, num_repeats: int, accuracy: float, loss: float, correlation: float
) -> tuple[Floats, Floats]:
    """Like `lost_everywhere`, but all repeats of a problem are identical, as at temperature 0."""
    own, target = lost_everywhere(rng, num_problems, 1, accuracy, loss, correlation)
    return np.repeat(own, num_repeats, axis=1), np.repeat(target, num_repeats, axis=1)


@dataclass(frozen=True)
class Latencies:
    """Seconds and tokens of a policy and of the target, each [problems, evaluations], summed over repeats."""

    own_s: Floats
    target_s: Floats
    own_tokens: Floats
    target_tokens: Floats

    speedup = _SPEEDUP
    length_ratio = _LENGTH_RATIO
    median_ratio = _SPEEDUP * exp((_FACTOR_SPREAD**2 + _OWN_NOISE**2 + _LENGTH_SPREAD**2 - _BASE_NOISE**2) / 2)
    """True median of the ratios for one run of each problem. The squared spreads convert means to medians."""


def latencies(rng: np.random.Generator, num_problems: int, num_repeats: int, evaluations: int) -> Latencies:
    """Sample lognormal latencies. A factor of each problem, over two orders of magnitude, scales all four values."""
    shape = num_problems, evaluations
    common = rng.lognormal(0, 0.8, shape)
    factor = common * _even(rng, _FACTOR_SPREAD, shape) / _SPEEDUP
    length = common * _LENGTH_RATIO
    sampled = Latencies(*(np.zeros(shape) for _ in range(4)))
    for _ in range(num_repeats):
        longer, base = _even(rng, _LENGTH_SPREAD, shape), _even(rng, _BASE_NOISE, shape)
        sampled.own_s[:] += factor * longer * _even(rng, _OWN_NOISE, shape)
        sampled.target_s[:] += common * base
        sampled.own_tokens[:] += length * longer
        sampled.target_tokens[:] += common * base
    return sampled


@dataclass(frozen=True)
class Steps:
    """Judged steps: their scores, whether each is good (0 or 1), and the index of its problem, all [steps]."""

    scores: Floats
    good: Floats
    problems: NDArray[np.int_]

    area = 0.8
    share = 0.7


def judged_steps(rng: np.random.Generator, num_problems: int) -> Steps:
    """Sample about 8 judged steps for each problem.

    Within a problem, whether steps are good has correlation 0.5, and all scores share an offset.
    """
    num_steps = 1 + rng.poisson(_MEAN_STEPS - 1, num_problems)
    problems = np.repeat(np.arange(num_problems), num_steps)
    good = (rng.random(len(problems)) < _varying(rng, Steps.share, num_problems)[problems]).astype(np.float64)
    effect = rng.normal(0, _PROBLEM_EFFECT, num_problems)[problems]
    distance = NormalDist().inv_cdf(Steps.area) * sqrt(2 * (1 + _PROBLEM_EFFECT**2))
    return Steps(distance * good + effect + rng.normal(0, 1, len(problems)), good, problems)


def scored_outcomes(rng: np.random.Generator, good: NDArray[np.bool_], area: float) -> Floats:
    """Sample a normal score for each outcome, [outcomes], with ROC area `area`. Each outcome is a separate problem."""
    return NormalDist().inv_cdf(area) * sqrt(2) * good + rng.normal(0, 1, len(good))


def _varying(rng: np.random.Generator, mean: float, size: int, correlation: float = 0.5) -> Floats:
    """Sample probabilities, [size], such that two tosses with one of them have this correlation.

    A high correlation moves the probabilities toward 0 and 1; without correlation all are equal to the mean.
    """
    if correlation == 0:
        return np.full(size, mean)
    strength = 1 / correlation - 1
    return rng.beta(mean * strength, (1 - mean) * strength, size)


def _tosses(rng: np.random.Generator, chances: Floats, num_repeats: int) -> Floats:
    return (rng.random((len(chances), num_repeats)) < chances[:, None]).astype(np.float64)


def _even(rng: np.random.Generator, spread: float, shape: tuple[int, int]) -> Floats:
    """Sample lognormal values with mean 1."""
    return rng.lognormal(-(spread**2) / 2, spread, shape)
