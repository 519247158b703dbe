"""Costs of one request: tokens by fate, seconds by role, and the rest of the token budget."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any, Literal, TypeVar, get_args

from stepspec.chat.events import AnswerDelta, ToolCalled
from stepspec.engines.protocol import TokenChunk
from stepspec.loop.counts import Counts, Times, TokenRounds
from stepspec.loop.result import Event
from stepspec.loop.step import StepCommitted, StepProposed

T = TypeVar("T")
Role = Literal["queue", "engine_wait", "draft", "judge", "target", "controller"]
_AHEAD: ContextVar[bool] = ContextVar("ahead", default=False)
"""Whether the running task works ahead of the request, which does not wait for it yet."""

FIRSTS: Mapping[type[Event], str] = {
    StepCommitted: "first_step",
    AnswerDelta: "first_answer",
    ToolCalled: "first_answer",
}
"""The field of `Times` that is set when an event of that kind is emitted for the first time."""


class Ledger:
    """Counts and times of one request.

    Work may overlap. The times of the roles say who was waited for: they are exclusive, as entering a role stops the
    clock of the outer role, and add up to the wall time. The busy times say who worked, for the request or ahead of it.
    """

    def __init__(self, max_tokens: int, spent: Mapping[Role, float] = {}) -> None:
        """
        Args:
            max_tokens: limit on committed tokens. Rejected and discarded tokens do not count.
            spent: seconds of the request before now, by role.
        """
        self._max_tokens = max_tokens
        self._since = time.perf_counter()
        self._started = self._since - sum(spent.values())
        self._role: Role | None = None
        self._seconds: dict[Role, float] = {role: spent.get(role, 0.0) for role in get_args(Role)}
        self._busy = dict.fromkeys(("draft", "judge", "target"), 0.0)
        self._working: Counter[Role] = Counter()
        self._working_since: dict[Role, float] = {}
        self._firsts: dict[str, float] = {}
        self._shown_at: float | None = None
        self._longest_gap: float | None = None
        self._counts = dict.fromkeys((each.name for each in fields(Counts)), 0)
        self.token_rounds: TokenRounds | None = None
        """Rounds of token-level speculation; None if the target's engine does not report them."""
        self.first_relaxed: int | None = None
        """Tokens of the text before its first relaxed one; None if there is none."""
        self.cached: int | None = None
        """Prompt tokens that the target's first call found cached; None before that call."""

    @contextmanager
    def time(self, role: Role) -> Generator[None]:
        """Measure the time of the block for a role. In nested blocks, only the inner role's clock runs.

        In a task that works ahead, the block only counts as busy time.
        """
        self._start(role)
        try:
            with self.waiting(role):
                yield
        finally:
            self._stop(role)

    @contextmanager
    def waiting(self, role: Role | None) -> Generator[None]:
        """Measure a block that waits for a role whose work is timed elsewhere, or for none."""
        if _AHEAD.get():
            yield
            return
        outer = self._role
        self._switch(role)
        try:
            yield
        finally:
            self._switch(outer)

    def _start(self, role: Role) -> None:
        if role in self._busy:
            self._working[role] += 1
            self._working_since.setdefault(role, time.perf_counter())

    def _stop(self, role: Role) -> None:
        """Overlapping calls of one role count once."""
        if role in self._busy:
            self._working[role] -= 1
            if not self._working[role]:
                self._busy[role] += time.perf_counter() - self._working_since.pop(role)

    def _switch(self, role: Role | None) -> None:
        now = time.perf_counter()
        if self._role is not None:
            self._seconds[self._role] += now - self._since
        self._role, self._since = role, now

    def shown(self, event: Event) -> None:
        """Count proposed steps, and record when the first step and the first chunk of the answer were emitted, and how
        long nothing was."""
        if isinstance(event, StepProposed) and event.text:
            self._counts["steps_proposed"] += 1
        first = FIRSTS.get(type(event))
        if first is None:
            return
        now = time.perf_counter()
        self._firsts.setdefault(first, now - self._started)
        if self._shown_at is not None:
            self._longest_gap = max(self._longest_gap or 0.0, now - self._shown_at)
        self._shown_at = now

    def waited(self, role: Role, queue_s: float) -> None:
        """Move the seconds that a role waited for its engine from that role to `engine_wait`."""
        if _AHEAD.get():
            return
        moved = min(queue_s, self._seconds[role])
        self._seconds[role] -= moved
        self._seconds["engine_wait"] += moved

    @property
    def counts(self) -> Counts:
        """The counts so far."""
        return Counts(**self._counts)

    def add(self, **counts: int) -> None:
        """Add to counts by their names in `Counts`.

        The tokens that a model delivers are counted apart from what becomes of them: `drafted` from `accepted`,
        `rejected` and `abandoned`, `generated` from `regenerated`, `forced` and `discarded`.
        """
        for name, number in counts.items():
            self._counts[name] += number
        if self._num_committed:
            self._firsts.setdefault("first_token", self.age_s)

    def add_target_call(self, chunk: TokenChunk, *, first: bool = True) -> None:
        """Add the passes and token-level counts of a target call, from its last chunk that came.

        `first`: whether the call may be the first of the request, see `found_cached`.
        """
        self.add(target_passes=chunk.passes, token_drafted=chunk.drafted, token_accepted=chunk.accepted)
        if chunk.metrics is not None:
            self.token_rounds = self.token_rounds or TokenRounds()
            self.token_rounds.add(chunk.metrics.drafts, chunk.metrics.accepted_at)
        self.waited("target", chunk.queue_s)
        if first and (chunk.end is not None or chunk.cached):
            self.found_cached(chunk.cached)

    def relaxed(self, positions: Sequence[int], num_before: int) -> None:
        """Count relaxed tokens, by their positions after `num_before` tokens of the text."""
        if positions:
            self.add(relaxed_tokens=len(positions))
            if self.first_relaxed is None:
                self.first_relaxed = num_before + positions[0]

    def found_cached(self, num_tokens: int) -> None:
        """Record the cached tokens of the first target call. Later calls also find this request's own tokens."""
        if self.cached is None:
            self.cached = num_tokens

    def committed(self, num_tokens: int) -> None:
        """Set the number of committed tokens, counted in the text itself."""
        self._counts["committed"] = num_tokens

    @property
    def age_s(self) -> float:
        """Seconds since the request was accepted."""
        return time.perf_counter() - self._started

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self._max_tokens - self._num_committed

    @property
    def _num_committed(self) -> int:
        counts = self._counts  # not `self.counts`, which costs as much as all the counting of a step
        return counts["accepted"] + counts["regenerated"] + counts["forced"]

    def may_waste(self, max_step_tokens: int, rate: int = 1) -> bool:
        """Whether there may be one more round of speculation, with at most `rate` uncommitted steps of
        `max_step_tokens` tokens each for a committed one.

        Wasted tokens never exceed the committed tokens plus two steps, times `rate`. This bounds the cost of
        speculation that never succeeds.
        """
        counts = self._counts
        wasted = counts["rejected"] + counts["abandoned"] + counts["discarded"]
        return wasted <= rate * (self._num_committed + max_step_tokens)

    def times(self) -> Times:
        """Return the seconds measured so far."""
        self._switch(self._role)
        wall = self._since - self._started
        other = max(0.0, wall - sum(self._seconds.values()))
        busy = {f"busy_{role}": seconds for role, seconds in self._busy.items()}
        seconds = self._seconds | busy | self._firsts
        return Times(**seconds, other=other, wall=wall, longest_gap=self._longest_gap)


async def ahead(work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Call a coroutine function for work that the request does not wait for yet. Call it in a task of its own."""
    _AHEAD.set(True)
    return await work(*arguments)
