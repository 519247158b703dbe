"""Log-probs and entropies of generated ids equal those of the model's own logits, however the ids were chosen."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tiny_models import (
    DRAFTED,
    VOCAB_SIZE,
    llama_config,
    make_model,
    make_network,
    noisy_copy,
    piece,
    random_ids,
    serving,
    slow_logits,
)
from transformers import PreTrainedModel

from stepspec.engines.protocol import Drafting, Generate, Sampling, Stop, TokenBuffer, TokenChunk, collect
from stepspec.engines.torch_engine.self_check import checked_model

pytestmark = pytest.mark.anyio

ROUNDING = 2e-4
HOT = Sampling(
    0.8, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, logit_bias=((3, 2.0),), seed=5
)
PROMPTS = [random_ids(12, 1), random_ids(5, 2), [7]]


@pytest.fixture(scope="module")
def network() -> PreTrainedModel:
    return make_network(llama_config())


def assert_of_the_model(network: PreTrainedModel, prompt: Sequence[int], chunk: TokenChunk) -> None:
    """Check the values of a chunk against plain passes: at temperature 1, without penalty, bias or filter."""
    rows = slow_logits(network, [*prompt, *chunk.ids])[len(prompt) - 1 : -1].log_softmax(-1)
    expected = [rows[index, id].item() for index, id in enumerate(chunk.ids)]
    assert chunk.logprobs == pytest.approx(expected, abs=ROUNDING)
    assert chunk.entropies == pytest.approx((-(rows.exp() * rows).sum(-1)).tolist(), abs=ROUNDING)


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", [Drafting(), DRAFTED, Drafting("prompt-lookup", 3)], ids=lambda d: d.drafter)
async def test_they_are_those_of_the_model(
    network: PreTrainedModel, drafting: Drafting, sampling: Sampling, by_slot: bool
) -> None:
    model, drafter = (make_model(each, by_slot=by_slot) for each in (network, noisy_copy(network, 0.2)))
    async with serving(model, drafter) as engine:
        call = Generate(TokenBuffer([0]), sampling, Stop(24), drafting, logprobs=True)
        calls = [replace(call, prompt=TokenBuffer(prompt)) for prompt in PROMPTS]
        chunks = await asyncio.gather(*(collect(engine.generate(each)) for each in calls))
        plain = await collect(engine.generate(replace(calls[0], logprobs=False)))
    for prompt, chunk in zip(PROMPTS, chunks, strict=True):
        assert_of_the_model(network, prompt, chunk)
    assert (plain.ids, plain.logprobs, plain.entropies) == (chunks[0].ids, None, None)


@pytest.mark.parametrize("ends_with", ["a token", "a delimiter"])
async def test_a_text_that_ends_within_a_round_has_no_values_of_tokens_behind_its_end(
    network: PreTrainedModel, ends_with: str
) -> None:
    """Every drafted token is accepted, so that the round has further tokens."""
    async with serving(make_model(network), make_model(network)) as engine:
        call = Generate(TokenBuffer(PROMPTS[0]), Sampling(), Stop(24), Drafting("draft-model", 7), logprobs=True)
        ids = (await collect(engine.generate(call))).ids
        for index in range(14):
            stop = (
                Stop(24, (piece(ids[index]),)) if ends_with == "a delimiter" else Stop(24, (), frozenset({ids[index]}))
            )
            chunk = await collect(engine.generate(replace(call, prompt=TokenBuffer(PROMPTS[0]), stop=stop)))
            assert chunk.ids == ids[: ids.index(ids[index]) + 1]
            assert len(chunk.logprobs or ()) == len(chunk.entropies or ()) == len(chunk.ids)
            assert_of_the_model(network, PROMPTS[0], chunk)


async def test_a_draft_vocabulary_is_the_whole_distribution(network: PreTrainedModel) -> None:
    vocabulary = tuple(range(0, VOCAB_SIZE, 3))
    async with serving(checked_model(copy.deepcopy(network), "draft", vocabulary)) as engine:
        chunk = await collect(engine.generate(Generate(TokenBuffer(PROMPTS[0]), Sampling(), Stop(9), logprobs=True)))
    rows = slow_logits(network, [*PROMPTS[0], *chunk.ids])[len(PROMPTS[0]) - 1 : -1][:, list(vocabulary)]
    logprobs = rows.log_softmax(-1)
    assert set(chunk.ids) <= set(vocabulary)
    expected = [row[vocabulary.index(id)].item() for row, id in zip(logprobs, chunk.ids, strict=True)]
    assert chunk.logprobs == pytest.approx(expected, abs=ROUNDING)
    assert chunk.entropies == pytest.approx((-(logprobs.exp() * logprobs).sum(-1)).tolist(), abs=ROUNDING)
