"""The judges: the scores that they read from one pass, and the rejection of steps without a score."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import WordTokenizer

from stepspec.engines.protocol import Verification
from stepspec.errors import ModelError
from stepspec.loop.judges import Panel
from stepspec.loop.judges.likelihood import LikelihoodJudge
from stepspec.loop.judges.rating import RatingJudge, expected_digit
from stepspec.loop.policy import LikelihoodSpec, RatingSpec

TOKENIZER = WordTokenizer()


def verification(
    *logprobs: float, choices: tuple[str, ...] = (), distributions: tuple[dict[int, float], ...] = ()
) -> Verification:
    """Return a verification with these log-probs, and one choice and one distribution over digits for each probe."""
    return Verification(
        logprobs=logprobs,
        choices=(0,) * len(logprobs),
        next_choice=0,
        probe_choices=tuple(TOKENIZER.encode(choice)[0] for choice in choices),
        probe_logprobs=tuple(
            tuple(math.log(distribution[digit]) if distribution.get(digit) else -math.inf for digit in range(10))
            for distribution in distributions
        ),
    )


def rating(**spec: object) -> RatingJudge:
    return RatingJudge(RatingSpec.model_validate({"kind": "rating"} | spec), TOKENIZER)


@pytest.mark.parametrize("digit", range(10))
def test_the_greedy_rating_is_the_digit_that_was_chosen(digit: int) -> None:
    assert rating().score(verification(choices=(str(digit),), distributions=({},)), 0) == digit


@pytest.mark.parametrize("choice", ["ten", " ", "</think>", "<|end|>"])
def test_a_choice_that_is_no_digit_is_not_a_rating_and_rejects(choice: str) -> None:
    without_digit = verification(-0.1, choices=(choice,), distributions=({9: 0.4},))
    assert rating().score(without_digit, 0) is None
    verdict = Panel([RatingSpec(kind="rating", threshold=0.0)], TOKENIZER).judge(without_digit)
    assert not verdict.accepted
    assert verdict.scores == {"rating.short": None}


@pytest.mark.parametrize(("score", "accepted"), [(7.0, True), (6.999, False), (9.0, True), (0.0, False)])
def test_a_step_is_accepted_from_the_threshold_on(score: float, accepted: bool) -> None:
    assert rating(threshold=7).accepts(score) is accepted


def test_the_expected_rating_renormalises_over_the_digits() -> None:
    judge = rating(readout="expected")
    assert judge.score(verification(choices=("ten",), distributions=({9: 0.3, 6: 0.1},)), 0) == pytest.approx(8.25)


@given(st.lists(st.floats(0, 1), min_size=10, max_size=10))
def test_the_expected_rating_lies_between_the_digits_and_needs_some_probability(distribution: list[float]) -> None:
    score = expected_digit(tuple(math.log(p) if p else -math.inf for p in distribution))
    if sum(distribution) < 0.9e-6:
        assert score is None
    elif sum(distribution) > 1.1e-6:
        assert score == pytest.approx(sum(d * p for d, p in enumerate(distribution)) / sum(distribution))
        assert score is not None
        assert 0 <= score <= 9.0000001


def test_a_rating_without_any_digit_in_the_distribution_rejects() -> None:
    spec = RatingSpec(kind="rating", readout="expected", threshold=0.0)
    verdict = Panel([spec], TOKENIZER).judge(verification(-0.1, choices=("ten",), distributions=({},)))
    assert (verdict.accepted, verdict.scores) == (False, {"rating.short": None})


def test_the_rating_s_labels_are_the_ten_digits() -> None:
    judge = rating()
    assert [TOKENIZER.decode([label]) for label in judge.probe.labels] == list("0123456789")


class MergingTokenizer(WordTokenizer):
    """Has one token for all digits."""

    def encode(self, text: str) -> list[int]:
        return super().encode("".join("#" if char.isdigit() else char for char in text))


def test_a_tokenizer_without_a_token_for_each_digit_cannot_rate() -> None:
    with pytest.raises(ModelError, match="does not give each digit its own token"):
        RatingJudge(RatingSpec(kind="rating"), MergingTokenizer())


def likelihood(threshold: float) -> LikelihoodJudge:
    return LikelihoodJudge(LikelihoodSpec(kind="likelihood", threshold=threshold))


def test_the_likelihood_is_that_of_the_least_probable_token() -> None:
    assert likelihood(-3).score(verification(-0.1, -2.5, -0.2), 0) == -2.5


@pytest.mark.parametrize(("score", "accepted"), [(-3.0, True), (-3.01, False), (0.0, True)])
def test_a_step_is_accepted_down_to_the_bound(score: float, accepted: bool) -> None:
    assert likelihood(-3).accepts(score) is accepted


@pytest.mark.parametrize(("mean", "accepted"), [(-1.0, True), (-0.9, False)])
def test_the_mean_and_the_minimum_may_both_have_thresholds(mean: float, accepted: bool) -> None:
    minimum = LikelihoodSpec(kind="likelihood", threshold=-3.0)
    verdict = Panel([minimum, LikelihoodSpec(kind="likelihood", statistic="mean", threshold=mean)], TOKENIZER).judge(
        verification(-0.5, -1.5)
    )
    assert verdict.accepted is accepted
    assert verdict.scores == {"likelihood.min": -1.5, "likelihood.mean": -1.0}


def test_a_step_of_no_tokens_has_no_likelihood_and_is_rejected() -> None:
    assert likelihood(-3).score(verification(), 0) is None
    assert not Panel([LikelihoodSpec(kind="likelihood", threshold=-3.0)], TOKENIZER).judge(verification()).accepted


def test_the_likelihood_judge_needs_no_probe() -> None:
    assert Panel([LikelihoodSpec(kind="likelihood", threshold=-3.0)], TOKENIZER).probes == ()


def test_each_judge_reads_its_own_probe() -> None:
    greedy = RatingSpec(kind="rating", prompt="short", threshold=7.0)
    expected = RatingSpec(kind="rating", prompt="specreason", readout="expected", threshold=3.0)
    between = LikelihoodSpec(kind="likelihood", threshold=-3.0)
    panel = Panel([greedy, between, expected], TOKENIZER)
    assert len(panel.probes) == 2
    assert panel.probes[0] != panel.probes[1]
    distributions: tuple[dict[int, float], ...] = ({2: 1.0}, {4: 1.0})
    assert panel.judge(verification(-1.0, choices=("8", "1"), distributions=distributions)).accepted
    assert not panel.judge(verification(-1.0, choices=("6", "9"), distributions=distributions)).accepted
    assert not panel.judge(verification(-1.0, choices=("8", "9"), distributions=({9: 1.0}, {2: 1.0}))).accepted
