"""The area under the curve is the share of ordered pairs, and the reliability bins contain every step once."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepspec.evaluation.stats import MIN_CLASS, auc, reliability, wilson

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
    assert few.why == "49 of the problems have a bad outcome, and an area needs at least 50"
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
