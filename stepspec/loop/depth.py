"""How many draft steps one pass of the target judges, from measured acceptance and costs."""

from typing import Literal

Depth = int | Literal["auto"]
MAX_DEPTH = 8
"""Most steps that one pass judges."""
PRIOR_ACCEPTED, PRIOR_WEIGHT = 0.7, 8.0
"""Share of accepted steps that is assumed before any step was judged, and the number of steps that it counts as."""
MEMORY = 0.98
"""What an observation counts after the next one of its kind. The memory is of about 50 observations."""
FIRST_PASSES = 2
"""Passes over single steps before a chain is longer than one."""
MARGIN, AHEAD_MARGIN = 1.02, 1.05
"""How much faster a longer chain must be expected to be, and one that is written while the target judges."""

KNOWN_CHAINS, TURN, TRIAL_EVERY = 4.0, 3, 64
"""Chains with and without look-ahead after which their times decide, chains in a row of one kind, and chains between
two trials of the slower one."""


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


class Line:
    """A line through the latest pairs of a number of tokens and the seconds that they took."""

    def __init__(self) -> None:
        self._tokens, self._seconds, self._squares, self._products = Mean(), Mean(), Mean(), Mean()

    def note(self, num_tokens: float, seconds: float) -> None:
        """Add a pair."""
        values = num_tokens, seconds, num_tokens**2, num_tokens * seconds
        for mean, value in zip((self._tokens, self._seconds, self._squares, self._products), values, strict=True):
            mean.note(value)

    @property
    def is_known(self) -> bool:
        """Whether there is a pair."""
        return self._tokens.weight > 0

    @property
    def mean_s(self) -> float:
        """Mean of the seconds; 0 without pairs."""
        return self._seconds.value

    def at(self, num_tokens: float) -> float:
        """Return the seconds that some tokens take. Only after a first pair.

        As long as all pairs have equally many tokens, half of the seconds are taken to be independent of them.
        """
        tokens, seconds = self._tokens.value, self._seconds.value
        variance = self._squares.value - tokens**2
        covariance = self._products.value - tokens * seconds
        slope = covariance / variance if variance > tokens**2 / 100 else seconds / tokens / 2
        slope = min(max(slope, 0.0), seconds / tokens)
        return seconds + slope * (num_tokens - tokens)


