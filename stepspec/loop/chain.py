"""Chains of draft steps, and the one pass of the target that reads all steps of a chain."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from stepspec.engines.protocol import Probe, Stop, Verification
from stepspec.errors import ContextError, EngineError
from stepspec.loop.request import Judged, Request
from stepspec.loop.step import Proposal, StepJudged, StepProposed

MAX_ANSWER = 64
"""Most tokens of an answer that the draft writes before the target has read what is before it."""


@dataclass(frozen=True)
class Chain:
    """What the draft has written after the committed text.

    Attributes:
        steps: steps, each after the last one. Only the last one may have a tag that ends it.
        answer: ids after that tag.
        seconds: what it took to write them.
        answer_s: what it took to write the answer, where the target reads the whole text again to check it; else None.
    """

    steps: Sequence[Proposal] = ()
    answer: Sequence[int] = ()
    seconds: float = 0.0
    answer_s: float | None = None
    goes_on: bool = False
    """Whether the draft can write another step after it."""

    @property
    def ids(self) -> list[int]:
        """The ids of all steps."""
        return [id for step in self.steps for id in step.ids]

    def next_id(self, number: int) -> int | None:
        """Return the first id after a step, its own tag included; None if there is none."""
        step = self.steps[number]
        if step.tag is not None:
            return step.tag
        return self.steps[number + 1].ids[0] if number + 1 < len(self.steps) else None

    def num_after(self, number: int) -> int:
        """Return the number of ids after a step and its tag."""
        return sum(len(step.ids) for step in self.steps[number + 1 :]) + len(self.answer)


class SharedPass:
    """One pass of the target over a chain, made when the first of its steps needs it.

    Args:
        chain: the chain.
        verify: makes a pass over ids after the committed text, with probes.
    """

    def __init__(
        self, chain: Chain, verify: Callable[[Sequence[int], Sequence[Probe]], Awaitable[Verification]]
    ) -> None:
        self._ends = [0, *accumulate(step.num_written for step in chain.steps)]
        ids = [id for step in chain.steps for id in step.ids]
        self._ids = [*ids, *chain.answer] if chain.answer else ids[: self._ends[-1]]
        self._verify = verify
        self._probes: tuple[Probe, ...] = ()
        self._seen: Verification | None = None
        self._first = 0
        self._is_optional = chain.answer_s is not None
        self._failed = False

    async def read(self, number: int, probes: Sequence[Probe]) -> Verification | None:
        """Return what the pass says about a step of the chain; None if it does not have that.

        The first call makes the pass, with its probes after every step from this one on. Those before are committed.

        Args:
            number: number of the step in the chain.
            probes: what the target is asked after the step.
        """
        if self._seen is None and not self._failed:
            self._probes, self._first = tuple(probes), number
            begin = self._ends[number]
            asked = [replace(probe, place=end - begin) for end in self._ends[number + 1 :] for probe in probes]
            try:
                self._seen = await self._verify(self._ids[begin:], asked)
            except ContextError:  # a single step may still fit
                self._failed = True
            except EngineError:
                if not self._is_optional:
                    raise
                self._failed = True
        seen = self._seen
        if seen is None or not set(probes) <= set(self._probes):
            return None
        start, end = (each - self._ends[self._first] for each in self._ends[number : number + 2])
        places = [(number - self._first) * len(self._probes) + self._probes.index(probe) for probe in probes]
        assert seen.choices is not None, "chains are only for targets that return their choices"
        return Verification(
            logprobs=None if seen.logprobs is None else seen.logprobs[start:end],
            choices=seen.choices[start:end],
            next_choice=(*seen.choices, seen.next_choice)[end],
            probe_logprobs=tuple(seen.probe_logprobs[place] for place in places) if seen.probe_logprobs else (),
            probe_choices=tuple(seen.probe_choices[place] for place in places),
        )

    @property
    def was_made(self) -> bool:
        """Whether the target was asked, with success or not."""
        return self._failed or self._seen is not None

    @property
    def answer_choices(self) -> Sequence[int]:
        """The target's own choice at each place of the answer, and after it; empty if the pass was not made."""
        seen = self._seen
        if seen is None or seen.choices is None:
            return ()
        return (*seen.choices, seen.next_choice)[self._ends[-1] - self._ends[self._first] + 1 :]


