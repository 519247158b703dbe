"""Whether steps are speculated on, from what that saved and cost. Requests of one session share what was measured."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from statistics import median_low

from stepspec.loop.costs import ChainCosts, Mean
from stepspec.loop.load import LoadChoice
from stepspec.loop.result import NotProposed

MAX_SAVED = 10.0
"""Savings that count as credit, in times of a chain; at least the first credit does. It bounds what a change for the
worse can cost. A single loss counts as no more than that, as a machine may stall."""
KEPT = 3.0
"""Savings and losses that are kept when the load changes, in times of a chain; of savings one more for each running
request. What pays at one load may not pay at another."""
FREE_S = 1.0
"""Seconds that speculation may cost at first, and after which no chain begins before the target's own speed is known.
The first passes of a model also allocate and compile, and a bad first step says little about the next ones."""
MIN_GAIN = 0.05
"""Least share of the target's time that a chain must save to be no loss."""
KNOWN_TOKENS = 32
"""Tokens that the target must have written before its speed counts as known. A few may be easy ones."""
FIRST_CONTROL, RARER, CONTROL_EVERY = 4, 4, 256
"""Number of chains before the first control, the factor by which it grows with each further one, and most chains
between two controls."""
MAX_CONTROLS, SPREAD = 16, 1.5
"""Number of measurements of controls that count, and how many times as slow or as fast as the median one of them counts
as. A machine that stalls in one of the first few would make the target look slow for long."""
PATIENCE, MIN_PATIENCE_S = 2.0, 0.1
"""How many times as long as the target a draft may take for a step, and the shortest such limit."""
READ_TOKENS = 16
"""Tokens that a draft may read in the time in which it may write one."""


class ControlSpeed:
    """Seconds a token of the latest controls."""

    def __init__(self) -> None:
        self._token_s = deque[tuple[float, int]](maxlen=MAX_CONTROLS)
        self.value, self.num_tokens = 0.0, 0

    def note(self, token_s: float, num_tokens: int) -> None:
        """Add the seconds a token that some tokens took."""
        self._token_s.append((token_s, num_tokens))
        median = median_low(token_s for token_s, _ in self._token_s)
        self.num_tokens = sum(count for _, count in self._token_s)
        within = [(min(max(token_s, median / SPREAD), median * SPREAD), count) for token_s, count in self._token_s]
        self.value = sum(token_s * count for token_s, count in within) / self.num_tokens


class TargetSpeed:
    """How fast the target writes without speculation on steps, by level of load.

    What it writes after a rejected step is the hard part of a text, and slower to write with token-level speculation
    than the rest. So now and then it writes in place of a chain, as a control, and the speed of controls counts once it
    is known.

    Args:
        load: the requests that run.
    """

    def __init__(self, load: LoadChoice) -> None:
        self._load = load
        self._all_token_s = defaultdict[int, Mean](Mean)
        self._control_token_s = defaultdict[int, ControlSpeed](ControlSpeed)
        self._num_chains, self._control_at, self._tokens_left = 0, FIRST_CONTROL, 0
        self._controlled: Hashable = None

    def generated(self, num_tokens: int, seconds: float, *, control: bool) -> None:
        """Note that the target has generated tokens; see `StepPace.generated`."""
        level = self._load.level
        self._all_token_s[level].note(seconds / num_tokens, num_tokens)
        if control:
            self._control_token_s[level].note(seconds / num_tokens, num_tokens)
            self._tokens_left -= num_tokens

    def chain_ended(self) -> None:
        """Note that a chain has ended. Controls are for requests that run alone, so are the chains between them."""
        self._num_chains += self._load.num_running < 2

    def request_ended(self, request: Hashable) -> None:
        """Note that a request has ended, and its control with it."""
        if self._controlled is request:
            self._controlled = None

    def controls(self, request: Hashable) -> bool:
        """Return whether the target should write in place of a request's next chain. It begins a control when one is
        due, and ends it after `KNOWN_TOKENS`. Under load there are none: `LoadChoice` has the target write."""
        if self._load.num_running > 1:
            return False
        if self._num_chains >= self._control_at:
            self._control_at = min(RARER * self._num_chains, self._num_chains + CONTROL_EVERY)
            self._controlled, self._tokens_left = request, KNOWN_TOKENS
        if self._tokens_left <= 0:
            self._controlled = None
        return self._controlled is request

    @property
    def _known(self) -> list[int]:
        return [level for level, mean in self._all_token_s.items() if mean.weight >= KNOWN_TOKENS]

    @property
    def is_known(self) -> bool:
        """Whether it has written enough at any load."""
        return bool(self._known)

    @property
    def _level(self) -> int:
        """The level nearest to the present one of those at which the speed is known."""
        return min(self._known, key=lambda level: (abs(level - self._load.level), level))

    @property
    def has_controls(self) -> bool:
        """Whether the speed is that of controls."""
        return self.is_known and self._control_token_s[self._level].num_tokens >= KNOWN_TOKENS

    @property
    def token_s(self) -> float:
        """Seconds a token. Only once the speed is known."""
        return (self._control_token_s if self.has_controls else self._all_token_s)[self._level].value


