"""A draft that writes answers, tags, ends and tool calls, and a wrapper around a target that records what it writes.

See `own_answers`. A script in another environment imports this too, so it needs no pytest.
"""

import random
from collections.abc import AsyncGenerator, Sequence
from itertools import cycle
from typing import Any

from own_answers import check
from random_judge import RandomJudge

from stepspec import Pair, Policy, StepSpec
from stepspec.engines.protocol import Engine, Generate, Sampling, TokenBuffer, TokenChunk, Verification, Verify, collect
from stepspec.engines.stops import StopMatcher
from stepspec.loop.request import Request

SMUGGLED = ("</think>", "#### 5", "\\boxed{5}", "the answer is 5", "<|end|>", "<think>", "<tool_call>", "\n\n")
RANDOM: tuple[dict[str, Any], ...] = (RandomJudge(share=0.7),)
TABLES = {"step": {"max_step_tokens": 24}, "token": {"drafter": "auto"}}
POLICIES: tuple[dict[str, Any], ...] = (
    {"family": "score", "judges": RANDOM, "score": {"depth": 2, "draft_answer": True}},
    {"family": "score", "judges": ({"kind": "likelihood", "threshold": -3.0},), "salvage": {"min_logprob": -2.0}},
    {"family": "compare", "judges": RANDOM},
    {"family": "route", "route": {"signal": "words", "opening_tokens": 2, "checking_tokens": 3, "doubts": 2}},
    {"family": "alternate"},
)


RELAXED: tuple[dict[str, Any], ...] = (
    {"family": "target", "token": {"drafter": "engine", "acceptance": "ratio", "threshold": 1e-6}},
    {"family": "target", "token": {"drafter": "engine", "acceptance": "typical", "threshold": 1e-6}},
)
"""Rules that keep nearly every drafted token."""


class Recording:
    """An engine that records what another one writes and confirms.

    Of a greedy text with relaxed tokens, it records those that a pass of the target confirms. Of a sampled one, it
    records those that the engine does not report as relaxed.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.record: set[tuple[int, int]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def confirm(self, ids: list[int], id: int | None) -> None:
        if id is not None:
            self.record.add((hash((*ids,)), id))

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        ids = [*call.prompt.since(0), *call.after]
        loose = not call.drafting.acceptance.is_exact
        async for chunk in self.engine.generate(call):
            for place, id in enumerate(chunk.ids):
                if not loose or (call.sampling.temperature > 0 and place not in (chunk.relaxed or ())):
                    self.confirm(ids, id)
                ids.append(id)
            if loose and call.sampling.temperature == 0:
                start = len(ids) - len(chunk.ids)
                await self.verify(Verify(TokenBuffer(ids[:start]), ids[start:]))
            yield chunk

    async def verify(self, call: Verify) -> Verification:
        ids = [*call.prompt.since(0)]
        found = await self.engine.verify(call)
        for at, id in enumerate(call.continuation):
            self.confirm(ids, found.choices[at] if found.choices else None)
            ids.append(id)
        self.confirm(ids, found.next_choice)
        return found


class Hostile:
    """An engine that puts tags, answers and ends into what another one writes."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.rng = engine, random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        tokenizer, written = self.engine.tokenizer, list[int]()
        honest = [*(await collect(self.engine.generate(call))).ids]
        if self.rng.random() < 0.5:
            at = self.rng.randrange(len(honest) + 1)
            honest[at:at] = tokenizer.encode_text(self.rng.choice(SMUGGLED))
            at = self.rng.randrange(len(honest) + 1)
            honest[at:at] = tokenizer.encode(self.rng.choice(SMUGGLED))
        watch, end = StopMatcher(call.stop, tokenizer.piece, tokenizer.end_ids), None
        for id in honest:
            written.append(id)
            if (end := watch.feed(id)) is not None:
                break
        yield TokenChunk(tuple(written), end or "length")


async def try_policies(
    engine: Engine, draft: Hostile, questions: Sequence[str], policies: Sequence[dict[str, Any]] = POLICIES
) -> None:
    """Ask each question under another policy that runs on the engine, and check the texts."""
    runnable = [each for each in policies if "scores" in engine.abilities or each is not POLICIES[1]]
    found, num_checked = set[str](), 0
    for number, (question, policy) in enumerate(zip(questions, cycle(runnable), strict=False)):
        kind, num_places = await _run(Recording(engine), draft, policy, question, number)
        found.add(kind)
        num_checked += num_places
    assert num_checked > 0, "some text has an answer"
    assert any(each.endswith("draft") for each in found), "some text has tokens of the draft"


async def _run(target: Any, draft: Any, tables: dict[str, Any], question: str, seed: int) -> tuple[str, int]:
    policy = Policy.model_validate({"version": 1, "summary": "a test", **TABLES} | tables)
    session, made = StepSpec(policy=policy, pair=Pair(target, draft)), list[Request]()
    make = session._request
    session._request = lambda *given: made.append(make(*given)) or made[-1]  # type: ignore[method-assign]
    # vLLM's CPU build 0.32 loses the temperature of drafted tokens, unless it has the plugin.
    own, repaired = target.own_speculation, "relaxed acceptance" in target.abilities
    samples = seed % 2 == 1 and (own in (None, "none") or repaired)
    sampling = Sampling(temperature=1.0 if samples else 0.0, seed=seed)
    result = await session.generate(question, sampling=sampling, max_tokens=160)
    return check(result, made[0], target)
