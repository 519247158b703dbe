"""Whether speculation on steps pays under load, from the throughput of all requests of a session.

A request that speculates takes passes and cores from the others, which its own times do not show. So all requests
speculate, or none does, for an epoch at a time, and the tokens that they commit together per second decide.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log2

EPOCH_TOKENS, EPOCH_S = 32, 0.5
"""Shortest epoch: committed tokens for each running request, and seconds."""
FIRST_EPOCHS = 3
"""Epochs with speculation and without it before they are compared."""
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
            if found.num_epochs < FIRST_EPOCHS:
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
        self._num_running, self._changed_at, self._request_s = 0, clock(), 0.0
        self._num_tokens = 0
        self._levels: defaultdict[int, Level] = defaultdict(Level)
        self._speculating = True
        self._restart()

    def _restart(self) -> None:
        """Begin the next epoch once the running requests have asked, so that they do what the epoch is about."""
        self._num_asked, self._began_at = 0, -1.0

    @contextmanager
    def request(self) -> Generator[None]:
        """Count a request while it runs."""
        if not self._num_running:
            self._restart()  # the time without requests is none of an epoch
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        now = self._clock()
        self._request_s += self._num_running * (now - self._changed_at)
        self._num_running, self._changed_at = self._num_running + change, now

    def committed(self, num_tokens: int) -> None:
        """Note that a request has committed tokens."""
        self._num_tokens += num_tokens

    def speculates(self) -> bool:
        """Return whether a request should speculate on its next step. Requests ask after every step or chunk."""
        if self._began_at < 0:
            self._num_asked += 1
            if self._num_asked >= self._num_running:
                self._begin()
        elif self._num_tokens >= EPOCH_TOKENS * self._num_running and self._clock() - self._began_at >= EPOCH_S:
            self._end()
        return self._speculating or self._num_running < 2

    def _begin(self) -> None:
        self._count(0)
        self._began_at, self._num_tokens, self._request_s = self._changed_at, 0, 0.0

    def _end(self) -> None:
        """Note an epoch, and choose for the next one."""
        self._count(0)
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
