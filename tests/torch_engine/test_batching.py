"""Calls share passes without affecting each other: the output of a row depends only on its own seed and text."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest
from tiny_models import (
    DRAFTED,
    generate,
    generate_all,
    llama_config,
    make_model,
    make_network,
    noisy_copy,
    random_ids,
    serving,
    slow_greedy,
)
from transformers import PreTrainedModel

from stepspec.engines.protocol import (
    DrafterName,
    Drafting,
    Generate,
    Probe,
    Sampling,
    Stop,
    TokenBuffer,
    TokenChunk,
    Verification,
    Verify,
    collect,
)
from stepspec.engines.torch_engine.engine import MAX_SLOTS, TorchEngine

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def network() -> PreTrainedModel:
    return make_network(llama_config(initializer_range=0.15))


@dataclass(frozen=True)
class Call:
    prompt: tuple[int, ...]
    num_tokens: int
    sampling: Sampling
    drafting: Drafting

    async def run(self, engine: TorchEngine) -> TokenChunk:
        return await generate(engine, self.prompt, self.num_tokens, sampling=self.sampling, drafting=self.drafting)


# The rows end in different rounds, because a row is most likely to depend on others in its last drafts.
CALLS = [
    Call(
        prompt=tuple(random_ids(3 + 5 * number, seed=number)),
        num_tokens=9 + 4 * number,
        sampling=Sampling() if number % 4 == 3 else Sampling(1.0, seed=number % 2, top_p=1 - 0.05 * number),
        drafting=drafting,
    )
    for number in range(6)
    for drafting in (Drafting(), DRAFTED, Drafting("draft-model", 6))
]


async def test_a_row_emits_the_same_alone_and_among_others(network: PreTrainedModel) -> None:
    async with serving(make_model(network), make_model(noisy_copy(network, 0.2))) as engine:
        alone = [await call.run(engine) for call in CALLS]
        together = await asyncio.gather(*(call.run(engine) for call in CALLS))
    for call, first, second in zip(CALLS, alone, together, strict=True):
        assert (first.ids, first.end) == (second.ids, second.end), call
        costs = [(chunk.passes, chunk.drafted, chunk.accepted) for chunk in (first, second)]
        assert costs[0] == costs[1], call


@pytest.mark.parametrize("drafter", ["prompt-lookup", "suffix"])
async def test_with_lookup_drafters_a_row_emits_the_same_alone_and_among_others(
    network: PreTrainedModel, drafter: DrafterName
) -> None:
    calls = [replace(call, drafting=Drafting(drafter, 3)) for call in CALLS[::2]]
    async with serving(make_model(network)) as engine:
        alone = [await call.run(engine) for call in calls]
        await engine.forget()
        together = await asyncio.gather(*(call.run(engine) for call in calls))
    assert [(each.ids, each.end) for each in alone] == [(each.ids, each.end) for each in together]
    assert sum(each.accepted for each in together) > 0


@pytest.mark.parametrize("drafting", [Drafting(), Drafting("draft-model", 3)])
async def test_steps_are_judged_in_the_passes_of_calls_that_generate(
    network: PreTrainedModel, drafting: Drafting
) -> None:
    steps = [
        Verify(TokenBuffer(random_ids(10, seed=n)), random_ids(4 + 3 * n, seed=50 + n), [Probe((1, 2), (3, 4))] * n)
        for n in range(4)
    ]
    text = Generate(TokenBuffer(random_ids(12)), Sampling(0.8), Stop(150), drafting)
    async with serving(make_model(network), make_model(noisy_copy(network, 0.2))) as engine:
        alone = [await engine.verify(each) for each in steps]
        ids = (await collect(engine.generate(text))).ids
        await engine.forget()
        before = engine.metrics().passes["read"]
        together: list[Verification] = []
        written: list[int] = []
        async with aclosing(engine.generate(replace(text, prompt=TokenBuffer(random_ids(12))))) as chunks:
            async for chunk in chunks:
                written += chunk.ids
                if len(together) < len(steps):
                    together = await asyncio.gather(*(engine.verify(each) for each in steps))
        assert engine.metrics().passes["read"] - before <= 2, "the text's prompt, and passes that measure"
    assert tuple(written) == ids
    for one, other in zip(alone, together, strict=True):
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert [*other.probe_logprobs] == [pytest.approx(each, abs=1e-4) for each in one.probe_logprobs]
        assert (other.choices, other.next_choice) == (one.choices, one.next_choice)


async def test_equal_calls_give_equal_text_and_other_seeds_give_other_text(network: PreTrainedModel) -> None:
    async with serving(make_model(network), make_model(noisy_copy(network, 0.2))) as engine:
        for drafting in (Drafting(), DRAFTED):
            texts = [
                (await generate(engine, [1, 2], 20, sampling=Sampling(1.0, seed=seed), drafting=drafting)).ids
                for seed in (0, 1, 0, 2)
            ]
            assert texts[0] == texts[2]
            assert len(set(texts)) == 3


async def test_more_calls_than_slots_wait_and_finish(network: PreTrainedModel) -> None:
    prompts = [random_ids(3, seed) for seed in range(MAX_SLOTS + 9)]
    async with serving(make_model(network), make_model(noisy_copy(network, 0.1))) as engine:
        verifying = asyncio.create_task(engine.verify(Verify(TokenBuffer([1, 2]), [3])))
        chunks = await generate_all(engine, prompts, 4, DRAFTED)
        await verifying
    assert [list(chunk.ids) for chunk in chunks] == [slow_greedy(network, prompt, 4) for prompt in prompts]


async def test_texts_in_reused_slots_are_right(network: PreTrainedModel) -> None:
    """More texts than slots continue in turn, so that every slot is reused for other texts."""
    buffers = [TokenBuffer(random_ids(3 + seed % 5, seed)) for seed in range(MAX_SLOTS + 3)]
    prompts = [buffer.since(0) for buffer in buffers]
    async with serving(make_model(network), make_model(noisy_copy(network, 0.1))) as engine:
        for _ in range(2):
            for buffer in buffers:
                buffer.append((await generate(engine, buffer, 2, drafting=DRAFTED)).ids)
    for prompt, buffer in zip(prompts, buffers, strict=True):
        assert buffer.since(len(prompt)) == slow_greedy(network, prompt, 4)


async def test_concurrent_calls_on_one_text_do_not_affect_each_other(network: PreTrainedModel) -> None:
    buffer, expected = TokenBuffer([5, 6, 7]), slow_greedy(network, [5, 6, 7], 12)
    async with serving(make_model(network), make_model(noisy_copy(network, 0.1))) as engine:
        verification, *chunks = await asyncio.gather(
            engine.verify(Verify(buffer, expected)),
            *(generate(engine, buffer, 12, drafting=drafting) for drafting in (DRAFTED, Drafting(), DRAFTED)),
        )
        buffer.append(expected[:5])
        following = await generate(engine, buffer, 7)
    assert list(verification.choices) == expected
    assert [list(chunk.ids) for chunk in chunks] == [expected] * 3
    assert list(following.ids) == expected[5:]
