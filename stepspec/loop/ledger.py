"""Costs of one request: tokens by fate, seconds by role, and the rest of the token budget."""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from stepspec.chat.events import AnswerDelta, ToolCallDelta
from stepspec.engines.protocol import Chunk
from stepspec.loop.step import Counts, Event, StepCommitted, Times

Role = Literal["draft", "judge", "target", "controller"]
FIRSTS: Mapping[type[Event], str] = {
    StepCommitted: "first_step",
    AnswerDelta: "first_answer",
    ToolCallDelta: "first_answer",
}
"""The field of `Times` that is set when an event of that kind is emitted for the first time."""


class Ledger:
    """Counts and times of one request.

    Times are exclusive: entering a role stops the clock of the outer role. `Times.other` is the time outside all
    roles.
    """

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: limit on committed tokens. Rejected and discarded tokens do not count."""
        self._max_tokens = max_tokens
        self._started = self._since = time.perf_counter()
        self._role: Role | None = None
        self._seconds = {"queue": 0.0, "draft": 0.0, "judge": 0.0, "target": 0.0, "controller": 0.0}
        self._firsts: dict[str, float] = {}
        self.counts = Counts()
        self.cached: int | None = None
        """Prompt tokens that the target's first call found cached; None before that call."""

    @contextmanager
    def time(self, role: Role) -> Generator[None]:
        """Measure the time of the block for a role. In nested blocks, only the inner role's clock runs."""
        outer = self._role
        self._switch(role)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, role: Role | None) -> None:
        now = time.perf_counter()
        if self._role is not None:
            self._seconds[self._role] += now - self._since
        self._role, self._since = role, now

    def shown(self, event: Event) -> None:
        """Record when the first step and the first chunk of the answer were emitted."""
        first = FIRSTS.get(type(event))
        if first is not None and first not in self._firsts:
            self._firsts[first] = time.perf_counter() - self._started

    def waited(self, role: Role, queue_s: float) -> None:
        """Move the seconds that a role waited in its engine's queue from that role to `queue`."""
        moved = min(queue_s, self._seconds[role])
        self._seconds[role] -= moved
        self._seconds["queue"] += moved

    def add(self, **counts: int) -> None:
        """Add to counts by name."""
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in counts.items()})

    def add_target_call(self, chunk: Chunk) -> None:
        """Add the passes and token-level counts of the last chunk of a target call."""
        self.add(target_passes=chunk.passes, token_drafted=chunk.drafted, token_accepted=chunk.accepted)
        self.waited("target", chunk.queue_s)
        if chunk.end is not None:
            self.found_cached(chunk.cached)

    def found_cached(self, num_tokens: int) -> None:
        """Record the cached tokens of the first target call. Later calls also find this request's own tokens."""
        if self.cached is None:
            self.cached = num_tokens

    def proposed(self, num_tokens: int) -> None:
        """Count tokens as the draft delivers them, before their fate is known."""
        self.add(drafted=num_tokens)

    def judged(self, *, accepted: int, rejected: int, salvaged: int = 0) -> None:
        """Count the fate of drafted tokens. `accepted` includes `salvaged`."""
        self.add(accepted=accepted, rejected=rejected, salvaged=salvaged)

    def abandoned(self, num_tokens: int) -> None:
        """Count drafted tokens that are never judged."""
        self.add(cancelled=num_tokens)

    def generated(self, num_tokens: int) -> None:
        """Count tokens as the target delivers them, before their fate is known."""
        self.add(target_generated=num_tokens)

    def wrote(self, fate: Literal["regenerated", "forced", "discarded"], num_tokens: int) -> None:
        """Count the fate of the target's tokens."""
        self.add(**{fate: num_tokens})

    def committed(self, num_tokens: int) -> None:
        """Set the number of committed tokens, counted in the text itself."""
        self.counts = replace(self.counts, committed=num_tokens)

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self._max_tokens - self._num_committed

    @property
    def _num_committed(self) -> int:
        counts = self.counts
        return counts.accepted + counts.regenerated + counts.forced

    def may_waste(self, max_step_tokens: int) -> bool:
        """Whether the draft may propose one more step of at most `max_step_tokens` tokens.

        Wasted tokens never exceed the committed tokens plus two steps. This bounds the cost of speculation that never
        succeeds.
        """
        return self.counts.wasted <= self._num_committed + max_step_tokens

    def times(self) -> Times:
        """Return the seconds measured so far."""
        self._switch(self._role)
        wall = self._since - self._started
        other = max(0.0, wall - sum(self._seconds.values()))
        return Times(**self._seconds, other=other, wall=wall, **self._firsts)
