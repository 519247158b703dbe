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
MARGIN = 1.02
"""How much faster a longer chain must be expected to be."""


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


class ChainDepth:
    """Chooses the length of chains.

    One pass over many steps costs less than one for each, but the steps after a rejected one are written in vain. With
    p the share of accepted steps, a chain of k steps commits p + .. + p^k of them and, if one was rejected, the
    target's own.

    Attributes:
        step_tokens: tokens of a draft step.
    """

    def __init__(self) -> None:
        self.step_tokens = Mean()
        self._draft_s, self._write_s = Mean(), Mean()
        self._read, self._seconds, self._squares, self._products = Mean(), Mean(), Mean(), Mean()
        self._num_passes = 0
        self.forget()

    def forget(self) -> None:
        """Drop what was learned from texts, the share of accepted steps. The costs are preserved."""
        self._accepted = Mean(PRIOR_ACCEPTED, PRIOR_WEIGHT)

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """Note that the draft has written a step."""
        self._draft_s.note(seconds)
        self.step_tokens.note(num_tokens)

    def read(self, num_tokens: int, seconds: float) -> None:
        """Note that the target has read tokens in one pass to judge steps."""
        self._num_passes += 1
        values = num_tokens, seconds, num_tokens**2, num_tokens * seconds
        for mean, value in zip((self._read, self._seconds, self._squares, self._products), values, strict=True):
            mean.note(value)

    def decided(self, *, accepted: bool) -> None:
        """Note the verdict on a step."""
        self._accepted.note(accepted)

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

    def _speed(self, depth: int, *, ahead: bool) -> float:
        """Return the expected steps a second of chains."""
        share = self._accepted.value
        all_stand = share**depth
        committed = sum(share**number for number in range(1, depth + 1)) + 1 - all_stand
        draft_s, pass_s = depth * self._draft_s.value, self.pass_s(depth * self.step_tokens.value)
        waited_s = draft_s - all_stand * min(draft_s, pass_s) if ahead else draft_s
        seconds = waited_s + pass_s + (1 - all_stand) * self._write_s.value
        return committed / seconds if seconds else 0.0

    def pass_s(self, num_tokens: float) -> float:
        """Return the seconds of a pass that reads some tokens. Only after a first pass."""
        base_s, token_s = self._pass_s()
        return base_s + num_tokens * token_s

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
