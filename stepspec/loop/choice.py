"""Whether the requests of a session speculate on steps: the one way to choose.

There are two ways to write steps: with speculation, and the target alone. All requests take one of them for an epoch,
and the tokens that they commit together per second decide: a request that speculates takes passes and cores from the
others, which its own times do not show. The slower way rests, and is tried again once what the last trial lost is a
small share of the time since. Each level of load has its own choice.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager

from stepspec.loop.costs import ChainCosts
from stepspec.loop.load_level import Epoch, Level, level_of
from stepspec.loop.result import NotProposed

ALONE_TOKENS, MIN_TOKENS, EPOCH_TOKENS, EPOCH_S = 128, 1024, 32, 0.5
"""Shortest epoch: committed tokens of a request that is alone, of several together and of each of them, and seconds."""
FIRST_S, LONG = 1.0, 2.0
"""When an epoch of fewer tokens ends: after some seconds as long as the other way is not known, and after some times of
what the other way takes. It bounds what a draft costs that hangs."""
MAX_LATE = 0.1
"""Share of the requests that need not have committed in the first epoch after a change: none of fewer than ten. The
fast ones alone say too much, and the slowest of many may take very long."""
FAR = 2
"""Difference between two levels of load from which a choice for the one is no choice for the other."""
PATIENCE, MIN_PATIENCE_S = 2.0, 0.1
"""How many times as long as the target a draft may take for a step, and the shortest such limit."""
READ_TOKENS = 16
"""Tokens that a draft may read in the time in which it may write one."""


class StepChoice:
    """Chooses whether the requests of a session speculate on steps.

    Levels of load are powers of two. Where the load changes by two levels, as at the beginning and the end of a burst,
    the choice is immediately that of the new level, if that is known.

    The throughput is what the requests commit in the seconds that they take for it, times their number. Tokens between
    two moments would not do: a whole text may be committed in one go, and after a change all are at the same point.
    Answers are written alike in both ways, so they do not count.

    Args:
        max_overhead: largest share of the time that trials may cost; None speculates always, 0 never tries a way again
            that was slower.
        clock: returns the time in seconds.

    Attributes:
        costs: what chains cost.
        first_token_s: seconds in which the target wrote one token, before anything else was known.
        why: why the latest request that asked should not speculate.
    """

    def __init__(self, max_overhead: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_overhead, self._clock = max_overhead, clock
        self.costs = ChainCosts()
        self.first_token_s: float | None = None
        self.why: NotProposed = "max_overhead"
        self._levels: defaultdict[int, Level] = defaultdict(Level)
        self._committed_at: dict[Hashable, float] = {}  # of running requests: the last commit, or the beginning
        self._skipped, self._silent = set[Hashable](), set[Hashable]()
        self._trying: Hashable = None  # the request that tries a draft which has not written a step yet
        self._speculating, self._chosen_for, self._has_committed = True, 0, False
        self._last: Epoch | None = None
        self._restart()

    def forget(self) -> None:
        """Drop what was learned from texts, such as how often a chain ends the thinking. The costs are preserved."""
        self.costs.forget()

    # Epochs

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

    def _note_running(self) -> None:
        """Add up how many requests ran for how long. The time without requests does not count."""
        now = self._clock()
        if self.num_running:
            self._running_s += self.num_running * (now - self._changed_at)
        else:
            self._began_at += now - self._changed_at
            self._chosen_at += now - self._changed_at
        self._changed_at = now

    def _recall(self) -> None:
        """Choose what is known to be better, if the level of load is not near that of the last choice. The requests of
        a burst enter one by one: until one of them has committed tokens, each level is its own."""
        load, level = self.level, self._levels[self.level]
        is_near = abs(load - self._chosen_for) < FAR or not level.is_known
        if not self.num_running or (self._has_committed and is_near):
            return
        self._last, self._chosen_for, self._has_committed = None, load, False
        if self._speculating == level.best:
            self._chosen_at = self._clock()
            self._begin()
        else:
            self._speculating = level.best
            self._restart()

    @property
    def _is_over(self) -> bool:
        """Whether the epoch has enough tokens and time, or takes too long for as many."""
        num_running, other_s = self.num_running, self._levels[self.level].took_s.get(not self._speculating)
        if not self._num_tokens or len(self._late) > MAX_LATE * num_running:
            return False
        least = max(ALONE_TOKENS if num_running < 2 else MIN_TOKENS, EPOCH_TOKENS * num_running)
        most_s = FIRST_S if other_s is None else max(FIRST_S, LONG * other_s)
        is_long = self._speculating and self._seconds >= most_s * num_running
        return is_long or (self._num_tokens >= least and self._seconds >= EPOCH_S * num_running)

    def _end(self) -> None:
        """Note an epoch, and choose for the next one."""
        self._note_running()
        seconds = self._changed_at - self._began_at
        mean_running = max(1.0, self._running_s / seconds if seconds else self.num_running)
        rate = self._num_tokens * mean_running / self._seconds
        epoch = Epoch(mean_running, self._speculating, self._num_tokens, rate)
        level, last = self._levels[epoch.load], self._last
        if last is not None and (last.load, last.speculating) == (epoch.load, not epoch.speculating):
            level.compare(last, epoch)
        took_s, changed = self._changed_at - self._chosen_at, last is None or last.speculating != epoch.speculating
        self._speculating = level.next(epoch.speculating, took_s, self._max_overhead or 0.0, changed=changed)
        self._last, self._chosen_for, self._chosen_at = epoch, epoch.load, self._changed_at
        if self._speculating == epoch.speculating:
            self._begin()
        else:
            self._restart()

    # What requests do

    @contextmanager
    def request(self, request: Hashable) -> Generator[None]:
        """Count a request while it runs."""
        self._note_running()
        if not self.num_running:  # requests that come one by one go on with what was chosen for them
            self._has_committed = self._chosen_for == 0
        self._committed_at[request] = self._clock()
        if not self._num_tokens:
            self._late.add(request)
        self._recall()
        try:
            yield
        finally:
            self._note_running()
            self.stops_asking(request)
            self._skipped.discard(request)
            self._silent.discard(request)
            self._trying = None if self._trying is request else self._trying
            del self._committed_at[request]
            self._recall()

    def committed(self, request: Hashable, num_tokens: int) -> None:
        """Note that a request has committed tokens."""
        if not num_tokens:
            return
        now, self._has_committed = self._clock(), True
        began, self._committed_at[request] = self._committed_at[request], now
        seconds = now - max(began, self._since)
        if request in self._skipped or request in self._silent:
            self._skipped.discard(request)
        elif seconds > 0:
            num_tokens_since = num_tokens * seconds / (now - began)
            self._late.discard(request)
            self._count(num_tokens_since, seconds)

    def _count(self, num_tokens: float, seconds: float) -> None:
        self._num_tokens += num_tokens
        self._seconds += seconds
        if not self._speculating:
            self._levels[self.level].target_s.note(seconds / num_tokens, num_tokens)

    def pauses(self, request: Hashable) -> None:
        """Note that a request waits for its caller, and that the engine may go on meanwhile."""
        self._skipped.add(request)
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

    def begins_chain(self, request: Hashable) -> None:
        """Note that the draft begins a chain for a request."""
        if not self.costs.step_tokens.weight:
            self._trying = request

    def ends_chain(self, request: Hashable) -> None:
        """Note that a chain was judged."""
        self._trying = None if self._trying is request else self._trying

    # What follows from it

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._committed_at)

    @property
    def level(self) -> int:
        """Level of load: the binary logarithm of the number of running requests, rounded."""
        return level_of(self.num_running)

    def speculates(self, request: Hashable) -> bool:
        """Return whether a request should speculate on its next step. Requests ask after every step or chunk.

        Until the draft has written its first step, one request at a time tries it, and the others do not wait for it.
        """
        if self._max_overhead is None:
            return True
        if self._trying not in (None, request) and not self.costs.step_tokens.weight:
            self.why = "another request tries the draft"
            self.pauses(request)  # what it does next says nothing
            return False
        if self._is_over:
            self._end()
        self._silent.discard(request)
        self._follow(request)
        level = self._levels[self.level]
        measures = not level.is_known or level.best
        self.why = "measuring the target" if measures else "the load" if self.num_running > 1 else "max_overhead"
        return self._speculating

    @property
    def _target_s(self) -> float | None:
        """Seconds a token of the target alone, at the nearest level of load where they are known; None if at none."""
        known = [level for level, each in self._levels.items() if each.target_s.weight]
        nearest = min(known, key=lambda level: abs(level - self.level), default=None)
        return None if nearest is None else self._levels[nearest].target_s.value

    @property
    def lacks_target(self) -> bool:
        """Whether nothing is known about the target's speed, by which the draft's is limited."""
        return self._max_overhead is not None and self._target_s is None and self.first_token_s is None

    def continues(self, num_tokens: int) -> bool:
        """Return whether the draft should go on with a step of which the target has rejected the last `num_tokens`, by
        the times of both models."""
        target_s = self._target_s
        return target_s is None or self.costs.continues(max(1, num_tokens), target_s)

    def patience_s(self, num_unread: int, longest: int) -> float | None:
        """Return the seconds after which a draft that is still writing a step is too slow to be of use; None for no
        limit.

        Args:
            num_unread: tokens that it reads first.
            longest: most tokens of a step. Before the first one is written, it may have as many.
        """
        step_tokens, target_s = self.costs.step_tokens, self._target_s or self.first_token_s
        if self._max_overhead is None or target_s is None:
            return None
        num_tokens = (step_tokens.value if step_tokens.weight else longest) + num_unread / READ_TOKENS
        return max(MIN_PATIENCE_S, PATIENCE * target_s * num_tokens)
