"""How many tokens to draft: as many as give the most tokens per second (arXiv:2211.17192, section 3.4).

alpha is the probability that a drafted token is accepted. A round that drafts k tokens emits
S(k) = 1 + alpha + .. + alpha^k tokens, and takes the time to draft k tokens and to verify them in one pass. All of that
is measured in every round. The time of a pass need not grow evenly with its tokens: kernels pad rows. If drafting does
not pay, it pauses, except for trials that cost a small share of the time.
"""

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from stepspec.engines.torch_engine.row import BatchRow

MAX_TOKENS = 16

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 12.0
"""Assumed acceptance of a new drafter, and the number of tokens that it counts for. A larger weight detects a useless
drafter later; a smaller one drops a good drafter after one bad guess."""

ROW_MEMORY, DRAFTER_MEMORY = 32.0, 500.0
"""Rounds after which an observation counts for 1/e. Acceptance changes within a text and from text to text."""

WINDOW, MEMORY = 16, 1000
"""Number of latest timings of a kind to take the median of, none of them before so many rounds. The median tolerates
spikes in up to half of them."""

FIRST_TIMINGS, TRIAL_TOKENS = 3, 2
"""Timings of a kind before their median is used, and tokens that a trial drafts. One token would show little about the
cost of verifying, and many are expensive."""

TRIAL_SHARE, FIRST_REST = 0.01, 8.0
"""Share of the time that trials may cost, and rounds without drafting before the first trial. The first trials come
sooner than the share allows, to correct wrong first timings early; the pause between them doubles each time."""

LOOKUP_ACCEPTANCE, LOOKUP_WEIGHT = 0.8, 6.0
"""Assumed acceptance of looked-up tokens in a new row, and the number of tokens that it counts for."""

MAX_RUN = 32
"""Consecutive rounds with drafting before one without, which measures the current cost of a plain round."""
WIDER, OFTEN = 2, 8
"""Factor on the tokens of one of these rounds, which measures what more tokens would cost: in as many runs as the
second number, and then in one of so many."""

MARGIN = 1.05
"""Factor by which the gain of a drafted token must exceed its cost, because costs and acceptance are estimates."""


@dataclass
class SuccessRate:
    """A success rate from exponentially weighted counts."""

    successes: float = 0.0
    tries: float = 0.0

    def note(self, successes: float, tries: float, memory: float, least: float = 0.0) -> None:
        """Add a round's counts. Earlier counts decay within `memory` rounds, but not below `least` tries."""
        decay = max(1 - 1 / memory, min(1.0, least / self.tries)) if self.tries else 1.0
        self.successes = decay * self.successes + successes
        self.tries = decay * self.tries + tries

    def estimate(self, prior: float, weight: float) -> float:
        """Return the success rate, with `prior` counted as `weight` tries."""
        return (self.successes + weight * prior) / (self.tries + weight)


@dataclass(frozen=True)
class Round:
    """The results of a round: token counts of each row, and seconds."""

    num_asked: int  # tokens per row requested from the drafter; 0 if it was not called
    found: Sequence[int]  # tokens that the drafter returned
    drafted: Sequence[int]  # tokens of these that were verified
    accepted: Sequence[int]
    catch_up_s: float  # the drafter reads what was written while it was not called
    draft_s: float
    verify_s: float  # all other time
    shared: bool = False  # the pass read other rows too or was captured, so its time says nothing about the round
    looked_up: bool = False  # the tokens were looked up instead of drafted


