"""The next token's distributions and the acceptance rule, tested by exact identities instead of samples."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from stepspec.engines.protocol import Sampling
from stepspec.engines.torch_engine.sampling import (
    ACCEPT,
    DRAFT,
    RESAMPLE,
    Seen,
    accept,
    accept_choices,
    acceptance,
    distributions,
    draw,
    edited,
    residual,
    samplers,
    seed_key,
    seen_along,
    uniform,
)

CPU = torch.device("cpu")
ROUNDING = 1e-12  # error of a few operations on float64 numbers below 1


def to_distribution(weights: list[int]) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def weights_of(size: int) -> st.SearchStrategy[list[int]]:
    # Zeros and weights of very different size are frequent.
    weight = st.one_of(st.just(0), st.integers(1, 5), st.integers(1, 10**9))
    return st.lists(weight, min_size=size, max_size=size).filter(any)


PAIRS = st.integers(1, 6).flatmap(lambda size: st.tuples(weights_of(size), weights_of(size)))
# Logits differ by at least an eighth, because rounding would decide the order of equally likely tokens.
LOGITS = st.lists(st.integers(-64, 64).map(lambda eighths: eighths / 8), min_size=1, max_size=8, unique=True)


def for_pairs_of_distributions(test):  # type: ignore[no-untyped-def]
    test = example(([1, 2, 3], [1, 2, 3]))(test)
    test = example(([1, 0, 2, 0], [0, 3, 0, 1]))(test)
    test = example(([1], [1]))(test)
    test = example(([10**9, 1], [1, 10**9]))(test)
    return given(PAIRS)(test)


@for_pairs_of_distributions
def test_an_accepted_or_replaced_token_has_the_targets_distribution(pair: tuple[list[int], list[int]]) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    accepted = q * acceptance(p, q)
    outcome = accepted + (1 - accepted.sum()) * residual(p, q)
    assert (outcome - p).abs().max() <= ROUNDING


@for_pairs_of_distributions
def test_the_residual_is_a_distribution_over_tokens_that_the_draft_gives_too_rarely(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    left = residual(p, q)
    assert (left >= 0).all()
    assert abs(left.sum() - 1) <= ROUNDING
    assert (left[p == 0] == 0).all()
    assert torch.equal(p, q) or (left[p <= q] == 0).all()


@for_pairs_of_distributions
def test_acceptance_is_a_probability_and_is_1_where_q_is_at_most_p(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    accepted = acceptance(p, q)
    assert ((accepted >= 0) & (accepted <= 1)).all()
    assert (accepted[q <= p] == 1).all()
    assert (accepted[(p == 0) & (q > 0)] == 0).all()


def test_the_residual_of_equal_distributions_is_that_distribution() -> None:
    p = torch.tensor([0.25, 0.0, 0.75])
    assert torch.equal(residual(p, p), p)


def test_acceptance_and_residual_take_distributions_of_many_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 3, 4, 5, generator=generator, dtype=torch.float64).softmax(-1)
    for index in [(0, 0), (2, 3)]:
        assert torch.equal(acceptance(p, q)[index], acceptance(p[index], q[index]))
        assert torch.equal(residual(p, q)[index], residual(p[index], q[index]))


def outcome(p: Tensor, q: Tensor, token: int, accept_noise: float, resample_noise: float = 0.5) -> tuple[int, int]:
    """Return how many tokens of a draft of one token are accepted, and the token that follows."""
    noise = torch.tensor([[resample_noise, resample_noise]], dtype=torch.float64)
    num_accepted, following, _ = accept(
        torch.stack([p, p])[None],
        q[None, None],
        torch.tensor([[token]]),
        torch.tensor([1]),
        torch.tensor([[accept_noise]], dtype=torch.float64),
        noise,
    )
    return int(num_accepted), int(following)


@for_pairs_of_distributions
def test_a_token_of_target_probability_0_is_not_accepted_even_with_noise_0(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    for token in range(len(p)):
        num_accepted, following = outcome(p, q, token, 0.0)
        assert num_accepted == int(p[token] > 0)
        assert p[following] > 0


@for_pairs_of_distributions
def test_a_drafted_token_is_accepted_if_its_number_is_below_its_acceptance(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    for token in [token for token in range(len(p)) if q[token] > 0]:
        chance = float(acceptance(p, q)[token])
        assert outcome(p, q, token, max(0.0, chance - 1e-9))[0] == int(chance > 0)
        assert chance == 1 or outcome(p, q, token, chance + 1e-9)[0] == 0


@for_pairs_of_distributions
def test_a_rejected_token_is_replaced_by_a_sample_of_the_residual(pair: tuple[list[int], list[int]]) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    for token in [token for token in range(len(p)) if p[token] < q[token]]:
        for noise in (0.0, 0.3, 1 - 2**-53):
            num_accepted, following = outcome(p, q, token, 1 - 2**-53, noise)
            assert (num_accepted, following) == (
                0,
                int(draw(residual(p, q)[None], torch.tensor([noise], dtype=torch.float64))),
            )


@pytest.mark.parametrize("size", [1, 127, 128, 1000])
def test_a_draw_by_blocks_is_the_one_over_the_whole_vocabulary(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    distributions = (3 * torch.randn(200, size, generator=generator)).softmax(1)
    distributions[:, size // 8 : size // 3] = 0
    noise = torch.rand(200, dtype=torch.float64, generator=generator)
    noise[0] = 0
    mass = distributions.double().cumsum(1)
    assert torch.equal(draw(distributions, noise), (mass <= noise[:, None] * mass[:, -1:]).sum(1))


@given(st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1 / 3, 1.0]), min_size=1, max_size=300).filter(any))
def test_a_draw_at_the_edges_is_a_token_that_has_probability(weights: list[float]) -> None:
    noise = torch.tensor([0, 2**-53, 1 / 3, 0.5, 1 - 2**-52, 1 - 2**-53], dtype=torch.float64)
    tokens = draw(torch.tensor(weights).expand(len(noise), -1), noise)
    assert all(weights[token] > 0 for token in tokens.tolist())


@given(weights_of(5))
@example([0, 1, 0, 0, 0])
@example([10**9, 1, 0, 0, 1])
def test_evenly_spread_numbers_sample_each_token_by_its_probability(weights: list[int]) -> None:
    """The evenly spaced numbers test the sampled distribution exactly, without randomness."""
    p, size = to_distribution(weights), 2000
    tokens = draw(p.expand(size, -1), (torch.arange(size, dtype=torch.float64) + 0.5) / size)
    counts = torch.bincount(tokens, minlength=len(p))
    assert (counts - size * p).abs().max() <= 1 + 1e-6
    assert (counts[p == 0] == 0).all()


@given(weights_of(5), st.sampled_from([0.0, 0.5, 1 - 2**-53]))
def test_no_number_samples_an_impossible_token(weights: list[int], noise: float) -> None:
    p = to_distribution(weights).float()
    assert p[draw(p[None], torch.tensor([noise], dtype=torch.float64))] > 0


def slow_distribution(logits: list[float], sampling: Sampling) -> list[float]:
    """Apply temperature, top-k, top-p and min-p to a single position, one token at a time."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.temperature == 0:
        return [float(token == order[0]) for token in range(len(logits))]
    candidates = order[: sampling.top_k] if sampling.top_k else order
    weights = {token: math.exp((logits[token] - logits[order[0]]) / sampling.temperature) for token in candidates}
    total = sum(weights.values())
    nucleus, mass = [], 0.0
    for token in candidates:
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += weights[token] / total
    nucleus = [token for token in nucleus if weights[token] >= sampling.min_p * weights[order[0]]]
    mass = sum(weights[token] for token in nucleus)
    return [weights[token] / mass if token in nucleus else 0.0 for token in range(len(logits))]


