"""What one request has spent: tokens by fate, seconds by role, and how much of the budget is left."""

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

    Every part of the time is measured by itself: entering a role stops the clock of the one around it. What no role
    measured, such as the time that a caller takes over an event, is `Times.other`.
    """

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: most tokens to commit. Rejected and discarded tokens do not count."""
        self._max_tokens = max_tokens
        self._started = self._since = time.perf_counter()
        self._role: Role | None = None
        self._seconds = {"queue": 0.0, "draft": 0.0, "judge": 0.0, "target": 0.0, "controller": 0.0}
        self._firsts: dict[str, float] = {}
        self.counts = Counts()
        self.cached: int | None = None
        """Prompt tokens that the target did not have to read, by its first call."""

    @contextmanager
    def time(self, role: Role) -> Generator[None]:
        """Measures the time inside as a role's. Where these nest, the inner role alone is measured."""
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
        """Notes when the first step and the first part of the answer were emitted."""
        first = FIRSTS.get(type(event))
        if first is not None and first not in self._firsts:
            self._firsts[first] = time.perf_counter() - self._started

    def waited(self, role: Role, queue_s: float) -> None:
        """Moves the part of a role's time that was spent waiting for its engine."""
        moved = min(queue_s, self._seconds[role])
        self._seconds[role] -= moved
        self._seconds["queue"] += moved

    def add(self, **counts: int) -> None:
        """Adds to counts by name."""
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in counts.items()})

    def add_target_call(self, chunk: Chunk) -> None:
        """Adds the passes and token-level speculation of a finished call of the target."""
        self.add(target_passes=chunk.passes, token_drafted=chunk.drafted, token_accepted=chunk.accepted)
        self.waited("target", chunk.queue_s)
        if chunk.end is not None:
            self.found_cached(chunk.cached)

    def found_cached(self, num_tokens: int) -> None:
        """Notes what a call of the target found cached; later ones than the first find what this request wrote."""
        if self.cached is None:
            self.cached = num_tokens

    def proposed(self, num_tokens: int) -> None:
        """Counts tokens as the draft delivers them, before their fate is known."""
        self.add(drafted=num_tokens)

    def judged(self, *, accepted: int, rejected: int, salvaged: int = 0) -> None:
        """Counts the fate of drafted tokens; `salvaged` is within `accepted`."""
        self.add(accepted=accepted, rejected=rejected, salvaged=salvaged)

    def abandoned(self, num_tokens: int) -> None:
        """Counts drafted tokens that are never judged."""
        self.add(cancelled=num_tokens)

    def generated(self, num_tokens: int) -> None:
        """Counts tokens as the target delivers them, before their fate is known."""
        self.add(target_generated=num_tokens)

    def wrote(self, fate: Literal["regenerated", "forced", "discarded"], num_tokens: int) -> None:
        """Counts the fate of tokens of the target."""
        self.add(**{fate: num_tokens})

    def committed(self, num_tokens: int) -> None:
        """Takes the number of committed tokens, as the text itself has it."""
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
        """Whether one more step of at most so many tokens may be drafted.

        Wasted tokens stay at most the committed ones plus those of two steps, so that speculation that never succeeds
        costs a bounded amount of work.
        """
        return self.counts.wasted <= self._num_committed + max_step_tokens

    def times(self) -> Times:
        """The seconds so far."""
        self._switch(self._role)
        wall = self._since - self._started
        other = max(0.0, wall - sum(self._seconds.values()))
        return Times(**self._seconds, other=other, wall=wall, **self._firsts)