class StepPace:
    """Pauses speculation on steps that costs more than it saves.

    The balance is what speculation has saved less what it has cost, in seconds. It begins with `FREE_S`, and grows with
    the target's own work by `max_overhead` of it. While it is below 0, the target writes the steps. It also writes them
    under load, where speculation was measured to give a lower throughput, see `LoadChoice`.

    A chain that saves less than `MIN_GAIN` counts as a loss: the draft's text may be longer than the target's own,
    and it may be wrong.

    Under load the times of all requests add up, and a chain takes passes from the others, which its own time does not
    show: with 16 requests, chains of 2.5% of that sum took 6% of the machine. So the first credit grows with the square
    root of the number of requests, and the share that the target's own work earns falls with it. No more chains run
    beside each other than the balance pays for. Where speculation was measured to pay under load, a balance below 0
    does not end it, but has that measured again.

    Args:
        max_overhead: largest share of the target's own time that speculation may cost; None for no limit.
        clock: returns the time in seconds.

    Attributes:
        costs: what chains cost.
        load: chooses whether the requests of the session speculate.
        why: why the latest request that asked should not speculate.
    """

    def __init__(self, max_overhead: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_overhead = max_overhead
        self._balance_s = 0.0
        self._level: int = 0
        self._chain_s = Mean()
        self._early_tokens, self._early_s = 0, 0.0  # of chains before the target's speed was known
        self._clock = clock
        self._begun: dict[Hashable, float] = {}  # when chains that run or may now begin did so, by request
        self.costs, self.load = ChainCosts(), LoadChoice()
        self._target = TargetSpeed(self.load)
        self.why: NotProposed = "max_overhead"
        self.forget()

    def forget(self) -> None:
        """Drop what was learned from texts, such as the share of accepted steps. The costs are preserved."""
        self.costs.forget()

    @contextmanager
    def request(self, request: Hashable) -> Generator[None]:
        """Count a request while it runs."""
        with self.load.request(request):
            try:
                yield
            finally:
                self._begun.pop(request, None)
                self._target.request_ended(request)

    # What was measured

    def tries(self, request: Hashable) -> None:
        """Note that the draft begins a chain for a request."""
        self._begun[request] = self._clock()

    def generated(self, num_tokens: int, seconds: float, *, control: bool = False) -> None:
        """Note that the target has generated tokens.

        Args:
            num_tokens: number of tokens.
            seconds: what they took, without reading the prompt.
            control: whether it wrote them in place of a chain, and not after a rejected step.
        """
        was_known = self._target.is_known
        self._target.generated(num_tokens, seconds, control=control)
        usual_s = num_tokens * self._target.token_s if self._target.has_controls else math.inf
        self._settle(self._earned_s(min(seconds, usual_s)))  # slow writing may be a consequence of speculation
        if self._target.is_known and not was_known:
            self._settle(self._free_s)
            self._ended(self._early_tokens, self._early_s)

    def generated_at_unknown_speed(self, seconds: float) -> None:
        """Note what the target took to read a prompt and write a text that came in one piece."""
        if self._target.is_known:
            self._settle(self._earned_s(seconds))
        else:
            self._early_s = max(0.0, self._early_s - self._earned_s(seconds))

    def _earned_s(self, seconds: float) -> float:
        """Return what speculation may cost for some seconds of the target's own work."""
        return (self._max_overhead or 0.0) * seconds / math.sqrt(max(1, self.load.num_running))

    @property
    def _free_s(self) -> float:
        return FREE_S * math.sqrt(max(1, self.load.num_running))

    def regenerated(self, num_tokens: int, seconds: float) -> None:
        """Note that the target has generated tokens after the kept part of a rejected step. `seconds`: all it took."""
        if self._target.has_controls:
            self._settle(num_tokens * self._target.token_s - seconds)

    def ended(self, num_committed: int, seconds: float, request: Hashable = None) -> None:
        """Note what a chain of a request has committed, in tokens, and what drafting and judging it took."""
        self._begun.pop(request, None)
        self._target.chain_ended()
        self._chain_s.note(seconds)
        if self._target.is_known:
            self._ended(num_committed, seconds)
        else:
            self._early_tokens, self._early_s = self._early_tokens + num_committed, self._early_s + seconds

    def _ended(self, num_committed: int, seconds: float) -> None:
        target_s = num_committed * self._target.token_s
        self._settle((1 - MIN_GAIN) * target_s - seconds)

    def _settle(self, seconds: float) -> None:
        self._note_level()
        most = max(self._free_s, (MAX_SAVED + self.load.num_running) * self._chain_s.value)
        self._balance_s = min(self._balance_s + max(seconds, -most), most)

    def _note_level(self) -> None:
        """Keep less of what was saved, and of what was spent, if the load has changed."""
        if self.load.level != self._level and self._target.is_known:
            chain_s = self._chain_s.value
            most = (KEPT + self.load.num_running) * chain_s
            self._balance_s = max(-KEPT * chain_s, min(self._balance_s, most))
        self._level = self.load.level

    # What follows from it

    @property
    def pauses(self) -> bool:
        """Whether the target should write the next step."""
        return self._max_overhead is not None and not self._pays_for(len(self._begun))

    def _pays_for(self, num_chains: int) -> bool:
        """Return whether one more chain may begin beside others."""
        self._note_level()
        others_s = num_chains * self._chain_s.value
        return self._balance_s >= others_s if self._target.is_known else self._early_s + others_s < self._free_s

    def speculates(self, request: Hashable) -> bool:
        """Return whether a request should speculate on its next step. Requests ask after every step or chunk.

        Until the draft has written its first step, one request at a time tries it, and the others do not wait for it.
        Where not all requests may speculate, what they commit says nothing about the load.
        """
        self._begun.pop(request, None)
        if self._max_overhead is None:
            return True
        self.why = "the load"
        if self.load.pays:
            self._note_level()
            if self._balance_s < 0:  # the machine may have become slower, and the target with it
                self._balance_s = self.load.num_running * self._chain_s.value
                self.load.doubts()
            return self.load.speculates(request)
        if self.pauses:
            speculates, self.why = False, "max_overhead"
        elif not self.costs.step_tokens.weight:
            speculates, self.why = not self._begun, "another request tries the draft"
        elif self._target.controls(request):
            speculates, self.why = False, "measuring the target"
        elif self._pays_for(self.load.num_running - 1) or not self.load.prefers_steps:
            return self.load.speculates(request)
        else:
            speculates = True
        if speculates:  # else others would also stop writing for it
            self._begun[request] = self._clock()
        self.load.skips(request)
        return speculates

    def continues(self, num_tokens: int) -> bool:
        """Return whether the draft should go on with a step of which the target has rejected the last `num_tokens`, by
        the times of both models."""
        return not self._target.is_known or self.costs.continues(max(1, num_tokens), self._target.token_s)

    def patience_s(self, num_unread: int) -> float | None:
        """Return the seconds after which a draft that is still writing a step is too slow to be of use; None for no
        limit.

        Args:
            num_unread: tokens that it reads first.
        """
        step_tokens = self.costs.step_tokens
        if self._max_overhead is None or not (self._target.is_known and step_tokens.weight):
            return None  # the first step may take what it takes, and what it took then counts
        num_tokens = step_tokens.value + num_unread / READ_TOKENS
        return max(MIN_PATIENCE_S, PATIENCE * self._target.token_s * num_tokens)
