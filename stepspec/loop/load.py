"""Whether speculation on steps pays under load, from the throughput of all requests of a session.

A request that speculates takes passes and cores from the others, which its own times do not show. So all requests
speculate, or none does, for an epoch at a time, and the tokens that they commit in their time decide.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log2

LEAST_TOKENS, EPOCH_TOKENS, EPOCH_S = 512, 16, 0.5
"""Shortest epoch: committed tokens, committed tokens for each running request, and seconds."""
FIRST_EPOCHS, FIRST_TOKENS = 3, 1024
"""Epochs with speculation and without it before they are compared, fewer if they have this many tokens."""
FIRST_REST, LONGEST_REST = 16, 64
"""Epochs between two trials of the slower way. The number doubles with each trial that finds it slower again."""
MEMORY = 0.8
"""What an epoch counts after the next one of its kind."""


@dataclass
class Throughput:
    """Tokens a second of a request in the latest epochs of a kind."""

    num_epochs: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, tokens: float, seconds: float) -> None:
        """Add an epoch."""
        self.num_epochs += 1
        self.tokens, self.seconds = MEMORY * self.tokens + tokens, MEMORY * self.seconds + seconds

    @property
    def is_known(self) -> bool:
        """Whether there were enough epochs to compare it."""
        return self.num_epochs >= FIRST_EPOCHS or self.tokens >= FIRST_TOKENS

    @property
    def rate(self) -> float:
        """Tokens a second; 0 before the first epoch."""
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

    The throughput is the tokens that requests commit in the seconds that they take for them, which needs no common
    beginning and end: a step that is drafted and judged is committed as a whole.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._levels: defaultdict[int, Level] = defaultdict(Level)
        self._committed_at: dict[Hashable, float] = {}  # of running requests: the last commit, or the beginning
        self._speculating = True
        self._restart()

    def _restart(self) -> None:
        """Begin with other epochs. They count from the time at which no request does what it did before."""
        self._others = {*self._committed_at}
        self._since = math.inf if self._others else self._clock()
        self._begin()

    def _begin(self) -> None:
        self._level, self._num_tokens, self._seconds = self._level_now, 0.0, 0.0

    @property
    def _level_now(self) -> int:
        return round(log2(max(1, len(self._committed_at))))

    @contextmanager
    def request(self, request: Hashable) -> Generator[None]:
        """Count a request while it runs."""
        self._committed_at[request] = self._clock()
        try:
            yield
        finally:
            del self._committed_at[request]
            self._follows(request)

    def committed(self, request: Hashable, num_tokens: int) -> None:
        """Note that a request has committed tokens."""
        now = self._clock()
        began, self._committed_at[request] = self._committed_at[request], now
        seconds = now - max(began, self._since)
        if seconds > 0:  # else it has not done what the epoch is about
            self._num_tokens += num_tokens * seconds / (now - began)
            self._seconds += seconds

    def speculates(self, request: Hashable) -> bool:
        """Return whether a request should speculate on its next step. Requests ask after every step or chunk."""
        num_running = len(self._committed_at)
        if self._num_tokens >= max(LEAST_TOKENS, EPOCH_TOKENS * num_running) and self._seconds >= EPOCH_S * num_running:
            self._end()
        self._follows(request)
        return self._speculating or num_running < 2

    def _follows(self, request: Hashable) -> None:
        """Note that a request does what the epochs are about, or has ended."""
        if self._others:
            self._others.discard(request)
            if not self._others:
                self._since = self._clock()

    def _end(self) -> None:
        """Note an epoch, and choose for the next one.

        An epoch in which the load has changed a lot says nothing. In the first one of requests that begin together,
        only the fast ones have committed.
        """
        number = max(self._level, self._level_now)
        if number and abs(self._level - self._level_now) < 2:
            level = self._levels[number]
            level.found[self._speculating].note(self._num_tokens, self._seconds)
            before, self._speculating = self._speculating, level.next()
            if self._speculating != before:
                self._restart()
                return
        self._begin()
