"""Cost of the controller itself, measured with an engine that answers instantly.

Measures several prompt lengths and numbers of concurrent requests. Every fourth step is rejected; its first half is
salvaged and the rest is regenerated, so that every path for a step runs.
"""

import asyncio
import statistics
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Annotated
from weakref import WeakKeyDictionary

import typer

from evals.bench.speed import ControllerCost, ControllerCosts, controller_table
from stepspec.api.models import Pair
from stepspec.api.pairs import EMBEDDED_NAME, find_pair
from stepspec.api.policy_support import fit_policy
from stepspec.cli.output import JsonOption, finish
from stepspec.engines.hugging_face import load_tokenizer
from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import (
    EVERYTHING,
    Ability,
    DrafterName,
    Generate,
    Sampling,
    TokenBuffer,
    TokenChunk,
    Tokenizer,
    Verification,
    Verify,
)
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.conversation import Conversation
from stepspec.evaluation.machine import conditions
from stepspec.loop.controller import run
from stepspec.loop.ledger import Ledger
from stepspec.loop.policy import load_policy
from stepspec.loop.request import Request
from stepspec.loop.result import Done, Result

POLICY = "two-level"
STEPS = 120
"""Number of steps in one request."""
REFUSED_EVERY = 4
SENTENCE = "so there are {number} apples in the basket and we go on from there to the next person in the story"

Transport = Callable[[TokenBuffer], Callable[[], int]]
"""For a request, returns a function that encodes the prompt as a remote request and returns its size in bytes."""


@dataclass
class InstantEngine:
    """An engine that generates and verifies without a model."""

    tokenizer: Tokenizer
    name: str = "instant"
    max_context: int = 1 << 30
    abilities: frozenset[Ability] = EVERYTHING - {"logprobs", "entropies"}
    drafters: tuple[DrafterName, ...] = ("draft-model",)
    own_speculation: str | None = "none"
    default_sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    num_steps: WeakKeyDictionary[TokenBuffer, int] = field(default_factory=WeakKeyDictionary[TokenBuffer, int])
    """Steps proposed in each request. The target shares the draft's counts, because it rejects every fourth step."""

    def __post_init__(self) -> None:
        sentences = [f"{number}: {SENTENCE.format(number=number)}.\n\n" for number in range(STEPS)]
        self.steps = [tuple(self.tokenizer.encode_text(sentence)) for sentence in sentences]
        tags = self.tokenizer.thinking
        self._end = next(iter(self.tokenizer.end_ids)) if tags is None else tags.ending[0]

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        """See `Engine.generate`: yields the next step, or an end token."""
        await asyncio.sleep(0)
        index = self.num_steps.get(call.prompt, 0)
        if not call.stop.delimiters:
            yield TokenChunk((next(iter(self.tokenizer.end_ids)),), "token", passes=1)
        elif index < STEPS:
            self.num_steps[call.prompt] = index + 1
            yield TokenChunk(self.steps[index], "delimiter", passes=1)
        else:
            yield TokenChunk((self._end,), "token", passes=1)

    async def check_schema(self, json_schema: str) -> None:
        """See `Engine.check_schema`: accepts any schema."""

    async def verify(self, call: Verify) -> Verification:
        """See `Engine.verify`: in every fourth step, the argmax token in the middle differs from the proposed token."""
        await asyncio.sleep(0)
        ids = tuple(call.continuation)
        choices, logprobs = list(ids), [-0.1] * len(ids)
        index = self.num_steps.get(call.prompt, 0)
        if ids and index % REFUSED_EVERY == 0:
            middle = len(ids) // 2
            choices[middle], logprobs[middle] = self.steps[0][0], -9.0
        return Verification(tuple(logprobs), tuple(choices), self._end if not ids else ids[0])

    def describe(self) -> dict[str, str | None]:
        """See `Engine.describe`."""
        return {"name": self.name, "weights": None, "dtype": None, "device": None}

    def metrics(self) -> EngineMetrics:
        """See `Engine.metrics`."""
        return EngineMetrics()

    async def forget(self) -> None:
        """Nothing to forget."""

    async def aclose(self) -> None:
        """Nothing to free."""