def distribution(logits: list[float] | Tensor, sampling: Sampling) -> Tensor:
    """Return the distributions of one position or of several."""
    rows = torch.as_tensor(logits).reshape(-1, 1, len(logits[-1]) if torch.as_tensor(logits).dim() > 1 else len(logits))
    how = samplers([sampling] * len(rows), rows.shape[-1], CPU)
    return distributions(edited(rows, how, None), how)[:, 0].reshape(torch.as_tensor(logits).shape)


SETTINGS = st.builds(
    Sampling,
    st.floats(0.25, 4),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 9),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
)


@given(LOGITS, SETTINGS)
@example([0.5, -1.0, 2.0], Sampling(1.0, 0.97, 1))
@example([0.5, -1.0, 2.0], Sampling(0.0, 0.5, 2))
def test_distributions_agree_with_a_slow_reference(logits: list[float], sampling: Sampling) -> None:
    expected = torch.tensor(slow_distribution(logits, sampling))
    # If a sum or a quotient is within rounding of a bound, the reference may be wrong as well.
    assume(torch.allclose(expected, torch.tensor(slow_distribution(logits, nudged(sampling, 1e-5))), atol=1e-4))
    assume(torch.allclose(expected, torch.tensor(slow_distribution(logits, nudged(sampling, -1e-5))), atol=1e-4))
    assert torch.allclose(distribution(logits, sampling), expected, atol=2e-6)


def nudged(sampling: Sampling, amount: float) -> Sampling:
    top_p, min_p = (min(1.0, max(each + amount, 0.0)) for each in (sampling.top_p, sampling.min_p))
    return replace(sampling, top_p=top_p if sampling.top_p < 1 else 1.0, min_p=min_p if sampling.min_p else 0.0)


@given(LOGITS)
def test_the_greedy_distribution_is_one_hot_at_the_largest_logit(logits: list[float]) -> None:
    greedy = distribution(logits, Sampling(temperature=0))
    assert greedy.tolist() == [float(value == max(logits)) for value in logits]


