"""The loop over steps: propose, judge, then accept, or salvage and regenerate; at last the answer.

Step-level speculation is not exact: an accepted step is the draft's, not the target's. What is exact, token-level
speculation inside whatever the target writes, is the engine's business. The draft never ends the thinking or the
text by itself: where it wants to, the target's own choice there decides, and the answer is always the target's.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

from stepspec.breaker import Breaker
from stepspec.engine import Drafting, Engine, Sampling, Stop, Verification, collect
from stepspec.errors import ContextError, EngineError, TargetError
from stepspec.judges import Panel
from stepspec.ledger import Ledger
from stepspec.policy import Policy
from stepspec.step import Done, Event, Proposal, Result, StepJudged, StepProposed, Verdict
from stepspec.transcript import Transcript

DRAFT_SEED = 0x5EED
"""Added to the draft's seed, so that draft and target never draw with the same numbers."""

SURE = math.log(0.5)
"""A token above this log-probability is the most likely one, whatever the others are."""


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
    breaker: Breaker = field(default_factory=Breaker)
    """Of the draft, for all requests together."""

    def __post_init__(self) -> None:
        self.tokenizer = self.target.tokenizer
        self.ends = self.tokenizer.end_ids
        if self.think_end is not None:
            self.ends |= {self.think_end}
        self.drafting = self.policy.token.drafting

    async def run(self, prompt: Sequence[int]) -> AsyncGenerator[Event, None]:
        """The events of the request, `Done` last.

        Raises:
            ContextError: the prompt leaves no room for a token.
            TargetError: the target failed; the error carries what was committed.
        """
        table = self.policy.step
        step_stop = Stop(table.max_step_tokens, (table.delimiter,), self.ends)
        self.transcript = Transcript(prompt, self.tokenizer, step_stop, self.think_end)
        try:
            if self.policy.family == "score":
                async with aclosing(self.speculate()) as events:
                    async for event in events:
                        self.ledger.shown(event)
                        yield event
            async with aclosing(self.write_on()) as events:
                async for event in events:
                    self.ledger.shown(event)
                    yield event
        except ContextError:
            if len(self.transcript.buffer) == len(prompt):
                raise
        except EngineError as error:
            committed = "".join(step.text for step in self.transcript.steps) + self.transcript.answer
            raise TargetError(f"{error} Committed until then: {committed!r}.", committed) from error
        yield Done(self.result(len(prompt)))

    async def speculate(self) -> AsyncGenerator[Event, None]:
        """The thinking, step by step, for as long as there are a draft and tokens to spend."""
        while self.transcript.thinking and self.draft is not None and self.ledger.remaining > 0:
            if len(self.transcript.steps) < self.policy.first_target_steps:
                await self.regenerate("forced")
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
            except ContextError:  # no room is left to judge in, but there may be some to write in
                self.ledger.abandoned(len(proposal.ids))
                return
            yield StepJudged(index, verdict.accepted, verdict.scores)
            if verdict.accepted:
                self.accept(proposal, verification)
                origin, num_from_draft = "draft", proposal.num_written
            else:
                num_from_draft, rest = self.salvage(proposal, verification, verdict)
                await self.regenerate("regenerated", hint=rest)
                origin = "salvaged" if num_from_draft else "target"
            for event in self.transcript.close_step(origin, num_from_draft, verdict.scores):
                yield event
            self.end_where_the_target_would(proposal, verification, verdict)

    async def propose(self, draft: Engine) -> Proposal | None:
        """The draft's next step; None if it failed or took too long, which costs the request its speed alone."""
        if not self.breaker.allows():
            return None
        sampling = replace(self.sampling, seed=self.sampling.seed + DRAFT_SEED)
        stop = self.transcript.rest_of_step(self.ledger.remaining)
        drafted: list[int] = []
        try:
            with self.ledger.time("draft"):
                async with asyncio.timeout(self.policy.step.draft_deadline_s):
                    chunk = await collect(draft.generate(self.transcript.buffer, sampling, stop), drafted)
        except (EngineError, ContextError, TimeoutError) as error:
            self.ledger.abandoned(len(drafted))
            if not isinstance(error, ContextError):
                self.breaker.failed()
            return None
        self.breaker.worked()
        self.ledger.waited("draft", chunk.queue_s)
        num_written = len(chunk.ids) - (chunk.end == "token")
        return Proposal(chunk.ids, self.tokenizer.decode(chunk.ids[:num_written]), num_written)

    async def judge(self, proposal: Proposal) -> tuple[Verification, Verdict]:
        """What the target thinks of the step, from one pass. Empty and repeated steps are refused unasked."""
        steps = self.transcript.steps
        repeated = bool(steps) and proposal.text.strip() == steps[-1].text.strip()
        refused = repeated or not proposal.text.strip()
        with self.ledger.time("judge"):
            verification = await self.target.verify(
                self.transcript.buffer,
                proposal.ids[: proposal.num_written],
                () if refused else self.panel.probes,
                scores=self.policy.needs_scores,
            )
        self.ledger.waited("judge", verification.queue_s)
        self.ledger.found_cached(verification.cached)
        self.ledger.add(target_passes=verification.passes)
        if not refused:
            self.ledger.add(steps_judged=1)
            return verification, self.panel.judge(verification)
        only_ends = not proposal.num_written and verification.next_choice == proposal.tag
        return verification, Verdict(only_ends, {})

    def accept(self, proposal: Proposal, verification: Verification) -> None:
        """Takes the draft's step; the tag that ends it, if there is one, only if it is the target's choice too."""
        confirmed = proposal.tag is not None and proposal.tag == verification.next_choice
        taken = proposal.ids if confirmed else proposal.ids[: proposal.num_written]
        self.ledger.drafted(accepted=len(taken), rejected=len(proposal.ids) - len(taken))
        if proposal.num_written:
            self.ledger.add(steps_accepted=1)
        self.transcript.extend(taken)

    def salvage(self, proposal: Proposal, verification: Verification, verdict: Verdict) -> tuple[int, tuple[int, ...]]:
        """Keeps the part of a rejected step that the target agrees with.

        Returns its length in tokens, and what the rest of the step, whose first token the target may have replaced
        already, says of how the target goes on.

        The verifying pass has also shown the target's own choice after that part. At temperature 0 that is the next
        token, which then costs no pass of its own. Of a step refused unasked nothing is kept that is merely
        probable, or an empty or repeated step would come in by this door.
        """
        table = self.policy.salvage
        bound = table.min_logprob if table and verdict.scores else 0.0
        kept = agreed_prefix(proposal, verification, bound) if table else 0
        self.ledger.drafted(accepted=kept, salvaged=kept, rejected=len(proposal.ids) - kept)
        self.transcript.extend(proposal.ids[:kept])
        free = table is not None and self.sampling.temperature == 0 and not self.transcript.step_is_over
        if free and verification.choices is not None and self.ledger.remaining > 0:
            choices = (*verification.choices, verification.next_choice)
            self.ledger.wrote("regenerated", 1)
            self.transcript.extend([choices[kept]])
            return kept, proposal.ids[kept + 1 :]
        return kept, proposal.ids[kept:]

    async def regenerate(self, fate: Literal["regenerated", "forced"], hint: Sequence[int] = ()) -> None:
        """Has the target write the open step to its end, perhaps much as in the hint."""
        if self.transcript.step_is_over or self.ledger.remaining <= 0:
            return
        stop = self.transcript.rest_of_step(self.ledger.remaining)
        try:
            with self.ledger.time("target"):
                written = self.target.generate(self.transcript.buffer, self.sampling, stop, self.drafting, hint)
                chunk = await collect(written)
        except ContextError:
            if not self.transcript.open_ids:
                raise
            return  # what was salvaged fills the context, and is the whole step
        self.ledger.add_target_call(chunk)
        self.ledger.wrote(fate, len(chunk.ids))
        self.transcript.extend(chunk.ids)

    def end_where_the_target_would(self, proposal: Proposal, verification: Verification, verdict: Verdict) -> None:
        """Ends the thinking after an accepted step if the verifying pass has shown that the target does so."""
        if self.ledger.remaining <= 0 or not self.transcript.thinking:
            return
        if verdict.accepted and verification.next_choice in self.ends:
            self.ledger.wrote("forced", 1)
            self.transcript.extend([verification.next_choice])
            for _ in self.transcript.close_step("target"):
                raise AssertionError("a tag alone is no step")

    async def write_on(self) -> AsyncGenerator[Event, None]:
        """Whatever is left, from one writer alone: the answer, or everything under a policy without steps."""
        if self.transcript.ended or self.ledger.remaining <= 0:
            return
        draft = self.draft if self.policy.family == "draft" else None
        engine = draft or self.target
        writer: Literal["draft", "target"] = "draft" if draft else "target"
        stop = Stop(self.ledger.remaining, token_ids=self.tokenizer.end_ids)
        drafting = Drafting() if draft else self.drafting
        async with aclosing(engine.generate(self.transcript.buffer, self.sampling, stop, drafting)) as chunks:
            while not self.transcript.ended:
                with self.ledger.time(writer):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    raise EngineError("The engine ended a generation without saying why.")
                if draft:
                    self.ledger.drafted(accepted=len(chunk.ids), rejected=0)
                    self.ledger.waited("draft", chunk.queue_s)
                else:
                    self.ledger.wrote("forced", len(chunk.ids))
                    self.ledger.add_target_call(chunk)
                for event in self.transcript.write_on(chunk.ids, writer):
                    yield event
                if chunk.end is not None:
                    break
        for event in self.transcript.finish(writer):
            yield event

    def result(self, num_prompt_tokens: int) -> Result:
        """The request as it ended; the identities of counts and times are asserted here, for every request."""
        steps = tuple(self.transcript.steps)
        reasoning = "".join(step.text for step in steps)
        self.ledger.add(steps=len(steps))
        counts, times = self.ledger.counts, self.ledger.times()
        counts.check()
        times.check()
        return Result(
            reasoning=reasoning,
            answer=self.transcript.answer if self.think_end is not None else reasoning,
            steps=steps,
            counts=counts,
            times=times,
            finish_reason="stop" if self.transcript.ended else "length",
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=self.ledger.cached or 0,
            token_level_exact=self.policy.token.tolerance == 0,
        )


def agreed_prefix(proposal: Proposal, verification: Verification, min_logprob: float) -> int:
    """How many leading tokens of a step the target agrees with: its own choices, or at least that probable to it."""
    logprobs, choices = verification.logprobs, verification.choices
    assert logprobs is not None, "policies that salvage are refused where the target gives no scores"
    for index in range(proposal.num_written):
        own_choice = logprobs[index] > SURE if choices is None else proposal.ids[index] == choices[index]
        if not own_choice and logprobs[index] < min_logprob:
            return index
    return proposal.num_written
