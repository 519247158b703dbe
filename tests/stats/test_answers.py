"""A speed counts unless the policy leaves more requests unanswered than the target, beyond chance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepspec.evaluation.stats import Answered

COUNT = st.integers(0, 400)


@given(COUNT.filter(bool), COUNT)
def test_a_policy_without_answers_has_no_speed_for_any_number_of_requests(only_target: int, neither: int) -> None:
    assert Answered(0, only_target, 0, neither).why_no_speed() is not None


@given(COUNT.filter(bool), COUNT, COUNT)
def test_requests_truncated_under_both_policies_do_not_count(both: int, only_policy: int, neither: int) -> None:
    assert Answered(both, 0, only_policy, neither).why_no_speed() is None


@given(COUNT, COUNT, COUNT, COUNT)
def test_losing_one_more_answer_never_makes_a_speed_count(both: int, lost: int, gained: int, neither: int) -> None:
    before, after = Answered(both + 1, lost, gained, neither), Answered(both, lost + 1, gained, neither)
    assert before.why_no_speed() is None or after.why_no_speed() is not None


@pytest.mark.parametrize(
    ("answered", "counts"),
    [
        (Answered(300, 0, 0, 0), True),
        (Answered(297, 3, 0, 0), True),  # a hundredth of the requests
        (Answered(293, 7, 0, 0), False),
        (Answered(280, 12, 8, 0), True),  # lost and gained by chance
        (Answered(9, 1, 0, 0), True),  # a tenth, of few requests
        (Answered(8, 2, 0, 0), False),
        (Answered(0, 3, 0, 0), False),
        (Answered(0, 0, 5, 5), False),  # the target answered nothing
        (Answered(0, 0, 0, 5), False),
    ],
)
def test_examples_of_the_rule(answered: Answered, counts: bool) -> None:
    assert (answered.why_no_speed() is None) == counts


def test_two_equal_policies_rarely_lose_their_speed_by_chance() -> None:
    """Each policy truncates 10% of the texts, independently. The limit of 7.5% allows for chance."""
    rng = np.random.default_rng(0)
    num_rejected = 0
    for _ in range(400):
        own, target = rng.random(300) < 0.9, rng.random(300) < 0.9
        counts = (own & target).sum(), (target & ~own).sum(), (own & ~target).sum(), (~own & ~target).sum()
        num_rejected += Answered(*map(int, counts)).why_no_speed() is not None
    assert num_rejected / 400 <= 0.075


def test_the_reason_gives_the_number_of_missing_answers() -> None:
    assert Answered(200, 90, 4, 6).why_no_speed() == (
        "the target answered 90 of the 300 requests that it did not, and it answered 4 that the target did not"
    )
    assert Answered(0, 300, 0, 0).why_no_speed() == "it answered none of the 300 requests"
    assert Answered(8, 2, 0, 0).mirrored() == Answered(8, 0, 2, 0)
