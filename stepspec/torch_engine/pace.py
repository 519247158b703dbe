"""How many tokens to draft: as many as measured acceptance and measured costs say pay (arXiv:2211.17192, section 3.4).

With acceptance a a token, a round of k drafted tokens emits E(k) = (1 - a^(k+1)) / (1 - a) and takes d(k) + t(k+1)
seconds, where d and t are what drafting k tokens and reading k + 1 cost. The count with the most tokens a second is
taken; where that is none, nothing is drafted, and now and then one token is tried.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

MAX_TOKENS = 16

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 2.0
"""What is believed of a drafter at first, as so many tokens seen: few, as a useless one must be found out at once."""

FORGETTING = 0.97
"""Weight of what was seen, from one round to the next: acceptance changes within a text."""

FIRST_REST = 16
"""Rounds without drafting before one token is tried again; twice as many after each trial in vain."""


@dataclass(frozen=True)
class Costs:
    """Measured seconds for so many rows: of a pass of the target by its width, of drafting by the number of tokens."""

    target: Mapping[int, float]
    draft: Mapping[int, float]

    def round_s(self, num_drafted: int) -> float:
        """Seconds of a round with so many drafted tokens."""
        draft = between(self.draft, num_drafted) if num_drafted else 0.0
        return draft + between(self.target, num_drafted + 1)


def between(points: Mapping[int, float], size: int) -> float:
    """A value on the straight lines through measured points; beyond the last one on the line of the last two."""
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]]
    upper = next((index for index, point in enumerate(known) if point >= size), len(known) - 1)
    right = max(upper, 1)
    low, high = known[right - 1], known[right]
    return points[low] + (points[high] - points[low]) * (size - low) / (high - low)


def expected_tokens(acceptance: float, num_drafted: int) -> float:
    """Tokens that a round emits, on average, if each drafted token is accepted with that probability."""
    return sum(acceptance**index for index in range(num_drafted + 1))


def best_count(acceptance: float, costs: Costs, limit: int = MAX_TOKENS) -> int:
    """How many tokens to draft for the most tokens a second; 0 if drafting does not pay."""
    return max(range(limit + 1), key=lambda count: expected_tokens(acceptance, count) / costs.round_s(count))


class Pace(Protocol):
    """Says how many tokens a call drafts next."""

    @property
    def count(self) -> int: ...

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Takes what came of a round."""
        ...


@dataclass(frozen=True)
class FixedPace:
    """Always the same."""

    count: int

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Changes nothing."""


class MeasuredPace:
    """Chooses for one call, by the call's own acceptance and by costs that were measured."""

    def __init__(self, limit: int = MAX_TOKENS) -> None:
        self.costs: Costs | None = None
        self._limit = limit
        self._accepted = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
        self._tried = PRIOR_WEIGHT
        self._rest = FIRST_REST
        self._rested = 0

    @property
    def count(self) -> int:
        """How many tokens to draft now."""
        assert self.costs is not None, "costs are measured before a round"
        best = best_count(self._accepted / self._tried, self.costs, self._limit)
        return best or int(self._rested >= self._rest)

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Takes what came of a round. Tokens behind the first rejected one were not tried."""
        if num_drafted:
            was_trial = self._rested >= self._rest
            self._accepted = FORGETTING * self._accepted + num_accepted
            self._tried = FORGETTING * self._tried + num_accepted + (num_accepted < num_drafted)
            self._rest, self._rested = (2 * self._rest if was_trial else FIRST_REST), 0
        else:
            self._rested += 1
