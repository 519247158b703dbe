"""Calls that are cancelled, passes that fail, and engines that are closed."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
import torch
from tiny_models import (
    DRAFTED,
    VOCAB_SIZE,
    generate,
    llama_config,
    make_model,
    make_network,
    make_tokenizer,
    noisy_copy,
    random_ids,
    serving,
    slow_greedy,
)
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel

from stepspec.engines.protocol import (
    DrafterName,
    Drafting,
    Generate,
    Sampling,
    Stop,
    TokenBuffer,
    TokenChunk,
    Verify,
    collect,
)
from stepspec.engines.torch_engine.engine import MAX_SLOTS, TorchEngine
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.errors import EngineError, UsageError

pytestmark = pytest.mark.anyio

POISON = VOCAB_SIZE - 1
FOREVER = 30_000
PROMPT = [1, 2, 3]


class PoisonableBody(LlamaModel):
    """A Llama body that raises an error when it reads the poison token."""

    def forward(self, input_ids: torch.Tensor, **options):  # type: ignore[no-untyped-def,override]
        if (input_ids == POISON).any():
            raise RuntimeError("poisoned")
        return super().forward(input_ids=input_ids, **options)


class PoisonableLlama(LlamaForCausalLM):
    """A Llama model with that body."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = PoisonableBody(config)


@pytest.fixture(scope="module")
def network() -> PreTrainedModel:
    network = make_network(llama_config(max_position_embeddings=1 << 15))
    with torch.no_grad():
        network.lm_head.weight[POISON] = 0  # never the argmax, so it occurs only in prompts
    return network


def poisonable(network: PreTrainedModel) -> CausalModel:
    copied = PoisonableLlama(network.config)
    copied.load_state_dict(network.state_dict())
    return make_model(copied.eval(), "poisonable")


def endless(
    engine: TorchEngine, prompt: list[int], drafting: Drafting = Drafting()
) -> AsyncGenerator[TokenChunk, None]:
    return engine.generate(Generate(TokenBuffer(prompt), Sampling(), Stop(FOREVER), drafting))


async def assert_serves(engine: TorchEngine, network: PreTrainedModel, drafting: Drafting = Drafting()) -> None:
    """Assert that the engine gives right results, long before an endless call would release its slot."""
    async with asyncio.timeout(20):
        chunk = await generate(engine, PROMPT, 5, drafting=drafting)
        verification = await engine.verify(Verify(TokenBuffer(PROMPT), chunk.ids))
    assert list(chunk.ids) == list(verification.choices) == slow_greedy(network, PROMPT, 5)


@pytest.mark.parametrize("drafting", [Drafting(), DRAFTED], ids=str)
async def test_closing_the_iterators_frees_their_slots(network: PreTrainedModel, drafting: Drafting) -> None:
    async with serving(make_model(network), make_model(noisy_copy(network, 0.1))) as engine:
        calls = [endless(engine, [number % 40, 2], drafting) for number in range(MAX_SLOTS)]
        await asyncio.gather(*(anext(call) for call in calls))
        for call in calls:
            await call.aclose()
        await assert_serves(engine, network, drafting)


