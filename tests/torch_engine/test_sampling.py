"""The next token's distributions and the acceptance rule, as algebra: nothing is sampled where identities do."""

import math
from dataclasses import replace

import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from stepspec.engines.protocol import Sampling
from stepspec.engines.torch_engine.sampling import (
    ACCEPT,
    DRAFT,
    RESAMPLE,
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
ROUNDING = 1e-12  # of a few operations on float64 numbers below 1


def to_distribution(weights: list[int]) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def weights_of(size: int) -> st.SearchStrategy[list[int]]:
    # Zeros are frequent, and so are weights of very different size.
    weight = st.one_of(st.just(0), st.integers(1, 5), st.integers(1, 10**9))
    return st.lists(weight, min_size=size, max_size=size).filter(any)


PAIRS = st.integers(1, 6).flatmap(lambda size: st.tuples(weights_of(size), weights_of(size)))
# Apart by an eighth at least: of tokens that are equally likely but for rounding either may come first.
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
    kept = q * acceptance(p, q)
    outcome = kept + (1 - kept.sum()) * residual(p, q)
    assert (outcome - p).abs().max() <= ROUNDING


@for_pairs_of_distributions
def test_the_residual_is_a_law_that_only_gives_what_the_draft_gave_too_rarely(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    left = residual(p, q)
    assert (left >= 0).all()
    assert abs(left.sum() - 1) <= ROUNDING
    assert (left[p == 0] == 0).all()
    assert torch.equal(p, q) or (left[p <= q] == 0).all()


@for_pairs_of_distributions
def test_acceptance_is_a_probability_and_certain_where_the_draft_is_not_too_eager(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    accepted = acceptance(p, q)
    assert ((accepted >= 0) & (accepted <= 1)).all()
    assert (accepted[q <= p] == 1).all()
    assert (accepted[(p == 0) & (q > 0)] == 0).all()


def test_the_residual_of_equal_laws_is_the_law_itself() -> None:
    p = torch.tensor([0.25, 0.0, 0.75])
    assert torch.equal(residual(p, p), p)


def test_acceptance_and_residual_take_distributions_of_many_positions_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 3, 4, 5, generator=generator, dtype=torch.float64).softmax(-1)
    for index in [(0, 0), (2, 3)]:
        assert torch.equal(acceptance(p, q)[index], acceptance(p[index], q[index]))
        assert torch.equal(residual(p, q)[index], residual(p[index], q[index]))


def outcome(p: Tensor, q: Tensor, token: int, accept_noise: float, resample_noise: float = 0.5) -> tuple[int, int]:
    """How many of one drafted token are kept, and what follows."""
    noise = torch.tensor([[resample_noise, resample_noise]], dtype=torch.float64)
    num_kept, following = accept(
        torch.stack([p, p])[None],
        q[None, None],
        torch.tensor([[token]]),
        torch.tensor([1]),
        torch.tensor([[accept_noise]], dtype=torch.float64),
        noise,
    )
    return int(num_kept), int(following)


@for_pairs_of_distributions
def test_a_token_that_the_target_never_writes_is_not_accepted_even_by_the_smallest_number(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    for token in range(len(p)):
        num_kept, following = outcome(p, q, token, 0.0)
        assert num_kept == int(p[token] > 0)
        assert p[following] > 0


@for_pairs_of_distributions
def test_a_drafted_token_is_kept_by_just_those_numbers_that_its_acceptance_says(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    for token in [token for token in range(len(p)) if q[token] > 0]:
        chance = float(acceptance(p, q)[token])
        assert outcome(p, q, token, max(0.0, chance - 1e-9))[0] == int(chance > 0)
        assert chance == 1 or outcome(p, q, token, chance + 1e-9)[0] == 0


@for_pairs_of_distributions
def test_a_rejected_token_is_replaced_by_one_of_the_residual(pair: tuple[list[int], list[int]]) -> None:
    p, q = to_distribution(pair[0]), to_distribution(pair[1])
    for token in [token for token in range(len(p)) if p[token] < q[token]]:
        for noise in (0.0, 0.3, 1 - 2**-53):
            num_kept, following = outcome(p, q, token, 1 - 2**-53, noise)
            assert (num_kept, following) == (
                0,
                int(draw(residual(p, q)[None], torch.tensor([noise], dtype=torch.float64))),
            )


@given(weights_of(5))
@example([0, 1, 0, 0, 0])
@example([10**9, 1, 0, 0, 1])
def test_evenly_spread_numbers_draw_each_token_in_its_share(weights: list[int]) -> None:
    """The distribution of a draw, exactly: no number is random here."""
    p, size = to_distribution(weights), 2000
    tokens = draw(p.expand(size, -1), (torch.arange(size, dtype=torch.float64) + 0.5) / size)
    counts = torch.bincount(tokens, minlength=len(p))
    assert (counts - size * p).abs().max() <= 1 + 1e-6
    assert (counts[p == 0] == 0).all()


@given(weights_of(5), st.sampled_from([0.0, 0.5, 1 - 2**-53]))
def test_no_number_draws_an_impossible_token(weights: list[int], noise: float) -> None:
    p = to_distribution(weights).float()
    assert p[draw(p[None], torch.tensor([noise], dtype=torch.float64))] > 0


def slow_distribution(logits: list[float], sampling: Sampling) -> list[float]:
    """Temperature, top-k and top-p of a single position, one token at a time."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.temperature == 0:
        return [float(token == order[0]) for token in range(len(logits))]
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = {token: math.exp((logits[token] - logits[order[0]]) / sampling.temperature) for token in kept}
    total = sum(weights.values())
    nucleus, mass = [], 0.0
    for token in kept:
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += weights[token] / total
    nucleus = [token for token in nucleus if weights[token] >= sampling.min_p * weights[order[0]]]
    mass = sum(weights[token] for token in nucleus)
    return [weights[token] / mass if token in nucleus else 0.0 for token in range(len(logits))]


def distribution(logits: list[float] | Tensor, sampling: Sampling) -> Tensor:
    """The distribution of one position, or of many."""
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
def test_laws_agree_with_a_slow_reference(logits: list[float], sampling: Sampling) -> None:
    expected = torch.tensor(slow_distribution(logits, sampling))
    # Where a sum or a quotient is at a bound but for rounding, the reference may err as well.
    assume(torch.allclose(expected, torch.tensor(slow_distribution(logits, nudged(sampling, 1e-5))), atol=1e-4))
    assume(torch.allclose(expected, torch.tensor(slow_distribution(logits, nudged(sampling, -1e-5))), atol=1e-4))
    assert torch.allclose(distribution(logits, sampling), expected, atol=2e-6)


def nudged(sampling: Sampling, amount: float) -> Sampling:
    top_p, min_p = (min(1.0, max(each + amount, 0.0)) for each in (sampling.top_p, sampling.min_p))
    return replace(sampling, top_p=top_p if sampling.top_p < 1 else 1.0, min_p=min_p if sampling.min_p else 0.0)


@given(LOGITS)
def test_the_greedy_law_is_one_hot_at_the_largest_logit(logits: list[float]) -> None:
    greedy = distribution(logits, Sampling(temperature=0))
    assert greedy.tolist() == [float(value == max(logits)) for value in logits]


def test_rows_of_a_batch_draw_each_in_its_own_way() -> None:
    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    ways = [
        Sampling(),
        Sampling(0.7),
        Sampling(0.7, 0.8),
        Sampling(1.3, 1.0, 3),
        Sampling(1.0, min_p=0.4),
        Sampling(1.0, logit_bias=((2, 5.0),), allowed=frozenset({1, 2, 6})),
    ]
    how = samplers(ways, 7, CPU)
    together = distributions(edited(logits[:, None], how, None), how)[:, 0]
    alone = torch.stack([distribution(row, way) for row, way in zip(logits, ways, strict=True)])
    assert torch.allclose(together, alone, atol=1e-6)
    assert (together[5] > 0).tolist() == [False, True, True, False, False, False, True]


def test_a_penalty_makes_what_was_written_less_likely_and_looks_at_drafted_tokens_too() -> None:
    """As `transformers` has it: a positive logit is divided, a negative one multiplied."""
    how = samplers([Sampling(1.0, repetition_penalty=2.0)], 4, CPU)
    how = how._replace(seen=torch.tensor([[True, False, False, False]]))
    logits = torch.tensor([1.0, -1.0, 2.0, -2.0]).expand(1, 3, -1)
    actual = edited(logits, how, seen_along(how, torch.tensor([[3, 2]])))
    assert actual.tolist() == [[[0.5, -1.0, 2.0, -2.0], [0.5, -1.0, 2.0, -4.0], [0.5, -1.0, 1.0, -4.0]]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5), st.integers(0, 3))
def test_choices_are_accepted_as_one_hot_laws_are(pairs: list[tuple[int, int]], beyond: int) -> None:
    choices = torch.tensor([[choice for choice, _ in pairs] + [beyond]])
    drafted, counts = torch.tensor([[token for _, token in pairs]]), torch.tensor([len(pairs)])
    p, q = (torch.nn.functional.one_hot(tokens, 4).float() for tokens in (choices, drafted))
    noise = torch.full(choices.shape, 0.5, dtype=torch.float64)
    sampled = accept(p, q, drafted, counts, noise[:, 1:], noise)
    assert [each.tolist() for each in sampled] == [each.tolist() for each in accept_choices(choices, drafted, counts)]


def test_of_rows_with_fewer_drafted_tokens_the_padding_is_never_accepted() -> None:
    choices = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafted = torch.tensor([[1, 2], [1, 2], [1, 2]])
    num_kept, following = accept_choices(choices, drafted, torch.tensor([0, 1, 2]))
    assert (num_kept.tolist(), following.tolist()) == ([0, 1, 2], [1, 2, 3])


def test_numbers_are_decided_by_seed_position_and_purpose_and_are_all_different() -> None:
    keys = torch.tensor([seed_key(seed) for seed in range(20)])
    positions = torch.arange(50).expand(20, -1)
    numbers = torch.stack([uniform(keys, positions, purpose) for purpose in (DRAFT, ACCEPT, RESAMPLE)])
    assert len(set(numbers.flatten().tolist())) == numbers.numel()
    assert torch.equal(uniform(keys[3:4], positions[:1, 7:9], ACCEPT)[0], numbers[1, 3, 7:9])
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_numbers_are_spread_evenly_and_neighbours_are_not_alike() -> None:
    """A right generator fails for one seed in a million of each of the eight statistics."""
    numbers = uniform(torch.tensor([seed_key(0)]), torch.arange(100_000)[None], ACCEPT)[0]
    for size in (10, 100):
        for shifted in (numbers, (numbers * 1024) % 1):
            cells = (shifted * size).long()
            statistic = ((torch.bincount(cells, minlength=size) - 1e5 / size) ** 2).sum() / (1e5 / size)
            assert abs(float(statistic) - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5 + 12
    for lag in (1, 2, 3, 64):
        first, second = numbers[:-lag] - 0.5, numbers[lag:] - 0.5
        assert abs(float((first * second).mean()) * 12 * len(first) ** 0.5) < 5
