"""The next token's laws and the acceptance rule, as algebra: nothing is sampled where identities do."""

import math

import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from stepspec.engine import Sampling
from stepspec.torch_engine.sampling import Stream, accept, accept_greedy, acceptance, law, residual

CPU = torch.device("cpu")
ROUNDING = 1e-12  # of a few operations on float64 numbers below 1


def to_law(weights: list[int]) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def weights_of(size: int) -> st.SearchStrategy[list[int]]:
    # Zeros are frequent, and so are weights of very different size.
    weight = st.one_of(st.just(0), st.integers(1, 5), st.integers(1, 10**9))
    return st.lists(weight, min_size=size, max_size=size).filter(any)


PAIRS = st.integers(1, 6).flatmap(lambda size: st.tuples(weights_of(size), weights_of(size)))
# Apart by an eighth at least: of tokens that are equally likely but for rounding either may come first.
LOGITS = st.lists(st.integers(-64, 64).map(lambda eighths: eighths / 8), min_size=1, max_size=8, unique=True)


def for_pairs_of_laws(test):  # type: ignore[no-untyped-def]
    test = example(([1, 2, 3], [1, 2, 3]))(test)
    test = example(([1, 0, 2, 0], [0, 3, 0, 1]))(test)
    test = example(([1], [1]))(test)
    test = example(([10**9, 1], [1, 10**9]))(test)
    return given(PAIRS)(test)


@for_pairs_of_laws
def test_an_accepted_or_replaced_token_has_the_targets_law(pair: tuple[list[int], list[int]]) -> None:
    p, q = to_law(pair[0]), to_law(pair[1])
    kept = q * acceptance(p, q)
    outcome = kept + (1 - kept.sum()) * residual(p, q)
    assert (outcome - p).abs().max() <= ROUNDING


@for_pairs_of_laws
def test_the_residual_is_a_law_that_only_gives_what_the_draft_gave_too_rarely(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_law(pair[0]), to_law(pair[1])
    left = residual(p, q)
    assert (left >= 0).all()
    assert abs(left.sum() - 1) <= ROUNDING
    assert (left[p == 0] == 0).all()
    assert torch.equal(p, q) or (left[p <= q] == 0).all()


@for_pairs_of_laws
def test_acceptance_is_a_probability_and_certain_where_the_draft_is_not_too_eager(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_law(pair[0]), to_law(pair[1])
    accepted = acceptance(p, q)
    assert ((accepted >= 0) & (accepted <= 1)).all()
    assert (accepted[q <= p] == 1).all()
    assert (accepted[(p == 0) & (q > 0)] == 0).all()


def test_the_residual_of_equal_laws_is_the_law_itself() -> None:
    p = torch.tensor([0.25, 0.0, 0.75])
    assert torch.equal(residual(p, p), p)


def test_acceptance_and_residual_take_laws_of_many_positions_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 3, 4, 5, generator=generator, dtype=torch.float64).softmax(-1)
    for index in [(0, 0), (2, 3)]:
        assert torch.equal(acceptance(p, q)[index], acceptance(p[index], q[index]))
        assert torch.equal(residual(p, q)[index], residual(p[index], q[index]))


class Zeros(Stream):
    """A stream whose every uniform number is 0: the one at which a careless comparison accepts anything."""

    def uniform(self, count: int, purpose: str) -> Tensor:
        return torch.zeros(count)


@for_pairs_of_laws
def test_a_token_that_the_target_never_writes_is_not_accepted_even_by_the_smallest_number(
    pair: tuple[list[int], list[int]],
) -> None:
    p, q = to_law(pair[0]), to_law(pair[1])
    for token in range(len(p)):
        num_accepted, following = accept(torch.stack([p, p]), q[None], torch.tensor([token]), Zeros(0, 0, CPU))
        assert num_accepted == int(p[token] > 0)
        assert p[following] > 0


def slow_law(logits: list[float], sampling: Sampling) -> list[float]:
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
    return [weights[token] / (mass * total) if token in nucleus else 0.0 for token in range(len(logits))]


@given(LOGITS, st.floats(0.25, 4), st.floats(0.05, 1), st.integers(0, 9))
@example([0.5, -1.0, 2.0], 1.0, 0.97, 1)
@example([0.5, -1.0, 2.0], 0.0, 0.5, 2)
def test_laws_agree_with_a_slow_reference(logits: list[float], temperature: float, top_p: float, top_k: int) -> None:
    whole = torch.tensor(slow_law(logits, Sampling(temperature, 1.0, top_k))).sort(descending=True).values
    # Where the mass of the first few tokens is top_p but for rounding, the reference may err as well.
    assume(temperature == 0 or (whole.cumsum(0) - top_p).abs().min() > 1e-5)
    sampling = Sampling(temperature, top_p, top_k)
    assert torch.allclose(law(torch.tensor(logits), sampling), torch.tensor(slow_law(logits, sampling)), atol=2e-6)


@given(LOGITS)
def test_the_greedy_law_is_one_hot_at_the_largest_logit(logits: list[float]) -> None:
    greedy = law(torch.tensor(logits), Sampling(temperature=0))
    assert greedy.tolist() == [float(value == max(logits)) for value in logits]


def test_laws_of_several_positions_are_the_laws_of_each() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(), Sampling(0.7), Sampling(0.7, 0.8), Sampling(1.3, 1.0, 3)):
        rows = torch.stack([law(row, sampling) for row in logits])
        assert torch.allclose(law(logits, sampling), rows, atol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5), st.integers(0, 3))
