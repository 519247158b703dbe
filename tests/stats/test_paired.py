"""Paired differences: exact for one run per problem, and repeats count by their added information."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from stepspec.evaluation.stats import Paired, mcnemar_p

RNG = np.random.default_rng
BITS = st.integers(0, 1)
BOTH = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.tuples(*[st.lists(BITS, min_size=k, max_size=k)] * 2), min_size=2, max_size=30)
)


def test_scores_between_zero_and_one_count_as_fractions_of_a_problem() -> None:
    paired = Paired.of([1.0, 0.5, 0.0, 1.0], [1.0, 0.0, 0.25, 0.0])
    assert (paired.only_first, paired.only_second, paired.n, paired.worth) == (1.5, 0.25, 4, 1)
    assert paired.difference == pytest.approx(1.25 / 4)


@given(st.lists(st.tuples(BITS, BITS), min_size=1, max_size=100))
def test_one_run_per_problem_gives_plain_counts(pairs: list[tuple[int, int]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    b, c = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    paired = Paired.of(first, second)
    assert paired.worth == 1
    assert paired.interval() == Paired(b, c, len(pairs)).interval()
    assert paired.p_value(RNG(0)) == mcnemar_p(b, c) == Paired(b, c, len(pairs)).p_value(RNG(0))
    assert Paired.of([[a] for a in first], [[b] for b in second]) == paired


@given(BOTH)
@settings(max_examples=50)
def test_with_repeats_a_problem_is_worth_between_one_and_their_number(both: list[tuple[list[int], list[int]]]) -> None:
    first, second = [a for a, _ in both], [b for _, b in both]
    paired, other = Paired.of(first, second), Paired.of(second, first)
    assert 1 <= paired.worth <= len(first[0]) + 1e-9
    assert paired.difference == pytest.approx(np.mean(first) - np.mean(second))
    low, high = paired.interval()
    assert other.interval() == pytest.approx((-high, -low))


@given(BOTH)
@settings(max_examples=10)
def test_a_p_value_does_not_depend_on_the_order_of_the_policies(both: list[tuple[list[int], list[int]]]) -> None:
    """Except for sampling error, whose standard deviation is at most 0.005."""
    first, second = [a for a, _ in both], [b for _, b in both]
    p = Paired.of(first, second).p_value(RNG(0))
    assert 0 < p <= 1
    assert Paired.of(second, first).p_value(RNG(0)) == pytest.approx(p, abs=0.035)


def test_copied_repeats_do_not_narrow_the_interval() -> None:
    rng = RNG(0)
    first, second = (rng.random(100) < 0.5).astype(float), (rng.random(100) < 0.6).astype(float)
    once = Paired.of(first, second)
    copied = Paired.of(np.column_stack([first] * 4), np.column_stack([second] * 4))
    assert copied.interval() == pytest.approx(once.interval())
    assert copied.p_value(RNG(0)) == once.p_value(RNG(0))


def test_independent_repeats_are_worth_nearly_as_many_problems() -> None:
    rng = RNG(0)
    first, second = ((rng.random((2000, 4)) < each).astype(float) for each in (0.5, 0.6))
    assert Paired.of(first, second).worth == pytest.approx(4, rel=0.1)


def test_without_discordance_repeats_add_nothing() -> None:
    scores = [[1, 1, 1], [0, 1, 0]] * 20
    assert Paired.of(scores, scores).interval() == pytest.approx(Paired(0, 0, 40).interval())


def test_problems_must_have_the_same_repeats() -> None:
    with pytest.raises(AssertionError, match="same problems"):
        Paired.of([[1, 1], [0, 1]], [[1, 1], [0]])


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 0, 1),
        (1, 0, 1),
        (0, 5, 2 / 2**5),  # all five on one side
        (1, 5, 2 * (1 + 6) / 2**6),
        (3, 3, 1),
        (1, 7, 2 * (1 + 8) / 2**8),  # 0.0703, Fagerland et al. 2013
    ],
)
def test_the_exact_mcnemar_p_matches_manual_calculation(b: int, c: int, p: float) -> None:
    assert mcnemar_p(b, c) == pytest.approx(p)
    assert mcnemar_p(c, b) == pytest.approx(p)


@given(st.integers(0, 12), st.integers(0, 12))
@settings(max_examples=25)
def test_the_permutation_test_gives_the_p_value_of_mcnemars_test(b: int, c: int) -> None:
    """The repeats contain half scores, so this uses the permutation test. It must give the same p."""
    if b + c in (0, *range(14, 25)):  # beyond 2**13 flips, the test samples instead of enumerating
        return
    first = [[1, 1], [0, 1]] + [[1, 0]] * b + [[0, 0]] * c
    second = [[1, 1], [0, 1]] + [[0, 0]] * b + [[1, 0]] * c
    assert Paired.of(first, second).p_value(RNG(0)) == pytest.approx(binomtest(b, b + c).pvalue)


def test_the_permutation_test_detects_only_a_real_difference() -> None:
    rng = RNG(1)
    target, same, better = ((rng.random((300, 4)) < each).astype(float) for each in (0.5, 0.5, 0.6))
    assert Paired.of(same, target).p_value(RNG(0)) > 0.05
    assert Paired.of(better, target).p_value(RNG(0)) < 0.001


def test_the_same_generator_gives_the_same_p() -> None:
    rng = RNG(2)
    paired = Paired.of((rng.random((50, 3)) < 0.5).astype(float), (rng.random((50, 3)) < 0.6).astype(float))
    assert paired.p_value(RNG(5)) == paired.p_value(RNG(5))


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 300), st.sampled_from([0.005, 0.01, 0.05]))
@settings(max_examples=50)
def test_the_number_needed_is_positive_and_grows_with_the_precision(b: int, c: int, alike: int, half: float) -> None:
    paired = Paired(b, c, b + c + alike)
    needed = paired.n_for_half_width(half)
    assert 1 <= needed < paired.n_for_half_width(half / 2)


def test_the_number_needed_reaches_the_precision_on_similar_problems() -> None:
    paired = Paired(60, 40, 1000)
    times = paired.n_for_half_width(0.01) / 1000
    low, high = Paired(60 * times, 40 * times, 1000 * times).interval()
    assert (high - low) / 2 == pytest.approx(0.01, rel=0.02)


def test_zero_discordance_on_few_problems_requires_more_problems_than_on_many() -> None:
    few, many = Paired(0, 0, 20).n_for_half_width(0.01), Paired(0, 0, 2000).n_for_half_width(0.01)
    least = 1.96**2 * 0.99 / 0.01  # if no discordance ever occurs
    assert few > 1000 > many >= least - 1