def test_rows_of_a_batch_have_their_own_sampling_settings() -> None:
    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    settings = [
        Sampling(),
        Sampling(0.7),
        Sampling(0.7, 0.8),
        Sampling(1.3, 1.0, 3),
        Sampling(1.0, min_p=0.4),
        Sampling(1.0, logit_bias=((2, 5.0),), allowed=frozenset({1, 2, 6})),
    ]
    how = samplers(settings, 7, CPU)
    together = distributions(edited(logits[:, None], how, None), how)[:, 0]
    alone = torch.stack([distribution(row, each) for row, each in zip(logits, settings, strict=True)])
    assert torch.allclose(together, alone, atol=1e-6)
    assert (together[5] > 0).tolist() == [False, True, True, False, False, False, True]


def test_a_penalty_applies_to_written_and_to_drafted_tokens() -> None:
    """As in `transformers`, the penalty divides positive logits and multiplies negative ones."""
    how = samplers([Sampling(1.0, repetition_penalty=2.0)], 4, CPU)
    how = how._replace(seen=Seen(torch.tensor([[True, False, False, False]]), torch.zeros(1, 4)))
    logits = torch.tensor([1.0, -1.0, 2.0, -2.0]).expand(1, 3, -1)
    actual = edited(logits, how, seen_along(how, torch.tensor([[3, 2]])))
    assert actual.tolist() == [[[0.5, -1.0, 2.0, -2.0], [0.5, -1.0, 2.0, -4.0], [0.5, -1.0, 1.0, -4.0]]]


def test_presence_and_frequency_penalties_count_the_output_with_drafted_tokens() -> None:
    """As in OpenAI's API: `logit - count * frequency - (count > 0) * presence`. The prompt does not count."""
    settings = [Sampling(presence_penalty=0.5, frequency_penalty=0.25), Sampling(repetition_penalty=2.0)]
    how = samplers(settings, 3, CPU)
    text = torch.tensor([[True, True, False], [True, True, False]])
    how = how._replace(seen=Seen(text, torch.tensor([[0.0, 2.0, 0.0], [0.0, 2.0, 0.0]])))
    seen = seen_along(how, torch.tensor([[1, 2], [1, 2]]))
    actual = edited(torch.tensor([4.0, 3.0, 2.0]).expand(2, 3, -1), how, seen)
    assert actual[0].tolist() == [[4.0, 2.0, 2.0], [4.0, 1.75, 2.0], [4.0, 1.75, 1.25]]
    assert actual[1].tolist() == [[2.0, 1.5, 2.0], [2.0, 1.5, 2.0], [2.0, 1.5, 1.0]]
    assert seen is not None
    assert [each[0, 0].tolist() for each in seen.last()] == [[True, True, True], [0.0, 3.0, 1.0]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5), st.integers(0, 3))
def test_choices_are_accepted_like_one_hot_distributions(pairs: list[tuple[int, int]], beyond: int) -> None:
    choices = torch.tensor([[choice for choice, _ in pairs] + [beyond]])
    drafted, counts = torch.tensor([[token for _, token in pairs]]), torch.tensor([len(pairs)])
    p, q = (torch.nn.functional.one_hot(tokens, 4).float() for tokens in (choices, drafted))
    noise = torch.full(choices.shape, 0.5, dtype=torch.float64)
    sampled = accept(p, q, drafted, counts, noise[:, 1:], noise)
    chosen = accept_choices(choices, drafted, counts)
    assert [each.tolist() for each in sampled[:2]] == [each.tolist() for each in chosen[:2]]


def test_padding_of_shorter_drafts_is_never_accepted() -> None:
    choices = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafted = torch.tensor([[1, 2], [1, 2], [1, 2]])
    num_accepted, following, _ = accept_choices(choices, drafted, torch.tensor([0, 1, 2]))
    assert (num_accepted.tolist(), following.tolist()) == ([0, 1, 2], [1, 2, 3])


def test_numbers_depend_on_seed_position_and_purpose_and_are_all_different() -> None:
    keys = torch.tensor([seed_key(seed) for seed in range(20)])
    positions = torch.arange(50).expand(20, -1)
    numbers = torch.stack([uniform(keys, positions, purpose) for purpose in (DRAFT, ACCEPT, RESAMPLE)])
    assert len(set(numbers.flatten().tolist())) == numbers.numel()
    assert torch.equal(uniform(keys[3:4], positions[:1, 7:9], ACCEPT)[0], numbers[1, 3, 7:9])
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_numbers_are_uniform_and_neighbors_are_uncorrelated() -> None:
    """A correct generator fails each of the eight tests for one seed in a million."""
    numbers = uniform(torch.tensor([seed_key(0)]), torch.arange(100_000)[None], ACCEPT)[0]
    for size in (10, 100):
        for shifted in (numbers, (numbers * 1024) % 1):
            cells = (shifted * size).long()
            statistic = ((torch.bincount(cells, minlength=size) - 1e5 / size) ** 2).sum() / (1e5 / size)
            assert abs(float(statistic) - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5 + 12
    for lag in (1, 2, 3, 64):
        first, second = numbers[:-lag] - 0.5, numbers[lag:] - 0.5
        assert abs(float((first * second).mean()) * 12 * len(first) ** 0.5) < 5
