"""How the embedded target judges the embedded draft's steps."""

import asyncio

import pytest

from stepspec.mini.measure import measure, report, roc_area


@pytest.mark.parametrize(
    ("right", "wrong", "area"),
    [([2.0, 3.0], [0.0, 1.0], 1.0), ([0.0], [1.0], 0.0), ([1.0], [1.0], 0.5), ([1.0, 3.0], [2.0], 0.5)],
)
def test_the_area_is_the_chance_that_a_right_step_scores_higher(right, wrong, area):
    assert roc_area(right, wrong) == area


def test_there_is_no_area_without_steps_of_both_kinds():
    assert roc_area([], [1.0]) is None
    assert report([(True, {"likelihood.min": -1.0})])["roc_area"] == {"likelihood.min": None}


def test_the_likelihood_tells_right_steps_of_the_draft_from_wrong_ones():
    """On 25 problems the draft makes about ten mistakes; an area of 0.75 leaves room for that few."""
    figures = asyncio.run(measure(25))
    assert figures["steps"] > 25
    assert figures["roc_area"]["likelihood.min"] > 0.75
