"""The cache: a rollback only sets a length, growing keeps the contents, and rows see only themselves."""

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, make_config, make_model, make_network, random_ids, slow_logits
from transformers import PreTrainedModel

from stepspec.engines.torch_engine.attention import runs_of_like_length
from stepspec.engines.torch_engine.cache import FIRST_CAPACITY
from stepspec.engines.torch_engine.model import Branch, CausalModel

ROUNDING = 2e-4
"""Difference between passes of different shapes, for logits of size 10 in float32."""


@pytest.fixture(scope="module", params=FAMILIES)
def network(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_network(make_config(request.param))


@pytest.fixture
def model(network: PreTrainedModel) -> CausalModel:
    return make_model(network)


@pytest.fixture(autouse=True)
def _inference():  # type: ignore[no-untyped-def]
    with torch.inference_mode():
        yield


def test_reading_in_parts_gives_the_models_own_logits(network: PreTrainedModel, model: CausalModel) -> None:
    ids = random_ids(40)
    expected = slow_logits(network, ids)
    parts, start = [], 0
    for size in (1, 7, 1, 1, 20, 2, 8):
        parts.append(model.extend([3], [ids[start : start + size]])[0])
        start += size
        model.cache.check()
    assert torch.allclose(torch.cat(parts), expected, atol=ROUNDING)


def test_extend_returns_only_the_requested_columns(model: CausalModel) -> None:
    ids = random_ids(9)
    everything = model.extend([0], [ids])
    some = model.extend([1], [ids], keep=[[8, 0, 3]])
    assert torch.allclose(some[0], everything[0][[8, 0, 3]], atol=ROUNDING)


def test_a_rollback_equals_never_having_read_the_rejected_tokens(network: PreTrainedModel, model: CausalModel) -> None:
    """Passes of the same shapes add in the same order, so the logits are equal, not only close."""
    prompt, rejected, step = random_ids(12, 1), random_ids(30, 2), random_ids(7, 3)
    model.extend([0], [prompt])
    model.extend([0], [rejected])
    model.rollback(0, len(prompt))
    model.cache.check()
    after_rejection = model.extend([0], [step])

    fresh = make_model(network)
    fresh.extend([0], [prompt])
    assert torch.equal(after_rejection[0], fresh.extend([0], [step])[0])
    expected = slow_logits(network, prompt + step)[len(prompt) :]
    assert torch.allclose(after_rejection[0], expected, atol=ROUNDING)


def test_a_rollback_of_one_row_of_a_batch_equals_never_having_read_it(
    network: PreTrainedModel, model: CausalModel
) -> None:
    """The pass reads the stale positions, and its mask hides them."""
    prompts, step = [random_ids(12, 1), random_ids(20, 2)], random_ids(4, 3)
    model.extend([0, 1], prompts)
    model.extend([0], [random_ids(15, 4)])
    model.rollback(0, 12)
    after_rejection = model.extend([0, 1], [step, step])

    fresh = make_model(network)
    fresh.extend([0, 1], prompts)
    for row, expected in zip(after_rejection, fresh.extend([0, 1], [step, step]), strict=True):
        assert torch.equal(row, expected)


def test_ragged_rows_give_the_same_logits_as_each_row_alone(network: PreTrainedModel, model: CausalModel) -> None:
    """The slots are out of order and have gaps between them, and some rows are padded."""
    slots = [4, 0, 2]
    prompts = [random_ids(length, length) for length in (3, 17, 9)]
    steps = [random_ids(length, length + 50) for length in (5, 1, 2)]
    model.extend(slots, prompts)
    model.cache.check()
    logits = model.extend(slots, steps)
    assert [model.cache_length(slot) for slot in slots] == [8, 18, 11]
    for row, prompt, step in zip(logits, prompts, steps, strict=True):
        expected = slow_logits(network, prompt + step)[len(prompt) :]
        assert torch.allclose(row, expected, atol=ROUNDING)


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_very_different_lengths_give_the_same_logits_as_each_row_alone(
    network: PreTrainedModel, model: CausalModel, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepspec.engines.torch_engine.model.CALL_BYTES", 600)
    lengths = [3, 90, 5, 4, 70, 71]
    assert len(model.runs_of(lengths)) == 4
    texts = [random_ids(length + count, length) for length in lengths]
    slots = range(len(lengths))
    for slot, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        model.extend([slot], [text[:length]], keep=[[]])
    together = model.extend(slots, [text[length:] for text, length in zip(texts, lengths, strict=True)])
    model.cache.check()
    for text, logits in zip(texts, together, strict=True):
        assert torch.allclose(logits, slow_logits(network, text)[-count:], atol=ROUNDING)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.floats(0.5, 60))
def test_runs_of_like_length_are_the_cheapest(lengths: list[int], call_cost: float) -> None:
    def cost(counts: Sequence[int]) -> float:
        ends = list(accumulate(counts))
        runs = [lengths[end - count : end] for end, count in zip(ends, counts, strict=True)]
        return sum(call_cost + len(run) * max(run) for run in runs)

    runs = runs_of_like_length(lengths, call_cost) or [(len(lengths), 0)]
    counts = [count for count, _ in runs]
    assert sum(counts) == len(lengths)
    first = 0
    for count, fewer in runs:
        assert max(lengths[first : first + count]) == max(lengths) - fewer
        first += count
    cuts = [each for size in range(len(lengths)) for each in combinations(range(1, len(lengths)), size)]
    splits = [[end - start for start, end in pairwise([0, *each, len(lengths)])] for each in cuts]
    assert cost(counts) == pytest.approx(min(map(cost, splits)))


def test_growing_in_slots_and_in_length_keeps_the_contents(network: PreTrainedModel, model: CausalModel) -> None:
    ids = [random_ids(FIRST_CAPACITY - 3, 1), random_ids(20, 2)]
    beyond = random_ids(12, 3)
    model.extend([0], [ids[0]])
    model.extend([5], [ids[1]])  # more slots
    model.cache.check()
    long = model.extend([0], [beyond])  # more positions
    model.cache.check()
    short = model.extend([5], [beyond])
    assert torch.allclose(long[0], slow_logits(network, ids[0] + beyond)[-len(beyond) :], atol=ROUNDING)
    assert torch.allclose(short[0], slow_logits(network, ids[1] + beyond)[-len(beyond) :], atol=ROUNDING)


def test_branches_see_what_comes_before_them_and_not_each_other(network: PreTrainedModel, model: CausalModel) -> None:
    prompt, trunk = random_ids(6, 1), random_ids(5, 2)
    branches = [random_ids(3, 3), random_ids(1, 4), random_ids(4, 5)]
    model.extend([0], [prompt])
    logits = model.extend(
        [0],
        [trunk + [id for branch in branches for id in branch]],
        branches=[[Branch(len(branch)) for branch in branches]],
    )[0]
    model.cache.check()
    assert torch.allclose(logits[:5], slow_logits(network, prompt + trunk)[6:], atol=ROUNDING)
    column = len(trunk)
    for branch in branches:
        expected = slow_logits(network, prompt + trunk + branch)[-len(branch) :]
        assert torch.allclose(logits[column : column + len(branch)], expected, atol=ROUNDING)
        column += len(branch)
    model.rollback(0, len(prompt) + len(trunk))
    following = random_ids(2, 6)
    expected = slow_logits(network, prompt + trunk + following)[-2:]
    assert torch.allclose(model.extend([0], [following])[0], expected, atol=ROUNDING)


def test_each_row_of_a_pass_can_have_its_own_branches(network: PreTrainedModel, model: CausalModel) -> None:
    trunks, branches = [random_ids(5, 1), random_ids(9, 2), random_ids(3, 3)], [[2, 3], [], [4]]
    texts = [[random_ids(size, 10 * row + size) for size in sizes] for row, sizes in enumerate(branches)]
    ids = [[*trunk, *(id for text in row for id in text)] for trunk, row in zip(trunks, texts, strict=True)]
    logits = model.extend([2, 0, 5], ids, branches=[[Branch(length) for length in row] for row in branches])
    for trunk, row, actual in zip(trunks, texts, logits, strict=True):
        expected = [slow_logits(network, trunk), *(slow_logits(network, trunk + text)[-len(text) :] for text in row)]
        assert torch.allclose(actual, torch.cat(expected), atol=ROUNDING)


def test_a_branch_can_leave_the_trunk_anywhere(network: PreTrainedModel, model: CausalModel) -> None:
    prompts, trunk, branch = [random_ids(6, 1), random_ids(3, 9)], random_ids(5, 2), random_ids(3, 3)
    model.extend([0, 1], prompts)
    hidden = [0, 2, 5]
    row = [*trunk, *branch * len(hidden)]
    found = model.extend([0, 1], [row, row], branches=[[Branch(3, each) for each in hidden]] * 2)
    for prompt, logits in zip(prompts, found, strict=True):
        for number, each in enumerate(hidden):
            expected = slow_logits(network, prompt + trunk[: 5 - each] + branch)[-3:]
            assert torch.allclose(logits[5 + 3 * number :][:3], expected, atol=ROUNDING)


def test_a_model_with_its_own_cache_shares_only_the_weights(network: PreTrainedModel, model: CausalModel) -> None:
    twin = model.with_own_cache()
    model.extend([0], [random_ids(9, 1)])
    assert twin.cache_length(0) == 0
    ids = random_ids(5, 2)
    assert torch.allclose(twin.extend([0], [ids])[0], slow_logits(network, ids), atol=ROUNDING)
    assert (model.cache_length(0), twin.cache_length(0)) == (9, 5)