async def test_cancelling_running_and_waiting_tasks_frees_their_slots(
    network: PreTrainedModel,
) -> None:
    async with serving(make_model(network)) as engine:
        tasks = [asyncio.create_task(collect(endless(engine, [number % 40, 2]))) for number in range(MAX_SLOTS + 5)]
        verifying = asyncio.create_task(engine.verify(Verify(TokenBuffer(PROMPT), [4])))
        await asyncio.sleep(0.2)
        for task in (*tasks, verifying):
            task.cancel()
        outcomes = await asyncio.gather(*tasks, verifying, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        await assert_serves(engine, network)


async def test_a_text_continues_correctly_after_a_cancelled_call(network: PreTrainedModel) -> None:
    buffer = TokenBuffer(PROMPT)
    async with serving(make_model(network), make_model(noisy_copy(network, 0.1))) as engine:
        call = engine.generate(Generate(buffer, Sampling(), Stop(FOREVER), DRAFTED))
        first = await anext(call)
        await call.aclose()
        buffer.append(first.ids[:4])
        following = await generate(engine, buffer, 6, drafting=DRAFTED)
    assert [*first.ids[:4], *following.ids] == slow_greedy(network, PROMPT, 10)


@pytest.mark.parametrize("drafting", [Drafting(), DRAFTED], ids=str)
async def test_a_failing_prompt_fails_only_its_own_call(network: PreTrainedModel, drafting: Drafting) -> None:
    async with serving(poisonable(network), make_model(noisy_copy(network, 0.1))) as engine:
        calls = [generate(engine, prompt, 60, drafting=drafting) for prompt in (PROMPT, [4, 5], [POISON, 1, 2])]
        good, other, failed = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(failed, EngineError)
        assert str(failed) == "poisonable failed: RuntimeError: poisoned"
        assert isinstance(good, TokenChunk)
        assert isinstance(other, TokenChunk)
        assert list(good.ids) == slow_greedy(network, PROMPT, 60)
        assert list(other.ids) == slow_greedy(network, [4, 5], 60)
        await assert_serves(engine, network, drafting)


@pytest.mark.parametrize("drafting", [Drafting(), DRAFTED], ids=str)
async def test_a_failing_shared_pass_fails_only_the_call_that_causes_it(
    network: PreTrainedModel, drafting: Drafting
) -> None:
    """A prompt of one token is read in the round that all rows share."""
    async with serving(poisonable(network), make_model(noisy_copy(network, 0.1))) as engine:
        running = [generate(engine, prompt, 200, drafting=drafting) for prompt in (PROMPT, [4, 5])]
        good, other, failed = await asyncio.gather(
            *running, generate(engine, [POISON], 5, drafting=drafting), return_exceptions=True
        )
        assert isinstance(failed, EngineError)
        assert isinstance(good, TokenChunk)
        assert isinstance(other, TokenChunk)
        assert list(good.ids) == slow_greedy(network, PROMPT, 200)
        assert list(other.ids) == slow_greedy(network, [4, 5], 200)
        await assert_serves(engine, network, drafting)


async def test_out_of_memory_fails_only_the_request_that_is_too_large(
    network: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make_model(network), random_ids(60)
    extend = model.extend

    def limited(slots: Sequence[int], ids: Sequence[Sequence[int]], **options: Any) -> Any:
        if max(map(len, ids)) > 50:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return extend(slots, ids, **options)

    monkeypatch.setattr(model, "extend", limited)
    async with serving(model) as engine:
        small, big = await asyncio.gather(
            generate(engine, PROMPT, 20), generate(engine, prompt, 5), return_exceptions=True
        )
        assert isinstance(big, EngineError)
        assert "ran out of memory" in str(big)
        assert "Reduce the concurrency or the context" in str(big)
        assert isinstance(small, TokenChunk)
        assert list(small.ids) == slow_greedy(network, PROMPT, 20)
        await assert_serves(engine, network)


async def test_a_failing_drafter_is_an_error_and_the_engine_continues(network: PreTrainedModel) -> None:
    async with serving(make_model(network), poisonable(noisy_copy(network, 0.1))) as engine:
        for prompt in ([POISON, 1, 2], [POISON]):
            with pytest.raises(EngineError, match="poisoned"):
                await generate(engine, prompt, 5, drafting=DRAFTED)
        await assert_serves(engine, network, DRAFTED)
        assert list((await generate(engine, [POISON, 1], 5)).ids) == slow_greedy(network, [POISON, 1], 5)


async def test_a_text_continues_after_a_failed_verification(network: PreTrainedModel) -> None:
    buffer = TokenBuffer(PROMPT)
    async with serving(poisonable(network)) as engine:
        await engine.verify(Verify(buffer, [7, 8, 9]))
        buffer.append([7])
        with pytest.raises(EngineError, match="poisoned"):
            await engine.verify(Verify(buffer, [4, POISON]))
        chunk = await generate(engine, buffer, 6)
    assert list(chunk.ids) == slow_greedy(network, [*PROMPT, 7], 6)


async def test_closing_fails_running_and_waiting_calls(network: PreTrainedModel) -> None:
    async with serving(make_model(network)) as engine:
        running = [endless(engine, [number % 40, 2]) for number in range(MAX_SLOTS)]
        await asyncio.gather(*(anext(call) for call in running))
        waiting = [
            asyncio.create_task(generate(engine, PROMPT, 5)),
            asyncio.create_task(engine.verify(Verify(TokenBuffer(PROMPT), [4]))),
        ]
        await asyncio.sleep(0)
        await engine.aclose()
        async with asyncio.timeout(5):
            outcomes = await asyncio.gather(*map(collect, running), *waiting, return_exceptions=True)
    assert {str(outcome) for outcome in outcomes} == {"The engine of tiny was closed."}
    assert {type(outcome) for outcome in outcomes} == {EngineError}


async def test_calls_after_closing_are_refused_and_closing_twice_is_harmless(
    network: PreTrainedModel,
) -> None:
    engine = TorchEngine(make_model(network), make_tokenizer())
    await engine.aclose()
    await engine.aclose()
    async with asyncio.timeout(5):
        with pytest.raises(EngineError, match="was closed"):
            await generate(engine, PROMPT, 5)
        with pytest.raises(EngineError, match="was closed"):
            await engine.verify(Verify(TokenBuffer(PROMPT), [4]))


async def test_an_engine_serves_an_event_loop_after_another_has_ended(network: PreTrainedModel) -> None:
    """Abandoned calls of a closed event loop do not stop the engine."""
    async with serving(make_model(network)) as engine:

        async def leave() -> None:
            await anext(endless(engine, PROMPT))

        await asyncio.to_thread(asyncio.run, leave())
        await assert_serves(engine, network)


async def test_drafted_by_replaces_the_engine(network: PreTrainedModel) -> None:
    alone = TorchEngine(make_model(network, "target"), make_tokenizer(), weights="abc")
    draft = TorchEngine(make_model(noisy_copy(network, 0.08), "draft"), make_tokenizer())
    await generate(alone, random_ids(20), 5)
    pair = alone.drafted_by(draft)
    try:
        with pytest.raises(EngineError, match="was closed"):
            await generate(alone, PROMPT, 5)
        chunk, by_draft = await asyncio.gather(
            generate(pair, PROMPT, 20, drafting=DRAFTED), generate(draft, PROMPT, 20)
        )
        assert list(chunk.ids) == slow_greedy(network, PROMPT, 20)
        assert chunk.accepted > 0
        assert len(by_draft.ids) == 20, "the draft's own engine does not continue"
        expected = {"name": "target", "weights": "abc", "dtype": "float32", "device": "cpu", "threads": 1}
        assert pair.describe() == expected
    finally:
        await pair.aclose()
        await draft.aclose()


async def test_drafting_without_a_draft_model_is_refused_and_not_listed(network: PreTrainedModel) -> None:
    async with serving(make_model(network)) as engine:
        with pytest.raises(UsageError, match="needs a draft model"):
            await generate(engine, PROMPT, 5, drafting=DRAFTED)
        assert engine.drafters == ["prompt-lookup", "suffix"]


@pytest.mark.parametrize("drafter", ["draft-model", "suffix"])
async def test_after_forget_new_calls_start_cold_and_running_calls_continue(
    network: PreTrainedModel, drafter: DrafterName
) -> None:
    drafting, prompt, other = Drafting(drafter, 4), random_ids(40, seed=1), random_ids(30, seed=2)
    async with serving(make_model(network), make_model(noisy_copy(network, 0.08))) as engine:
        cold = await generate(engine, prompt, 20, drafting=drafting)
        warm = await generate(engine, prompt, 20, drafting=drafting)
        assert (cold.cached, warm.cached) == (0, len(prompt) - 1)
        running = asyncio.create_task(generate(engine, other, 60, drafting=drafting))
        await asyncio.sleep(0)
        await engine.forget()
        again = await generate(engine, prompt, 20, drafting=drafting)
        assert again.cached == 0
        assert (again.drafted, again.accepted) == (cold.drafted, cold.accepted)
        assert list((await running).ids) == slow_greedy(network, other, 60)
        assert cold.ids == warm.ids == again.ids
    with pytest.raises(EngineError, match="was closed"):
        await engine.forget()


async def test_past_outputs_help_the_suffix_drafter_until_they_are_forgotten(network: PreTrainedModel) -> None:
    prompt, drafting = random_ids(40, seed=1), Drafting("suffix", 4)
    async with serving(make_model(network)) as engine:
        cold = (await generate(engine, prompt, 20, drafting=drafting)).accepted
        assert (await generate(engine, prompt, 20, drafting=drafting)).accepted > cold
        await engine.forget()
        assert (await generate(engine, prompt, 20, drafting=drafting)).accepted == cold


EXITS = """
import threading, time
from stepspec import SyncStepSpec

spec = SyncStepSpec(policy="target")
begun = threading.Event()

def answer():
    for _ in spec.stream("How many?", max_tokens=2000):
        begun.set()

threading.Thread(target=answer, daemon=True).start()
begun.wait(60)
"""


def test_a_program_may_exit_while_its_engine_is_working() -> None:
    """Otherwise PyTorch aborts the process, because Python unwinds the stack of daemon threads."""
    process = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