def test_greedy_acceptance_is_acceptance_of_one_hot_laws(pairs: list[tuple[int, int]], beyond: int) -> None:
    choices, drafted = [choice for choice, _ in pairs] + [beyond], [token for _, token in pairs]
    p = torch.nn.functional.one_hot(torch.tensor(choices), 4).float()
    q = torch.nn.functional.one_hot(torch.tensor(drafted, dtype=torch.long), 4).float()
    sampled = accept(p, q, torch.tensor(drafted, dtype=torch.long), Stream(0, 0, CPU))
    assert sampled == accept_greedy(choices, drafted)


def test_a_streams_numbers_are_decided_by_seed_position_and_purpose() -> None:
    def numbers(seed: int, position: int, purpose: str) -> list[float]:
        return Stream(seed, position, CPU).uniform(8, purpose).tolist()

    reference = numbers(1, 2, "draft")
    assert numbers(1, 2, "draft") == reference
    others = [numbers(2, 2, "draft"), numbers(1, 3, "draft"), numbers(1, 2, "accept"), numbers(2, 1, "draft")]
    assert all(not set(other) & set(reference) for other in others)


def test_the_purposes_of_a_stream_do_not_disturb_each_other() -> None:
    alone, mixed = Stream(1, 2, CPU), Stream(1, 2, CPU)
    expected = [alone.uniform(2, "accept").tolist() for _ in range(3)]
    actual = []
    for _ in range(3):
        mixed.draw(torch.tensor([0.5, 0.5]), "draft")
        actual.append(mixed.uniform(2, "accept").tolist())
    assert actual == expected


def test_an_impossible_token_is_never_drawn() -> None:
    stream = Stream(0, 0, CPU)
    possible = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert {int(stream.draw(possible, "resample")) for _ in range(200)} == {1, 3}


class Noting(Stream):
    """A stream that notes what its numbers were asked for."""

    def __init__(self) -> None:
        super().__init__(0, 0, CPU)
        self.purposes: list[str] = []

    def _generator(self, purpose: str) -> torch.Generator:
        self.purposes.append(purpose)
        return super()._generator(purpose)


def test_accepting_and_replacing_draw_from_streams_of_their_own() -> None:
    stream = Noting()
    p, q = torch.full((3, 4), 0.25), torch.eye(4)[:2]
    accept(p, q, torch.tensor([0, 1]), stream)
    assert stream.purposes == ["accept", "resample"]
