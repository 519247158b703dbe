"""The fastest policy is selected from those that are known to be faster and to keep the accuracy."""

import pytest

from stepspec.evaluation.stats import MatchedPolicy, Paired, corrected_confidence, fastest

GOOD, BAD, UNKNOWN = Paired(20, 10, 1000), Paired(10, 60, 1000), Paired(0, 0, 50)


def candidate(
    name: str, speedup: float, paired: Paired = GOOD, *, tried: int = 1, exact: bool = False
) -> MatchedPolicy:
    bound = paired.loss_upper(corrected_confidence(tried))
    return MatchedPolicy(name, speedup, (speedup - 0.1, speedup + 0.1), bound, exact)


def test_the_fastest_qualifying_candidate_is_selected() -> None:
    found = fastest([candidate("slow", 1.2), candidate("fast", 2.0), candidate("wrong", 9.0, BAD)], loss=0.01)
    assert found is not None
    assert found.name == "fast"


def test_a_candidate_qualifies_only_if_its_loss_is_bounded() -> None:
    assert fastest([candidate("few problems", 2.0, UNKNOWN)], loss=0.01) is None
    assert fastest([candidate("few problems", 2.0, UNKNOWN)], loss=0.1) is not None
    assert fastest([MatchedPolicy("not measured", 2.0, (1.9, 2.1))], loss=0.01) is None


def test_an_exact_candidate_keeps_the_accuracy_by_construction_and_wins_a_tie() -> None:
    found = fastest([candidate("lossy", 2.0), candidate("exact", 2.0, BAD, exact=True)], loss=0.01)
    assert found is not None
    assert found.name == "exact"


@pytest.mark.parametrize(
    "slow",
    [
        MatchedPolicy("may be slower", 1.5, (0.9, 2.4), exact=True),
        MatchedPolicy("too few problems for an interval", 5.0, None, exact=True),
        MatchedPolicy("no answers", 5.0, (4.0, 6.0), exact=True, why_no_speed="it answered none of the 9 requests"),
        MatchedPolicy("does less in all", 1.5, (1.2, 1.8), exact=True, throughput=0.9),
    ],
    ids=lambda each: each.name,
)
def test_a_candidate_not_known_to_be_faster_is_never_selected(slow: MatchedPolicy) -> None:
    assert not slow.pays()
    assert fastest([slow], loss=1.0) is None
    assert fastest([slow, candidate("fast", 1.3)], loss=0.01) == candidate("fast", 1.3)


def test_more_candidates_raise_the_requirement_for_each() -> None:
    """The loss bound is 1.1 points for one candidate, and more than 1.3 points for one of 20."""
    borderline = Paired(10, 10, 700)
    assert fastest([candidate("one", 2.0, borderline)], loss=0.013) is not None
    assert fastest([candidate(str(n), 2.0, borderline, tried=20) for n in range(20)], loss=0.013) is None


def test_the_confidence_is_corrected_for_the_number_of_candidates() -> None:
    assert corrected_confidence(0) == corrected_confidence(1) == 0.95
    assert corrected_confidence(5) == 0.99
