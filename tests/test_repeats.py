"""pass@k, maj@k and avg@k equal their means over every choice of k samples, counted one by one."""

from itertools import combinations
from math import comb
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepspec.evaluation.repeats import MAX_CHOICES, Samples, at_k
from stepspec.evaluation.stats import Share

Sample = tuple[bool, str | None]
SAMPLES = st.lists(st.sampled_from([(True, "7"), (False, "1"), (False, "2"), (False, "3"), (False, None)]), min_size=1)


def majority(chosen: tuple[Sample, ...]) -> float:
    """Return the correct answer's share of the first place, from the definition."""
    votes = [answer for _, answer in chosen if answer is not None]
    first = {answer for answer in votes if votes.count(answer) == max(map(votes.count, votes))}
    return ("7" in first) / len(first) if first else 0.0


@given(SAMPLES.filter(lambda samples: len(samples) <= 9), st.data())
def test_the_figures_are_means_over_every_choice_of_k_samples(samples: list[Sample], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    choices, found = list(combinations(samples, k)), Samples.of(samples)
    assert found.n == len(samples)
    assert found.pass_at(k) == pytest.approx(fmean(any(right for right, _ in chosen) for chosen in choices))
    assert found.majority_at(k) == pytest.approx(fmean(map(majority, choices)))


def test_an_example_by_hand() -> None:
    """Of 4 samples 2 are right and 2 give the same wrong answer: 1 of 6 pairs is right and 4 are ties."""
    samples = Samples.of([(True, "7"), (True, "7.0"), (False, "8"), (False, r"\frac{16}{2}")])
    assert samples == Samples(correct=2, others=(2,), unanswered=0)
    assert samples.pass_at(2) == pytest.approx(1 - 1 / comb(4, 2))
    assert (samples.majority_at(2), samples.majority_at(4)) == (pytest.approx((1 + 4 / 2) / 6), 0.5)


def test_answers_are_grouped_by_value_and_else_by_normalized_text() -> None:
    answers = ["0.5", r"\frac{1}{2}", "$1/2$", r"\text{Ann}", "Ann", "x + 1", "x+1", "9", None]
    found = Samples.of([(False, answer) for answer in answers])
    assert found == Samples(correct=0, others=(3, 2, 2, 1), unanswered=1)
    # A denied answer of the right value is not a vote for the correct one.
    assert Samples.of([(True, "7"), (False, "7")]) == Samples(1, (1,), 0)


def test_k_goes_up_to_the_smallest_number_of_samples() -> None:
    """k = 1 is the accuracy with its interval, and nothing is reported for single samples."""
    problems = [Samples(3, (2, 1), 0), Samples(0, (6,), 1), Samples(6, (), 0)]
    found = at_k(problems)
    assert list(found) == [f"{name}@{k}" for k in (1, 2, 4, 6) for name in ("pass", "maj")] + ["avg@6"]
    accuracy = Share.of([[1, 1, 1, 0, 0, 0], [0] * 7, [1] * 6])
    for name in ("pass@1", "maj@1", "avg@6"):
        assert found[name].value == pytest.approx(accuracy.value)
        assert found[name].interval() == pytest.approx(accuracy.interval())
    assert found["pass@6"].value == pytest.approx(2 / 3)
    assert found["maj@6"].value == pytest.approx(2 / 3)
    assert found["pass@6"].interval() == pytest.approx(Share.of([1.0, 0.0, 1.0]).interval())
    assert at_k([]) == at_k([Samples(1, (), 0), Samples(9, (), 0)]) == {}


def test_many_samples_take_no_long_time() -> None:
    """Above `MAX_CHOICES` maj@k is left out, except for k = n."""
    found = at_k([Samples(3, (3,) * 299, 100)])
    assert found["maj@1000"].value == pytest.approx(1 / 300)
    assert [name for name in found if name.startswith("maj")] == ["maj@1", "maj@2", "maj@4", "maj@8", "maj@1000"]
    assert 8 * 1000 <= MAX_CHOICES < 16 * 1000
