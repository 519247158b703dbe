"""Whether speculation on steps pays under load, from the throughput of all requests of a session.

A request that speculates takes passes and cores from the others, which its own times do not show. So all requests
speculate, or none does, for an epoch at a time, and the tokens that they commit together per second decide.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass, field

MIN_TOKENS, EPOCH_TOKENS, EPOCH_S = 1024, 32, 0.5
"""Shortest epoch: committed tokens, committed tokens for each running request, and seconds."""
MAX_LATE = 0.1
"""Share of the requests that need not have committed in the first epoch after a change: none of fewer than ten. The
fast ones alone say too much, and the slowest of many may take very long."""
NOISE = 24.0
"""Variance of the logarithm of the ratio of two epochs, times their tokens: that of 1,024 tokens varies by 15%."""
FIRST_TOKENS = 2048
"""Committed tokens, older ones weighted less, that are compared before one way is chosen."""
CERTAIN = 1.5
"""Gain or loss of speculation, in standard errors, at which a way is chosen before that. A smaller loss is no reason to
leave what the policy asks for."""
MIN_REST, MAX_REST = 4, 64
"""Time between two trials of the slower way, in times of the last one. It grows with the square of the evidence, as a
first choice may be wrong."""
MEMORY = 0.95
"""What a comparison counts after the next one. With epochs of 1,024 tokens, a loss of less than 5% is no evidence."""
FAR = 2
"""Difference between two levels of load from which a choice for the one is no choice for the other."""


def level_of(num_running: float) -> int:
    """Return the level of a load: the binary logarithm of a number of requests, rounded."""
    return round(math.log2(max(1.0, num_running)))


@dataclass
class Epoch:
    """What the requests committed in an epoch."""

    num_running: float
    """Mean number of running requests."""
    speculating: bool
    num_tokens: float
    rate: float
    """Tokens per second."""

    @property
    def load(self) -> int:
        """Level of load."""
        return level_of(max(2.0, self.num_running))


@dataclass
class Level:
    """What is known about a level of load.

    Only epochs that follow each other are compared: a machine is not equally fast at all times.
    """

    gain: float = 0.0
    """Mean of the logarithms of the throughput with speculation over that without it."""
    weight: float = 0.0
    """Tokens that the mean is of."""
    rested_s: float = 0.0
    took_s: dict[bool, float] = field(default_factory=dict[bool, float])
    """Seconds of the last epoch after a change to speculation and to none, with the change, which takes long under a
    great load."""

    @property
    def is_known(self) -> bool:
        """Whether one way was chosen. Until then the two ways take turns."""
        return self.weight >= FIRST_TOKENS or abs(self.evidence) >= CERTAIN

    @property
    def evidence(self) -> float:
        """The gain of speculation in standard errors."""
        return self.gain * math.sqrt(self.weight / NOISE)

    @property
    def best(self) -> bool:
        """Whether to speculate: unless that is known to be slower."""
        return self.evidence > -CERTAIN

    def compare(self, one: Epoch, other: Epoch) -> None:
        """Add what two epochs say, one with speculation and one without it. If the number of requests has changed, the
        throughput may have changed as much for that reason, so they say less."""
        gain = math.log(one.rate / other.rate) * (1 if one.speculating else -1)
        changed = math.log(one.num_running / other.num_running)
        num_tokens = 1 / (1 / min(one.num_tokens, other.num_tokens) + changed**2 / NOISE)
        kept = MEMORY * self.weight
        self.weight = kept + num_tokens
        self.gain = (kept * self.gain + num_tokens * gain) / self.weight

    def next(self, speculating: bool, changing_s: float, seconds: float) -> bool:
        """Return whether to speculate in the epoch after one with speculation or without it. It took some seconds, and
        those of the change to it, if there was one."""
        seconds += changing_s
        if changing_s or speculating not in self.took_s:
            self.took_s[speculating] = seconds
        if not self.is_known:
            return not speculating
        best = self.best
        self.rested_s = self.rested_s + seconds if speculating == best else 0.0
        rest = min(max(MIN_REST, MIN_REST * self.evidence**2), MAX_REST)
        if self.rested_s <= rest * self.took_s[not best]:
            return best
        self.rested_s = 0.0
        return not best


class LoadChoice:
    """Chooses whether the requests of a session speculate on steps, by their number and their common throughput.

    A request that is alone always speculates: its own times say whether that pays. Levels of load are powers of two.
    Where the load changes by two levels, as at the beginning and the end of a burst, the choice is immediately that of
    the new level, if that is known.

    The throughput is what the requests commit in the seconds that they take for it, times their number. Tokens between
    two moments would not do: a whole text may be committed in one go, and after a change all are at the same point.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._levels: defaultdict[int, Level] = defaultdict(Level)
        self._committed_at: dict[Hashable, float] = {}  # of running requests: the last commit, or the beginning
        self._skipped, self._silent = set[Hashable](), set[Hashable]()
        self._asked_alone = False
        self._begin_burst()

    def _begin_burst(self) -> None:
        """Begin as with no requests before. What is known of the levels of load stays."""
        self._speculating, self._chosen_for, self._has_committed = True, 0, False
        self._last: Epoch | None = None
        self._restart()

    def _restart(self) -> None:
        """Begin with other epochs. They count from the time at which no request does what it did before."""
        asking = self._committed_at.keys() - self._silent
        self._unchanged, self._late = {*asking}, {*asking}
        self._chosen_at = self._clock()
        self._since = math.inf if self._unchanged else self._chosen_at
        self._begin()

    def _begin(self) -> None:
        self._num_tokens = self._seconds = self._running_s = 0.0
        self._began_at = self._changed_at = self._clock()

    @contextmanager
    def request(self, request: Hashable) -> Generator[None]:
        """Count a request while it runs."""
        self._note_running()
        self._committed_at[request] = self._clock()
        if not self._num_tokens:
            self._late.add(request)
        if self._asked_alone or self.num_running == 1:
            self._asked_alone = False
            self._begin_burst()
        self._recall()
        try:
            yield
        finally:
            self._note_running()
            self.stops_asking(request)
            self._skipped.discard(request)
            self._silent.discard(request)
            del self._committed_at[request]
            self._recall()

    def _recall(self) -> None:
        """Choose what is known to be better, if the level of load is not near that of the last choice. The requests of
        a burst enter one by one: until one of them has committed tokens, each level is its own."""
        load, level = self.level, self._levels[self.level]
        if self._has_committed and (abs(load - self._chosen_for) < FAR or not level.is_known):
            return
        self._last, self._chosen_for, self._has_committed = None, load, False
        if self._speculating == level.best:
            self._chosen_at = self._clock()
            self._begin()
        else:
            self._speculating = level.best
            self._restart()

    def _note_running(self) -> None:
        """Add up how many requests ran for how long. What one alone commits does not count, so its time does not."""
        now = self._clock()
        if self.num_running > 1:
            self._running_s += self.num_running * (now - self._changed_at)
        else:
            self._began_at += now - self._changed_at
        self._changed_at = now

    def committed(self, request: Hashable, num_tokens: int) -> None:
        """Note that a request has committed tokens."""
        now = self._clock()
        self._has_committed = True
        began, self._committed_at[request] = self._committed_at[request], now
        if request in self._skipped:
            self._skipped.remove(request)
            return
        seconds = now - max(began, self._since)
        if seconds > 0 and self.num_running > 1:
            self._num_tokens += num_tokens * seconds / (now - began)
            self._seconds += seconds
            self._late.discard(request)

    @property
    def prefers_steps(self) -> bool:
        """Whether a request should speculate if it asks now."""
        return self._speculating or self.num_running < 2

    @property
    def pays(self) -> bool:
        """Whether speculation is known to be no slower at this load."""
        level = self._levels[self.level]
        return self.num_running > 1 and level.is_known and level.best

    def doubts(self) -> None:
        """Try the slower way after the present epoch."""
        self._levels[self.level].rested_s = math.inf

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._committed_at)

    @property
    def level(self) -> int:
        """Level of load: the binary logarithm of the number of running requests, rounded."""
        return level_of(self.num_running)

    def speculates(self, request: Hashable) -> bool:
        """Return whether a request should speculate on its next step. Requests ask after every step or chunk."""
        num_running = self.num_running
        enough = self._num_tokens >= max(MIN_TOKENS, EPOCH_TOKENS * num_running)
        if enough and self._seconds >= EPOCH_S * num_running and len(self._late) <= MAX_LATE * num_running:
            self._end()
        self._silent.discard(request)
        self._follow(request)
        self._asked_alone = num_running < 2
        return self.prefers_steps

    def skips(self, request: Hashable) -> None:
        """Note that what a request does next says nothing, as it may not speculate for a reason of its own."""
        self._skipped.add(request)
        self._asked_alone = self.num_running < 2
        self.stops_asking(request)

    def stops_asking(self, request: Hashable) -> None:
        """Note that a request goes on without asking, in its answer for example, so that none waits for it."""
        self._silent.add(request)
        self._follow(request)
        self._late.discard(request)

    def _follow(self, request: Hashable) -> None:
        if self._unchanged:
            begins = self._speculating and self._last is not None and not self._last.speculating
            if begins and request in self._unchanged:
                self._skipped.add(request)  # the draft first reads what the target has written meanwhile
            self._unchanged.discard(request)
            if not self._unchanged:
                self._since = self._clock()
                self._begin()

    def _end(self) -> None:
        """Note an epoch, and choose for the next one."""
        self._note_running()
        seconds = self._changed_at - self._began_at
        mean_running = self._running_s / seconds if seconds else self.num_running
        rate = self._num_tokens * mean_running / self._seconds
        epoch = Epoch(mean_running, self._speculating, self._num_tokens, rate)
        level, last = self._levels[epoch.load], self._last
        if last is not None and (last.load, last.speculating) == (epoch.load, not epoch.speculating):
            level.compare(last, epoch)
        changing_s = max(0.0, self._since - self._chosen_at)
        self._speculating = level.next(epoch.speculating, changing_s, self._seconds / mean_running)
        self._last, self._chosen_for, self._chosen_at = epoch, epoch.load, self._changed_at
        if self._speculating == epoch.speculating:
            self._begin()
        else:
            self._restart()
