"""At temperature 0 in float32, speculation with any drafter writes the same ids as transformers."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from tiny_models import (
    DRAFTED,
    EXPERTS,
    FAMILIES,
    WINDOWS,
    generate,
    generate_all,
    make_config,
    make_model,
    make_network,
    noisy_copy,
    random_ids,
    serving,
    slow_greedy,
    slow_logits,
)
from transformers import PreTrainedModel

from stepspec.engines.protocol import DrafterName, Drafting, Probe, Sampling, TokenBuffer, Verify
from stepspec.engines.torch_engine.pace import Pacer
from stepspec.engines.torch_engine.row import BatchRow

pytestmark = pytest.mark.anyio

NUM_NEW = 24
# Ragged. One prompt contains id 0, which transformers would take for padding without a mask.
PROMPTS = [random_ids(length, seed=length) for length in (3, 11, 1, 30)]
PROMPTS[1][4] = 0

NOISE = 0.08


def draft_of(quality: str, target: PreTrainedModel) -> PreTrainedModel:
    if quality == "another random model":
        return make_network(target.config, seed=7)
    if quality == "a noisy copy":
        return noisy_copy(target, NOISE)
    assert quality == "the target itself", quality
    return target


@pytest.fixture(scope="module", params=FAMILIES)
def network(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_network(make_config(request.param))


@pytest.fixture(scope="module")
def expected(network: PreTrainedModel) -> list[list[int]]:
    return [slow_greedy(network, prompt, NUM_NEW) for prompt in PROMPTS]


async def test_four_concurrent_calls_without_a_drafter_equal_transformers(
    network: PreTrainedModel, expected: list[list[int]]
) -> None:
    async with serving(make_model(network)) as engine:
        chunks = await generate_all(engine, PROMPTS, NUM_NEW)
    assert [list(chunk.ids) for chunk in chunks] == expected
    assert all(chunk.passes == NUM_NEW and chunk.drafted == 0 for chunk in chunks)


@pytest.mark.parametrize("by_slot", [False, True], ids=["as they come", "by_slot"])
@pytest.mark.parametrize("quality", ["another random model", "a noisy copy", "the target itself"])
async def test_concurrent_calls_with_any_draft_model_equal_transformers(
    network: PreTrainedModel, expected: list[list[int]], quality: str, by_slot: bool
) -> None:
    drafter = make_model(draft_of(quality, network), by_slot=by_slot)
    async with serving(make_model(network, by_slot=by_slot), drafter) as engine:
        for num_tokens in (1, 3, 5):
            chunks = await generate_all(engine, PROMPTS, NUM_NEW, Drafting("draft-model", num_tokens))
            assert [list(chunk.ids) for chunk in chunks] == expected
            drafted, accepted = sum(c.drafted for c in chunks), sum(c.accepted for c in chunks)
            assert all(chunk.passes + chunk.accepted == NUM_NEW for chunk in chunks)
            assert all(chunk.drafted <= num_tokens * chunk.passes for chunk in chunks)
            if quality == "the target itself":
                assert accepted == drafted > 0
            elif quality == "a noisy copy":
                assert 0.15 * drafted < accepted < 0.9 * drafted
            else:
                assert accepted < 0.4 * drafted


@pytest.mark.parametrize("by_slot", [False, True], ids=["as they come", "by_slot"])
@pytest.mark.parametrize("num_tokens", [3, None])
@pytest.mark.parametrize("name", ["prompt-lookup", "suffix"])
async def test_concurrent_calls_with_lookup_drafters_equal_transformers(
    network: PreTrainedModel, expected: list[list[int]], name: DrafterName, num_tokens: int | None, by_slot: bool
) -> None:
    async with serving(make_model(network, by_slot=by_slot)) as engine:
        chunks = await generate_all(engine, PROMPTS, NUM_NEW, Drafting(name, num_tokens))
    assert [list(chunk.ids) for chunk in chunks] == expected
    if num_tokens:
        assert 0 < sum(chunk.accepted for chunk in chunks) < sum(chunk.drafted for chunk in chunks)


@pytest.mark.parametrize("by_slot", [False, True], ids=["as they come", "by_slot"])
async def test_looked_up_and_drafted_tokens_in_turn_equal_transformers(
    network: PreTrainedModel, by_slot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: Counter[bool] = Counter()

    def num_looked_up(_: Pacer, rows: Sequence[BatchRow], counts: Sequence[int], load: int) -> int:
        looked_up = bool(rows[0].length % 2)
        rounds[looked_up] += 1
        return 3 * looked_up

    monkeypatch.setattr(Pacer, "num_looked_up", num_looked_up)
    monkeypatch.setattr(Pacer, "count", lambda *_: 2)
    monkeypatch.setattr(Pacer, "worth_verifying", lambda *_: 2)
    prompts = [[*prompt, *prompt, *prompt] for prompt in PROMPTS]
    drafter = make_model(noisy_copy(network, NOISE), by_slot=by_slot)
    async with serving(make_model(network, by_slot=by_slot), drafter) as engine:
        chunks = await generate_all(engine, prompts, NUM_NEW, Drafting("draft-model"))
        chunks += [await generate(engine, each, NUM_NEW, drafting=Drafting("draft-model")) for each in prompts]
    assert [list(chunk.ids) for chunk in chunks] == 2 * [slow_greedy(network, each, NUM_NEW) for each in prompts]
    assert all(rounds[each] for each in (True, False))


@pytest.mark.parametrize("by_slot", [False, True], ids=["as they come", "by_slot"])
@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS, *WINDOWS, "bloom", "opt"])
async def test_all_families_equal_transformers(family: str, by_slot: bool) -> None:
    """Concurrent calls with every drafter, and a judged step, equal transformers, far beyond the windows."""
    network = make_network(make_config(family))
    expected = [slow_greedy(network, prompt, NUM_NEW) for prompt in PROMPTS]
    models = (make_model(each, by_slot=by_slot) for each in (network, noisy_copy(network, NOISE)))
    async with serving(*models) as engine:
        for drafting in (Drafting(), DRAFTED, Drafting("prompt-lookup", 3), Drafting("suffix", 3)):
            chunks = await generate_all(engine, PROMPTS, NUM_NEW, drafting)
            assert [list(chunk.ids) for chunk in chunks] == expected
            assert drafting.drafter != "draft-model" or sum(chunk.accepted for chunk in chunks) > 0
        step, question = random_ids(9, 7), random_ids(3, 8)
        probes = [Probe(tuple(question), (4, 9)), Probe(tuple(question), (2,))]
        every = [*step, *question, *question]  # as many ids as with the probes, whose columns may not be left
        for judged, asked in ((step, probes), (every, ())):
            found = await engine.verify(Verify(TokenBuffer(PROMPTS[-1]), judged, asked))
            logits = slow_logits(network, [*PROMPTS[-1], *judged, *question]).log_softmax(-1)
            own = [float(logits[place, id]) for place, id in enumerate(judged, len(PROMPTS[-1]) - 1)]
            assert found.logprobs == pytest.approx(own, abs=1e-3)
            for probe, logprobs in zip(asked, found.probe_logprobs, strict=True):
                assert logprobs == pytest.approx(logits[-1, [*probe.labels]].tolist(), abs=1e-3)


async def test_greedy_and_sampled_calls_can_share_rounds() -> None:
    network = make_network(make_config("llama"))
    async with serving(make_model(network), make_model(noisy_copy(network, NOISE))) as engine:
        greedy, sampled = Sampling(), Sampling(1.0, seed=3)
        chunks = await asyncio.gather(
            *(
                generate(engine, prompt, NUM_NEW, sampling=sampling, drafting=DRAFTED)
                for prompt in PROMPTS
                for sampling in (greedy, sampled)
            )
        )
    assert [list(chunk.ids) for chunk in chunks[::2]] == [slow_greedy(network, p, NUM_NEW) for p in PROMPTS]
    assert all(len(chunk.ids) == NUM_NEW for chunk in chunks[1::2])


async def test_a_draft_with_a_differently_padded_vocabulary_can_draft() -> None:
    """Models of one family may pad the same vocabulary to different sizes. Either of the two may be larger."""
    target = make_network(make_config("llama"))
    for size in (40, 56):
        drafter = make_network(make_config("llama", vocab_size=size), seed=5)
        async with serving(make_model(target), make_model(drafter)) as engine:
            chunk = await generate(engine, [1, 2, 3], 2, drafting=DRAFTED)
            assert list(chunk.ids) == slow_greedy(target, [1, 2, 3], 2)
            sampled = await generate(engine, [1, 2, 3], 2, sampling=Sampling(1.0), drafting=DRAFTED)
            assert len(sampled.ids) == 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
async def test_generation_stops_where_the_context_ends_also_when_drafting(family: str) -> None:
    """GPT-2 has a table of positions, and a position beyond the table would fail."""
    context = 40
    small = {"n_positions": context} if family == "gpt2" else {"max_position_embeddings": context}
    network = make_network(make_config(family, **small))
    prompts = [random_ids(length, seed=length) for length in (context - 1, context - 4, context - 9, 5)]
    expected = [slow_greedy(network, prompt, context - len(prompt)) for prompt in prompts]
    async with serving(make_model(network), make_model(noisy_copy(network, NOISE))) as engine:
        for drafting in (Drafting(), DRAFTED, Drafting("draft-model", 12)):
            chunks = await generate_all(engine, prompts, 10_000, drafting)
            assert [list(chunk.ids) for chunk in chunks] == expected
            assert {chunk.end for chunk in chunks} == {"length"}
