"""A request in progress: its text, models and limits, and what a family can do with them.

The draft never ends the thinking or the text by itself: the target's own choice at that position decides. Token-level
speculation inside the target's own writing is exact; the engine does it.
"""

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from stepspec.chat.answer import AnswerReader
from stepspec.engines.judge_model import JudgeModel
from stepspec.engines.protocol import (
    Distant,
    Drafting,
    Engine,
    Generate,
    Probe,
    Sampling,
    Stop,
    TokenChunk,
    Verification,
    Verify,
    check_room,
    collect,
    side_by_side,
)
from stepspec.engines.thinking import ThinkingTags
from stepspec.errors import ContextError, EngineError, UnknownIdError, UsageError
from stepspec.loop.breaker import Breaker
from stepspec.loop.hopeless import StepWatch
from stepspec.loop.judge import Answer, Evidence, Panel, Verifier, own_choices
from stepspec.loop.ledger import Ledger, ahead
from stepspec.loop.limits import Limits, cut_off, has_passed
from stepspec.loop.options import RequestOptions
from stepspec.loop.pace import StepPace
from stepspec.loop.result import Event, NotProposed
from stepspec.loop.step import JudgedStep, Origin, Proposal, StepCommitted, StepJudged, StepProposed, Verdict
from stepspec.loop.tracing import Spans
from stepspec.loop.transcript import MAX_HEADER, Transcript

if TYPE_CHECKING:
    from stepspec.loop.policy import Policy  # which imports the families, and they this module

logger = logging.getLogger(__name__)

MAX_UNREAD = 256
"""Events that wait for the caller. If there are more, the request waits."""
DRAFT_SEED = 0x5EED
"""Added to the draft's seed, so that draft and target sample with other random numbers."""

TOLD_TOKENS = 16
"""Tokens of the target after which their time counts, before its call ends."""

BUNDLE_S = 1e-4
"""Longest wait for a chunk that came together with the one before."""

ANSWER = re.compile(r"\\boxed|\\fbox|####|\banswer\s*(?:is\b|:|=)|\bfinal answer\b|</?answer>", re.IGNORECASE)
"""Marks of an answer in the text of a model that does not mark its thinking."""

MARK_CHARACTERS = 16
"""Most characters of such a mark."""

SURE = math.log(0.5)
"""A token above this log-probability is the most likely one: all others are less likely."""

Shared = Callable[[Sequence[Probe]], Awaitable[Verification | None]]
"""Returns what a pass over a whole chain says about one of its steps, with probes after it."""


@dataclass(frozen=True)
class Judged:
    """A proposed step, the verdict on it, and the target's pass over it; None if no judge and no salvage needed one."""

    proposal: Proposal
    verdict: Verdict
    verification: Verification | None
    by_judges: bool = False
    """Whether the judges were asked."""
    recorded: Verification | None = None
    """The target's pass over it for a recording, which may need one where nothing else does."""
    seconds: float = 0.0
    """Seconds in which it was judged."""
    next_id: int | None = None
    """The id that the draft has written after it."""
    answers: bool = False
    """Whether it belongs to the answer, of which only what the target would have written itself is kept."""

    @property
    def accepted(self) -> bool:
        """Whether the step is accepted."""
        return self.verdict.accepted