class RoundCosts:
    """Costs of the latest rounds with about the same number of rows, in seconds. Medians absorb spikes."""

    def __init__(self, *, by_token: bool) -> None:
        """`by_token`: whether the time to draft is proportional to the number of tokens; else it is constant."""
        self._by_token = by_token
        self._verify: defaultdict[int, deque[tuple[int, float]]] = defaultdict(partial(deque, maxlen=WINDOW))
        self._num_rounds = 0
        self._draft: deque[float] = deque(maxlen=WINDOW)
        self._times = [0.0] * (MAX_TOKENS + 1)
        self.draft_s = 0.0
        """Time to draft one token for every row; without `by_token`, time to draft any number of tokens."""
        self.num_runs = 0
        """Longer runs of rounds with drafting so far."""

    @property
    def lacks_rounds(self) -> bool:
        """Whether there are too few rounds to know their cost. Rounds with drafts count, as there may be no others."""
        return sum(map(len, self._verify.values())) < FIRST_TIMINGS

    @property
    def lacks_drafts(self) -> bool:
        """Whether there are too few drafts to know their cost."""
        return len(self._draft) < FIRST_TIMINGS

    def note(self, done: Round) -> None:
        """Add the timings of a round."""
        if done.num_asked:
            self._draft.append(done.draft_s / done.num_asked if self._by_token else done.draft_s)
            self.draft_s = median(self._draft)
        self._num_rounds += 1
        self._verify[max(done.drafted)].append((self._num_rounds, done.verify_s))
        recent = {
            count: [seconds for number, seconds in found if number > self._num_rounds - MEMORY]
            for count, found in self._verify.items()
        }
        wide = [seconds for count, found in recent.items() if count for seconds in found]
        plain = [median(found) for found in (recent.get(0), wide) if found]  # a pass over more tokens takes no less
        known = {count: median(found) for count, found in recent.items() if count and len(found) >= FIRST_TIMINGS}
        self._times = _interpolated(min(plain), known)

    def verify_s(self, count: int) -> float:
        """Return the time of a round that verifies so many drafted tokens, without the time to draft them."""
        return self._times[min(count, MAX_TOKENS)]

    def loss_s(self, done: Round) -> float:
        """Return the seconds that a round took longer than its tokens would without drafting; negative if it paid."""
        drafting = self.draft_s * (done.num_asked if self._by_token else 1)
        gained = sum(done.accepted) / len(done.accepted)
        return done.catch_up_s + drafting + self.verify_s(max(done.drafted)) - self.verify_s(0) * (1 + gained)

    def fastest(self, acceptances: Sequence[float], coverage: float) -> tuple[int, float]:
        """Return how many tokens to request from a drafter that finds tokens for a share `coverage` of the rows, and
        the tokens per second."""
        share = 1 - (1 - coverage) ** len(acceptances)  # share of rounds with at least one draft to verify
        plain_s = self.verify_s(0)

        def round_s(count: int) -> float:
            drafting = self.draft_s * (count if self._by_token or not count else 1)
            return drafting + plain_s + share * (self.verify_s(count) - plain_s)

        return fastest(acceptances, [MAX_TOKENS] * len(acceptances), round_s, coverage)


def _interpolated(plain: float, known: Mapping[int, float]) -> list[float]:
    """Return times by number of tokens, up to `MAX_TOKENS`, from those of none and of some numbers. More tokens never
    take less. Beyond the last number, each takes as much as those before it on average."""
    times, last = [plain], 0
    for count in sorted(known):
        found = max(known[count], times[-1])
        times += [times[last] + (found - times[last]) * step / (count - last) for step in range(1, count - last + 1)]
        last = count
    token_s = (times[-1] - times[0]) / last if last else 0.0
    return times + [times[-1] + token_s * step for step in range(1, MAX_TOKENS - last + 1)]


def fastest(
    acceptances: Sequence[float], limits: Sequence[int], round_s: Callable[[int], float], coverage: float = 1.0
) -> tuple[int, float]:
    """Return the number of drafted tokens that maximizes emitted tokens per second, and these; 0 if drafting does not
    pay.

    Args:
        acceptances: acceptance probability of each row.
        limits: maximum number of tokens that each row can draft.
        round_s: seconds of a round by the number of drafted tokens.
        coverage: probability that a row gets a draft.
    """
    plain_s, tokens = round_s(0), float(len(acceptances))
    gains = [coverage] * len(acceptances)
    best, most = 0, tokens / plain_s if plain_s else math.inf
    for count in range(1, max(limits) + 1):
        rows = zip(gains, acceptances, limits, strict=True)
        gains = [gain * acceptance if count <= limit else 0.0 for gain, acceptance, limit in rows]
        tokens += sum(gains)
        speed = tokens / (plain_s + MARGIN * (round_s(count) - plain_s))
        if speed > most:
            best, most = count, speed
    return best, most