async def controller_cost(
    tokenizer: Tokenizer, context: int, concurrent: int, transport: Transport | None
) -> ControllerCost:
    """Measure the cost of a step. A first round warms up.

    Args:
        tokenizer: the tokenizer of the engine.
        context: tokens in each prompt.
        concurrent: number of concurrent requests.
        transport: how to encode a prompt for a remote engine; None measures no transport.
    """
    await _requests(tokenizer, context, concurrent)
    results = await _requests(tokenizer, context, concurrent)
    tracemalloc.start()
    await _requests(tokenizer, context, concurrent)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    per_step = [result.times.controller / result.counts.steps * 1000 for result in results]
    cost = ControllerCost(
        context=context,
        concurrent=concurrent,
        steps=sum(result.counts.steps for result in results),
        ms=statistics.fmean(per_step),
        memory_bytes=peak / concurrent,
    )
    if transport is None:
        return cost
    milliseconds, num_bytes = _transported(tokenizer, context, transport)
    return cost.model_copy(update={"transport_ms": milliseconds, "transport_bytes": num_bytes})


def instant_requests(
    target: InstantEngine, draft: InstantEngine, policy: str, prompt: list[int]
) -> Callable[[], Request]:
    """Return a function that makes equal requests to two engines."""
    fitted, _ = fit_policy(load_policy(policy)[0], Pair(target, draft))
    panel = fitted.panel(target.tokenizer)

    def make() -> Request:
        return Request(
            policy=fitted,
            target=target,
            draft=draft,
            panel=panel,
            tags=target.tokenizer.thinking,
            sampling=Sampling(),
            ledger=Ledger(1 << 30),
            prompt=prompt,
        )

    return make


async def _requests(tokenizer: Tokenizer, context: int, concurrent: int) -> list[Result]:
    """Run concurrent requests and return their results."""
    draft = InstantEngine(tokenizer)
    target = InstantEngine(tokenizer, num_steps=draft.num_steps)
    make = instant_requests(target, draft, POLICY, _prompt(target, context))

    async def request() -> Result:
        async for event in run(make()):
            if isinstance(event, Done):
                return event.result
        raise AssertionError("a request ends with Done or an error")

    return await asyncio.gather(*(request() for _ in range(concurrent)))


def _transported(tokenizer: Tokenizer, context: int, transport: Transport) -> tuple[float, float]:
    """Return milliseconds and bytes for encoding the prompts of a step's two calls: proposal and verification."""
    engine = InstantEngine(tokenizer)
    buffer = TokenBuffer(_prompt(engine, context))
    write, num_bytes, seconds = transport(buffer), 0, 0.0
    write()  # the prompt is encoded once, not in every step
    for step in engine.steps:
        started = time.perf_counter()
        num_bytes += write()
        num_bytes += write()
        seconds += time.perf_counter() - started
        buffer.append(step)
    return seconds / len(engine.steps) * 1000, num_bytes / len(engine.steps)


def _prompt(engine: InstantEngine, context: int) -> list[int]:
    """Return `context` token ids of plain text."""
    return list(islice(cycle(engine.steps[0]), context))


def main(
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens in the prompt. Default: 100, 1000, 8000 and 32000.")
    ] = None,
    concurrent: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests. Default: 1, 16 and 256.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time the controller with an engine that answers instantly, and separately the encoding of remote requests."""
    about, tokenizer = conditions(), embedded_tokenizer()
    found = [
        asyncio.run(controller_cost(tokenizer, length, count, _http_transport(tokenizer)))
        for length in context or (100, 1000, 8000, 32000)
        for count in concurrent or (1, 16, 256)
    ]
    costs = ControllerCosts.model_validate({**about, "policy": POLICY, "results": found})
    finish([controller_table(costs)], costs, json_file)


def embedded_tokenizer() -> Tokenizer:
    """Return the tokenizer of the embedded pair."""
    return load_tokenizer(str(find_pair(EMBEDDED_NAME) / "target"))


def _http_transport(tokenizer: Tokenizer) -> Transport:
    """Return a transport that encodes requests like the remote engine."""
    address = Address("http://localhost/v1")

    def begin(buffer: TokenBuffer) -> Callable[[], int]:
        sent = Conversation(address, tokenizer, buffer, as_ids=True)
        return lambda: len(sent.body(buffer, {}))

    return begin
