"""Times both models on the user's prompts by engine calls: reading, writing, wide passes, and drafters.

This module uses engines and token ids, no steps and no policies. Every turn uses different prompts. Figures are medians
over turns, so that a single disturbance of the machine has no effect.
"""

import asyncio
import statistics
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from stepspec.api.models import Pair
from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import (
    Distant,
    DrafterName,
    Drafting,
    Engine,
    Generate,
    Sampling,
    Stop,
    TokenBuffer,
    TokenChunk,
    Verify,
    collect,
    side_by_side,
)
from stepspec.evaluation.advise import formula
from stepspec.evaluation.advise.findings import ModelCosts, PairCosts, Trial

TURNS = 5
WRITTEN = 33
"""Tokens generated after each prompt to time one token."""
WIDTHS = (1, 8, 64)
"""Numbers of continuation tokens to verify in one pass."""

TRIED_PROMPTS, TRIED_TOKENS, TRIED_COUNT = 4, 64, 4
"""Minimum number of prompts to try a drafter on, tokens generated after each, and tokens drafted per round."""

T = TypeVar("T")
Ids = list[int]


async def load_costs(pair: Pair, prompts: Sequence[str], concurrency: int, widths: Sequence[int] = WIDTHS) -> PairCosts:
    """Measure the costs of both models at one concurrency.

    Args:
        pair: the models.
        prompts: rendered texts, which each model encodes with its own tokenizer.
        concurrency: number of concurrent requests.
        widths: numbers of tokens that the timed passes of the target read, the first of them 1.
    """
    target = await model_costs(pair.target, prompts, concurrency, widths)
    draft = await model_costs(pair.draft, prompts, concurrency, ()) if pair.draft else None
    return PairCosts(concurrency=concurrency, target=target, draft=draft)


