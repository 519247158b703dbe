"""Chains of draft steps, each after the last one."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from stepspec.engines.protocol import Stop
from stepspec.loop.draft import DraftWriter, is_hopeless
from stepspec.loop.request import Request
from stepspec.loop.step import Proposal

MAX_ANSWER = 64
"""Most tokens of an answer that the draft writes before the target has read what is before it."""


@dataclass(frozen=True)
class Chain:
    """What the draft has written after the committed text.

    Attributes:
        steps: steps, each after the last one. Only the last one may have a tag that ends it.
        answer: ids after that tag.
    """

    steps: Sequence[Proposal] = ()
    answer: Sequence[int] = ()

    def next_id(self, number: int) -> int | None:
        """Return the first id after a step, its own tag included; None if there is none."""
        step = self.steps[number]
        if step.tag is not None:
            return step.tag
        return self.steps[number + 1].ids[0] if number + 1 < len(self.steps) else None

    def num_after(self, number: int, *, answer: bool) -> int:
        """Return the number of ids after a step and its tag, with those of the answer or without them."""
        return sum(len(step.ids) for step in self.steps[number + 1 :]) + len(self.answer) * answer


@dataclass(frozen=True)
class Proposing:
    """What the draft may propose before the target has judged it.

    Attributes:
        depth: most steps of a chain.
        answer: whether the draft goes on with the answer after a step that ends the thinking.
    """

    depth: int = 1
    answer: bool = False

    @classmethod
    def fitted(cls, request: Request, depth: int, *, answer: bool) -> "Proposing":
        """Return what is possible for a request: single steps for a recording, which wants the costs of each, and for a
        target that would read the whole text again for its choices alone."""
        if request.judged_steps is not None:
            return cls()
        abilities = request.target.abilities
        reads_anyway = request.policy.needs_scores or "cached scores" in abilities
        return cls(depth, answer) if "choices" in abilities and reads_anyway else cls()


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


async def propose_chain(request: Request, draft: DraftWriter, table: Proposing) -> Chain:
    """Return steps of the draft, each after the last one. Empty if the draft failed or was too slow; the target then
    continues alone.

    A chain ends early with a step that cannot be followed: an unfinished, empty, repeated or aborted one, one that
    ends the thinking, and one that calls a tool.

    Args:
        request: the request.
        draft: writes the steps.
        table: what the draft may propose.
    """
    front = DraftFront(request)
    request.choice.begins_chain(request)
    most = 1 if request.transcript.open_ids else table.depth  # the rest of a step has less room than a whole one
    chain, answer, goes_on = list[Proposal](), list[int](), True
    try:
        while goes_on and len(chain) < most and (not front.follows or request.room_after(front.uncommitted)):
            proposal = await draft.step(after=front.uncommitted, index=front.num_steps)
            goes_on = False
            if proposal is None or (front.follows and not proposal.ids):  # a server may send an empty step
                break
            if front.follows and not request.target_has(proposal.ids):
                request.record.abandoned(len(proposal.ids))
                break
            request.choice.costs.drafted(len(proposal.ids), proposal.seconds)
            goes_on = proposal.end == "delimiter" and not is_hopeless(request, proposal, front.text)
            chain.append(proposal)
            front.add(proposal)
        asks = not request.draft_is_far or request.choice.costs.asks_for_end()
        if table.answer and chain and goes_on and asks:
            tag = await _draft_tag(request, draft, front.uncommitted)
            if tag is not None:
                goes_on = False
                chain.append(tag)
                front.add(tag)
        tag = chain[-1].tag if chain else None
        ends = tag is not None and tag == request.thinking.end
        request.choice.costs.proposed(ends=ends)
        if table.answer and ends and _may_answer(request, front.uncommitted):
            await _draft_answer(request, draft, front.uncommitted, answer)
    except asyncio.CancelledError:
        request.record.abandoned(sum(len(step.ids) for step in chain))
        raise
    return Chain(chain, answer)


async def _draft_tag(request: Request, draft: DraftWriter, after: Sequence[int]) -> Proposal | None:
    """Return the tag that ends the thinking, if the draft writes it next, as a step without text."""
    if request.thinking.end is None or not request.room_after(after):
        return None
    ids, found = list[int](), None
    try:
        found = await draft.text(Stop(1, token_ids=request.ends), ids, after, coupled=True)
        found = found if found is not None and found.tag == request.thinking.end else None
    finally:
        request.record.drafted(len(ids), abandoned=0 if found else len(ids))
    return found


def _may_answer(request: Request, after: Sequence[int]) -> bool:
    """Return whether what the draft writes after the end of the thinking may be kept, and there is room for it."""
    limits, has_room = request.limits, request.room_after(after) > 0
    return has_room and request.is_own_text and not limits.separate_answer and limits.call_opener is None


async def _draft_answer(request: Request, draft: DraftWriter, after: Sequence[int], ids: list[int]) -> None:
    """Let the draft write the answer after the end of the thinking. `ids` receives it, as far as it may be kept."""
    found, num_kept = None, 0
    try:
        stop = Stop(min(request.room_after(after), MAX_ANSWER), token_ids=request.answer_ends)
        found = await draft.text(stop, ids, after, coupled=True)
        if found is not None and not found.aborted and request.target_has(ids):
            num_kept = len(ids)
    finally:
        request.record.drafted(len(ids), abandoned=len(ids) - num_kept)
        del ids[num_kept:]