@dataclass(frozen=True)
class Proposing:
    """What the draft may propose before the target has judged it.

    Attributes:
        depth: most steps of a chain.
        answer: whether the draft goes on with the answer after a step that ends the thinking.
            rereads: whether the target reads the whole text again to check an answer of the draft.
    """

    depth: int = 1
    answer: bool = False
    rereads: bool = False

    @classmethod
    def fitted(cls, request: Request, depth: int, *, answer: bool) -> "Proposing":
        """Return what is possible for a request. A recording wants the costs of every step, and a target that would
        read the whole text again for its choices alone is asked for them only to check an answer."""
        if request.judged_steps is not None:
            return cls()
        abilities, scores = request.target.abilities, request.policy.needs_scores
        if "choices" not in abilities:
            return cls()
        if scores or "cached scores" in abilities:
            return cls(depth, answer)
        return cls(answer=answer, rereads=True)


class DraftFront:
    """Where the draft writes on: after the text, and steps that are not committed yet."""

    def __init__(self, request: Request) -> None:
        self.uncommitted: list[int] = []
        """The ids that are not committed yet."""
        self.num_steps = len(request.transcript.steps)
        """Number of steps before it, committed or not."""
        self.text = request.transcript.last_text
        """Text of the step before it."""
        self.follows = False
        """Whether there is a step before it that was not committed."""

    def add(self, step: Proposal) -> None:
        """Move on after a step of the draft."""
        self.uncommitted.extend(step.ids)
        self.num_steps, self.text, self.follows = self.num_steps + 1, step.text, True


async def propose_chain(request: Request, table: Proposing) -> Chain:
    """Return steps of the draft, each after the last one. Empty if the draft failed or was too slow; the target then
    continues alone.

    A chain ends early with a step that cannot be followed: an unfinished, empty, repeated or aborted one, one that
    ends the thinking, and one that calls a tool.

    Args:
        request: the request.
        table: what the draft may propose.
    """
    started, front = time.perf_counter(), DraftFront(request)
    request.pace.tries(request)
    most = 1 if request.transcript.open_ids else table.depth  # the rest of a step has less room than a whole one
    chain, answer, goes_on, answer_s = list[Proposal](), list[int](), True, None
    try:
        while goes_on and len(chain) < most and (not front.follows or request.room_after(front.uncommitted)):
            proposal = await request.propose_one(after=front.uncommitted, index=front.num_steps)
            goes_on = False
            if proposal is None or (front.follows and not proposal.ids):  # a server may send an empty step
                break
            if front.follows and not request.target_has(proposal.ids):
                request.ledger.add(abandoned=len(proposal.ids))
                break
            request.pace.costs.drafted(len(proposal.ids), proposal.seconds)
            goes_on = proposal.end == "delimiter" and not request.is_hopeless(proposal, front.text)
            chain.append(proposal)
            front.add(proposal)
        asks = not table.rereads and (not request.draft_is_far or request.pace.costs.asks_for_end())
        if table.answer and chain and goes_on and asks:
            tag = await _draft_tag(request, front.uncommitted)
            if tag is not None:
                goes_on = False
                chain.append(tag)
                front.add(tag)
        tag = chain[-1].tag if chain else None
        ends = tag is not None and request.tags is not None and tag == request.tags.end
        request.pace.costs.proposed(ends=ends)
        if table.answer and ends and _may_answer(request, front.uncommitted):
            num_before, since = len(request.transcript.buffer) + len(front.uncommitted), time.perf_counter()
            if not table.rereads or request.pace.rereads(num_before + MAX_ANSWER):
                await _draft_answer(request, front.uncommitted, answer)
                answer_s = time.perf_counter() - since if table.rereads else None
    except asyncio.CancelledError:
        request.ledger.add(abandoned=sum(len(step.ids) for step in chain))
        raise
    return Chain(chain, answer, time.perf_counter() - started, answer_s, bool(chain) and goes_on)


