"""Chains of draft steps, and the one pass of the target that reads all steps of a chain."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from stepspec.engines.protocol import Probe, Stop, Verification
from stepspec.errors import ContextError
from stepspec.loop.pace import Depth
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
    """

    steps: Sequence[Proposal] = ()
    answer: Sequence[int] = ()
    seconds: float = 0.0

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
        self._too_long = False

    async def read(self, number: int, probes: Sequence[Probe]) -> Verification | None:
        """Return what the pass says about a step of the chain; None if it does not have that.

        The first call makes the pass, with its probes after every step.

        Args:
            number: number of the step in the chain.
            probes: what the target is asked after the step.
        """
        if self._seen is None and not self._too_long:
            self._probes = tuple(probes)
            asked = [replace(probe, place=end) for end in self._ends[1:] for probe in probes]
            try:
                self._seen = await self._verify(self._ids, asked)
            except ContextError:  # a single step may still fit
                self._too_long = True
        seen = self._seen
        if seen is None or not set(probes) <= set(self._probes):
            return None
        start, end = self._ends[number : number + 2]
        places = [number * len(self._probes) + self._probes.index(probe) for probe in probes]
        assert seen.choices is not None, "chains are only for targets that return their choices"
        return Verification(
            logprobs=None if seen.logprobs is None else seen.logprobs[start:end],
            choices=seen.choices[start:end],
            next_choice=(*seen.choices, seen.next_choice)[end],
            probe_logprobs=tuple(seen.probe_logprobs[place] for place in places) if seen.probe_logprobs else (),
            probe_choices=tuple(seen.probe_choices[place] for place in places),
        )

    @property
    def answer_choices(self) -> Sequence[int]:
        """The target's own choice at each place of the answer, and after it; empty if the pass was not made."""
        seen = self._seen
        return () if seen is None or seen.choices is None else (*seen.choices, seen.next_choice)[self._ends[-1] + 1 :]


async def propose_chain(request: Request, depth: Depth, *, answer: bool) -> Chain:
    """Return steps of the draft, each after the last one, at most `depth`. Empty if the draft failed or was too
    slow; the target then continues alone.

    A chain ends early with a step that cannot be followed: an unfinished, empty, repeated or aborted one, one that
    ends the thinking, and one that calls a tool.

    Args:
        depth: most steps.
        answer: whether the draft goes on with the answer after a step that ends the thinking.
    """
    if request.judged_steps is not None or "choices" not in request.target.abilities:
        depth, answer = 1, False  # a recording wants the costs of every step
    started, most = time.perf_counter(), request.pace.depth() if depth == "auto" else depth
    chain, ids, before = list[Proposal](), list[int](), request.transcript.last_text
    in_context = request.target.max_context - len(request.transcript.buffer)
    while len(chain) < most and (not chain or min(request.limits.room, in_context) > len(ids)):
        proposal = await request.propose_one(after=ids, index=len(request.transcript.steps) + len(chain))
        if proposal is None:
            break
        if chain and not request.target_has(proposal.ids):
            request.ledger.abandoned(len(proposal.ids))
            break
        request.pace.drafted(len(proposal.ids), proposal.seconds)
        chain.append(proposal)
        ids.extend(proposal.ids)
        request.emit([StepProposed(len(request.transcript.steps) + len(chain) - 1, proposal.text, len(proposal.ids))])
        if proposal.end != "delimiter" or request.is_hopeless(proposal, before):
            break
        before = proposal.text
    written: Sequence[int] = ()
    if answer and chain and request.think_end is not None and chain[-1].tag == request.think_end:
        written = await _draft_answer(request, ids, min(request.limits.room, in_context))
    return Chain(chain, written, time.perf_counter() - started)


async def _draft_answer(request: Request, after: Sequence[int], room: int) -> Sequence[int]:
    """Return the draft's answer after the end of the thinking, as far as it may be kept; empty if there is none."""
    demands, ids = request.demands, list[int]()
    follows = request.is_own_text and not demands.separate_answer and demands.call_opener is None
    if not follows or room <= len(after):
        return ()
    stop = Stop(min(room - len(after), MAX_ANSWER), token_ids=request.answer_ends)
    found = await request.drafted(stop, ids, after)
    request.ledger.proposed(len(ids))
    if found is None or found.aborted or not request.target_has(ids):
        request.ledger.abandoned(len(ids))
        return ()
    return ids


async def judge_chain(request: Request, chain: Chain) -> AsyncGenerator[Judged, None]:
    """Yield the steps of a chain as they are judged. The caller commits each of them before it takes the next one.

    It ends after a rejected step, at the end of the thinking, and at a step that the target cannot read before the
    deadline; see `judge`. Of an answer after the thinking, the target's own beginning is committed.
    """
    shared = SharedPass(chain, request.read) if len(chain.steps) > 1 or chain.answer else None
    seconds, accepted, number, judged = chain.seconds, request.ledger.num_accepted, 0, None
    for number, proposal in enumerate(chain.steps):
        judged = await request.judge_one(proposal, shared and partial(shared.read, number))
        if judged is not None:
            judged = replace(judged, next_id=chain.next_id(number))
            seconds += judged.seconds
            request.pace.decided(accepted=judged.accepted)
            request.ledger.add(steps_judged=judged.by_judges)
            request.emit([StepJudged(len(request.transcript.steps), judged.accepted, judged.verdict.scores)])
            yield judged
        if judged is None or not judged.accepted or not request.transcript.thinking or request.only_target:
            break
    ended = not (request.transcript.thinking or request.transcript.ended)
    if shared and ended and judged is not None and judged.accepted and number + 1 == len(chain.steps):
        _keep_answer(request, chain.answer, shared.answer_choices)
    else:
        request.ledger.abandoned(chain.num_after(number))
    request.pace.ended(request.ledger.num_accepted - accepted, seconds)


def _keep_answer(request: Request, answer: Sequence[int], own: Sequence[int]) -> None:
    """Commit the beginning of the draft's answer that is the target's own, and the target's token after it.

    Args:
        answer: the draft's ids.
        own: the target's own choice at each place of the answer, and after it.
    """
    num_kept = [*map(int.__eq__, answer, own), False].index(False)
    kept = [*answer[:num_kept]]
    request.ledger.judged(accepted=num_kept, rejected=len(answer) - num_kept)
    if own and request.ledger.remaining > 0 and not (kept and kept[-1] in request.answer_ends):
        request.ledger.generated(1)
        request.ledger.wrote("forced", 1)
        kept.append(own[num_kept])
    if kept:
        request.emit(request.transcript.write_on(kept, "target"))