class WayOfChains:
    """Compares chains that the draft writes while the target judges with others, by what they took for a token.

    What overlaps may also be slower, where both models share a processor or a wire.
    """

    def __init__(self) -> None:
        self._tokens, self._seconds = ({ahead: Mean() for ahead in (False, True)} for _ in range(2))
        self._num_chains = 0

    def note(self, num_committed: int, seconds: float, *, ahead: bool) -> None:
        """Add a chain."""
        self._tokens[ahead].note(num_committed)
        self._seconds[ahead].note(seconds)

    @property
    def is_known(self) -> bool:
        """Whether there were enough chains of both kinds."""
        return min(mean.weight for mean in self._seconds.values()) >= KNOWN_CHAINS

    @property
    def best(self) -> bool:
        """Whether looking ahead is faster. Only once both are known."""
        return self._tokens[True].value * self._seconds[False].value > (
            self._tokens[False].value * self._seconds[True].value
        )

    def next(self) -> bool:
        """Return whether to look ahead in the next chain: in turns until both are known, then mostly as is best."""
        self._num_chains += 1
        if not self.is_known:
            return bool(self._num_chains // TURN % 2)
        return self.best != (self._num_chains % TRIAL_EVERY < TURN)


class ChainDepth:
    """Chooses the length of chains, and what else the draft does before the target has judged.

    One pass over many steps costs less than one for each, but the steps after a rejected one are written in vain. With
    p the share of accepted steps, a chain of k steps commits p + .. + p^k of them and, if one was rejected, the
    target's own.

    Attributes:
        step_tokens: tokens of a draft step.
    """

    def __init__(self) -> None:
        self.step_tokens = Mean()
        self._drafting, self._reading, self._write_s = Line(), Line(), Mean()
        self._num_passes = 0
        self._ways = WayOfChains()
        self.forget()

    def forget(self) -> None:
        """Drop what was learned from texts, the share of accepted steps. The costs are preserved."""
        self._accepted = Mean(PRIOR_ACCEPTED, PRIOR_WEIGHT)
        self._ends = Mean()

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """Note that the draft has written a step."""
        self._drafting.note(max(1, num_tokens), seconds)
        self.step_tokens.note(num_tokens)

    def read(self, num_tokens: int, seconds: float) -> None:
        """Note that the target has read tokens in one pass to judge steps."""
        self._num_passes += 1
        self._reading.note(num_tokens, seconds)

    def decided(self, *, accepted: bool) -> None:
        """Note the verdict on a step."""
        self._accepted.note(accepted)

    def proposed(self, *, ends: bool) -> None:
        """Note that the draft has written a chain, and whether it ends the thinking."""
        self._ends.note(ends)

    def replaced(self, seconds: float) -> None:
        """Note that the target has written a rejected step again."""
        self._write_s.note(seconds)

    def best(self, *, ahead: bool = False) -> int:
        """Return how many steps the next chain should have. `ahead`: whether the draft writes it while the target
        judges the one before it."""
        if self._num_passes < FIRST_PASSES:
            return 1
        best = 1
        for depth in range(2, MAX_DEPTH + 1):
            if self._speed(depth, ahead=ahead) > MARGIN * self._speed(best, ahead=ahead):
                best = depth
        return best

    def took(self, num_committed: int, seconds: float, *, ahead: bool) -> None:
        """Note what a chain has committed, in tokens, and what it took. `ahead`: whether the draft looked ahead."""
        self._ways.note(num_committed, seconds, ahead=ahead)

    def tries_ahead(self) -> bool:
        """Return whether the draft should write the next chain while the target judges. Sometimes that is a trial."""
        return self._may_pay_ahead() and self._ways.next()

    def looks_ahead(self) -> bool:
        """Return whether it is faster if the draft writes on while the target judges."""
        return self._may_pay_ahead() and (self._ways.best or not self._ways.is_known)

    def _may_pay_ahead(self) -> bool:
        """Whether looking ahead would be faster if neither model took anything from the other.

        What the draft writes after a rejected step is dropped.
        """
        if self._num_passes < FIRST_PASSES:
            return False
        alone, ahead = (self._speed(self.best(ahead=each), ahead=each) for each in (False, True))
        return ahead > AHEAD_MARGIN * alone

    def asks_for_end(self) -> bool:
        """Return whether to ask the draft after a chain if it ends the thinking there.

        Where it does, that saves a pass of the target; elsewhere the call was in vain.
        """
        if not (self._drafting.is_known and self._reading.is_known):
            return True
        share = self._ends.value
        return share * self.pass_s(1) > (1 - share) * self._drafting.at(1)

    def continues(self, num_tokens: int, token_s: float) -> bool:
        """Return whether the draft and a pass of the target take less than the target for the rest of a step.

        Args:
            num_tokens: tokens of the rest.
            token_s: seconds that the target takes for one.
        """
        if not (self._drafting.is_known and self._reading.is_known):
            return True
        return self._drafting.at(num_tokens) + self.pass_s(num_tokens) < num_tokens * token_s

    def _speed(self, depth: int, *, ahead: bool) -> float:
        """Return the expected steps a second of chains."""
        share = self._accepted.value
        all_stand = share**depth
        committed = sum(share**number for number in range(1, depth + 1)) + 1 - all_stand
        draft_s, pass_s = depth * self._drafting.mean_s, self.pass_s(depth * self.step_tokens.value)
        waited_s = draft_s - all_stand * min(draft_s, pass_s) if ahead else draft_s
        seconds = waited_s + pass_s + (1 - all_stand) * self._write_s.value
        return committed / seconds if seconds else 0.0

    def pass_s(self, num_tokens: float) -> float:
        """Return the seconds of a pass that reads some tokens. Only after a first pass."""
        return self._reading.at(num_tokens)
