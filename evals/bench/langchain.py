"""Overhead of the LangChain chat model with engines that answer instantly, and many calls on one real engine."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import typer

from evals.bench.controller import InstantEngine, embedded_tokenizer, instant_requests
from evals.bench.problems import questions
from evals.bench.speed import ChatCost, ChatCosts, ManyChats, chat_lines
from stepspec.api.models import Pair, load_pair
from stepspec.chat.prompts import encode_request
from stepspec.cli.options import DraftOption, PairOption, TargetOption
from stepspec.cli.output import JsonOption, finish
from stepspec.engines.protocol import Tokenizer
from stepspec.evaluation.machine import conditions
from stepspec.langchain.chat import ChatStepSpec
from stepspec.loop.controller import run

POLICY = "two-level"
QUESTION = "How many apples are there?"
ROUNDS = 40
WARM_UP = 5


async def chat_cost(tokenizer: Tokenizer) -> ChatCost:
    """Measure the overhead of a call and of a streamed chunk over the controller, as medians of paired differences."""
    draft = InstantEngine(tokenizer)
    target = InstantEngine(tokenizer, num_steps=draft.num_steps)
    chat = ChatStepSpec(pair=Pair(target, draft), policy=POLICY, temperature=0.0, seed=0)
    make = instant_requests(target, draft, POLICY, encode_request(tokenizer, QUESTION))

    async def bare() -> int:
        return len([event async for event in run(make())])

    async def invoked() -> int:
        await chat.ainvoke(QUESTION)
        return 1

    async def streamed() -> int:
        stream: Any = chat.astream(QUESTION)
        async with aclosing(stream) as chunks:
            return len([None async for _ in chunks])

    seconds: dict[str, list[float]] = {"bare": [], "invoked": [], "streamed": []}
    calls: dict[str, Callable[[], Awaitable[int]]] = {"bare": bare, "invoked": invoked, "streamed": streamed}
    num_chunks = 0
    for turn in range(WARM_UP + ROUNDS):
        for name, call in calls.items():
            started = time.perf_counter()
            count = await call()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
                num_chunks = count if name == "streamed" else num_chunks
    return ChatCost(
        calls=ROUNDS,
        chunks=num_chunks,
        call_ms=_difference(seconds["invoked"], seconds["bare"]) * 1000,
        chunk_ms=_difference(seconds["streamed"], seconds["bare"]) * 1000 / num_chunks,
    )


def _difference(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a - b for a, b in zip(one, other, strict=True))


async def many_chats(pair: Pair, question: str, concurrent: int) -> ManyChats:
    """Time calls of equal work on one engine, first sequentially and then concurrently."""
    chat = ChatStepSpec(pair=pair, policy=POLICY, temperature=0.0, seed=0)

    async def call() -> tuple[float, int]:
        started = time.perf_counter()
        message = await chat.ainvoke(question)
        assert message.usage_metadata is not None
        return time.perf_counter() - started, message.usage_metadata["output_tokens"]

    for _ in range(3):
        await asyncio.gather(*(call() for _ in range(concurrent)))
    alone = [await call() for _ in range(concurrent)]
    started = time.perf_counter()
    together = await asyncio.gather(*(call() for _ in range(concurrent)))
    wall = time.perf_counter() - started
    seconds = [each for each, _ in together]
    return ManyChats(
        concurrent=concurrent,
        median_s=statistics.median(seconds),
        slowest_s=max(seconds),
        tokens_per_s_alone=sum(tokens for _, tokens in alone) / sum(each for each, _ in alone),
        tokens_per_s=sum(tokens for _, tokens in together) / wall,
    )


def main(
    concurrent: Annotated[int, typer.Option(min=2, help="Concurrent calls.")] = 64,
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time the overhead of the LangChain chat model, and many concurrent calls on one engine."""
    (question,), about = questions(1), conditions()
    with asyncio.Runner() as runner:
        added = runner.run(chat_cost(embedded_tokenizer()))
        models = load_pair(target, draft, pair=pair, notes=False)
        many = runner.run(many_chats(models, question, concurrent))
        names = {"target": models.target.name, "draft": models.draft.name if models.draft else ""}
        runner.run(models.aclose())
    costs = ChatCosts.model_validate({**about, **names, "policy": POLICY, "overhead": added, "many": many})
    finish(chat_lines(costs), costs, json_file)
