"""Calls cancelled at random moments free their slots and do not affect other calls."""

import asyncio
import random

import pytest
import torch
from tiny_models import VOCAB_SIZE, llama_config, make_model, make_network, noisy_copy, serving, slow_greedy

from stepspec.engines.protocol import (
    Drafting,
    Generate,
    Sampling,
    Stop,
    TokenBuffer,
    Verify,
    collect,
)
from stepspec.engines.torch_engine.engine import MAX_SLOTS, TorchEngine

pytestmark = pytest.mark.anyio

NETWORK = make_network(llama_config())
PROMPTS = [[number % VOCAB_SIZE, 7, number // VOCAB_SIZE] for number in range(24)]
NUM_NEW = 20
EXPECTED = [slow_greedy(NETWORK, prompt, NUM_NEW) for prompt in PROMPTS]
DRAFTERS = ("none", "draft-model", "prompt-lookup", "suffix")


async def some_call(engine: TorchEngine, rng: random.Random) -> None:
    """Make a random call on a random prompt, and check its result."""
    number = rng.randrange(len(PROMPTS))
    buffer, expected = TokenBuffer(PROMPTS[number]), EXPECTED[number]
    if rng.random() < 0.3:
        verification = await engine.verify(Verify(buffer, expected[:9]))
        assert list(verification.choices) == expected[:9]
        return
    drafting = Drafting(rng.choice(DRAFTERS), rng.choice((None, 1, 4)))
    chunk = await collect(engine.generate(Generate(buffer, Sampling(), Stop(NUM_NEW), drafting)))
    assert list(chunk.ids) == expected


async def cancel_at_random(num_calls: int, seed: int) -> tuple[int, int]:
    """Make calls and cancel some at random. Check all results, and that every slot is free at the end.

    Returns:
        Bytes of the caches before and after the calls.
    """
    rng = random.Random(seed)
    model, drafter = make_model(NETWORK), make_model(noisy_copy(NETWORK, 0.1))
    async with serving(model, drafter) as engine:
        stop, drafting = Stop(NUM_NEW), Drafting("draft-model", 4)
        every_slot = [
            engine.generate(Generate(TokenBuffer([1, 2, 3]), Sampling(), stop, drafting)) for _ in range(MAX_SLOTS)
        ]
        await asyncio.gather(*map(collect, every_slot))
        size = model.cache.num_bytes + drafter.cache.num_bytes
        tasks: set[asyncio.Task[None]] = set()
        for _ in range(num_calls):
            tasks.add(asyncio.create_task(some_call(engine, rng)))
            await asyncio.sleep(rng.random() * 0.004)
            if rng.random() < 0.4:
                rng.choice(sorted(tasks, key=id)).cancel()
            done = {task for task in tasks if task.done()}
            for task in done:
                assert task.cancelled() or task.exception() is None, task.exception()
            tasks -= done
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(120):
            await asyncio.gather(*(some_call(engine, rng) for _ in range(MAX_SLOTS + 5)))
        return size, model.cache.num_bytes + drafter.cache.num_bytes


async def test_calls_cancelled_at_random_leave_the_others_right_and_every_slot_free() -> None:
    torch.set_num_threads(1)
    before, after = await cancel_at_random(150, seed=0)
    assert before == after


@pytest.mark.soak
async def test_thousands_of_calls_cancelled_at_random() -> None:
    torch.set_num_threads(1)
    for seed in range(1, 11):
        before, after = await cancel_at_random(2000, seed)
        assert before == after