@dataclass(eq=False)
class Request:
    """One request under one policy.

    Its text is in `transcript` and its events are in `events`, for the caller. `None` in `events` is their end.
    """

    policy: "Policy"
    target: Engine
    draft: Engine | None
    panel: Panel
    tags: ThinkingTags | None
    sampling: Sampling
    ledger: Ledger
    prompt: Sequence[int]
    question: str = ""
    """Text of the last user turn, for the judges."""
    breaker: Breaker = field(default_factory=Breaker)
    """The draft's circuit breaker, shared by all requests."""
    pace: StepPace = field(default_factory=StepPace)
    """Chooses the length of chains, and whether steps are speculated on. Requests of one session share it."""
    options: RequestOptions = RequestOptions()
    json_schema: InitVar[str | None] = None
    """See `Limits`, also for `call_opener`."""
    call_opener: InitVar[re.Pattern[str] | None] = None
    answer: AnswerReader = field(default_factory=AnswerReader)
    spans: Spans = field(default_factory=Spans)
    judges: Mapping[str, JudgeModel] = field(default_factory=dict[str, JudgeModel])
    """Judge models by name."""
    starts_thinking: bool = True
    """Whether the text begins with thinking, or without tags, with steps. Else the target writes an answer."""
    judged_steps: list[JudgedStep] | None = None
    """Receives the draft's steps with what was seen of them; None to record nothing."""

    def __post_init__(self, json_schema: str | None, call_opener: re.Pattern[str] | None) -> None:
        self.tokenizer, stop_ids = self.target.tokenizer, frozenset(self.options.stop_token_ids)
        self.answer_ends = self.tokenizer.end_ids | stop_ids
        self.ends = self.answer_ends if self.tags is None else self.tokenizer.end_ids | self.tags.ends
        table = self.policy.step
        step_stop = Stop(table.max_step_tokens, (table.delimiter,), self.ends)
        self.transcript = Transcript(
            self.prompt,
            self.tokenizer,
            step_stop,
            self.tags,
            self.answer,
            stop_ids,
            thinks=self.starts_thinking,
            session=self.options.session_id,
            group=self.options.cache_salt,
        )
        self.transcript.answer_is_apart = json_schema is not None
        self.limits = Limits(self.options, self.ledger, self.transcript, json_schema, call_opener)
        self.draft_is_far = isinstance(self.draft, Distant)
        """Whether the draft is on a server, so that each call of it takes a round trip."""
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.events_read = asyncio.Event()
        self._origin: Origin = "target"  # of the open step
        self._num_from_draft = 0
        self._draft_refused = False
        self.has_answered = False
        """Whether an answer is marked in the text of a model that does not mark its thinking."""
        self._held: Proposal | None = None  # the draft's beginning of a step that is not committed
        self._draft_samplings: dict[int, Sampling] = {}
        self.only_target = False
        self.not_proposed: NotProposed | None = None
        """Why the draft was not asked for its next step, or did not write it; None if it did."""
        self._num_told = 0
        self._num_read = 0  # tokens that the draft has read
        self.prompt_s = 0.0
        """Seconds of the first pass over a chain in which the target read the prompt. Not a cost of speculation."""
        self.judge_failures: Counter[str] = Counter()
        """At how many steps each judge failed."""
        self._writing_since: int | None = None
        self._proposed = False

    @property
    def num_written(self) -> int:
        """Number of tokens after the prompt, counted in the text itself."""
        return len(self.transcript.buffer) - len(self.prompt)

    async def wait_for_reader(self) -> float:
        """Wait while the caller has `MAX_UNREAD` events to read, at most until the deadline. Return the seconds."""
        if self.events.qsize() < MAX_UNREAD:
            return 0.0
        since = time.perf_counter()
        with self.ledger.time("queue"):
            async with cut_off(self.limits.end):
                while self.events.qsize() >= MAX_UNREAD:
                    self.events_read.clear()
                    await self.events_read.wait()
        return time.perf_counter() - since

    def emit(self, events: Iterable[Event]) -> None:
        """Pass events on to the caller."""
        for event in events:
            self.ledger.shown(event)
            self.spans.event(event)
            if isinstance(event, StepCommitted) and self._writing_since is not None:
                self.spans.generated(self._writing_since, event.step, proposed=self._proposed)
                self._writing_since = time.time_ns()
            self.events.put_nowait(event)

    # Speculating

    async def speculates(self) -> bool:
        """Whether the next step may be speculated on. The target first writes the steps that the policy leaves to it.

        False once the thinking or the budget has ended, the draft is missing, too much was wasted, or a tool call has
        begun, which only the target writes. False too if the policy is exact and the target cannot say what it would
        write here.
        """
        if self.policy.step_level_exact and not self.is_own_text:
            self.not_proposed = "the sampling"
            return False
        if self.transcript.in_header and not self.limits.separate_answer:
            await self.write_header()
        while self.transcript.thinking and self.draft is not None and self.limits.allow_more():
            await self.wait_for_reader()
            if self.only_target or not self.ledger.may_waste(*self.policy.waste):
                self.not_proposed = "a tool call" if self.only_target else "too much was wasted"
                return False
            if len(self.transcript.steps) < self.policy.first_target_steps:
                await self.write_step()
            elif self.pace.speculates(self):
                self.not_proposed = None
                return True
            else:
                self.not_proposed = self.pace.why
                await self.complete_step()  # which may open a tool call
                if not self.only_target:
                    await self.write_on()
        return False

    async def complete_step(self) -> None:
        """Let the target write the rest of the open step, if there is one, and commit it."""
        if self.transcript.open_ids:
            await self._write_step("regenerated")
            self._close_step()

    async def write_step(self) -> None:
        """Let the target write the next step, and commit it."""
        await self._write_step("forced")
        self._close_step()

    async def write_header(self) -> None:
        """Let the target write the header of a message, which decides whether the thinking goes on."""
        assert self.tags is not None
        assert self.tags.header_end is not None
        if self.limits.allow_more():
            await self._write(
                Stop(min(self.limits.room, MAX_HEADER), token_ids=self.answer_ends | {self.tags.header_end})
            )

    async def write_on(self) -> None:
        """Let the target write steps in one call until speculation pays again, and commit them."""
        num_before = len(self.transcript.steps)
        await self.write_rest(until=lambda: self.pace.speculates(self))
        if self.transcript.open_ids:
            await self.write_step()
        self.only_target = any(map(self._opens_call, range(num_before, len(self.transcript.steps))))

    def _opens_call(self, index: int) -> bool:
        """Whether a tool call begins in a committed step."""
        steps = self.transcript.steps
        return self.limits.opens_call(steps[index].text, steps[index - 1].text if index else "")

    async def propose(self, count: int) -> list[Proposal]:
        """Return different steps of the draft, written side by side. Empty if the draft failed or was too slow; the
        target then continues alone."""
        if self.sampling.temperature == 0:  # all are equal
            found = [await self.propose_one()]
        else:
            with self.ledger.waiting("draft"):
                found = await side_by_side(*(ahead(self.propose_one, sibling) for sibling in range(count)))
        different: dict[str, Proposal] = {}
        for proposal in found:
            if proposal is not None and different.setdefault(proposal.text, proposal) is not proposal:
                self.ledger.add(abandoned=len(proposal.ids))
        index, self._proposed = len(self.transcript.steps), bool(different)
        self.emit(StepProposed(index, each.text, len(each.ids)) for each in different.values())
        return [*different.values()]

    async def propose_one(
        self, sibling: int = 0, after: Sequence[int] = (), index: int | None = None
    ) -> Proposal | None:
        """Return a step of the draft, counted. None if the draft failed or was too slow.

        Args:
            sibling: see `draft_text`.
            after: see `draft_text`.
            index: the step's number; that of the open step by default.
        """
        since, ids = time.time_ns(), list[int]()
        index = len(self.transcript.steps) if index is None else index
        stop = self.transcript.rest_of_step(self.limits.room - len(after), after)
        proposal = None
        try:
            proposal = await self.draft_text(stop, ids, after, sibling)
        finally:  # the draft may be stopped
            self.ledger.add(drafted=len(ids), abandoned=0 if proposal else len(ids))
        if proposal is None:
            if ids:  # else only short steps would count, and a long one never be waited for
                self.pace.costs.step_tokens.note(len(ids))
            return None
        self._proposed = True
        self.spans.drafted(since, index, len(proposal.ids))
        return proposal

    async def draft_text(
        self, stop: Stop, ids: list[int], after: Sequence[int] = (), sibling: int = 0, *, coupled: bool = False
    ) -> Proposal | None:
        """Return a text of the draft, uncounted. None if the draft failed, was too slow, or is out of use.

        Args:
            stop: where it ends.
            ids: receives the ids as they arrive.
            after: uncommitted ids before it.
            sibling: number of the step among those at the same place. Each has its own random seed.
            coupled: whether the draft uses the target's own random numbers, with which it more often writes what the
                target would. Only for texts of which the target's own choices are kept.
        """
        if self.draft is None or not (self.breaker.is_closed if sibling else self.breaker.allows()):
            self.not_proposed = "the draft failed"
            return None
        is_step = not coupled
        coupled = coupled or (self.policy.step_level_exact and not sibling)
        sampling = self.sampling if coupled else self._draft_sampling(sibling)
        recorded = self.judged_steps is not None and "logprobs" in self.draft.abilities
        logprobs = self.policy.needs_draft_logprobs or recorded
        call = Generate(self.transcript.buffer, sampling, stop, after=tuple(after), logprobs=logprobs)
        watch, since, num_worked = (
            StepWatch(self.policy.step.abort_entropy),
            time.perf_counter(),
            self.breaker.num_worked,
        )
        try:
            with self.ledger.time("draft"):
                num_before = len(self.transcript.buffer) + len(after)
                patience = self.pace.patience_s(max(0, num_before - self._num_read)) or math.inf
                patience = min(patience, self.policy.step.draft_deadline_s)
                async with asyncio.timeout(patience), asyncio.timeout_at(self.limits.deadline):
                    chunk = await collect(watch.until_hopeless(self.draft.generate(call)), ids)
        except TimeoutError:
            if ids:  # it works, if slowly
                self.breaker.worked()
            elif num_worked == self.breaker.num_worked and not self.limits.expired and not sibling:
                self.breaker.failed()
            why: NotProposed = "the draft was too slow"
        except UsageError as error:  # says nothing about other requests
            why = "no room in the context" if isinstance(error, ContextError) else "the draft rejects the text"
        except EngineError:
            if not self.limits.expired and not sibling:
                self.breaker.failed()
            why = "the draft failed"
        else:
            self._num_read = num_before + len(ids)
            self.breaker.worked()
            self.ledger.waited("draft", chunk.queue_s)
            seconds, chunk = time.perf_counter() - since, self._before_ending(chunk, ids, after)
            return replace(_step_of(chunk, self._text_of(chunk)), aborted=watch.aborted, seconds=seconds)
        if is_step and not self.limits.expired:
            self.not_proposed = why
        return None

    def _before_ending(self, chunk: TokenChunk, ids: list[int], after: Sequence[int]) -> TokenChunk:
        """Return a finished call of the draft, cut off where a text that ends the thinking begins or may begin: the
        target writes it. `ids` keeps the same part, and the rest is counted here."""
        count = self.transcript.num_before_ending(chunk.ids[: num_written(chunk)], after)
        if count == num_written(chunk):
            return chunk
        self.ledger.add(drafted=len(ids) - count, abandoned=len(ids) - count)
        del ids[count:]
        details: dict[str, Any] = {
            name: each and each[:count]
            for name in ("logprobs", "entropies", "margins")
            for each in [getattr(chunk, name)]
        }
        return replace(chunk, ids=chunk.ids[:count], end="length", **details)

    def room_after(self, ids: Sequence[int]) -> int:
        """Return how many tokens may follow uncommitted ids."""
        return max(0, min(self.limits.room, self.target.max_context - len(self.transcript.buffer)) - len(ids))

    def _draft_sampling(self, sibling: int) -> Sampling:
        """Return the draft's sampling, with other random numbers for each step at the same place."""
        if sibling not in self._draft_samplings:  # making one checks all its settings
            self._draft_samplings[sibling] = self.sampling.reseeded(DRAFT_SEED * (sibling + 1))
        return self._draft_samplings[sibling]

    def _text_of(self, chunk: TokenChunk) -> str:
        """Return the text of a step, without the tag that ends it."""
        return self.tokenizer.decode(self.transcript.visible(chunk.ids[: num_written(chunk)]))

    async def written(self, room: int, ids: list[int], after: Sequence[int] = ()) -> Proposal:
        """Return a step of the target, uncounted. The arguments are those of `draft_text`.

        Raises:
            ContextError: there is no room in the target's context.
            TimeoutError: the deadline was reached.
            EngineError: the target failed.
        """
        stop, drafting = self.transcript.rest_of_step(room, after), self.policy.token.drafting
        call = Generate(self.transcript.buffer, self.sampling, stop, drafting, after=after)
        with self.ledger.time("target"):
            async with asyncio.timeout_at(self.limits.deadline):
                chunk = await collect(self.target.generate(call), ids)
        self.ledger.add_target_call(chunk, first=not after)
        count = self.transcript.num_before_ending(chunk.ids[: num_written(chunk)], after, whole=True)
        text = self.tokenizer.decode(self.transcript.visible(chunk.ids[:count]))
        return replace(_step_of(chunk, text), num_written=count)

    async def ask(self, after: Sequence[int], probe: Probe) -> Answer:
        """Ask the target a question after uncommitted ids."""
        with self.ledger.time("judge"):
            found = await self.target.verify(Verify(self.transcript.buffer, after, [probe], scores=False))
        self.ledger.waited("judge", found.queue_s)
        self.ledger.add(target_passes=found.passes)
        return Answer(found.probe_choices[0], found.probe_logprobs[0] if found.probe_logprobs else ())

    async def judge(self, proposals: Sequence[Proposal]) -> AsyncGenerator[Judged, None]:
        """Judge steps side by side. Yield the best one that is accepted, or else the best one. Yields none if there is
        none that the target can read before the deadline.

        Empty steps, repeated steps and tool calls are rejected without asking the judges. The target cannot read a step
        that does not fit its context, or that has a token which it does not have. The context may still have room for
        writing then.
        """
        with self.ledger.waiting("judge"):
            found = await side_by_side(*(ahead(self.judge_one, proposal) for proposal in proposals))
        judged = [each for each in found if each is not None]
        best = max(judged, key=lambda each: (each.accepted, self._rank(each.verdict)), default=None)
        for each in judged:
            spare = each is not best and (each.accepted or each.proposal.aborted)
            if spare:
                self.ledger.add(abandoned=len(each.proposal.ids))
            elif each is not best:
                self.ledger.add(rejected=len(each.proposal.ids))
            self.ledger.add(steps_judged=each.by_judges and not spare)
            chosen = each.accepted and each is best
            self.emit([StepJudged(len(self.transcript.steps), chosen, each.verdict.scores)])
        if best is not None:
            yield best

    def _rank(self, verdict: Verdict) -> float:
        score = None if self.panel.ranked_by is None else verdict.scores.get(self.panel.ranked_by)
        return -math.inf if score is None else score

    async def judge_one(self, proposal: Proposal, shared: Shared | None = None) -> Judged | None:
        """Judge a step; None if the target cannot read it before the deadline. For `shared` see `Shared`."""
        since, started = time.time_ns(), time.perf_counter()
        try:
            judged = replace(await self._judge(proposal, shared), seconds=time.perf_counter() - started)
        except (ContextError, UnknownIdError, TimeoutError):
            self.ledger.add(abandoned=len(proposal.ids))
            return None
        self.spans.judged(since, len(self.transcript.steps), judged.verdict)
        return judged

    def is_hopeless(self, proposal: Proposal, before: str) -> bool:
        """Whether a step after one with the text `before` is rejected without asking the judges."""
        repeated, text = proposal.text.strip() == before.strip(), self._open_text + proposal.text
        unusable = repeated or proposal.aborted or self.has_control_token(proposal.ids[: proposal.num_written])
        return unusable or not proposal.text.strip() or self.limits.opens_call(text, before)

    def has_control_token(self, ids: Sequence[int]) -> bool:
        """Whether a draft's text has tokens that only the target may write, such as those that open a message."""
        return any(map(self.tokenizer.is_special, ids))

    def answers(self, proposal: Proposal, seen: Verification | None) -> bool:
        """Whether a draft's text belongs to the answer of a model that does not mark its thinking.

        It does if the answer is marked in it or before it, or if one of the models would end the text after it.
        """
        if self.tags is not None:
            return False
        ends = proposal.tag is not None or seen is None or seen.next_choice in self.ends
        marked = marks_answer(self._open_text + proposal.text, self.transcript.last_text)
        return ends or marked or self.has_answered

    def _own_prefix(self, proposal: Proposal, seen: Verification | None) -> int:
        """Return how many leading tokens of a draft's text are the target's own choices; 0 if these are not known."""
        own = own_choices(proposal.ids[: proposal.num_written], seen) if self.is_own_text else None
        return [*(own or ()), False].index(False)

    @property
    def _open_text(self) -> str:
        """What the step has before the draft's part."""
        ids = self.transcript.open_ids
        return self.tokenizer.decode(self.transcript.visible(ids)) if ids else ""

    async def _judge(self, proposal: Proposal, shared: Shared | None) -> Judged:
        """Judge a step. `shared` returns what a pass over a whole chain says about it."""
        check_room(self.target, len(self.transcript.buffer), proposal.num_written)

        async def look(probes: Sequence[Probe] = ()) -> Verification:
            found = None if shared is None else await shared(probes)
            return found or await self._verify(proposal, probes)

        if self.is_hopeless(proposal, self.transcript.last_text):
            if proposal.num_written and self.policy.salvage is None:
                return Judged(proposal, Verdict(False, {}), None)
            verification = await look()
            only_ends = not proposal.num_written and verification.next_choice == proposal.tag
            return Judged(proposal, Verdict(only_ends, {}), verification)
        passes: list[Verification] = []

        async def verify(probes: Sequence[Probe]) -> Verification:
            passes.append(await (self._verify(proposal, probes, again=True) if passes else look(probes)))
            return passes[-1]

        with self.ledger.time("judge"):
            evidence = Evidence.of(proposal, self.question, self.transcript.steps, self.judges, self.options.cache_salt)
            verdict = await self.ask_panel(evidence, verify)
        seen = passes[0] if passes else None
        if seen is None and not self.target_has(proposal.ids):  # else the target has read them
            raise UnknownIdError(f"{self.target.name} does not have a token of the draft's step.")
        ends = proposal.tag is not None or self.tags is None
        if seen is None and (ends if verdict.accepted else self.policy.salvage is not None):
            with suppress(ContextError, TimeoutError):  # without room or time, no tag is confirmed and nothing salvaged
                seen = await look()
        answers = self.answers(proposal, seen) and self._own_prefix(proposal, seen) < proposal.num_written
        verdict = replace(verdict, accepted=verdict.accepted and not answers)
        recorded = seen
        if self.judged_steps is not None and seen is None:  # the text must not depend on this pass
            with suppress(ContextError, TimeoutError):
                recorded = await self._verify(proposal, ())
        return Judged(proposal, verdict, seen, by_judges=True, recorded=recorded, answers=answers)

    async def ask_panel(self, evidence: Evidence, verify: Verifier) -> Verdict:
        """Return the judges' verdict on a step, and count the calls of judge models. See `Panel.judge`."""
        verdict = await self.panel.judge(evidence, verify, self.limits.deadline)
        self.ledger.add(judge_calls=len(self.panel.with_models & verdict.scores.keys()))
        for name, error in verdict.errors.items():
            if name not in self.judge_failures:
                logger.warning("The judge %s failed, which rejects the step: %s", name, error)
            self.judge_failures[name] += 1
        return verdict

    async def _verify(self, proposal: Proposal, probes: Sequence[Probe], *, again: bool = False) -> Verification:
        """Return the target's pass over a step; `again` is a further pass, of which only the probes count.

        Raises:
            TimeoutError: the deadline was reached.
        """
        scores = self.policy.needs_scores or (self.judged_steps is not None and "scores" in self.target.abilities)
        return await self.read(proposal.ids[: proposal.num_written], probes, scores=scores and not again)

    async def read(self, ids: Sequence[int], probes: Sequence[Probe], *, scores: bool = True) -> Verification:
        """Return the target's pass over ids after the text, see `Verify`."""
        is_argmax = self.sampling.temperature == 0 and not self._is_edited
        sampling = self.sampling if self._samples and not is_argmax else None
        call = Verify(self.transcript.buffer, ids, probes, scores, sampling)
        with self.ledger.time("judge"):
            async with asyncio.timeout_at(self.limits.deadline):
                reads_prompt, since = self.ledger.cached is None, time.perf_counter()
                verification = await self.target.verify(call)
        seconds = time.perf_counter() - since
        num_asked = sum(len(probe.ids) for probe in probes)
        num_read = len(self.transcript.buffer) - verification.cached + len(ids) + num_asked
        self.pace.costs.read(max(1, num_read), seconds)
        if reads_prompt:
            self.prompt_s += max(0.0, seconds - self.pace.costs.pass_s(len(ids) + num_asked))
        self.ledger.waited("judge", verification.queue_s)
        self.ledger.found_cached(verification.cached)
        self.ledger.add(target_passes=verification.passes)
        return verification

    # Committing

    def accept(self, judged: Judged) -> None:
        """Commit the draft's step. An end tag is included only if the target chooses it too.

        The target's own choice after the step may also end the thinking.
        """
        proposal = judged.proposal
        chosen = None if judged.verification is None else judged.verification.next_choice
        confirmed = proposal.tag is not None and proposal.tag == chosen
        accepted = proposal.ids if confirmed else proposal.ids[: proposal.num_written]
        self.ledger.add(accepted=len(accepted), rejected=len(proposal.ids) - len(accepted))
        if proposal.num_written:
            self.ledger.add(steps_accepted=1)
        self._record(judged)
        self._origin = "salvaged" if self.transcript.open_ids else "draft"
        self._num_from_draft += proposal.num_written
        self.transcript.extend(accepted)
        self._close_step(judged.verdict)
        if chosen not in self.ends or chosen == judged.next_id:  # the draft may have ended it too
            return
        if self._is_edited and not self._samples:  # then it need not be what the target would write
            return
        if self.transcript.thinking and not self.only_target and self.ledger.remaining > 0:
            self.ledger.add(generated=1, forced=1)
            self.transcript.extend([chosen])
            self.emit(self.transcript.close_step("target"))

    def commit(self, step: Proposal, writer: Literal["draft", "target"], verdict: Verdict | None = None) -> None:
        """Commit a whole step of one model, with the tag that ends it."""
        if writer == "draft":
            self.ledger.add(accepted=len(step.ids), steps_accepted=bool(step.num_written))
            self._origin, self._num_from_draft = "draft", step.num_written
        else:
            self.ledger.add(forced=len(step.ids))
        self.transcript.extend(step.ids)
        self._close_step(verdict)

    @property
    def _samples(self) -> bool:
        """Whether passes over draft steps say what the target would write, under the request's sampling."""
        return "samples" in self.target.abilities and not self.sampling.depends_on_text

    @property
    def is_own_text(self) -> bool:
        """Whether the target's choices in a pass over a text are what it would write there."""
        return self._samples or (self.sampling.temperature == 0 and not self._is_edited)

    @property
    def _is_edited(self) -> bool:
        """Whether the sampling changes logits."""
        sampling = self.sampling
        return sampling.depends_on_text or bool(sampling.logit_bias) or sampling.allowed is not None

    def target_has(self, ids: Sequence[int]) -> bool:
        """Whether the target has these tokens, as far as its vocabulary is known. A draft may have further ones."""
        return self.tokenizer.num_ids is None or max(ids, default=0) < self.tokenizer.num_ids

    # Routing

    @property
    def longest_step(self) -> int:
        """Most tokens of a step."""
        return self.policy.step.max_step_tokens

    @property
    def is_stuck(self) -> bool:
        """Whether the last two steps are equal."""
        texts = [step.text.strip() for step in self.transcript.steps[-2:]]
        return len(texts) == 2 and texts[0] == texts[1]

    async def glance(self, num_tokens: int) -> Proposal | None:
        """Return the draft's next tokens of the open step, at most `num_tokens`, after those that are held. None if
        there is no room for one, or the draft failed or was too slow."""
        held, self._held = self._held or Proposal((), "", 0), None
        in_step = self.longest_step - len(self.transcript.open_ids)
        in_context = self.target.max_context - len(self.transcript.buffer)
        room = min(self.limits.room, num_tokens, in_step, in_context) - len(held.ids)
        since, ids, draft = time.time_ns(), list[int](), None
        if room > 0:
            stop = self.transcript.rest_of_step(room)
            draft = await self.draft_text(replace(stop, before=stop.before + held.text), ids, held.ids)
        self.ledger.add(drafted=len(ids))
        if draft is None:
            self.ledger.add(abandoned=len(held.ids) + len(ids))
            return None
        self.spans.drafted(since, len(self.transcript.steps), len(draft.ids))
        if not (held.ids or self.transcript.open_ids):
            self.ledger.add(steps_proposed=1)
        return held.followed_by(draft)

    async def keep(self, draft: Proposal) -> None:
        """Commit the draft's tokens to the open step. An end tag is kept only if the target chooses it too. Nothing is
        kept of a tool call, of a step that repeats itself, and of tokens that the target does not have.

        A model that does not mark its thinking may answer at any place. The beginning of a step is then held until the
        whole step is there, because the target has to see how it ends.
        """
        is_beginning = draft.end == "length" and len(self.transcript.open_ids) + len(draft.ids) < self.longest_step
        if self.tags is None and is_beginning:
            self._held = draft
        else:
            await self._keep(draft)

    async def _keep(self, draft: Proposal) -> None:
        """Commit the draft's tokens as `keep` does. Of an answer, only the target's own beginning is kept."""
        kept = draft.ids[: draft.num_written]
        text = self.tokenizer.decode([*self.transcript.open_ids, *kept])
        opens_call = self.limits.opens_call(text, self.transcript.last_text)
        hopeless = draft.aborted or self.has_control_token(kept) or opens_call
        if hopeless or not self.target_has(kept):
            kept, self._draft_refused = (), True
        elif draft.tag is not None or self.tags is None:
            seen = None
            with suppress(ContextError, TimeoutError):  # without room or time, the draft's text does not end here
                seen = await self._verify(draft, ())
            if self.answers(draft, seen):
                kept = kept[: self._own_prefix(draft, seen)]
            if len(kept) == draft.num_written and seen is not None and seen.next_choice == draft.tag:
                kept = draft.ids
            self._draft_refused = len(kept) < len(draft.ids)
        num_dropped = len(draft.ids) - len(kept)
        dropped = "abandoned" if draft.aborted else "rejected"
        self.ledger.add(accepted=len(kept), **{dropped: num_dropped})
        self._num_from_draft += min(len(kept), draft.num_written)
        self.transcript.extend(kept)

    async def take_over(self, draft: Proposal, num_tokens: int, sentence: str = "") -> None:
        """Drop the draft's tokens, and let the target write at most `num_tokens` instead, after a sentence if given."""
        self.ledger.add(rejected=len(draft.ids))
        room = min(self.limits.room, self.longest_step, self.target.max_context - len(self.transcript.buffer))
        ids = self.tokenizer.encode_text(sentence)[: max(0, room)] if sentence else []
        self.ledger.add(generated=len(ids), forced=len(ids))
        self.transcript.extend(ids)
        await self._write_step("forced", num_tokens=num_tokens)

    async def finish_step(self) -> bool:
        """Let the draft write the rest of the open step, or the target if the draft cannot, and commit it.

        Returns:
            Whether the draft still works.
        """
        works = True
        if not self.step_is_over and not self._draft_refused:
            rest = await self.glance(self.longest_step)
            works = rest is not None or self.limits.room <= 0
            if rest is not None:
                await self._keep(rest)
        if not self.step_is_over:
            await self._write_step("forced")
        if self._num_from_draft:
            others = len(self.transcript.open_ids) > self._num_from_draft + self.transcript.has_end_tag
            self._origin = "salvaged" if others else "draft"
        self._close_step()
        return works

    @property
    def step_is_over(self) -> bool:
        """Whether nothing more is written to the open step."""
        return self.transcript.step_is_over or self.answer.stopped

    async def replace(self, judged: Judged) -> None:
        """Let the target write a rejected step again, after the part of it that the policy salvages.

        With `redraft`, a step of which a beginning is committed stays open instead, for the draft to go on with.
        """
        num_before, num_open = self._num_from_draft, len(self.transcript.open_ids)
        hint, since = self._salvage(judged), time.perf_counter()
        num_salvaged = self._num_from_draft - num_before
        redrafts = self.policy.salvage is not None and self.policy.salvage.redraft and not judged.proposal.aborted
        redrafts = redrafts and (not self.draft_is_far or self.pace.continues(len(hint)))
        if redrafts and len(self.transcript.open_ids) > num_open and not self.step_is_over and self.limits.room > 0:
            self._record(judged, num_salvaged)
            return
        waited_s = await self._write_step("regenerated", hint)
        self._record(judged, num_salvaged, time.perf_counter() - since - waited_s)
        self._close_step(judged.verdict)

    def _record(self, judged: Judged, num_salvaged: int = 0, write_s: float = 0.0) -> None:
        """Record what was seen of a step, if the caller wants it. Call it before the step is closed."""
        if self.judged_steps is None:
            return
        proposal, seen = judged.proposal, judged.recorded or judged.verification
        self.judged_steps.append(
            JudgedStep(
                index=len(self.transcript.steps),
                text=proposal.text,
                num_tokens=proposal.num_written,
                accepted=judged.accepted,
                asked=judged.by_judges,
                scores=judged.verdict.scores,
                target_logprobs=None if seen is None else seen.logprobs,
                own_choices=own_choices(proposal.ids, seen),
                draft_logprobs=proposal.logprobs,
                draft_entropies=proposal.entropies,
                draft_margins=proposal.margins,
                num_salvaged=num_salvaged,
                draft_s=proposal.seconds,
                judge_s=judged.seconds,
                write_s=write_s,
            )
        )

    def _salvage(self, judged: Judged) -> tuple[int, ...]:
        """Keep the prefix of a rejected step that the target agrees with, if the policy salvages.

        The verifying pass also shows the target's own choice after that prefix. If that choice was made under the
        request's sampling, it is the next token, which needs no extra pass. If no judge scored the step, only the
        target's own choices are kept; otherwise empty or repeated steps could be accepted here.

        Returns:
            The rest of the step as a hint for how the target continues. It leaves out a token that the target has
            already replaced.
        """
        proposal, verification, verdict = judged.proposal, judged.verification, judged.verdict
        opens_call = self.limits.opens_call(self._open_text + proposal.text, self.transcript.last_text)
        table = None if opens_call else self.policy.salvage
        num_kept = 0
        if judged.answers or (table and self.tags is None):  # the rest of the step may end the text
            num_kept = self._own_prefix(proposal, verification)
        elif table and verification is not None:
            num_kept = agreed_prefix(proposal, verification, table.min_logprob if verdict.scores else 0.0)
        num_kept = self.transcript.num_before_ending(proposal.ids[:num_kept])
        num_dropped = len(proposal.ids) - num_kept
        dropped = "abandoned" if proposal.aborted else "rejected"
        self.ledger.add(accepted=num_kept, salvaged=num_kept, **{dropped: num_dropped})
        self.transcript.extend(proposal.ids[:num_kept])
        self._num_from_draft += num_kept
        self._origin = "salvaged" if self._num_from_draft else "target"
        free = (table is not None or judged.answers) and self.is_own_text and not self.transcript.step_is_over
        if free and verification is not None and verification.choices is not None and self.limits.room > 0:
            choices = (*verification.choices, verification.next_choice)
            self.ledger.add(generated=1, regenerated=1)
            self.pace.regenerated(1, 0.0)
            self.transcript.extend([choices[num_kept]])
            return proposal.ids[num_kept + 1 :]
        return proposal.ids[num_kept:]

    async def _write_step(
        self, fate: Literal["regenerated", "forced"], hint: Sequence[int] = (), num_tokens: int | None = None
    ) -> float:
        """Let the target finish the open step, or write `num_tokens` of it. `hint` holds ids that it may write next.

        Returns:
            The seconds in which it waited for the caller to read. The engine may have gone on meanwhile, so what it
            took is then not known.
        """
        self._writing_since = time.time_ns()
        if self.transcript.step_is_over or self.limits.room <= 0:
            return 0.0
        room = self.limits.room if num_tokens is None else min(self.limits.room, num_tokens)
        stop = self.transcript.rest_of_step(room)
        num_before, chunk, watch = len(self.transcript.open_ids), TokenChunk(()), self._writing_watch()
        table = self.policy.token
        call = Generate(self.transcript.buffer, self.sampling, stop, table.drafting, hint if table.hint else ())
        reads_prompt, since, waited_s = self.ledger.cached is None, time.perf_counter(), 0.0
        async with aclosing(punctual(self.target.generate(call), self.limits.deadline)) as chunks:
            while not self.answer.stopped:
                try:
                    with self.ledger.time("target"):
                        watch.asks()
                        following = await anext(chunks, None)
                except ContextError:
                    if not self.transcript.open_ids:
                        raise
                    break  # the salvaged tokens fill the context, so they are the entire step
                if following is None:
                    break
                chunk = following
                watch.got(len(chunk.ids))
                self.ledger.add(generated=len(chunk.ids))
                self.transcript.extend(chunk.ids)
                self.emit(self.transcript.emit())
                if paused_s := await self.wait_for_reader():
                    watch.pause(self.pace)
                    waited_s += paused_s
        watch.end(self.pace)
        num_new = len(self.transcript.open_ids) - num_before
        if fate == "regenerated" and not reads_prompt and not waited_s:
            self.pace.regenerated(num_new, time.perf_counter() - since)
        self.ledger.add_target_call(chunk)
        self.ledger.add(**{fate: num_new})
        return waited_s

    def _close_step(self, verdict: Verdict | None = None) -> None:
        """Commit the open step. If it opens a tool call, the target continues alone."""
        scores = None if verdict is None else verdict.scores
        self.emit(self.transcript.close_step(self._origin, self._num_from_draft, scores))
        self._origin, self._num_from_draft, self._draft_refused = "target", 0, False
        self._writing_since, self._proposed = None, False
        steps = self.transcript.steps
        self.only_target = bool(steps) and self._opens_call(len(steps) - 1)
        if self.tags is None and steps:
            self.has_answered |= marks_answer(steps[-1].text, steps[-2].text if len(steps) > 1 else "")
        self.tell_committed()

    def tell_committed(self) -> None:
        """Tell the session how much was committed since the last time."""
        self.pace.load.committed(self, self.num_written - self._num_told)
        self._num_told = self.num_written

    def _writing_watch(self, *, control: bool = False) -> "WritingWatch":
        return WritingWatch(reads_prompt=self.ledger.cached is None, control=control)

    # Writing without speculation on steps

    async def write_rest(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let a single writer finish the text: the draft if the policy names it alone, else the target.

        `until` is asked after every chunk of the thinking, and may stop the writer, in the middle of a step too.
        """
        transcript, limits = self.transcript, self.limits
        separate = self.tags is not None and limits.separate_answer
        thinking_alone = replace(transcript.end_of_thinking, max_tokens=max(1, limits.room))
        if separate and transcript.thinking and limits.allow_more() and not await self._write(thinking_alone, until):
            return
        thought = transcript.in_header or (transcript.thinking and not limits.allow_more())
        if separate and thought and not has_passed(limits.end):
            self._end_thinking()
        schema, goes_on = limits.json_schema, not transcript.ended and limits.allow_more()
        if goes_on and not await self._write(Stop(limits.room, token_ids=self.answer_ends), until, schema):
            return
        if transcript.open_ids:
            self._close_step()

    def _end_thinking(self) -> None:
        """Commit what is missing of the tags that end the thinking, in place of the target."""
        ids = self.transcript.rest_of_ending[: max(0, self.ledger.remaining)]
        self.ledger.add(generated=len(ids), forced=len(ids))
        self.emit(self.transcript.end_thinking("target", len(ids)))

    async def _write(
        self, stop: Stop, until: Callable[[], bool] = lambda: False, json_schema: str | None = None
    ) -> bool:
        """Let a single writer write up to `stop`. Return False if `until` stopped it, which may leave a step open."""
        draft = self.draft if self.policy.family == "draft" else None
        writer: Literal["draft", "target"] = "draft" if draft else "target"
        drafting = Drafting() if draft else self.policy.token.drafting
        call = Generate(self.transcript.buffer, self.sampling, stop, drafting, json_schema=json_schema)
        self._writing_since, self._proposed = time.time_ns(), False
        watch = self._writing_watch(control=self.transcript.thinking)
        async with aclosing(punctual((draft or self.target).generate(call), self.limits.deadline)) as chunks:
            while not self.transcript.ended:
                with self.ledger.time(writer):
                    watch.asks()
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                if draft:
                    self.ledger.add(drafted=len(chunk.ids), accepted=len(chunk.ids))
                    self.ledger.waited("draft", chunk.queue_s)
                else:
                    watch.got(len(chunk.ids))
                    self.ledger.add(generated=len(chunk.ids), forced=len(chunk.ids))
                    self.ledger.add_target_call(chunk)
                self.emit(self.transcript.write_on(chunk.ids, writer))
                self.tell_committed()
                if await self.wait_for_reader():
                    watch.pause(self.pace)
                if not self.transcript.thinking:
                    watch.thinking_ended(self.pace)
                    self.pace.load.stops_asking(self)
                watch.tell(self.pace)
                if chunk.end is None and self.transcript.thinking and until():
                    watch.end(self.pace)
                    return False
        watch.end(self.pace)
        self.emit(self.transcript.finish(writer))
        return True


class WritingWatch:
    """Times what the target writes in a call after its first chunk, which waits for the prompt to be read.

    Chunks that need no waiting came together with the one before: a server may send many tokens at a time. Where most
    of a text came at a time, the whole call is timed. In the first call of a request, which reads the prompt, this says
    nothing about the target's speed.

    Args:
        reads_prompt: whether the call is the first one of its request.
        control: see `StepPace.generated`.
        clock: returns the time in seconds.
    """

    def __init__(self, *, reads_prompt: bool, control: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._reads_prompt, self._began_as_control, self._control = reads_prompt, control, control
        self._clock = clock
        self._began = self._asked_at = clock()
        self._bundles: list[tuple[float, int]] = []  # of chunks that came together: when, and how many tokens
        self._told = False

    def asks(self) -> None:
        """Note that the next chunk is asked for."""
        self._asked_at = self._clock()

    def got(self, num_tokens: int) -> None:
        """Note a chunk."""
        now = self._clock()
        if self._bundles and now - self._asked_at < BUNDLE_S:
            now, num_before = self._bundles.pop()
            num_tokens += num_before
        self._bundles.append((now, num_tokens))

    def tell(self, pace: StepPace) -> None:
        """Pass on what was timed since the last time, if it is enough. More may belong to the latest chunks."""
        if sum(count for _, count in self._bundles[1:-1]) >= TOLD_TOKENS:
            self._pass_on(pace, self._bundles[:-1])

    def thinking_ended(self, pace: StepPace) -> None:
        """Pass on what was timed before. The answer that follows is no control, as answers are easy."""
        if self._control:
            self._pass_on(pace, self._bundles[:-1])
            self._control = False

    def pause(self, pace: StepPace) -> None:
        """Leave out a wait for the caller, and the next chunk, which the engine may have written meanwhile."""
        self._pass_on(pace, self._bundles)
        self._bundles, self._told = [], True

    def end(self, pace: StepPace) -> None:
        """Pass on the rest at the end of the call."""
        num_tokens = sum(count for _, count in self._bundles)
        if not num_tokens:  # a server may send an empty text
            return
        num_first = self._bundles[0][1]
        seconds = self._bundles[-1][0] - self._began
        if self._told or num_tokens > 2 * num_first:
            self._pass_on(pace, self._bundles)
        elif self._reads_prompt:
            pace.generated_at_unknown_speed(seconds)
        else:
            pace.generated(num_tokens, seconds, control=self._began_as_control)

    def _pass_on(self, pace: StepPace, bundles: Sequence[tuple[float, int]]) -> None:
        """Pass on what these bundles have after the first of them."""
        num_tokens = sum(count for _, count in bundles[1:])
        if num_tokens:
            pace.generated(num_tokens, bundles[-1][0] - bundles[0][0], control=self._control)
            self._bundles, self._told = self._bundles[len(bundles) - 1 :], True


def num_written(chunk: TokenChunk) -> int:
    """Return the number of tokens of a finished call without the token that ended it."""
    return len(chunk.ids) - (chunk.end == "token")


def _step_of(chunk: TokenChunk, text: str) -> Proposal:
    """Return a step from a finished call and its text. The details of the tag that ends it are left out."""
    count = num_written(chunk)
    logprobs, entropies, margins = (
        None if each is None else each[:-1] if chunk.end == "token" else each
        for each in (chunk.logprobs, chunk.entropies, chunk.margins)
    )
    return Proposal(chunk.ids, text, count, logprobs, entropies, margins, chunk.end or "length")


async def punctual(
    chunks: AsyncGenerator[TokenChunk, None], deadline: float | None
) -> AsyncGenerator[TokenChunk, None]:
    """Yield the chunks of a call until it ends. The deadline, in the event loop's time, cuts the call off."""
    async with aclosing(chunks):
        while True:
            chunk = None
            async with cut_off(deadline) as limit:
                chunk = await anext(chunks, None)
            if limit.expired():
                return
            if chunk is None:
                raise EngineError("The engine ended a generation without a reason.")
            yield chunk
            if chunk.end is not None:
                return


def marks_answer(text: str, before: str) -> bool:
    """Return whether an answer is marked in a text. The mark may begin in the text before it."""
    before = before[-MARK_CHARACTERS:]
    return any(mark.end() > len(before) for mark in ANSWER.finditer(before + text))


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
