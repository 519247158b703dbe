"""A request in progress: its text, models and limits, and what a family can do with them.

The draft never ends the thinking or the text by itself: the target's own choice at that position decides. Token-level
speculation inside the target's own writing is exact; the engine does it.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from stepspec.chat.answer import AnswerReader
from stepspec.engines.protocol import (
    Chunk,
    Drafting,
    Engine,
    Generate,
    Probe,
    Sampling,
    Stop,
    Verification,
    Verify,
    check_ids,
    check_room,
    collect,
)
from stepspec.errors import ContextError, EngineError, UnknownIdError
from stepspec.loop.breaker import Breaker
from stepspec.loop.judging import Evidence, Panel
from stepspec.loop.ledger import Ledger
from stepspec.loop.limits import Demands, Limits
from stepspec.loop.policy import Policy
from stepspec.loop.step import Event, Origin, Proposal, StepCommitted, StepJudged, StepProposed, Verdict
from stepspec.loop.tracing import Spans
from stepspec.loop.transcript import Transcript

DRAFT_SEED = 0x5EED
"""Added to the draft's seed, so that draft and target never sample with the same random numbers."""

SURE = math.log(0.5)
"""A token above this log-probability is the most likely one: all others are less likely."""


@dataclass(frozen=True)
class Judged:
    """The verdict on a proposed step, and the target's pass over it; None if no judge and no salvage needed one."""

    verdict: Verdict
    verification: Verification | None

    @property
    def accepted(self) -> bool:
        """Whether the step is accepted."""
        return self.verdict.accepted


