"""Generated runs of all families with faults, hangs, deadlines and cancellation: counts, times and limits agree with
what the engines did and with the events.

The checks do not use the bookkeeping: engines count the ids that they hand out and the time in which they work, and
the text is read from the events. Time passes only while all tasks wait, so times agree exactly.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from random_judge import RandomJudge
from scripted import PROMPT, Call, Opinion, Reply, ScriptedEngine, Stage, check_deltas

from stepspec.chat.events import AnswerDelta
from stepspec.engines.protocol import Generate, TokenChunk, Verification, Verify
from stepspec.errors import EngineError, StepSpecError
from stepspec.loop.choice import StepChoice
from stepspec.loop.counts import Times
from stepspec.loop.families import FAMILIES
from stepspec.loop.families.route import CHECK_STEPS
from stepspec.loop.options import RequestOptions
from stepspec.loop.policy import Policy
from stepspec.loop.result import Done, Event
from stepspec.loop.step import Step, StepCommitted

END = "</think>"
WORDS = ("one", "two", "three", "wait", "check", "so")
POLICIES: tuple[dict[str, Any], ...] = (
    {"family": "target"},
    {"family": "draft"},
    {"family": "score", "judges": ({"kind": "rating"},)},
    {"family": "score", "judges": ({"kind": "likelihood", "threshold": -3.0},), "salvage": {"min_logprob": -1.0}},
    {"family": "score", "judges": (RandomJudge(share=0.6),), "first_target_steps": 2},
    {"family": "score", "judges": ({"kind": "rating"},), "score": {"depth": 3, "draft_answer": True}},
    {"family": "score", "judges": ({"kind": "exact"},), "salvage": {}, "score": {"depth": 4, "max_overhead": 0.05}},
    {
        "family": "score",
        "judges": (RandomJudge(share=0.6),),
        "score": {"depth": 4, "draft_answer": True},
    },
    {
        "family": "score",
        "judges": (
            {"kind": "draft-confidence", "threshold": -0.2, "reject_below": -9.0},
            RandomJudge(share=0.5),
        ),
        "judging": "cascade",
        "salvage": {"redraft": True},
        "score": {"depth": 2, "draft_answer": True, "max_overhead": 0.1},
    },
    {
        "family": "score",
        "judges": (RandomJudge(share=0.8),),
        "salvage": {"redraft": True},
        "score": {"depth": 3, "draft_answer": True, "max_overhead": 0.1},
    },
    {"family": "compare", "judges": ({"kind": "equivalence"},)},
    {"family": "compare", "judges": (RandomJudge(share=0.7),), "compare": {"depth": 2}},
    {"family": "route"},
    {"family": "alternate"},
    {"family": "route", "route": {"signal": "words", "opening_tokens": 2, "checking_tokens": 3, "doubts": 2}},
)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while all tasks wait, and then immediately."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector = self._selector  # type: ignore[attr-defined]
        ready = selector.select

        def select(timeout: float | None) -> Any:
            if not (found := ready(0)):
                assert timeout is not None, "every task waits forever"
                self._now += timeout
            return found

        selector.select = select

    def time(self) -> float:
        return self._now


class Meter:
    """The seconds in which at least one call was open."""

    def __init__(self) -> None:
        self.seconds, self._num_open, self._since = 0.0, 0, 0.0

    @contextmanager
    def open(self) -> Generator[None]:
        clock = asyncio.get_running_loop()
        if not self._num_open:
            self._since = clock.time()
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self.seconds += clock.time() - self._since


class Erratic(ScriptedEngine):
    """Writes random steps, is slow, hangs or fails at random, and counts the ids that it hands out and its time."""

    rng: random.Random
    fault: float
    generating: Meter
    verifying: Meter
    num_delivered = 0

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        with self.generating.open():
            async with aclosing(super().generate(call)) as chunks:
                async for chunk in chunks:
                    self.num_delivered += len(chunk.ids)
                    yield chunk

    async def verify(self, call: Verify) -> Verification:
        with self.verifying.open():
            return await super().verify(call)

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
        if self.rng.random() < self.fault / 2:
            opinion = replace(opinion, fails=EngineError("no"))
        return replace(opinion, hangs=self.rng.random() < self.fault / 2)


async def run(seed: int) -> str:
    """Make a request from a seed, check it, and return how it ended."""
    rng = random.Random(seed)
    tables = rng.choice(POLICIES)
    step = {"max_step_tokens": rng.choice((4, 8, 64)), "draft_deadline_s": 0.03, "judge_deadline_s": 0.03}
    policy = Policy.model_validate({"version": 1, "summary": "a test", "step": step} | tables)
    stage = Stage(policy, max_tokens=rng.choice((1, 7, 30, 200)), temperature=rng.choice((0.0, 1.0)))
    stage.request.choice = StepChoice(policy.max_overhead)
    stage.request.transcript.shows_deltas = seed % 2 == 0
    fault = rng.choice((0.0, 0.0, 0.05, 0.2))
    for engine in (stage.target, stage.draft):
        engine.__class__ = Erratic
        assert isinstance(engine, Erratic)
        engine.rng, engine.fault, engine.generating, engine.verifying = rng, fault, Meter(), Meter()
    late = rng.choice((None, None, 0.03, 0.06)) if fault == 0 else 0.06  # else a hanging target would never end
    limits = {"max_thinking_tokens": rng.choice((None, None, 12)), "max_thinking_s": rng.choice((None, None, 0.03))}
    stage.request.limits.options = RequestOptions(deadline_s=late, **limits)
    patience = rng.random() / 20 if rng.random() < 0.3 else None
    events: list[Event] = []
    ended = "done"
    now = asyncio.get_running_loop().time
    began = now()
    try:
        async with asyncio.timeout(patience or 60), aclosing(stage.events()) as found:
            async for event in found:
                events.append(event)
    except TimeoutError:
        assert patience, "a request without a deadline took a minute, or its deadline did not end it"
        ended = "cancelled"
    except StepSpecError:
        ended = "failed"
    assert late is None or now() - began <= late + 1e-9
    check(stage, events, ended)
    return ended


def check(stage: Stage, events: list[Event], ended: str) -> None:
    target, draft, request = stage.target, stage.draft, stage.request
    assert isinstance(target, Erratic)
    assert isinstance(draft, Erratic)
    assert target.num_open == draft.num_open == 0
    assert len(asyncio.all_tasks()) == 1
    num_deltas = check_deltas(events)
    assert stage.request.transcript.shows_deltas or not num_deltas
    assert request.ledger.counts.drafted <= draft.num_delivered
    if ended != "done":
        return
    done = events[-1]
    assert isinstance(done, Done)
    result = done.result
    counts = result.counts
    counts.check(stage.max_tokens)
    assert counts.drafted == draft.num_delivered
    # A verifying pass or a limit gives at most two tokens in a step, and `words` a sentence.
    given = counts.generated - target.num_delivered
    sentence = len(stage.tokenizer.encode(CHECK_STEPS)) if stage.policy.family == "route" else 0
    assert 0 <= given <= (2 + sentence) * (counts.steps + 1)
    steps = [event.step for event in events if isinstance(event, StepCommitted)]
    assert "".join(step.text for step in steps) == result.reasoning
    assert "".join(event.text for event in events if isinstance(event, AnswerDelta)) == result.answer
    text = stage.tokenizer.decode(request.transcript.buffer.since(0))
    assert text.removeprefix(PROMPT).removesuffix("<|end|>").replace(END, "") == result.reasoning + result.answer
    if (late := request.limits.options.deadline_s) is not None and result.times.wall >= late - 1e-9:
        assert (result.finish_reason, result.limit) == ("length", "deadline") or request.transcript.ended
    check_limits(stage, result.reasoning, steps)
    check_times(result.times, target, draft, stage.policy.family == "compare")


def check_limits(stage: Stage, reasoning: str, steps: list[Step]) -> None:
    policy, counts, tokenizer = stage.policy, stage.request.ledger.counts, stage.tokenizer
    assert all(len(tokenizer.encode(step.text)) <= policy.step.max_step_tokens for step in steps)
    most = stage.request.limits.options.max_thinking_tokens
    assert most is None or len(tokenizer.encode(reasoning)) <= most
    if FAMILIES[policy.family].table.speculates:
        assert {step.origin for step in steps[: policy.first_target_steps]} <= {"target"}
    longest, rate = policy.waste
    assert counts.wasted <= rate * (counts.committed + 2 * longest)


def check_times(times: Times, target: Erratic, draft: Erratic, overlapping: bool) -> None:
    assert times.controller == times.queue == times.engine_wait == 0
    assert times.draft + times.judge + times.target + times.other == pytest.approx(times.wall)
    assert times.other == pytest.approx(0, abs=1e-9)
    worked = (draft.generating.seconds, target.verifying.seconds, target.generating.seconds)
    assert (times.busy_draft, times.busy_judge, times.busy_target) == pytest.approx(worked)
    if not overlapping:
        assert (times.draft, times.judge, times.target) == pytest.approx(worked)


def runs(count: int) -> None:
    ends: set[str] = set()
    for seed in range(count):
        runner = asyncio.Runner(loop_factory=VirtualLoop)
        with runner, patch.object(time, "perf_counter", runner.get_loop().time):
            ends.add(runner.run(run(seed)))
    assert ends == {"done", "cancelled", "failed"}


def test_every_family_is_among_the_runs() -> None:
    assert {tables["family"] for tables in POLICIES} == {*FAMILIES}


def test_counts_and_times_hold_in_all_families_whatever_happens() -> None:
    runs(300)


@pytest.mark.soak
def test_counts_and_times_hold_in_many_runs() -> None:
    runs(5_000)