async def _draft_tag(request: Request, after: Sequence[int]) -> Proposal | None:
    """Return the tag that ends the thinking, if the draft writes it next, as a step without text."""
    if request.tags is None or request.tags.end is None or not request.room_after(after):
        return None
    ids, found = list[int](), None
    try:
        found = await request.draft_text(Stop(1, token_ids=request.ends), ids, after, coupled=True)
        found = found if found is not None and found.tag == request.tags.end else None
    finally:
        request.ledger.add(drafted=len(ids), abandoned=0 if found else len(ids))
    return found


def _may_answer(request: Request, after: Sequence[int]) -> bool:
    """Return whether what the draft writes after the end of the thinking may be kept, and there is room for it."""
    limits, has_room = request.limits, request.room_after(after) > 0
    return has_room and request.is_own_text and not limits.separate_answer and limits.call_opener is None


async def _draft_answer(request: Request, after: Sequence[int], ids: list[int]) -> None:
    """Let the draft write the answer after the end of the thinking. `ids` receives it, as far as it may be kept."""
    found, num_kept = None, 0
    try:
        stop = Stop(min(request.room_after(after), MAX_ANSWER), token_ids=request.answer_ends)
        found = await request.draft_text(stop, ids, after, coupled=True)
        if found is not None and not found.aborted and request.target_has(ids):
            num_kept = len(ids)
    finally:
        request.ledger.add(drafted=len(ids), abandoned=len(ids) - num_kept)
        del ids[num_kept:]


async def judge_chain(request: Request, chain: Chain) -> AsyncGenerator[Judged, None]:
    """Yield the steps of a chain as they are judged. The caller commits each of them before it takes the next one.

    It ends after a rejected step, at the end of the thinking, and at a step that the target cannot read before the
    deadline; see `judge`. Of an answer after the thinking, the target's own beginning is committed.
    """
    shared = SharedPass(chain, request.read) if len(chain.steps) > 1 or chain.answer else None
    seconds, accepted, number, judged = chain.seconds, request.ledger.num_accepted, 0, None
    for index, proposal in enumerate(chain.steps, len(request.transcript.steps)):
        request.emit([StepProposed(index, proposal.text, len(proposal.ids))])
    for number, proposal in enumerate(chain.steps):
        judged = await request.judge_one(proposal, shared and partial(shared.read, number))
        if judged is not None:
            judged = replace(judged, next_id=chain.next_id(number))
            seconds += judged.seconds
            request.ledger.add(steps_judged=judged.by_judges)
            request.emit([StepJudged(len(request.transcript.steps), judged.accepted, judged.verdict.scores)])
            yield judged
        if judged is None or not judged.accepted or not request.transcript.thinking or request.only_target:
            break
    ended = not (request.transcript.thinking or request.transcript.ended)
    # The answer was read after the draft's own tag.
    ended = ended and request.transcript.last_id == chain.steps[-1].tag
    num_kept = 0
    if shared and ended and judged is not None and judged.accepted and number + 1 == len(chain.steps):
        num_kept = _keep_answer(request, chain.answer, shared.answer_choices)
    else:
        request.ledger.add(abandoned=chain.num_after(number))
    if chain.answer_s is not None and judged is not None:
        read_s = judged.seconds if shared and shared.was_made else 0.0
        request.pace.reread(num_kept, chain.answer_s + read_s)
    request.pace.ended(request.ledger.num_accepted - accepted, max(0.0, seconds - request.prompt_s), request)
    request.prompt_s = 0.0  # the target alone would have read the prompt too


def _keep_answer(request: Request, answer: Sequence[int], own: Sequence[int]) -> int:
    """Commit the beginning of the draft's answer that is the target's own, and the target's token after it.

    Args:
        answer: the draft's ids.
        own: the target's own choice at each place of the answer, and after it.

    Returns:
        The number of committed tokens.
    """
    num_kept = [*map(int.__eq__, answer, own), False].index(False)
    kept = [*answer[:num_kept]]
    request.ledger.add(accepted=num_kept, rejected=len(answer) - num_kept)
    if own and request.ledger.remaining > 0 and not (kept and kept[-1] in request.answer_ends):
        request.ledger.add(generated=1, forced=1)
        kept.append(own[num_kept])
    if kept:
        request.emit(request.transcript.write_on(kept, "target"))
    return len(kept)
