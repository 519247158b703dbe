"""The loop over steps: propose, judge, then accept, or salvage and regenerate; finally the answer.

Step-level speculation is not exact: the draft writes accepted steps, not the target. Token-level speculation inside
the target's own writing is exact; the engine does it. The draft never ends the thinking or the text by itself: the
target's own choice at that position decides. After speculative steps, the target writes the answer.
"""

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Sequence
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
from stepspec.errors import ContextError, EngineError, TargetError, UnknownIdError
from stepspec.loop.breaker import Breaker
from stepspec.loop.judging import Evidence, Panel
from stepspec.loop.ledger import Ledger
from stepspec.loop.policy import Policy
from stepspec.loop.step import Done, Event, FinishReason, Limit, Proposal, Result, StepJudged, StepProposed, Verdict
from stepspec.loop.transcript import Transcript

DRAFT_SEED = 0x5EED
"""Added to the draft's seed, so that draft and target never sample with the same random numbers."""

SURE = math.log(0.5)
"""A token above this log-probability is the most likely one: all others are less likely."""


@dataclass(frozen=True)
class Demands:
    """Constraints and limits of a request.

    Attributes:
        json_schema: JSON schema of the answer, see `Engine.generate`.
        call_opener: matches the beginning of a tool call, for a model that does not separate its thinking.
        max_thinking_tokens: after this many tokens, the thinking ends and the answer begins.
        deadline_s: after this many seconds, the thinking ends and the answer begins. If the model does not separate
            its thinking, the text ends.
        stop_token_ids: tokens that end the answer, like the model's own end tokens.
    """

    json_schema: str | None = None
    call_opener: re.Pattern[str] | None = None
    max_thinking_tokens: int | None = None
    deadline_s: float | None = None
    stop_token_ids: frozenset[int] = frozenset()