@dataclass
class Request:
    """One request under one policy.

    Its text is in `transcript` and its events are in `events`, for the caller. `None` in `events` is their end.
    """

    policy: Policy
    target: Engine
    draft: Engine | None
    panel: Panel
    think_end: int | None
    sampling: Sampling
    ledger: Ledger
    prompt: Sequence[int]
    question: str = ""
    """Text of the last user turn, for the judges."""
    breaker: Breaker = field(default_factory=Breaker)
    """The draft's circuit breaker, shared by all requests."""
    demands: Demands = field(default_factory=Demands)
    answer: AnswerReader = field(default_factory=AnswerReader)
    spans: Spans = field(default_factory=Spans)

    def __post_init__(self) -> None:
        self.tokenizer = self.target.tokenizer
        self.answer_ends = self.tokenizer.end_ids | self.demands.stop_token_ids
        self.ends = self.answer_ends if self.think_end is None else self.tokenizer.end_ids | {self.think_end}
        table = self.policy.step
        step_stop = Stop(table.max_step_tokens, (table.delimiter,), self.ends)
        self.transcript = Transcript(
            self.prompt, self.tokenizer, step_stop, self.think_end, self.answer, self.demands.stop_token_ids
        )
        self.limits = Limits(self.demands, self.ledger, self.transcript)
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._origin: Origin = "target"  # of the open step
        self._num_from_draft = 0
        self._only_target = False
        self._writing_since: int | None = None
        self._proposed = False

    @property
    def num_written(self) -> int:
        """Number of tokens after the prompt, counted in the text itself."""
        return len(self.transcript.buffer) - len(self.prompt)

    def emit(self, events: Iterable[Event]) -> None:
        """Pass events on to the caller."""
        for event in events:
            self.ledger.shown(event)
            self.spans.event(event)
            if isinstance(event, StepCommitted) and self._writing_since is not None:
                self.spans.wrote(self._writing_since, event.step, proposed=self._proposed)
                self._writing_since = time.time_ns()
            self.events.put_nowait(event)

    # Speculating

    async def speculates(self) -> bool:
        """Whether the next step may be speculated on. The target first writes the steps that the policy leaves to it.

        False once the thinking or the budget has ended, the draft is missing, too much was wasted, or a tool call has
        begun, which only the target writes.
        """
        while self.transcript.thinking and self.draft is not None and self.limits.allow_thinking():
            if self._only_target or not self.ledger.may_waste(self.policy.step.max_step_tokens):
                return False
            if len(self.transcript.steps) >= self.policy.first_target_steps:
                return True
            await self._write_step("forced")
            self._close_step()
        return False

    async def propose(self) -> Proposal | None:
        """Return the draft's next step. None if the draft failed or was too slow; the target then continues alone."""
        if self.draft is None or not self.breaker.allows():
            return None
        since, index = time.time_ns(), len(self.transcript.steps)
        sampling = replace(self.sampling, seed=self.sampling.seed + DRAFT_SEED)
        stop = self.transcript.rest_of_step(self.limits.room)
        call = Generate(self.transcript.buffer, sampling, stop, logprobs=self.policy.needs_draft_logprobs)
        drafted: list[int] = []
        try:
            with self.ledger.time("draft"):
                async with asyncio.timeout(self.policy.step.draft_deadline_s), asyncio.timeout_at(self.limits.deadline):
                    chunk = await collect(self.draft.generate(call), drafted)
        except (EngineError, ContextError, UnknownIdError, TimeoutError) as error:
            self.ledger.proposed(len(drafted))
            self.ledger.abandoned(len(drafted))
            if not isinstance(error, ContextError) and self.limits.allow_thinking():
                self.breaker.failed()
            return None
        self.breaker.worked()
        self.ledger.waited("draft", chunk.queue_s)
        self.ledger.proposed(len(chunk.ids))
        num_written = len(chunk.ids) - (chunk.end == "token")
        own = slice(None, -1 if chunk.end == "token" else None)
        proposal = Proposal(
            chunk.ids,
            self.tokenizer.decode(self.transcript.visible(chunk.ids[:num_written])),
            num_written,
            None if chunk.logprobs is None else chunk.logprobs[own],
            None if chunk.entropies is None else chunk.entropies[own],
        )
        self.spans.drafted(since, index, len(proposal.ids))
        self._proposed = True
        self.emit([StepProposed(index, proposal.text, len(proposal.ids))])
        return proposal

    async def judge(self, proposal: Proposal) -> Judged | None:
        """Judge a step, with at most one pass of the target. None if the target cannot read it.

        Empty steps, repeated steps and tool calls are rejected without asking the judges. The target cannot read a step
        that does not fit its context, or that has a token which it does not have. The context may still have room for
        writing then.
        """
        since, index = time.time_ns(), len(self.transcript.steps)
        try:
            judged = await self._judge(proposal)
        except (ContextError, UnknownIdError):
            self.ledger.abandoned(len(proposal.ids))
            return None
        self.spans.judged(since, index, judged.verdict)
        self.emit([StepJudged(index, judged.accepted, judged.verdict.scores)])
        return judged

    async def _judge(self, proposal: Proposal) -> Judged:
        steps = self.transcript.steps
        check_room(self.target, len(self.transcript.buffer), proposal.num_written)
        repeated = bool(steps) and proposal.text.strip() == steps[-1].text.strip()
        if repeated or not proposal.text.strip() or self.demands.opens_call(proposal.text):
            if proposal.num_written and self.policy.salvage is None:
                return Judged(Verdict(False, {}), None)
            verification = await self._verify(proposal, ())
            only_ends = not proposal.num_written and verification.next_choice == proposal.tag
            return Judged(Verdict(only_ends, {}), verification)
        seen: Verification | None = None

        async def verify_once() -> Verification:
            nonlocal seen
            if seen is None:
                seen = await self._verify(proposal, self.panel.probes)
            return seen

        with self.ledger.time("judge"):
            evidence = Evidence(self.question, steps, proposal.text, proposal.logprobs, proposal.entropies)
            verdict = await self.panel.judge(evidence, verify_once, self.limits.deadline)
        if seen is None and self.tokenizer.num_ids is not None:  # else the target has read the ids
            check_ids(self.target.name, self.tokenizer.num_ids, self.transcript.buffer, proposal.ids)
        self.ledger.add(steps_judged=1)
        if self.policy.salvage is not None and not verdict.accepted and seen is None:
            with suppress(ContextError):  # without room, nothing is salvaged
                seen = await self._verify(proposal, ())
        return Judged(verdict, seen)

    async def _verify(self, proposal: Proposal, probes: Sequence[Probe]) -> Verification:
        """Return the target's pass over a step."""
        own, scores = proposal.ids[: proposal.num_written], self.policy.needs_scores
        with self.ledger.time("judge"):
            verification = await self.target.verify(Verify(self.transcript.buffer, own, probes, scores=scores))
        self.ledger.waited("judge", verification.queue_s)
        self.ledger.found_cached(verification.cached)
        self.ledger.add(target_passes=verification.passes)
        return verification

    # Committing

    def accept(self, proposal: Proposal, judged: Judged) -> None:
        """Commit the draft's step. An end tag is included only if the target chooses it too.

        The target's own choice after the step may also end the thinking.
        """
        chosen = None if judged.verification is None else judged.verification.next_choice
        confirmed = proposal.tag is not None and proposal.tag == chosen
        accepted = proposal.ids if confirmed else proposal.ids[: proposal.num_written]
        self.ledger.judged(accepted=len(accepted), rejected=len(proposal.ids) - len(accepted))
        if proposal.num_written:
            self.ledger.add(steps_accepted=1)
        self.transcript.extend(accepted)
        self._origin, self._num_from_draft = "draft", proposal.num_written
        self._close_step(judged.verdict)
        if chosen in self.ends and self.transcript.thinking and not self._only_target and self.ledger.remaining > 0:
            self.ledger.generated(1)
            self.ledger.wrote("forced", 1)
            self.transcript.extend([chosen])
            for _ in self.transcript.close_step("target"):
                raise AssertionError("an end tag alone is not a step")

    async def replace(self, proposal: Proposal, judged: Judged) -> None:
        """Let the target write a rejected step again, after the part of it that the policy salvages."""
        hint = self._salvage(proposal, judged)
        await self._write_step("regenerated", hint)
        self._close_step(judged.verdict)

    def _salvage(self, proposal: Proposal, judged: Judged) -> tuple[int, ...]:
        """Keep the prefix of a rejected step that the target agrees with, if the policy salvages.

        The verifying pass also shows the target's own choice after that prefix. At temperature 0 that choice is the
        next token, so it needs no extra pass. If no judge scored the step, only the target's own choices are kept;
        otherwise empty or repeated steps could be accepted here.

        Returns:
            The rest of the step as a hint for how the target continues. It leaves out a token that the target has
            already replaced.
        """
        verification, verdict = judged.verification, judged.verdict
        table = None if self.demands.opens_call(proposal.text) else self.policy.salvage
        bound = table.min_logprob if table and verdict.scores else 0.0
        num_kept = agreed_prefix(proposal, verification, bound) if table and verification is not None else 0
        self.ledger.judged(accepted=num_kept, salvaged=num_kept, rejected=len(proposal.ids) - num_kept)
        self.transcript.extend(proposal.ids[:num_kept])
        self._origin, self._num_from_draft = "salvaged" if num_kept else "target", num_kept
        free = table is not None and self.sampling.temperature == 0 and not self.transcript.step_is_over
        if free and verification is not None and verification.choices is not None and self.ledger.remaining > 0:
            choices = (*verification.choices, verification.next_choice)
            self.ledger.generated(1)
            self.ledger.wrote("regenerated", 1)
            self.transcript.extend([choices[num_kept]])
            return proposal.ids[num_kept + 1 :]
        return proposal.ids[num_kept:]

    async def _write_step(self, fate: Literal["regenerated", "forced"], hint: Sequence[int] = ()) -> None:
        """Let the target finish the open step. `hint` holds ids that it may write next."""
        self._writing_since = time.time_ns()
        if self.transcript.step_is_over or self.limits.room <= 0:
            return
        stop = self.transcript.rest_of_step(self.limits.room)
        num_before, chunk = len(self.transcript.open_ids), Chunk(())
        call = Generate(self.transcript.buffer, self.sampling, stop, self.policy.token.drafting, hint)
        async with aclosing(punctual(self.target.generate(call), self.limits.deadline)) as chunks:
            while not self.answer.stopped:
                try:
                    with self.ledger.time("target"):
                        following = await anext(chunks, None)
                except ContextError:
                    if not self.transcript.open_ids:
                        raise
                    break  # the salvaged tokens fill the context, so they are the entire step
                if following is None:
                    break
                chunk = following
                self.ledger.generated(len(chunk.ids))
                self.transcript.extend(chunk.ids)
                self.emit(self.transcript.emit())
        self.ledger.add_target_call(chunk)
        self.ledger.wrote(fate, len(self.transcript.open_ids) - num_before)

    def _close_step(self, verdict: Verdict | None = None) -> None:
        """Commit the open step. If it opens a tool call, the target continues alone."""
        scores = {} if verdict is None else verdict.scores
        self.emit(self.transcript.close_step(self._origin, self._num_from_draft, scores))
        self._origin, self._num_from_draft = "target", 0
        self._writing_since, self._proposed = None, False
        steps = self.transcript.steps
        self._only_target = bool(steps) and self.demands.opens_call(steps[-1].text)

    # Writing without speculation on steps

    async def write_rest(self) -> None:
        """Let a single writer finish the text: the draft if the policy names it alone, else the target."""
        transcript, limits, ledger = self.transcript, self.limits, self.ledger
        if transcript.thinking and self.think_end is not None and self.demands.separate_answer:
            if limits.allow_thinking():
                await self._write(Stop(limits.room, token_ids=self.ends), limits.deadline)
            if not limits.allow_thinking() and ledger.remaining > 0:
                ledger.generated(1)
                ledger.wrote("forced", 1)
                self.emit(transcript.end_thinking("target"))
        if not transcript.ended and ledger.remaining > 0 and limits.allow_thinking():
            stop = Stop(ledger.remaining, token_ids=self.answer_ends)
            await self._write(stop, limits.deadline if self.think_end is None else None, self.demands.json_schema)
            limits.allow_thinking()

    async def _write(self, stop: Stop, deadline: float | None, json_schema: str | None = None) -> None:
        draft = self.draft if self.policy.family == "draft" else None
        writer: Literal["draft", "target"] = "draft" if draft else "target"
        drafting = Drafting() if draft else self.policy.token.drafting
        call = Generate(self.transcript.buffer, self.sampling, stop, drafting, json_schema=json_schema)
        self._writing_since, self._proposed = time.time_ns(), False
        async with aclosing(punctual((draft or self.target).generate(call), deadline)) as chunks:
            while not self.transcript.ended:
                with self.ledger.time(writer):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                if draft:
                    self.ledger.proposed(len(chunk.ids))
                    self.ledger.judged(accepted=len(chunk.ids), rejected=0)
                    self.ledger.waited("draft", chunk.queue_s)
                else:
                    self.ledger.generated(len(chunk.ids))
                    self.ledger.wrote("forced", len(chunk.ids))
                    self.ledger.add_target_call(chunk)
                self.emit(self.transcript.write_on(chunk.ids, writer))
        self.emit(self.transcript.finish(writer))


async def punctual(chunks: AsyncGenerator[Chunk, None], deadline: float | None) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of a call until it ends. The deadline, in the event loop's time, cuts the call off."""
    async with aclosing(chunks):
        while True:
            limit = asyncio.timeout_at(deadline)
            try:
                async with limit:
                    chunk = await anext(chunks, None)
            except TimeoutError:
                if limit.expired():
                    return
                raise
            if chunk is None:
                raise EngineError("The engine ended a generation without a reason.")
            yield chunk
            if chunk.end is not None:
                return


def agreed_prefix(proposal: Proposal, verification: Verification, min_logprob: float) -> int:
    """Return how many leading tokens of a step the target agrees with.

    The target agrees with a token if it is the target's own choice or has at least `min_logprob` (in nats) under it.
    """
    logprobs, choices = verification.logprobs, verification.choices
    assert logprobs is not None, "policies that salvage are rejected if the target returns no log-probs"
    for index in range(proposal.num_written):
        own_choice = logprobs[index] > SURE if choices is None else proposal.ids[index] == choices[index]
        if not own_choice and logprobs[index] < min_logprob:
            return index
    return proposal.num_written
