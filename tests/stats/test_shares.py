"""Shares: Wilson's interval for one run per problem, and an effective n between n and n times k with k repeats."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepspec.evaluation.stats import Share, wilson

REPEATS = st.integers(1, 5).flatmap(
    lambda k: st.lists(st.lists(st.integers(0, 1), min_size=k, max_size=k), min_size=2, max_size=40)
)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=200))
def test_one_run_per_problem_gives_the_plain_wilson_interval(scores: list[float]) -> None:
    share = Share.of(scores)
    assert share.value == pytest.approx(sum(scores) / len(scores))
    assert share.interval() == pytest.approx(wilson(sum(scores), len(scores)))
    assert Share.of([[score] for score in scores]) == share
    assert Share.of(np.array(scores)) == share


@given(REPEATS)
def test_repeats_are_worth_between_one_problem_and_all_of_them(scores: list[list[int]]) -> None:
    share, n = Share.of(scores), len(scores)
    assert n <= share.effective_n <= n * len(scores[0]) + 1e-9
    low, high = share.interval()
    assert 0 <= low <= share.value + 1e-12
    assert share.value - 1e-12 <= high <= 1


@given(REPEATS, st.randoms(use_true_random=False))
def test_neither_the_order_of_problems_nor_of_runs_matters(scores: list[list[int]], random: Random) -> None:
    shuffled = [random.sample(each, len(each)) for each in random.sample(scores, len(scores))]
    assert Share.of(shuffled).interval() == pytest.approx(Share.of(scores).interval())


def test_copied_runs_do_not_narrow_the_interval() -> None:
    once = [1, 0, 1, 1, 0, 1, 0, 0, 1, 1]
    four = Share.of([[score] * 4 for score in once])
    assert four.interval() == pytest.approx(Share.of(once).interval())


def test_independent_runs_are_worth_nearly_as_many_problems() -> None:
    runs = np.random.default_rng(0).random((2000, 4)) < 0.5
    assert Share.of(runs.astype(np.float64)).effective_n == pytest.approx(8000, rel=0.1)


@pytest.mark.parametrize("score", [0, 1])
def test_if_all_runs_agree_they_are_not_assumed_independent(score: int) -> None:
    assert Share.of([[score] * 8] * 30).interval() == wilson(30 * score, 30)


def test_problems_with_different_numbers_of_runs_have_equal_weight() -> None:
    share = Share.of([[1, 1, 1, 1], [0], [1, 0]])
    assert share.value == 0.5
    assert share.num_problems == 3
    assert share.effective_n <= 9 / (1 / 4 + 1 + 1 / 2)


def test_pooling_gives_every_trial_equal_weight() -> None:
    share = Share.pooled([9, 0, 1], [10, 0, 10])
    assert (share.value, share.num_problems) == (0.5, 2)
    assert share.effective_n == 2  # the trials within a problem nearly agree, so each problem counts as one


def test_pooling_single_steps_gives_the_wilson_interval() -> None:
    assert Share.pooled([1, 0, 1, 1], [1, 1, 1, 1]).interval() == pytest.approx(wilson(3, 4))


def test_a_share_without_trials_is_rejected() -> None:
    with pytest.raises(ZeroDivisionError, match="no trials"):
        Share.pooled([0, 0], [0, 0])
