"""Whether speculation on steps pays under load, from the throughput of all requests of a session.

A request that speculates takes passes and cores from the others, which its own times do not show. So all requests
speculate, or none does, for an epoch at a time, and the tokens that they commit together per second decide.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log2

LEAST_TOKENS, EPOCH_TOKENS, EPOCH_S = 128, 16, 0.5
"""Shortest epoch: committed tokens, committed tokens for each running request, and seconds."""
FIRST_EPOCHS, FIRST_TOKENS = 3, 768
"""Epochs with speculation and without it before they are compared, fewer if they have this many tokens."""
FIRST_REST, LONGEST_REST = 8, 64
"""Epochs between two trials of the slower way. The number doubles with each trial that finds it slower again."""
MEMORY = 0.8
"""What an epoch counts after the next one of its kind."""


@dataclass
class Throughput:
    """Tokens per second of the latest epochs of a kind."""

    num_epochs: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Add an epoch."""
        self.num_epochs += 1
        self.tokens, self.seconds = MEMORY * self.tokens + tokens, MEMORY * self.seconds + seconds

    @property
    def is_known(self) -> bool:
        """Whether there were enough epochs to compare it."""
        return self.num_epochs >= FIRST_EPOCHS or self.tokens >= FIRST_TOKENS

    @property
    def rate(self) -> float:
        """Tokens per second; 0 before the first epoch."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Level:
    """What is known about a level of load."""

    found: dict[bool, Throughput] = field(default_factory=lambda: {True: Throughput(), False: Throughput()})
    """Throughput with speculation on steps and without it."""
    rest: int = FIRST_REST
    num_rested: int = 0
    best: bool = True

    def next(self) -> bool:
        """Return whether to speculate in the next epoch."""
        for speculating, found in self.found.items():
            if not found.is_known:
                return speculating
        best = self.found[True].rate >= self.found[False].rate
        if best != self.best:
            self.best, self.rest, self.num_rested = best, FIRST_REST, 0
        self.num_rested += 1
        if self.num_rested <= self.rest:
            return best
        self.rest, self.num_rested = min(2 * self.rest, LONGEST_REST), 0
        return not best


class LoadChoice:
    """Chooses whether the requests of a session speculate on steps, by their number and their common throughput.

    A request that is alone always speculates: its own times say whether that pays. Levels of load are powers of two.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._changed_at, self._request_s = clock(), 0.0
        self._num_tokens = 0
        self._levels: defaultdict[int, Level] = defaultdict(Level)
        self._running = set[Hashable]()
        self._speculating = True
        self._restart()

    def _restart(self) -> None:
        """Begin the next epoch once the running requests do what it is about, and have committed what comes of it.

        The first commits of many requests that begin together are late: all of them read their prompts.
        """
        self._began_at, self._others, self._num_commits = -1.0, set(self._running), 0

    @contextmanager
    def request(self, request: Hashable) -> Generator[None]:
        """Count a request while it runs."""
        if not self._running:
            self._restart()  # the time without requests is none of an epoch
        self._count()
        self._running.add(request)
        try:
            yield
        finally:
            self._count()
            self._running.discard(request)
            self._others.discard(request)

    def _count(self) -> None:
        """Count the time since the last change for each request that has run since then."""
        now = self._clock()
        self._request_s += len(self._running) * (now - self._changed_at)
        self._changed_at = now

    def committed(self, request: Hashable, num_tokens: int) -> None:
        """Note that a request has committed tokens."""
        self._num_tokens += num_tokens
        if self._began_at < 0 and request not in self._others:
            self._num_commits += 1
            if not self._others and self._num_commits >= len(self._running):
                self._begin()

    def speculates(self, request: Hashable) -> bool:
        """Return whether a request should speculate on its next step. Requests ask after every step or chunk."""
        if self._began_at < 0:
            self._others.discard(request)
        elif self._num_tokens >= self._epoch_tokens and self._clock() - self._began_at >= EPOCH_S:
            self._end()
        return self._speculating or len(self._running) < 2

    @property
    def _epoch_tokens(self) -> int:
        return max(LEAST_TOKENS, EPOCH_TOKENS * len(self._running))

    def _begin(self) -> None:
        self._count()
        self._began_at, self._num_tokens, self._request_s = self._changed_at, 0, 0.0

    def _end(self) -> None:
        """Note an epoch, and choose for the next one."""
        self._count()
        seconds = self._changed_at - self._began_at
        number = round(log2(max(1.0, self._request_s / seconds)))
        if number:
            level = self._levels[number]
            level.found[self._speculating].note(self._num_tokens, seconds)
            before, self._speculating = self._speculating, level.next()
            if self._speculating != before:
                self._restart()
                return
        self._begin()
