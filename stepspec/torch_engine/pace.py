"""How many tokens to draft: as many as measured acceptance and measured costs say pay (arXiv:2211.17192, section 3.4).

With acceptance a of a token, a round of k drafted tokens emits E(k) = (1 - a^(k+1)) / (1 - a) of a row and takes
d(k) + t(k + 1) seconds, where d and t are what drafting k tokens and reading k + 1 cost. A round is as wide as its
widest row, so the rows that share it go for one count together: the one with the most tokens a second. Where that is
none, nothing is drafted, and now and then one token is tried.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stepspec.torch_engine.row import Row

MAX_TOKENS = 16

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 20.0
"""What is believed of a drafter before it has drafted, and how many drafted tokens a first belief counts for: more, and
a useless drafter is found out later; fewer, and a good one is given up after one bad guess."""

CALL_FORGETTING, DRAFTER_FORGETTING = 0.97, 0.998
"""Weight of what was seen, from one round of a row to the next: acceptance changes within a text, and between texts."""

FIRST_REST, LONGEST_REST = 16, 512
"""Rounds without drafting before one token is tried again; twice as many after each trial in vain. For a trial a draft
model reads all that was written in the meantime."""

MARGIN = 1.1
"""How many times as fast drafting has to be believed to be: both sides are estimates, and a tie costs work."""

LONGEST_RUN = 32
"""Rounds with drafting after which there is one without, to see what that costs by now."""

LEARNING, MOST_OFF = 0.2, 2.0
"""Weight of a round in what is learned of costs, and how many times off what is believed it may be taken to be."""


class Costs:
    """What rounds of so many rows cost: measured beforehand one by one, and corrected by what rounds then take.

    Repeated by itself a pass finds everything in the processor's caches, and in a round it does not, a wide one less
    than a narrow one. Machines are faster and slower from one second to the next besides, and then all rounds are. So
    what the usual rounds take says how fast the machine is; what one without drafting takes in between says how the two
    kinds compare. The trial of a drafter at rest says nothing: it has reading to catch up with.
    """

    def __init__(self, verify: Mapping[int, float], draft: Mapping[int, float]) -> None:
        """Seconds of verifying by the width of the pass, and of drafting by the number of tokens."""
        drafting = [0.0] + [between(draft, count) for count in range(1, MAX_TOKENS + 1)]
        self._verify = [between(verify, count + 1) for count in range(MAX_TOKENS + 1)]
        self._round = [draft + verify for draft, verify in zip(drafting, self._verify, strict=True)]
        self._slowness = 1.0  # of the machine
        self._drafted = 1.0  # of rounds with drafting, beside those without

    @property
    def verify_s(self) -> list[float]:
        """Seconds of verifying 0, 1, .. drafted tokens a row."""
        return self._corrected(self._verify)

    @property
    def round_s(self) -> list[float]:
        """Seconds of a round with 0, 1, .. drafted tokens a row."""
        return self._corrected(self._round)

    def _corrected(self, seconds: Sequence[float]) -> list[float]:
        plain, *drafted = seconds
        return [self._slowness * plain, *(self._slowness * self._drafted * each for each in drafted)]

    def note(self, num_drafted: int, seconds: float, *, usual: bool) -> None:
        """Takes what a round with so many drafted tokens a row has taken, and whether that is the usual kind now."""
        if num_drafted and not usual:
            return
        off = seconds / self.round_s[min(num_drafted, MAX_TOKENS)]
        off = min(max(off, 1 / MOST_OFF), MOST_OFF) ** LEARNING
        if usual:
            self._slowness *= off
        else:
            self._drafted /= off


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


def best_count(acceptances: Sequence[float], limits: Sequence[int], round_s: Sequence[float]) -> int:
    """The number of drafted tokens with which rows emit the most tokens a second; 0 if drafting does not pay.

    Args:
        acceptances: of each row.
        limits: the most that each row can draft.
        round_s: seconds of a round with 0, 1, .. tokens drafted by the row that drafts most.
    """
    tokens = float(len(acceptances))
    gains = [1.0] * len(acceptances)
    best, best_rate = 0, MARGIN * tokens / round_s[0]
    for count in range(1, min(len(round_s) - 1, max(limits)) + 1):
        gains = [
            gain * acceptance * (count <= limit)
            for gain, acceptance, limit in zip(gains, acceptances, limits, strict=True)
        ]
        tokens += sum(gains)
        if tokens / round_s[count] > best_rate:
            best, best_rate = count, tokens / round_s[count]
    return best


@dataclass
class Belief:
    """How likely a drafted token is accepted: tokens seen, those of long ago counted less."""

    accepted: float = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
    tried: float = PRIOR_WEIGHT

    @property
    def acceptance(self) -> float:
        """Between 0 and 1."""
        return self.accepted / self.tried

    def note(self, num_drafted: int, num_accepted: int, forgetting: float) -> None:
        """Takes what came of a draft. Tokens behind the first rejected one were not tried."""
        self.accepted = forgetting * self.accepted + num_accepted
        self.tried = forgetting * self.tried + num_accepted + (num_accepted < num_drafted)


class Pacer:
    """Chooses for the calls of one drafter, by each call's acceptance and by costs that were measured."""

    def __init__(self) -> None:
        self._costs: dict[int, Costs] = {}
        self._seen = Belief()
        self._rows: weakref.WeakKeyDictionary[Row, Belief] = weakref.WeakKeyDictionary()
        self._rest, self._rested, self._run = FIRST_REST, 0, 0
        self.usual = True
        """Whether the last count was what is best; else it is for comparison."""

    def costs(self, num_rows: int, measure: Callable[[], Costs]) -> Costs:
        """What a round of about so many rows costs, measured when it is first asked."""
        if num_rows not in self._costs:
            self._costs[num_rows] = measure()
        return self._costs[num_rows]

    def belief(self, row: Row) -> Belief:
        """What is believed of a row; of a new one, that it is like those before."""
        if row not in self._rows:
            self._rows[row] = Belief(PRIOR_WEIGHT * self._seen.acceptance, PRIOR_WEIGHT)
        return self._rows[row]

    def count(self, beliefs: Sequence[Belief], costs: Costs) -> int:
        """How many tokens the rows of the next round draft."""
        self.usual = True
        if self._rested % FIRST_REST:  # at rest; what other rows have come since is looked at now and then
            self._rested += 1
            return 0
        count = best_count([each.acceptance for each in beliefs], [MAX_TOKENS] * len(beliefs), costs.round_s)
        if count and self._run < LONGEST_RUN:
            self._rest, self._rested, self._run = FIRST_REST, 0, self._run + 1
            return count
        if not count and self._rested < self._rest:
            self._rested, self._run = self._rested + 1, 0
            return 0
        self.usual = False
        if count:
            self._run = 0
            return 0
        self._rest, self._rested = min(2 * self._rest, LONGEST_REST), 0
        return 1

    def note(self, row: Row, num_drafted: int, num_accepted: int) -> None:
        """Takes what came of a row's draft."""
        self.belief(row).note(num_drafted, num_accepted, CALL_FORGETTING)
        self._seen.note(num_drafted, num_accepted, DRAFTER_FORGETTING)


def worth_verifying(beliefs: Sequence[Belief], counts: Sequence[int], costs: Costs) -> int:
    """Of so many tokens drafted for each row, the first how many pay the pass that verifies them.

    What looks tokens up often finds some for a few rows only, and then the pass is wider for all.
    """
    return best_count([each.acceptance for each in beliefs], counts, costs.verify_s)