@dataclass
class Controller:
    """One request under one policy."""

    policy: Policy
    target: Engine
    draft: Engine | None
    panel: Panel
    think_end: int | None
    sampling: Sampling
    ledger: Ledger
    question: str = ""
    """Text of the last user turn, for the judges."""
    breaker: Breaker = field(default_factory=Breaker)
    """The draft's circuit breaker, shared by all requests."""
    demands: Demands = Demands()
    answer: AnswerReader = field(default_factory=AnswerReader)

    def __post_init__(self) -> None:
        self.tokenizer = self.target.tokenizer
        self.answer_ends = self.tokenizer.end_ids | self.demands.stop_token_ids
        self.ends = self.answer_ends if self.think_end is None else self.tokenizer.end_ids | {self.think_end}
        self.drafting = self.policy.token.drafting
        self.deadline: float | None = None
        self.limit: Limit | None = None

    async def run(self, prompt: Sequence[int]) -> AsyncGenerator[Event, None]:
        """Run the request and yield its events, `Done` last.

        Raises:
            ContextError: the prompt leaves no room for a token.
            TargetError: the target failed; the error carries the committed text.
        """
        table = self.policy.step
        step_stop = Stop(table.max_step_tokens, (table.delimiter,), self.ends)
        self.transcript = Transcript(
            prompt, self.tokenizer, step_stop, self.think_end, self.answer, self.demands.stop_token_ids
        )
        if self.demands.deadline_s is not None:
            self.deadline = asyncio.get_running_loop().time() + self.demands.deadline_s
        try:
            async with aclosing(self.text()) as events:
                while True:
                    with self.ledger.time("controller"):  # excludes the engines' time, which nested timers measure
                        event = await anext(events, None)
                    if event is None:
                        break
                    self.ledger.shown(event)
                    yield event
        except ContextError:
            if len(self.transcript.buffer) == len(prompt):
                raise
        except EngineError as error:
            committed = "".join(step.text for step in self.transcript.steps)
            committed += self.answer.text if self.think_end is not None else self.transcript.open_text
            raise TargetError(f"{error} Text committed before the failure: {committed!r}.", committed) from error
        with self.ledger.time("controller"):
            last = list(self.answer.finish())
        for event in last:
            self.ledger.shown(event)
            yield event
        with self.ledger.time("controller"):
            self.check_json()
            result = self.result(len(prompt))
        yield Done(result)

    def check_json(self) -> None:
        """Check that an answer under a schema is valid JSON, since an engine's grammar may give up midway.

        Answers that a limit, a stop or a tool call ended are not checked.

        Raises:
            TargetError: the answer is not valid JSON.
        """
        cut = not self.transcript.ended or self.answer.stopped or self.demands.stop_token_ids
        if self.demands.json_schema is None or cut or self.answer.calls or not self.answer.text:
            return
        try:
            json.loads(self.answer.text)
        except ValueError as error:
            raise TargetError(
                f"{self.target.name} ended its answer before it was valid under the JSON schema. Simplify the schema. "
                f"Text committed before the failure: {self.answer.text!r}.",
                self.answer.text,
            ) from error

    async def text(self) -> AsyncGenerator[Event, None]:
        """Generate the thinking and the answer, each with the models that the policy selects."""
        if self.policy.family == "score" and (self.think_end is not None or self.demands.json_schema is None):
            async with aclosing(self.speculate()) as events:
                async for event in events:
                    yield event
        if self.transcript.thinking and self.think_end is not None and self.answers_apart:
            if self.may_think_on():
                async with aclosing(self.write_on(Stop(self.room, token_ids=self.ends), self.deadline)) as events:
                    async for event in events:
                        yield event
            if not self.may_think_on() and self.ledger.remaining > 0:
                self.ledger.generated(1)
                self.ledger.wrote("forced", 1)
                for event in self.transcript.end_thinking("target"):
                    yield event
        if not self.transcript.ended and self.ledger.remaining > 0 and self.may_think_on():
            stop = Stop(self.ledger.remaining, token_ids=self.answer_ends)
            deadline = self.deadline if self.think_end is None else None
            async with aclosing(self.write_on(stop, deadline, self.demands.json_schema)) as events:
                async for event in events:
                    yield event
            self.may_think_on()

    @property
    def answers_apart(self) -> bool:
        """Whether the answer needs a separate call after the thinking."""
        demands = self.demands
        limited = demands.max_thinking_tokens is not None or self.deadline is not None
        return demands.json_schema is not None or limited or bool(demands.stop_token_ids)

    @property
    def room(self) -> int:
        """Tokens left in the budget; during the thinking also bounded by `max_thinking_tokens`."""
        most = self.demands.max_thinking_tokens
        if most is None or not self.transcript.thinking:
            return self.ledger.remaining
        return min(self.ledger.remaining, most - self.transcript.num_thought - len(self.transcript.open_ids))

    def may_think_on(self) -> bool:
        """Whether tokens and time are left for more thinking. Sets `limit` if not.

        Always true once the thinking has ended, because no deadline cuts off a separate answer.
        """
        if not self.transcript.thinking:
            return True
        if self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline:
            self.limit = "deadline"
        elif self.room <= 0 < self.ledger.remaining:
            self.limit = "max_thinking_tokens"
        return self.room > 0 and self.limit is None

    async def speculate(self) -> AsyncGenerator[Event, None]:
        """Generate the thinking step by step, as long as the draft works and the budget lasts."""
        max_step_tokens = self.policy.step.max_step_tokens
        while self.transcript.thinking and self.draft is not None and self.may_think_on():
            if not self.ledger.may_waste(max_step_tokens):
                return  # the target continues alone
            if len(self.transcript.steps) < self.policy.first_target_steps:
                async with aclosing(self.regenerate("forced")) as events:
                    async for event in events:
                        yield event
                for event in self.transcript.close_step("target"):
                    yield event
                continue
            proposal = await self.propose(self.draft)
            if proposal is None:
                return
            index = len(self.transcript.steps)
            yield StepProposed(index, proposal.text, len(proposal.ids))
            try:
                verification, verdict = await self.judge(proposal)
            except (ContextError, UnknownIdError):  # the context may still have room for writing, if not for judging
                self.ledger.abandoned(len(proposal.ids))
                return
            yield StepJudged(index, verdict.accepted, verdict.scores)
            if verdict.accepted:
                self.accept(proposal, verification)
                origin, num_from_draft = "draft", proposal.num_written
            else:
                num_from_draft, rest = self.salvage(proposal, verification, verdict)
                async with aclosing(self.regenerate("regenerated", hint=rest)) as events:
                    async for event in events:
                        yield event
                origin = "salvaged" if num_from_draft else "target"
            for event in self.transcript.close_step(origin, num_from_draft, verdict.scores):
                yield event
            if self.opens_call(self.transcript.steps[-1].text if self.transcript.steps else ""):
                return  # only the target writes tool calls
            self.end_where_the_target_would(verification, verdict)

    async def propose(self, draft: Engine) -> Proposal | None:
        """Return the draft's next step. None if the draft failed or was too slow; the target then continues alone."""
        if not self.breaker.allows():
            return None
        sampling = replace(self.sampling, seed=self.sampling.seed + DRAFT_SEED)
        stop = self.transcript.rest_of_step(self.room)
        call = Generate(self.transcript.buffer, sampling, stop, logprobs=self.policy.needs_draft_logprobs)
        drafted: list[int] = []
        try:
            with self.ledger.time("draft"):
                async with asyncio.timeout(self.policy.step.draft_deadline_s), asyncio.timeout_at(self.deadline):
                    chunk = await collect(draft.generate(call), drafted)
        except (EngineError, ContextError, UnknownIdError, TimeoutError) as error:
            self.ledger.proposed(len(drafted))
            self.ledger.abandoned(len(drafted))
            if not isinstance(error, ContextError) and self.may_think_on():
                self.breaker.failed()
            return None
        self.breaker.worked()
        self.ledger.waited("draft", chunk.queue_s)
        self.ledger.proposed(len(chunk.ids))
        num_written = len(chunk.ids) - (chunk.end == "token")
        own = slice(None, -1 if chunk.end == "token" else None)
        return Proposal(
            chunk.ids,
            self.tokenizer.decode(self.transcript.visible(chunk.ids[:num_written])),
            num_written,
            None if chunk.logprobs is None else chunk.logprobs[own],
            None if chunk.entropies is None else chunk.entropies[own],
        )

    def opens_call(self, text: str) -> bool:
        """Whether a tool call begins in the text of a step."""
        opener = self.demands.call_opener
        return opener is not None and opener.search(text) is not None

    async def judge(self, proposal: Proposal) -> tuple[Verification | None, Verdict]:
        """Judge a step, with at most one pass of the target. Empty steps, repeated steps and tool calls are rejected
        without asking the judges.

        Returns:
            The target's pass, None if no judge and no salvage needed it, and the verdict.

        Raises:
            ContextError: the step, or a judge's question after it, does not fit the target's context.
            UnknownIdError: the target does not have one of the step's tokens.
        """
        steps = self.transcript.steps
        check_room(self.target, len(self.transcript.buffer), proposal.num_written)
        repeated = bool(steps) and proposal.text.strip() == steps[-1].text.strip()
        if repeated or not proposal.text.strip() or self.opens_call(proposal.text):
            if proposal.num_written and self.policy.salvage is None:
                return None, Verdict(False, {})
            verification = await self.verify(proposal, ())
            only_ends = not proposal.num_written and verification.next_choice == proposal.tag
            return verification, Verdict(only_ends, {})
        seen: Verification | None = None

        async def verify_once() -> Verification:
            nonlocal seen
            if seen is None:
                seen = await self.verify(proposal, self.panel.probes)
            return seen

        with self.ledger.time("judge"):
            evidence = Evidence(self.question, steps, proposal.text, proposal.logprobs, proposal.entropies)
            verdict = await self.panel.judge(evidence, verify_once, self.deadline)
        if seen is None and self.tokenizer.num_ids is not None:  # else the target has read the ids
            check_ids(self.target.name, self.tokenizer.num_ids, self.transcript.buffer, proposal.ids)
        self.ledger.add(steps_judged=1)
        if self.policy.salvage is not None and not verdict.accepted and seen is None:
            with suppress(ContextError):  # without room, nothing is salvaged
                seen = await self.verify(proposal, ())
        return seen, verdict

    async def verify(self, proposal: Proposal, probes: Sequence[Probe]) -> Verification:
        """Return the target's pass over a step."""
        with self.ledger.time("judge"):
            verification = await self.target.verify(
                Verify(
                    self.transcript.buffer,
                    proposal.ids[: proposal.num_written],
                    probes,
                    scores=self.policy.needs_scores,
                )
            )
        self.ledger.waited("judge", verification.queue_s)
        self.ledger.found_cached(verification.cached)
        self.ledger.add(target_passes=verification.passes)
        return verification

    def accept(self, proposal: Proposal, verification: Verification | None) -> None:
        """Append the draft's step. An end tag is included only if the target chooses it too."""
        chosen = None if verification is None else verification.next_choice
        confirmed = proposal.tag is not None and proposal.tag == chosen
        accepted = proposal.ids if confirmed else proposal.ids[: proposal.num_written]
        self.ledger.judged(accepted=len(accepted), rejected=len(proposal.ids) - len(accepted))
        if proposal.num_written:
            self.ledger.add(steps_accepted=1)
        self.transcript.extend(accepted)

    def salvage(
        self, proposal: Proposal, verification: Verification | None, verdict: Verdict
    ) -> tuple[int, tuple[int, ...]]:
        """Keep the prefix of a rejected step that the target agrees with, if the policy salvages.

        The verifying pass also shows the target's own choice after that prefix. At temperature 0 that choice is the
        next token, so it needs no extra pass. If no judge scored the step, only the target's own choices are kept;
        otherwise empty or repeated steps could be accepted here.

        Returns:
            The length of the prefix in tokens, and the rest of the step as a hint for how the target continues. The
            hint leaves out a token that the target has already replaced.
        """
        table = None if self.opens_call(proposal.text) else self.policy.salvage
        bound = table.min_logprob if table and verdict.scores else 0.0
        num_kept = agreed_prefix(proposal, verification, bound) if table and verification is not None else 0
        self.ledger.judged(accepted=num_kept, salvaged=num_kept, rejected=len(proposal.ids) - num_kept)
        self.transcript.extend(proposal.ids[:num_kept])
        free = table is not None and self.sampling.temperature == 0 and not self.transcript.step_is_over
        if free and verification is not None and verification.choices is not None and self.ledger.remaining > 0:
            choices = (*verification.choices, verification.next_choice)
            self.ledger.generated(1)
            self.ledger.wrote("regenerated", 1)
            self.transcript.extend([choices[num_kept]])
            return num_kept, proposal.ids[num_kept + 1 :]
        return num_kept, proposal.ids[num_kept:]

    async def regenerate(
        self, fate: Literal["regenerated", "forced"], hint: Sequence[int] = ()
    ) -> AsyncGenerator[Event, None]:
        """Let the target finish the open step. `hint` holds ids that it may write next."""
        if self.transcript.step_is_over or self.room <= 0:
            return
        stop = self.transcript.rest_of_step(self.room)
        num_before, chunk = len(self.transcript.open_ids), Chunk(())
        written = self.target.generate(Generate(self.transcript.buffer, self.sampling, stop, self.drafting, hint))
        async with aclosing(punctual(written, self.deadline)) as chunks:
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
                for event in self.transcript.emit():
                    yield event
        self.ledger.add_target_call(chunk)
        self.ledger.wrote(fate, len(self.transcript.open_ids) - num_before)

    def end_where_the_target_would(self, verification: Verification | None, verdict: Verdict) -> None:
        """End the thinking after an accepted step if the target's next choice in the verifying pass ends it."""
        if verification is None or self.ledger.remaining <= 0 or not self.transcript.thinking:
            return
        if verdict.accepted and verification.next_choice in self.ends:
            self.ledger.generated(1)
            self.ledger.wrote("forced", 1)
            self.transcript.extend([verification.next_choice])
            for _ in self.transcript.close_step("target"):
                raise AssertionError("an end tag alone is not a step")

    async def write_on(
        self, stop: Stop, deadline: float | None, json_schema: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """Generate text with a single writer: the answer, or the entire text under a policy without steps."""
        draft = self.draft if self.policy.family == "draft" else None
        engine = draft or self.target
        writer: Literal["draft", "target"] = "draft" if draft else "target"
        drafting = Drafting() if draft else self.drafting
        call = Generate(self.transcript.buffer, self.sampling, stop, drafting, json_schema=json_schema)
        written = engine.generate(call)
        async with aclosing(punctual(written, deadline)) as chunks:
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
                for event in self.transcript.write_on(chunk.ids, writer):
                    yield event
        for event in self.transcript.finish(writer):
            yield event

    def result(self, num_prompt_tokens: int) -> Result:
        """Return the result of the finished request."""
        steps = tuple(self.transcript.steps)
        reasoning = "".join(step.text for step in steps)
        self.ledger.add(steps=len(steps))
        self.ledger.committed(len(self.transcript.buffer) - num_prompt_tokens)
        counts, times = self.ledger.counts, self.ledger.times()
        reason: FinishReason = "tool_calls" if self.answer.calls else "stop"
        if not self.transcript.ended:
            reason = "length"
            if self.limit != "deadline":
                self.limit = "context" if self.ledger.remaining > 0 else "max_tokens"
        elif self.limit == "deadline" and not self.answer.calls:
            reason = "length"
        return Result(
            reasoning=reasoning,
            answer=self.answer.text,
            steps=steps,
            counts=counts,
            times=times,
            finish_reason=reason,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=self.ledger.cached or 0,
            tool_calls=tuple(self.answer.calls),
            thinks=self.think_end is not None,
            limit=self.limit,
            token_level_exact=self.policy.token_level_exact,
        )


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
