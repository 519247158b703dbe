"""The area under the curve is the share of ordered pairs, and the reliability bins contain every step once."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepspec.evaluation.stats import MIN_CLASS, auc, reliability, wilson
from stepspec.evaluation.stats.judge_scores import area_alone, risks

RNG = np.random.default_rng
ROUNDING = 1e-12
STEPS = st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 20)), min_size=2, max_size=60)


def area_by_pairs(scores: list[int], good: list[bool]) -> float:
    good_scores = [score for score, is_good in zip(scores, good, strict=True) if is_good]
    bad_scores = [score for score, is_good in zip(scores, good, strict=True) if not is_good]
    return float(np.mean([(a > b) + (a == b) / 2 for a in good_scores for b in bad_scores]))


@given(STEPS)
@example([(0, True, 0), (0, True, 0), (1, False, 0), (1, True, 0)])  # no variance: both limits are the area, rounded
def test_the_area_is_the_share_of_pairs_in_the_right_order(steps: list[tuple[int, bool, int]]) -> None:
    scores, good, problems = (list(each) for each in zip(*steps, strict=True))
    copies = [problem + 100 * copy for copy in range(MIN_CLASS) for problem in problems]
    found = auc(scores * MIN_CLASS, good * MIN_CLASS, copies)
    if all(good) or not any(good):
        assert found.value is None
        return
    area = area_by_pairs(scores, good)
    if area in (0, 1):
        assert "separate" in (found.why or "")
        return
    assert found.value == pytest.approx(area)
    opposite = auc([-score for score in scores] * MIN_CLASS, good * MIN_CLASS, copies)
    assert opposite.value == pytest.approx(1 - area)
    assert found.interval is not None
    low, high = found.interval
    assert 0 <= low <= area + ROUNDING
    assert area - ROUNDING <= high <= 1
    assert opposite.interval == pytest.approx((1 - high, 1 - low))


def test_the_standard_error_is_delongs_if_every_problem_has_one_step() -> None:
    """E. R. DeLong, D. M. DeLong, D. L. Clarke-Pearson, Biometrics 44, 1988: variances of both placements."""
    rng = RNG(0)
    good = rng.random(4000) < 0.5
    scores = rng.normal(size=4000) + good
    found = auc(scores, good, np.arange(4000))
    area, interval = found.value, found.interval
    assert area is not None
    assert interval is not None
    below = (scores[good][:, None] > scores[~good]).astype(float)
    variance = below.mean(axis=1).var(ddof=1) / good.sum() + below.mean(axis=0).var(ddof=1) / (~good).sum()
    width = np.log(interval[1] / (1 - interval[1])) - np.log(interval[0] / (1 - interval[0]))
    assert width / 2 / 1.96 * area * (1 - area) == pytest.approx(np.sqrt(variance), rel=0.01)


def test_copied_steps_of_a_problem_do_not_narrow_the_interval() -> None:
    rng = RNG(1)
    good, problems = rng.random(200) < 0.5, np.arange(200)
    scores = rng.normal(size=200) + good
    once = auc(scores, good, problems)
    assert once.value is not None
    copied = auc(np.repeat(scores, 5), np.repeat(good, 5), np.repeat(problems, 5))
    assert (copied.value, copied.interval) == (pytest.approx(once.value), pytest.approx(once.interval))


def test_an_area_needs_two_large_overlapping_classes() -> None:
    rng, num_bad = RNG(2), MIN_CLASS - 1
    good = np.arange(300) >= num_bad
    few = auc(rng.normal(size=300), good, np.arange(300))
    assert (few.value, few.interval) == (None, None)
    assert few.why == "49 of the problems have a bad outcome, and an interval needs at least 50"
    assert "good outcome" in (auc(rng.normal(size=300), ~good, np.arange(300)).why or "")
    # More steps of the same problems do not count as more problems.
    assert auc(rng.normal(size=300), rng.random(300) < 0.5, np.arange(300) % num_bad).value is None
    assert "separate" in (auc([1, 2, 3, 4] * 25, [0, 0, 1, 1] * 25, range(100)).why or "")


@given(STEPS)
def test_the_bins_contain_every_step_once_and_keep_equal_scores_together(steps: list[tuple[int, bool, int]]) -> None:
    scores, good, problems = (list(each) for each in zip(*steps, strict=True))
    bins = reliability(scores, good, problems, num_bins=4)
    assert sum(each.num_steps for each in bins) == len(steps)
    assert sum(each.num_steps * each.outcome.value for each in bins) == pytest.approx(sum(good))
    assert all(left.highest < right.lowest for left, right in pairwise(bins))
    assert len(bins) <= 4


def test_bins_of_different_scores_have_about_equal_counts() -> None:
    bins = reliability(RNG(0).permutation(103) / 103, [1] * 103, range(103), num_bins=10)
    assert [each.num_steps for each in bins] == pytest.approx([10] * 10, abs=1)


def test_a_bins_interval_is_wilsons_for_single_steps_and_wider_for_steps_of_few_problems() -> None:
    scores, good = [7.0] * 40, [1, 0] * 20
    (alone,) = reliability(scores, good, range(40))
    assert alone.outcome.interval() == pytest.approx(wilson(20, 40))
    (together,) = reliability(scores, sorted(good), [step // 10 for step in range(40)])
    assert together.outcome.interval() == pytest.approx(wilson(2, 4))


def test_without_steps_there_are_no_bins() -> None:
    assert reliability([], [], []) == ()


def test_the_area_of_few_steps_is_known_without_an_interval() -> None:
    assert area_alone([3, 2, 1], [1, 1, 0]) == 1.0
    assert area_alone([1, 2, 3], [1, 1, 0]) == 0.0
    assert area_alone([5, 5, 5, 5], [1, 0, 1, 0]) == 0.5
    assert area_alone([1, 1, 2], [1, 0, 1]) == 0.75
    assert area_alone([1, 2], [1, 1]) is None
    assert area_alone([1, 2], [0, 0]) is None
    assert area_alone([], []) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=2, max_size=20))
def test_a_step_whose_outcome_is_a_probability_is_one_of_four_steps_in_that_share(steps: list[tuple[int, int]]) -> None:
    scores = [score for score, _ in steps]
    copies = [(score, copy < num_good) for score, num_good in steps for copy in range(4)]
    whole = area_alone([score for score, _ in copies], [float(good) for _, good in copies])
    assert area_alone(scores, [num_good / 4 for _, num_good in steps]) == pytest.approx(whole)


def test_the_interval_covers_for_probabilities_of_steps_that_depend_on_each_other() -> None:
    """400 evaluations of 60 problems. At a coverage of 95%, fewer than 92% cover once in 300 times."""
    rng, covered = RNG(3), 0

    def sampled(num_problems: int) -> tuple[list[float], list[float], list[int]]:
        problems = np.repeat(np.arange(num_problems), 4)
        wrong = rng.random(len(problems)) < 0.2
        outcomes = rng.binomial(8, np.where(wrong, 0.1, 0.8)) / 8
        scores = rng.normal(size=len(problems)) + ~wrong + rng.normal(0, 0.7, num_problems)[problems]
        return scores.tolist(), outcomes.tolist(), problems.tolist()

    true = area_alone(*sampled(50_000)[:2]) or 0.0
    for _ in range(400):
        low, high = auc(*sampled(60), min_class=10).interval or (1.0, 0.0)
        covered += low <= true <= high
    assert 0.92 < covered / 400 < 0.985


@given(STEPS)
def test_the_risk_is_the_share_of_bad_steps_among_the_accepted_ones(steps: list[tuple[int, bool, int]]) -> None:
    scores, good, _ = (list(each) for each in zip(*steps, strict=True))
    found = risks(scores, good)
    assert found[-1] == pytest.approx(1 - np.mean(good)), "all are accepted"
    for score in set(scores):
        accepted = [is_good for each, is_good in zip(scores, good, strict=True) if each >= score]
        assert found[len(accepted) - 1] == pytest.approx(1 - np.mean(accepted))


def test_equal_scores_have_the_risk_of_a_random_order() -> None:
    assert risks([1, 1, 1, 1], [1, 0, 0, 1]) == pytest.approx([0.5] * 4)
    assert risks([2, 1, 1], [1, 0, 1]) == pytest.approx([0.0, 0.25, 1 / 3])
