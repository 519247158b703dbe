"""The record of a request: the one sink of what happens in it, from which counts, times, spans and events are made."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

from stepspec.engines.protocol import TokenChunk, Verification
from stepspec.loop.ledger import Ledger, Role
from stepspec.loop.limits import cut_off
from stepspec.loop.result import Event
from stepspec.loop.step import Proposal, StepCommitted, Verdict
from stepspec.loop.tracing import Spans

logger = logging.getLogger(__name__)

MAX_UNREAD = 256
"""Events that wait for the caller. If there are more, the request waits."""

Fate = Literal["regenerated", "forced"]
"""What the target's tokens are for: a rejected step written again, or a text that only the target writes."""


class RequestRecord:
    """What has happened in one request. The parts of the loop call it, and nothing else counts.

    Args:
        ledger: counts and times.
        spans: spans.

    Attributes:
        events: events for the caller; None is their end.
        events_read: set when the caller takes an event.
        judge_failures: at how many steps each judge failed.
        has_proposed: whether the draft has proposed the open step.
    """

    def __init__(self, ledger: Ledger, spans: Spans) -> None:
        self._ledger, self._spans = ledger, spans
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.events_read = asyncio.Event()
        self.judge_failures = Counter[str]()
        self.has_proposed = False
        self._writing_since: int | None = None

    # Events

    def emit(self, events: Iterable[Event]) -> None:
        """Pass events on to the caller."""
        for event in events:
            self._ledger.shown(event)
            self._spans.event(event)
            if isinstance(event, StepCommitted) and self._writing_since is not None:
                self._spans.generated(self._writing_since, event.step, proposed=self.has_proposed)
                self._writing_since = time.time_ns()
            self.events.put_nowait(event)

    @property
    def is_full(self) -> bool:
        """Whether the caller has `MAX_UNREAD` events to read."""
        return self.events.qsize() >= MAX_UNREAD

    async def wait_for_reader(self, end: float | None) -> float:
        """Wait while it is full, at most until a moment in the event loop's time. Return the seconds."""
        since = time.perf_counter()
        with self._ledger.waiting(None):
            async with cut_off(end):
                while self.is_full:
                    self.events_read.clear()
                    await self.events_read.wait()
        return time.perf_counter() - since

    # Times

    def time(self, role: Role) -> AbstractContextManager[None]:
        """Measure a block for a role, see `Ledger.time`."""
        return self._ledger.time(role)

    def waiting(self, role: Role) -> AbstractContextManager[None]:
        """Measure a block that waits for a role, see `Ledger.waiting`."""
        return self._ledger.waiting(role)

    # What the draft does

    def drafted(self, num_tokens: int, *, abandoned: int = 0) -> None:
        """The draft has delivered tokens, of which some are of no use."""
        self._ledger.add(drafted=num_tokens, abandoned=abandoned)

    def draft_waited(self, seconds: float) -> None:
        """The draft has waited for its engine."""
        self._ledger.waited("draft", seconds)

    def proposed(self, since: int, index: int, num_tokens: int) -> None:
        """The draft has written a step, or begun one, since a time (`time.time_ns`)."""
        self._spans.drafted(since, index, num_tokens)

    def began_step(self) -> None:
        """The draft has begun a step that no judge will see."""
        self._ledger.add(steps_proposed=1)

    # What the target does

    def begins_writing(self, *, alone: bool = False) -> None:
        """The target, or a single writer `alone`, begins to write."""
        self._writing_since = time.time_ns()
        self.has_proposed &= not alone

    def ended_step(self) -> None:
        """The open step was committed."""
        self._writing_since, self.has_proposed = None, False

    def generated(self, num_tokens: int, fate: Fate | None = None) -> None:
        """The target has delivered tokens. They are committed with `fate`; None leaves that open."""
        self._ledger.add(generated=num_tokens)
        if fate is not None:
            self.written(num_tokens, fate)

    def written(self, num_tokens: int, fate: Fate) -> None:
        """Tokens that the target has delivered are committed."""
        self._ledger.add(**{fate: num_tokens})

    def discarded(self, num_tokens: int) -> None:
        """Tokens that the target has delivered are not committed."""
        self._ledger.add(discarded=num_tokens)

    def generated_ahead(self, since: int, index: int, num_tokens: int) -> None:
        """The target has written a step that may not be committed."""
        self._spans.generated_ahead(since, index, num_tokens)

    def called(self, chunk: TokenChunk, *, first: bool = True) -> None:
        """A call of the target has ended with a chunk, see `Ledger.add_target_call`."""
        self._ledger.add_target_call(chunk, first=first)

    def relaxed(self, positions: Sequence[int], num_before: int) -> None:
        """Some of the target's tokens that are committed are relaxed, see `Ledger.relaxed`."""
        self._ledger.relaxed(positions, num_before)

    def verified(self, seen: Verification, *, first: bool = True) -> None:
        """The target has made a pass. `first`: whether it may be the first one of the request."""
        self._ledger.waited("judge", seen.queue_s)
        if first:
            self._ledger.found_cached(seen.cached)
        self._ledger.add(target_passes=seen.passes)

    def finished(self, num_steps: int, num_tokens: int) -> None:
        """The text is complete, counted in the text itself."""
        self._ledger.add(steps=num_steps)
        self._ledger.committed(num_tokens)

    # What becomes of the draft's tokens

    def accepted(self, num_tokens: int, *, rejected: int = 0, step: bool = False) -> None:
        """Tokens of the draft are committed, and others after them are not. `step`: whether they are a whole step."""
        self._ledger.add(accepted=num_tokens, rejected=rejected, steps_accepted=step)

    def salvaged(self, num_tokens: int) -> None:
        """The beginning of a rejected step is committed."""
        self._ledger.add(accepted=num_tokens, salvaged=num_tokens)

    def rejected(self, num_tokens: int) -> None:
        """Tokens of the draft were judged, and are not committed."""
        self._ledger.add(rejected=num_tokens)

    def abandoned(self, num_tokens: int) -> None:
        """Tokens of the draft were not judged, and are not committed."""
        self._ledger.add(abandoned=num_tokens)

    def dropped(self, proposal: Proposal, num_tokens: int) -> None:
        """Tokens of a step are not committed. Those of an aborted one count as not judged."""
        (self.abandoned if proposal.aborted else self.rejected)(num_tokens)

    # What the judges do

    def judged(self, *, by_judges: bool) -> None:
        """A step was decided. `by_judges`: whether the judges were asked."""
        self._ledger.add(steps_judged=by_judges)

    def reviewed(self, since: int, index: int, verdict: Verdict) -> None:
        """A step was judged since a time (`time.time_ns`)."""
        self._spans.judged(since, index, verdict)

    def asked_judges(self, verdict: Verdict, num_calls: int) -> None:
        """The judges have given a verdict, with calls of judge models."""
        self._ledger.add(judge_calls=num_calls)
        for name, error in verdict.errors.items():
            if name not in self.judge_failures:
                logger.warning("The judge %s failed and did not accept the step: %s", name, error)
            self.judge_failures[name] += 1
