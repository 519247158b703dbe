"""How many draft steps one pass of the target judges, and whether steps are speculated on at all.

Both are chosen from measured acceptance and costs. Requests of one session share what was measured.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Literal

from stepspec.loop.load import LoadChoice

Depth = int | Literal["auto"]
MAX_DEPTH = 8
"""Most steps that one pass judges."""
PRIOR_ACCEPTED, PRIOR_WEIGHT = 0.7, 8.0
"""Share of accepted steps that is assumed before any step was judged, and the number of steps that it counts as."""
MEMORY = 0.98
"""What an observation counts after the next one of its kind. The memory is of about 50 observations."""
FIRST_PASSES = 2
"""Passes over single steps before a chain is longer than one."""
MARGIN = 1.02
"""How much faster a longer chain must be expected to be."""
MOST_SAVED = 10.0
"""Savings that count as credit, in times of a chain; at least `FREE_S` do. It bounds what a change for the worse can
cost."""
KEPT = 3.0
"""Savings that are kept when the load changes, in times of a chain. What pays at one load may not pay at another."""
FREE_S = 1.0
"""Seconds that speculation may cost at first, and may take before the target's own speed is known. The first passes of
a model also allocate and compile, and a bad first step says little about the next ones."""
KNOWN_TOKENS = 32
"""Tokens that the target must have written before its speed counts as known. A few may be easy ones."""
FIRST_CONTROL, CONTROL_EVERY = 4, 64
"""Chains before the target first writes in place of one, and then each time. The number doubles until then."""
PATIENCE, LEAST_PATIENCE_S = 2.0, 0.1
"""How many times as long as the target a draft may take for a step, and the shortest such limit."""
MOST_REREAD = 256
"""Longest text that a target reads again to check an answer of the draft. A server may need memory for the logits of
all its tokens; vLLM keeps as much free for the sampling of 256 requests."""
MOST_REST = 64
"""Most answers that the target writes before the draft's is checked once more, where that cost more than it saved."""
FIRST_STEP_TOKENS = 64
"""Tokens that the draft's first step is taken to have, for this limit."""


class Mean:
    """A mean of the latest values, each with a weight."""

    def __init__(self, value: float = 0.0, weight: float = 0.0) -> None:
        self._sum, self.weight = value * weight, weight

    def note(self, value: float, weight: float = 1.0) -> None:
        """Add a value."""
        self._sum, self.weight = MEMORY * self._sum + value * weight, MEMORY * self.weight + weight

    @property
    def value(self) -> float:
        """The mean; 0 without values."""
        return self._sum / self.weight if self.weight else 0.0


