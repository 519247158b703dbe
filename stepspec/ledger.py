"""What one request has spent: tokens by fate, seconds by role, and how much of the budget is left."""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from stepspec.engine import Chunk
from stepspec.step import AnswerDelta, Counts, Event, StepCommitted, Times, ToolCallDelta

Role = Literal["draft", "judge", "target"]
FIRSTS: Mapping[type[Event], str] = {
    StepCommitted: "first_step",
    AnswerDelta: "first_answer",
    ToolCallDelta: "first_answer",
}
"""What is noted when an event of that kind is shown for the first time, as `Times` calls it."""


class Ledger:
    """Books of one request. Time that no role has claimed is the controller's, so the parts make up the wall."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._started = time.perf_counter()
        self._seconds = {"queue": 0.0, "draft": 0.0, "judge": 0.0, "target": 0.0}
        self._firsts: dict[str, float] = {}
        self.counts = Counts()
        self.cached: int | None = None
        """Ids of the prompt that the target did not have to read, by its first call."""

    @contextmanager
    def time(self, role: Role) -> Generator[None]:
        """Books the time inside to a role; not to be nested."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[role] += time.perf_counter() - started

    def shown(self, event: Event) -> None:
        """Notes when a user saw the first step and the first piece of the answer."""
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
        """Books the passes and token-level speculation of a finished call of the target."""
        self.add(target_passes=chunk.passes, token_drafted=chunk.drafted, token_accepted=chunk.accepted)
        self.waited("target", chunk.queue_s)
        if chunk.end is not None:
            self.found_cached(chunk.cached)

    def found_cached(self, num_tokens: int) -> None:
        """Notes what a call of the target found cached; later ones than the first find what this request wrote."""
        if self.cached is None:
            self.cached = num_tokens

    def drafted(self, *, accepted: int, rejected: int, salvaged: int = 0) -> None:
        """Books the fate of a proposal's tokens; `salvaged` is within `accepted`."""
        self.add(
            drafted=accepted + rejected, accepted=accepted, rejected=rejected, salvaged=salvaged, committed=accepted
        )

    def abandoned(self, num_tokens: int) -> None:
        """Books drafted tokens that nobody judged."""
        self.add(drafted=num_tokens, cancelled=num_tokens)

    def wrote(self, fate: Literal["regenerated", "forced"], num_tokens: int) -> None:
        """Books tokens that the target wrote and that are committed."""
        self.add(**{fate: num_tokens, "committed": num_tokens, "target_generated": num_tokens})

    @property
    def remaining(self) -> int:
        """Tokens left in the budget, which rejected and discarded ones have used up too."""
        counts = self.counts
        return self._max_tokens - counts.committed - counts.rejected - counts.cancelled - counts.discarded

    def times(self) -> Times:
        """The seconds so far."""
        wall = time.perf_counter() - self._started
        controller = wall - sum(self._seconds.values())
        return Times(**self._seconds, controller=controller, wall=wall, **self._firsts)