async def model_costs(
    engine: Engine,
    prompts: Sequence[str],
    concurrency: int,
    widths: Sequence[int],
    num_turns: int = TURNS,
    written: int = WRITTEN,
) -> ModelCosts:
    """Measure the costs of one model.

    Args:
        engine: its engine.
        prompts: see `load_costs`.
        concurrency: number of concurrent requests.
        widths: numbers of tokens that the timed passes read, the first of them 1; empty for none.
        num_turns: number of turns.
        written: tokens generated after each prompt to time one token.
    """
    await engine.forget()  # cached prompts would be too cheap
    max_length = engine.max_context - max(WRITTEN, *WIDTHS)
    texts = [ids for prompt in prompts if 1 < len(ids := engine.tokenizer.encode(prompt)) <= max_length]
    if not texts:  # every prompt nearly fills the context, so measure after half a context instead
        texts = [engine.tokenizer.encode(prompt)[: engine.max_context // 2] for prompt in prompts]
    await _turn(
        engine, _some(texts, 0, concurrency), widths, written
    )  # the first calls of their kind may compile or allocate
    turns = [await _turn(engine, _some(texts, 1 + turn, concurrency), widths, written) for turn in range(num_turns)]
    reads = [turn.read_s for turn in turns if turn.read_s is not None]
    write_s = statistics.median(turn.write_s for turn in turns)
    round_trip_s = await engine.round_trip_s() if isinstance(engine, Distant) else None
    return ModelCosts(
        read_s=statistics.median(reads) if reads else None,
        write_s=write_s,
        pass_over_one={
            width: statistics.median(turn.pass_over_one[width] for turn in turns)
            for width in (turns[0].pass_over_one if widths else ())
        },
        round_trip_s=round_trip_s,
    )


def _some(texts: Sequence[Ids], turn: int, count: int) -> list[Ids]:
    """Return the texts for a turn, different from those of the turn before if there are enough."""
    return [texts[(turn * count + index) % len(texts)] for index in range(count)]


async def _turn(engine: Engine, texts: Sequence[Ids], widths: Sequence[int], written: int) -> ModelCosts:
    read_s = await _reading(engine, texts)
    buffers = [TokenBuffer(ids) for ids in texts]
    await _written(engine, buffers, 1)  # reads them
    one_s, _ = await _written(engine, buffers, 1)
    all_s, chunks = await _written(engine, buffers, written)
    more = max(len(chunk.ids) for chunk in chunks) - 1
    # If the model ends every text after the first token, only the time of a call for one token is known.
    write_s = max((all_s - one_s) / more, 0.01 * one_s) if more else one_s
    passes = {width: await _verifying(engine, buffers, chunks, width) for width in widths}
    wider = {width: 1 + (seconds - passes[widths[0]]) / write_s for width, seconds in passes.items()}
    return ModelCosts(read_s=read_s, write_s=write_s, pass_over_one={at: max(1.0, each) for at, each in wider.items()})


async def _reading(engine: Engine, texts: Sequence[Ids]) -> float | None:
    """Return the seconds per prompt token; None if the engine cached the prompts.

    The texts are rotated to begin in the middle, so that no engine has cached them.
    """
    buffers = [TokenBuffer([*ids[len(ids) // 2 :], *ids[: len(ids) // 2]]) for ids in texts]
    cold_s, chunks = await _written(engine, buffers, 1)
    warm_s, _ = await _written(engine, buffers, 1)
    unread = sum(len(buffer) - chunk.cached for buffer, chunk in zip(buffers, chunks, strict=True))
    return max(0.0, cold_s - warm_s) / unread if unread > len(buffers) else None


async def _written(engine: Engine, buffers: Sequence[TokenBuffer], num_tokens: int) -> tuple[float, list[TokenChunk]]:
    return await _timed([collect(engine.generate(Generate(each, Sampling(), Stop(num_tokens)))) for each in buffers])


async def _verifying(engine: Engine, buffers: Sequence[TokenBuffer], chunks: Sequence[TokenChunk], width: int) -> float:
    """Return the seconds of a pass that verifies `width` plausible continuation tokens."""
    calls = [
        engine.verify(Verify(buffer, _repeated(chunk.ids or tuple(buffer.since(0)), width), scores=False))
        for buffer, chunk in zip(buffers, chunks, strict=True)
    ]
    return (await _timed(calls))[0]


def _repeated(ids: Sequence[int], count: int) -> Ids:
    return [ids[index % len(ids)] for index in range(count)]


async def _timed(calls: Sequence[Coroutine[Any, Any, T]]) -> tuple[float, list[T]]:
    started = time.perf_counter()
    results = await side_by_side(*calls)
    return time.perf_counter() - started, results


async def try_drafters(
    pair: Pair, prompts: Sequence[str], costs: PairCosts, sampling: Sampling, max_tokens: int
) -> list[Trial]:
    """Try each drafter of the target on a few prompts, at the concurrency of `costs`."""
    stop = Stop(min(TRIED_TOKENS, max_tokens))
    names: list[DrafterName] = [name for name in pair.target.drafters if name != "engine"]
    texts = [pair.target.tokenizer.encode(prompt) for prompt in prompts[: max(TRIED_PROMPTS, costs.concurrency)]]
    return [await _trial(pair.target, name, texts, costs, sampling, stop) for name in names]


async def _trial(
    engine: Engine, drafter: DrafterName, texts: Sequence[Ids], costs: PairCosts, sampling: Sampling, stop: Stop
) -> Trial:
    await engine.forget()  # cached prompts would be too cheap
    before, slots = engine.metrics(), asyncio.Semaphore(costs.concurrency)

    async def write(ids: Ids) -> None:
        async with slots:
            drafting = Drafting(drafter, TRIED_COUNT)
            await collect(engine.generate(Generate(TokenBuffer(ids), sampling, stop, drafting)))

    await side_by_side(*map(write, texts))
    return _make_trial(drafter, engine.metrics() - before, costs)


def _make_trial(drafter: DrafterName, work: EngineMetrics, costs: PairCosts) -> Trial:
    acceptance, coverage = work.acceptance or 0.0, work.drafts / work.rounds if work.rounds else 0.0
    rounds_with_drafts = coverage * work.passes["verify"]
    draft_s = work.seconds.get("draft", 0.0) / (TRIED_COUNT * rounds_with_drafts) if rounds_with_drafts else 0.0
    relative = formula.RelativeCosts(draft_s / costs.target.write_s, costs.target.pass_over_one)
    best, predicted = formula.best_num_tokens(acceptance, relative, coverage)
    return Trial(
        drafter=drafter,
        num_tokens=TRIED_COUNT,
        acceptance=acceptance,
        coverage=coverage,
        cost=relative.drafting,
        best_num_tokens=best,
        predicted=predicted,
        ideal=formula.ideal_speedup(relative),
    )