class Pacer:
    """Chooses how many tokens one drafter drafts, from each row's acceptance and the costs of rounds of that load."""

    def __init__(self, *, by_token: bool = True) -> None:
        """`by_token`: see `RoundCosts`."""
        self._costs: defaultdict[int, RoundCosts] = defaultdict(partial(RoundCosts, by_token=by_token))
        self.forget()

    def forget(self) -> None:
        """Drop what was learned from texts: acceptance and the state of trials. The costs of rounds are preserved."""
        self._seen = SuccessRate(PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT)
        self._found = SuccessRate(1.0, 1.0)
        self._rows: weakref.WeakKeyDictionary[BatchRow, SuccessRate] = weakref.WeakKeyDictionary()
        self._looked_up: weakref.WeakKeyDictionary[BatchRow, SuccessRate] = weakref.WeakKeyDictionary()
        self._rest, self._early_rest, self._run, self._shared = 0.0, FIRST_REST, 0, 0
        self._trial = self._wider = False

    def acceptance(self, row: BatchRow) -> float:
        """Return the expected acceptance of a row: its own, with the acceptance of all rows as the prior."""
        seen = self._seen.successes / self._seen.tries
        own = self._rows.get(row)
        return seen if own is None else own.estimate(seen, PRIOR_WEIGHT)

    def count(self, rows: Sequence[BatchRow], load: int) -> int:
        """Return how many tokens each row of the next round drafts. `load` is the rough number of rows in the round."""
        costs = self._costs[load]
        self._trial = self._wider = False
        if costs.lacks_rounds:
            return 0
        if costs.lacks_drafts:
            self._trial = True
            return TRIAL_TOKENS
        best, _ = costs.fastest([self.acceptance(row) for row in rows], self._found.estimate(1.0, 0.0))
        if best:
            self._run = (self._run + 1) % (MAX_RUN + 1)
            if self._run == MAX_RUN // 4:
                costs.num_runs += 1
                self._wider = costs.num_runs <= OFTEN or costs.num_runs % OFTEN == 0
            if self._wider:
                return min(MAX_TOKENS, WIDER * best)
            return best if self._run else 0
        self._run = 0
        self._trial = self._rest <= 0
        self._rest -= 1
        return TRIAL_TOKENS if self._trial else 0

    def knows_costs(self, load: int) -> bool:
        """Whether the next round of that load need not be timed. One in `MAX_RUN` is."""
        costs = self._costs[load]
        self._shared = (self._shared + 1) % MAX_RUN
        return bool(self._shared) and not (costs.lacks_rounds or costs.lacks_drafts)

    def worth_verifying(self, rows: Sequence[BatchRow], counts: Sequence[int], load: int) -> int:
        """Return how many of the drafted tokens to verify; all of them in a trial and in a wider round.

        Lookup drafters often find tokens for only a few rows, but the verifying pass gets wider for every row.

        Args:
            rows: rows of the round.
            counts: number of tokens drafted for each row.
            load: rough number of rows in the round.
        """
        if self._trial or self._wider:
            return max(counts)
        costs = self._costs[load]
        return fastest([self.acceptance(row) for row in rows], counts, costs.verify_s)[0]

    def num_looked_up(self, rows: Sequence[BatchRow], counts: Sequence[int], load: int) -> int:
        """Return how many looked-up tokens to verify in the next round; 0 if drafting gives more tokens per second.

        The arguments are those of `worth_verifying`, with the number of tokens found for each row.
        """
        costs = self._costs[load]
        if costs.lacks_rounds or costs.lacks_drafts:
            return 0
        kept = [self._looked_up.get(row, SuccessRate()).estimate(LOOKUP_ACCEPTANCE, LOOKUP_WEIGHT) for row in rows]
        count, speed = fastest(kept, counts, costs.verify_s)
        _, drafted = costs.fastest([self.acceptance(row) for row in rows], self._found.estimate(1.0, 0.0))
        return count if speed > drafted else 0

    def note(self, rows: Sequence[BatchRow], load: int, done: Round) -> None:
        """Add the results of a round with that load."""
        costs = self._costs[load]
        if not done.shared:
            costs.note(done)
        self._learn(rows, done)
        if self._trial and done.num_asked and not costs.lacks_drafts:
            self._rest = costs.loss_s(done) / (TRIAL_SHARE * costs.verify_s(0))
            if any(done.drafted):
                self._rest, self._early_rest = min(self._rest, self._early_rest), 2 * self._early_rest

    def _learn(self, rows: Sequence[BatchRow], done: Round) -> None:
        """Add how many tokens were found and accepted. Tokens after the first rejected one do not count as tries."""
        if done.num_asked:
            self._found.note(sum(map(bool, done.found)) / len(rows), 1.0, ROW_MEMORY)
        rates = self._looked_up if done.looked_up else self._rows
        for row, num_drafted, num_accepted in zip(rows, done.drafted, done.accepted, strict=True):
            tries = num_accepted + (num_accepted < num_drafted)
            if tries or row in rates:
                rates.setdefault(row, SuccessRate()).note(num_accepted, tries, ROW_MEMORY)
            if not done.looked_up:
                self._seen.note(num_accepted, tries, DRAFTER_MEMORY * len(rows), PRIOR_WEIGHT)