class StepPace:
    """Chooses the length of chains, and pauses speculation on steps that costs more than it saves.

    One pass over many steps costs less than one for each, but the steps after a rejected one are written in vain. With
    p the share of accepted steps, a chain of k steps commits p + .. + p^k of them and, if one was rejected, the
    target's own.

    The balance is what speculation has saved less what it has cost, in seconds. It begins with `FREE_S`, and grows with
    the target's own work by `max_overhead` of it. While it is below 0, the target writes the steps. It also writes them
    under load, where speculation was measured to give a lower throughput, see `LoadChoice`.

    What the target writes after a rejected step is the hard part of a text, and slower to write with token-level
    speculation than the rest. So now and then it writes in place of a chain, as a control: that speed counts, for what
    the draft has saved and for what rejected steps have cost.

    Args:
        max_overhead: largest share of the target's own time that speculation may cost; None for no limit.
        clock: returns the time in seconds.
    """

    def __init__(self, max_overhead: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_overhead = max_overhead
        self._balance_s = 0.0
        self._draft_s, self._write_s, self._chain_s = Mean(), Mean(), Mean()
        self._token_s, self._step_tokens = defaultdict[int, Mean](Mean), Mean()
        self._control_s = defaultdict[int, Mean](Mean)  # of tokens that the target wrote in place of chains
        self._num_chains, self._control_at = 0, FIRST_CONTROL
        self._controlled: Hashable = None  # the request in which the target writes a control
        self._control_left = 0  # tokens
        self._level = 0
        self._read, self._seconds, self._squares, self._products = Mean(), Mean(), Mean(), Mean()
        self._num_passes = 0
        self._early_tokens, self._early_s = 0, 0.0  # of chains before the target's speed was known
        self._clock, self._tried_at = clock, -math.inf  # the last request that tried a draft without a step yet
        self.load = LoadChoice()
        self.forget()

    def forget(self) -> None:
        """Drop what was learned from texts, the share of accepted steps. The costs are preserved."""
        self._accepted = Mean(PRIOR_ACCEPTED, PRIOR_WEIGHT)
        self._saved_s, self._num_rested, self._rest = Mean(), 0, 1  # of answers that a text was read again for

    # What was measured

    def tries(self) -> None:
        """Note that the draft begins a chain."""
        self._tried_at = self._clock()
        self._num_chains += 1

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """Note that the draft has written a step."""
        self._draft_s.note(seconds)
        self._step_tokens.note(num_tokens)

    def read(self, num_tokens: int, seconds: float) -> None:
        """Note that the target has read tokens in one pass to judge steps."""
        self._num_passes += 1
        values = num_tokens, seconds, num_tokens**2, num_tokens * seconds
        for mean, value in zip((self._read, self._seconds, self._squares, self._products), values, strict=True):
            mean.note(value)

    def reread(self, num_kept: int, seconds: float) -> None:
        """Note what drafting an answer and reading the whole text again to check it took, and how many tokens the
        target did not have to write."""
        if self._knows_target:
            self._saved_s.note(num_kept * self._target_token_s - seconds)
            self._rest = 1 if self._saved_s.value > 0 else min(2 * self._rest, MOST_REST)

    def decided(self, *, accepted: bool) -> None:
        """Note the verdict on a step."""
        self._accepted.note(accepted)

    def replaced(self, seconds: float) -> None:
        """Note that the target has written a rejected step again."""
        self._write_s.note(seconds)

    def wrote(self, num_tokens: int, seconds: float, *, control: bool = False) -> None:
        """Note that the target has written tokens. `seconds` are without reading the prompt.

        Args:
            num_tokens: number of tokens.
            seconds: what they took.
            control: whether it wrote them in place of a chain, and not after a rejected step.
        """
        knew = self._knows_target
        self._token_s[self.load.level].note(seconds / num_tokens, num_tokens)
        if control:
            self._control_s[self.load.level].note(seconds / num_tokens, num_tokens)
            self._control_left -= num_tokens
        self._settle((self._max_overhead or 0.0) * seconds)
        if self._knows_target and not knew:
            self._settle(FREE_S)
            self._ended(self._early_tokens, self._early_s)

    def regenerated(self, num_tokens: int, seconds: float) -> None:
        """Note that the target has written tokens after the kept part of a rejected step. `seconds` are all it took."""
        if self._knows_controls:
            self._settle(num_tokens * self._target_token_s - seconds)

    def ended(self, num_committed: int, seconds: float) -> None:
        """Note what a chain has committed, in tokens, and what drafting and judging it took."""
        self._tried_at = -math.inf
        self._chain_s.note(seconds)
        if self._knows_target:
            self._ended(num_committed, seconds)
        else:
            self._early_tokens, self._early_s = self._early_tokens + num_committed, self._early_s + seconds

    def _ended(self, num_committed: int, seconds: float) -> None:
        self._settle((1 + (self._max_overhead or 0.0)) * num_committed * self._target_token_s - seconds)

    def _settle(self, seconds: float) -> None:
        self._note_level()
        self._balance_s = min(self._balance_s + seconds, max(FREE_S, MOST_SAVED * self._chain_s.value))

    def _note_level(self) -> None:
        """Keep less of what was saved if the load has changed."""
        if self.load.level != self._level and self._knows_target:
            self._balance_s = min(self._balance_s, KEPT * self._chain_s.value)
        self._level = self.load.level

    # What follows from it

    @property
    def _known(self) -> list[int]:
        return [level for level, mean in self._token_s.items() if mean.weight >= KNOWN_TOKENS]

    @property
    def _knows_target(self) -> bool:
        return bool(self._known)

    @property
    def _target_level(self) -> int:
        """The level nearest to that of the present load of those at which the target's speed is known."""
        return min(self._known, key=lambda level: (abs(level - self.load.level), level))

    @property
    def _knows_controls(self) -> bool:
        """Whether the target's speed is known from controls."""
        return self._knows_target and self._control_s[self._target_level].weight >= KNOWN_TOKENS

    @property
    def _target_token_s(self) -> float:
        """Seconds that the target takes for a token."""
        return (self._control_s if self._knows_controls else self._token_s)[self._target_level].value

    @property
    def pauses(self) -> bool:
        """Whether the target should write the next step."""
        if self._max_overhead is None:
            return False
        self._note_level()
        return self._balance_s < 0 if self._knows_target else self._early_s >= FREE_S

    def speculates(self, request: Hashable) -> bool:
        """Return whether a request should speculate on its next step. Requests ask after every step or chunk.

        Until the draft has written its first step, one request at a time tries it, and the others do not wait for it.
        """
        if self._max_overhead is None:
            return True
        has_step = self._step_tokens.weight > 0
        if not self.pauses and has_step and not self._is_control(request):
            return self.load.speculates(request)
        self.load.skips(request)
        return not self.pauses and not has_step and self._clock() - self._tried_at >= FREE_S

    def _is_control(self, request: Hashable) -> bool:
        """Return whether the target should write in place of a request's next chain, so that its own speed is known.
        Under load, `LoadChoice` has it write."""
        if self.load.num_running > 1:
            return False
        if self._num_chains >= self._control_at:
            self._control_at = self._num_chains + min(self._num_chains, CONTROL_EVERY)
            self._controlled, self._control_left = request, KNOWN_TOKENS
        if self._control_left <= 0:
            self._controlled = None
        return self._controlled is request

    def rereads(self, num_tokens: int) -> bool:
        """Return whether the target should read a whole text again to check an answer of the draft. If that has cost
        more than it saved, it does so now and then."""
        if num_tokens > MOST_REREAD:
            return False
        if self._saved_s.value >= 0:
            return True
        self._num_rested = (self._num_rested + 1) % self._rest
        return not self._num_rested

    @property
    def patience_s(self) -> float | None:
        """Seconds after which a draft that is still writing a step is too slow to be of use; None for no limit."""
        if self._max_overhead is None:
            return None
        if not self._knows_target:
            return FREE_S
        num_tokens = self._step_tokens.value if self._step_tokens.weight else FIRST_STEP_TOKENS
        return max(LEAST_PATIENCE_S, PATIENCE * self._target_token_s * num_tokens)

    def depth(self, *, ahead: bool = False) -> int:
        """Return how many steps the next chain should have. `ahead`: whether the draft writes it while the target
        judges the one before it."""
        if self._num_passes < FIRST_PASSES:
            return 1
        best = 1
        for depth in range(2, MAX_DEPTH + 1):
            if self._speed(depth, ahead=ahead) > MARGIN * self._speed(best, ahead=ahead):
                best = depth
        return best

    def _speed(self, depth: int, *, ahead: bool) -> float:
        """Return the expected steps a second of chains."""
        share = self._accepted.value
        all_stand = share**depth
        committed = sum(share**number for number in range(1, depth + 1)) + 1 - all_stand
        base_s, token_s = self._pass_s()
        draft_s, pass_s = depth * self._draft_s.value, base_s + depth * token_s * self._step_tokens.value
        waited_s = draft_s - all_stand * min(draft_s, pass_s) if ahead else draft_s
        seconds = waited_s + pass_s + (1 - all_stand) * self._write_s.value
        return committed / seconds if seconds else 0.0

    def _pass_s(self) -> tuple[float, float]:
        """Return the seconds of a pass and those of each token that it reads, from a line through the observations.

        As long as all passes were equally long, half of the seconds are taken for the pass's own.
        """
        tokens, seconds = self._read.value, self._seconds.value
        variance = self._squares.value - tokens**2
        covariance = self._products.value - tokens * seconds
        slope = covariance / variance if variance > tokens**2 / 100 else seconds / tokens / 2
        slope = min(max(slope, 0.0), seconds / tokens)
        return seconds - slope * tokens, slope
