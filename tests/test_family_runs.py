"""Generated runs of all families with faults, hangs, deadlines and cancellation: counts and times agree with what the
engines delivered and with the events.

The checks do not use the bookkeeping: engines count the ids that they hand out, and the text is read from the events.
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from scripted import PROMPT, Call, Opinion, Reply, ScriptedEngine, Stage

from stepspec.chat.events import AnswerDelta
from stepspec.engines.protocol import Chunk, Generate
from stepspec.errors import EngineError, StepSpecError
from stepspec.loop.limits import Demands
from stepspec.loop.policy import Policy
from stepspec.loop.step import Done, Event, StepCommitted

END = "</think>"
WORDS = ("one", "two", "three", "wait", "check", "so")
POLICIES: tuple[dict[str, Any], ...] = (
    {"family": "target"},
    {"family": "draft"},
    {"family": "score", "judges": ({"kind": "rating"},)},
    {"family": "score", "judges": ({"kind": "likelihood", "threshold": -3.0},), "salvage": {"min_logprob": -1.0}},
    {"family": "score", "judges": ({"kind": "random", "share": 0.6},), "first_target_steps": 2},
    {"family": "score", "judges": ({"kind": "random", "share": 0.6},), "score": {"candidates": 3}},
    {"family": "compare", "judges": ({"kind": "equivalence"},)},
    {"family": "compare", "judges": ({"kind": "random", "share": 0.7},), "compare": {"depth": 2, "width": 3}},
    {"family": "route"},
    {"family": "alternate"},
    {"family": "route", "route": {"signal": "words", "opening_tokens": 2, "checking_tokens": 3, "doubts": 2}},
)


class Erratic(ScriptedEngine):
    """Writes random steps, is slow, hangs or fails at random, and counts the ids that it hands out."""

    rng: random.Random
    fault: float
    num_delivered = 0

    async def generate(self, call: Generate) -> AsyncGenerator[Chunk, None]:
        async with aclosing(super().generate(call)) as chunks:
            async for chunk in chunks:
                self.num_delivered += len(chunk.ids)
                yield chunk

    def _reply_to(self, call: Call) -> Reply:
        rng, (thinking, ended, _) = self.rng, call.prompt.removeprefix(PROMPT).partition(END)
        steps = [" ".join(rng.choices(WORDS, k=rng.randint(0, 5))) + ".\n\n" for _ in range(rng.randint(0, 4))]
        ends = ended or rng.random() < 0.1 + 0.1 * thinking.count("\n\n")
        text = steps[0] if steps and not ends else END
        if call.stop is not None and not call.stop.delimiters:
            text = "".join(steps) + ("" if ended else END) + "So 9.<|end|>"
        reply = Reply(text, chunk_size=rng.randint(1, 4), logprobs={0: -rng.random() / 2})
        if rng.random() < 0.3:
            reply = replace(reply, delay_s=rng.random() / 100)
        if rng.random() < self.fault:
            cut = text[: rng.randrange(len(text) + 1)]
            broken = rng.random() < 0.5
            reply = replace(reply, text=cut, hangs=not broken, fails=EngineError("no") if broken else None)
        return reply

    def _opinion_on(self, call: Call) -> Opinion:
        agreed = call.continuation[: self.rng.randrange(len(call.continuation) + 1)]
        opinion = Opinion(agreed or END, rating=str(self.rng.randrange(10)), delay_s=self.rng.random() / 200)
        if call.probes:
            opinion = replace(opinion, digits={0: self.rng.random(), 1: self.rng.random(), 9: 0.1})
        return replace(opinion, fails=EngineError("no")) if self.rng.random() < self.fault / 2 else opinion


async def run(seed: int) -> str:
    """Make a request from a seed, check it, and return how it ended."""
    rng = random.Random(seed)
    tables = rng.choice(POLICIES)
    step = {"max_step_tokens": rng.choice((4, 8, 64)), "draft_deadline_s": 0.03, "judge_deadline_s": 0.03}
    policy = Policy.model_validate({"version": 1, "summary": "a test", "step": step} | tables)
    stage = Stage(policy, max_tokens=rng.choice((1, 7, 30, 200)), temperature=rng.choice((0.0, 1.0)))
    fault = rng.choice((0.0, 0.0, 0.05, 0.2))
    for engine in (stage.target, stage.draft):
        engine.__class__ = Erratic
        engine.rng, engine.fault = rng, fault  # type: ignore[attr-defined]
    limited = rng.choice((None, None, 0.03)) if fault == 0 else 0.03  # else a hanging target would never end
    stage.request.demands = Demands(deadline_s=limited, max_thinking_tokens=rng.choice((None, None, 12)))
    stage.request.limits._demands = stage.request.demands  # pyright: ignore[reportPrivateUsage]
    events: list[Event] = []
    ended = "done"
    try:
        async with asyncio.timeout(rng.random() / 20 if rng.random() < 0.3 else 0.5), aclosing(stage.events()) as found:
            async for event in found:
                events.append(event)
    except TimeoutError:
        ended = "cancelled"
    except StepSpecError:
        ended = "failed"
    check(stage, events, ended)
    return ended


def check(stage: Stage, events: list[Event], ended: str) -> None:
    target, draft, request = stage.target, stage.draft, stage.request
    assert isinstance(target, Erratic)
    assert isinstance(draft, Erratic)
    assert target.num_open == draft.num_open == 0
    assert len(asyncio.all_tasks()) == 1
    assert request.ledger.counts.drafted <= draft.num_delivered
    if ended != "done":
        return
    done = events[-1]
    assert isinstance(done, Done)
    result = done.result
    counts = result.counts
    counts.check(stage.max_tokens)
    assert counts.drafted == draft.num_delivered
    own_choices = counts.steps  # tokens that a verifying pass or a limit gives, at most two in a step
    assert target.num_delivered <= counts.target_generated <= target.num_delivered + 2 * own_choices + 20
    steps = [event.step for event in events if isinstance(event, StepCommitted)]
    assert "".join(step.text for step in steps) == result.reasoning
    assert "".join(event.text for event in events if isinstance(event, AnswerDelta)) == result.answer
    text = stage.tokenizer.decode(request.transcript.buffer.since(0))
    assert text.removeprefix(PROMPT).removesuffix("<|end|>").replace(END, "") == result.reasoning + result.answer
    times = result.times
    parts = times.queue + times.draft + times.judge + times.target + times.controller + times.other
    assert parts == pytest.approx(times.wall, abs=1e-6)
    assert min(parts, times.queue, times.draft, times.judge, times.target, times.controller, times.other) >= 0
    assert max(times.busy_draft, times.busy_judge, times.busy_target) <= times.wall


def runs(count: int) -> None:
    ends = [asyncio.run(run(seed)) for seed in range(count)]
    assert {"done", "cancelled", "failed"} == {*ends}


def test_counts_and_times_hold_in_all_families_whatever_happens() -> None:
    runs(300)


@pytest.mark.soak
def test_counts_and_times_hold_in_many_runs() -> None:
    runs(5_000)
