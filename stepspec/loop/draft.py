"""What the draft proposes, and how its failures are noted."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from stepspec.engines.protocol import Generate, Sampling, Stop, TokenChunk, collect
from stepspec.errors import ContextError, EngineError, UsageError
from stepspec.loop.repetition import StepWatch
from stepspec.loop.request import Request
from stepspec.loop.result import NotProposed
from stepspec.loop.step import Proposal

DRAFT_SEED = 0x5EED
"""Added to the draft's seed, so that draft and target sample with other random numbers."""


class DraftWriter:
    """Writes as the draft. Nothing of it is committed here.

    Attributes:
        held: the draft's beginning of a step that is not committed.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_read = 0  # tokens that the draft has read
        self.held: Proposal | None = None

    async def step(self, after: Sequence[int] = (), index: int | None = None) -> Proposal | None:
        """Return a step of the draft, counted. None if the draft failed or was too slow.

        Args:
            after: see `text`.
            index: the step's number; that of the open step by default.
        """
        request, since, ids = self._request, time.time_ns(), list[int]()
        index = len(request.transcript.steps) if index is None else index
        stop = request.transcript.rest_of_step(request.limits.room - len(after), after)
        proposal = None
        try:
            proposal = await self.text(stop, ids, after)
        finally:  # the draft may be stopped
            request.record.drafted(len(ids), abandoned=0 if proposal else len(ids))
        if proposal is None:
            if ids:  # else only short steps would count, and a long one never be waited for
                request.choice.costs.step_tokens.note(len(ids))
            return None
        request.record.has_proposed = True
        request.record.proposed(since, index, len(proposal.ids))
        return proposal

    async def more(self, num_tokens: int) -> Proposal | None:
        """Return the draft's next tokens of the open step, at most `num_tokens`, after those that are held. None if
        there is no room for one, or the draft failed or was too slow."""
        request, transcript = self._request, self._request.transcript
        held, self.held = self.held or Proposal((), "", 0), None
        in_step = request.policy.step.max_step_tokens - len(transcript.open_ids)
        in_context = request.target.max_context - len(transcript.buffer)
        room = min(request.limits.room, num_tokens, in_step, in_context) - len(held.ids)
        since, ids, draft = time.time_ns(), list[int](), None
        if room > 0:
            stop = transcript.rest_of_step(room)
            draft = await self.text(replace(stop, before=stop.before + held.text), ids, held.ids)
        if draft is None:
            request.record.drafted(len(ids), abandoned=len(held.ids) + len(ids))
            return None
        request.record.drafted(len(ids))
        request.record.proposed(since, len(transcript.steps), len(draft.ids))
        if not (held.ids or transcript.open_ids):
            request.record.began_step()
        return held.followed_by(draft)

    async def text(
        self, stop: Stop, ids: list[int], after: Sequence[int] = (), *, coupled: bool = False
    ) -> Proposal | None:
        """Return a text of the draft, uncounted. None if the draft failed, was too slow, or is out of use.

        Args:
            stop: where it ends.
            ids: receives the ids as they arrive.
            after: uncommitted ids before it.
            coupled: whether the draft uses the target's own random numbers, with which it more often writes what the
                target would. Only for texts of which the target's own choices are kept.
        """
        request, breaker, limits = self._request, self._request.breaker, self._request.limits
        if request.draft is None or not breaker.allows():
            request.not_proposed = "the draft failed"
            return None
        is_step = not coupled
        policy, buffer = request.policy, request.transcript.buffer
        coupled = coupled or policy.step_level_exact
        sampling = request.sampling if coupled else self._sampling
        recorded = request.judged_steps is not None and "logprobs" in request.draft.abilities
        logprobs = policy.needs_draft_logprobs or recorded
        call = Generate(buffer, sampling, stop, after=tuple(after), logprobs=logprobs)
        watch, since, num_worked = StepWatch(), time.perf_counter(), breaker.num_worked
        try:
            with request.record.time("draft"):
                num_before = len(buffer) + len(after)
                num_unread, longest = max(0, num_before - self._num_read), policy.step.max_step_tokens
                patience = request.choice.patience_s(num_unread, longest) or math.inf
                patience = min(patience, policy.step.draft_deadline_s)
                async with asyncio.timeout(patience), asyncio.timeout_at(limits.deadline):
                    chunk = await collect(watch.until_repeating(request.draft.generate(call)), ids)
        except TimeoutError:
            if ids:  # it works, if slowly
                breaker.worked()
            elif num_worked == breaker.num_worked and not limits.expired:
                breaker.failed()
            why: NotProposed = "the draft was too slow"
        except UsageError as error:  # says nothing about other requests
            why = "no room in the context" if isinstance(error, ContextError) else "the draft rejects the text"
        except EngineError:
            if not limits.expired:
                breaker.failed()
            why = "the draft failed"
        else:
            self._num_read = num_before + len(ids)
            breaker.worked()
            request.record.draft_waited(chunk.queue_s)
            seconds, chunk = time.perf_counter() - since, self._before_ending(chunk, ids, after)
            step = Proposal.of(chunk, request.tokenizer.decode(request.transcript.visible(chunk.written)))
            return replace(step, aborted=watch.aborted, seconds=seconds)
        if is_step and not limits.expired:
            request.not_proposed = why
        return None

    def _before_ending(self, chunk: TokenChunk, ids: list[int], after: Sequence[int]) -> TokenChunk:
        """Return a finished call of the draft, cut off where a text that ends the thinking begins or may begin: the
        target writes it. `ids` keeps the same part, and the rest is counted here."""
        count = self._request.transcript.num_before_ending(chunk.written, after)
        if count == len(chunk.written):
            return chunk
        self._request.record.drafted(len(ids) - count, abandoned=len(ids) - count)
        del ids[count:]
        details: dict[str, Any] = {
            name: each and each[:count] for name in ("logprobs", "entropies") for each in [getattr(chunk, name)]
        }
        return replace(chunk, ids=chunk.ids[:count], end="length", **details)

    @cached_property
    def _sampling(self) -> Sampling:
        """The draft's sampling, with other random numbers than the target's. Making one checks all its settings."""
        return self._request.sampling.reseeded(DRAFT_SEED)


def is_hopeless(request: Request, proposal: Proposal, before: str) -> bool:
    """Return whether a step after one with the text `before` is rejected without asking the judges."""
    repeated, text = proposal.text.strip() == before.strip(), request.open_text + proposal.text
    unusable = repeated or proposal.aborted or request.has_control_token(proposal.written)
    return unusable or not proposal.text.strip() or request.limits.opens_call(text, before)
