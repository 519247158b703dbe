"""How many tokens to draft: one more while alpha^(k + 1) > c * S(k) (arXiv:2211.17192, section 3.4).

alpha is the probability that a drafted token is accepted, and a round that drafts k of them emits S(k) = 1 + alpha + ..
+ alpha^k tokens. c is what one more costs, drafting and verifying it, as a share of the round so far. Both are measured
in every round. Where drafting does not pay it rests, but for trials that cost a small share of the time.
"""

import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from stepspec.engines.torch_engine.row import BatchRow

MAX_TOKENS = 16

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 12.0
"""The acceptance that is assumed of a drafter before it has drafted, and the number of tokens this counts for. With a
larger weight a useless drafter is found out later; with a smaller one a good one is given up after one bad guess."""

ROW_MEMORY, DRAFTER_MEMORY = 32.0, 500.0
"""Rounds after which an observation counts for 1/e: acceptance changes within a text, and from one text to the next."""

WINDOW = 16
"""Latest timings of a kind, of which the median counts: half of them may be spikes."""

FIRST_TIMINGS, TRIAL_TOKENS = 3, 2
"""Timings of a kind before their median is used, and tokens that a trial drafts. One token would say little of what
verifying costs, and many are expensive."""

TRIAL_SHARE, FIRST_REST = 0.01, 8.0
"""Share of the time that trials may cost, and rounds without drafting before the first of them. At first trials come
sooner than their share allows, at twice the distance every time, so that wrong first timings are corrected soon."""

LONGEST_RUN = 32
"""Rounds with drafting after which there is one without, to measure what that costs by now."""

MARGIN = 1.05
"""How many times its cost a drafted token has to be worth: costs and acceptance are estimates, and a tie is no gain."""


@dataclass
class Share:
    """How often something succeeds, by exponentially weighted counts."""

    successes: float = 0.0
    tries: float = 0.0

    def note(self, successes: float, tries: float, memory: float, least: float = 0.0) -> None:
        """Takes a round's counts. Earlier ones fade within `memory` rounds, but not to fewer than `least` tries."""
        kept = max(1 - 1 / memory, min(1.0, least / self.tries)) if self.tries else 1.0
        self.successes = kept * self.successes + successes
        self.tries = kept * self.tries + tries

    def estimate(self, prior: float, weight: float) -> float:
        """The share, if `prior` counts for `weight` tries."""
        return (self.successes + weight * prior) / (self.tries + weight)


@dataclass(frozen=True)
class Round:
    """What came of a round: token counts of each row, and seconds."""

    num_asked: int  # tokens a row that a drafter was asked for; 0 if it was not
    found: Sequence[int]
    drafted: Sequence[int]  # of those found the ones that were verified
    accepted: Sequence[int]
    catch_up_s: float  # of the drafter, reading what was written while it was not asked
    draft_s: float
    verify_s: float  # all other time


class Costs:
    """Seconds of the latest rounds of about so many rows: medians, so that spikes and wrong first timings pass."""

    def __init__(self, *, by_token: bool) -> None:
        """`by_token`: whether drafting two tokens takes twice as long as drafting one; else it takes as long."""
        self._by_token = by_token
        self._plain: deque[float] = deque(maxlen=WINDOW)
        self._wide: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._draft: deque[float] = deque(maxlen=WINDOW)
        self.plain_s = 0.0
        """A round without drafting. None is slower than one that verifies more."""
        self.draft_s = 0.0
        """Drafting a token for every row; tokens of any number where they are not drafted one by one."""
        self.wide_s = 0.0
        """What each drafted token adds to the time of verifying; 0 before that is known."""

    @property
    def lacks_rounds(self) -> bool:
        """Whether rounds were too few to know what they cost. Rows that always draft may leave none without drafts."""
        return len(self._plain) + len(self._wide) < FIRST_TIMINGS

    @property
    def lacks_drafts(self) -> bool:
        """Whether drafts were too few to know what they cost."""
        return len(self._draft) < FIRST_TIMINGS

    def note(self, done: Round) -> None:
        """Takes what a round has taken."""
        if done.num_asked:
            self._draft.append(done.draft_s / done.num_asked if self._by_token else done.draft_s)
            self.draft_s = median(self._draft)
        if width := max(done.drafted):
            self._wide.append((width, done.verify_s))
        else:
            self._plain.append(done.verify_s)
        self.plain_s = median(self._plain) if self._plain else done.verify_s
        if len(self._wide) >= FIRST_TIMINGS:
            self.plain_s = plain_s = min(self.plain_s, median([seconds for _, seconds in self._wide]))
            self.wide_s = max(0.0, median([(seconds - plain_s) / count for count, seconds in self._wide]))

    def loss_s(self, done: Round) -> float:
        """What a round has cost beyond what its tokens would have cost without drafting; less than 0 if it paid."""
        drafting = self.draft_s * (done.num_asked if self._by_token else 1)
        gained = sum(done.accepted) / len(done.accepted)
        return done.catch_up_s + drafting + self.wide_s * max(done.drafted) - self.plain_s * gained

    def best_count(self, acceptances: Sequence[float], coverage: float) -> int:
        """The number of tokens to ask a drafter for that finds some in that share of the rows."""
        some = 1 - (1 - coverage) ** len(acceptances)  # of the rounds verify drafted tokens
        token_s = some * self.wide_s + (self.draft_s if self._by_token else 0.0)
        extra_s = 0.0 if self._by_token else self.draft_s
        return best_count(acceptances, [MAX_TOKENS] * len(acceptances), self.plain_s, token_s, extra_s, coverage)


def best_count(
    acceptances: Sequence[float],
    limits: Sequence[int],
    plain_s: float,
    token_s: float,
    extra_s: float = 0.0,
    coverage: float = 1.0,
) -> int:
    """The number of drafted tokens with which rows emit the most tokens a second; 0 if drafting does not pay.

    Args:
        acceptances: of each row.
        limits: the most that each row can draft.
        plain_s: seconds of a round without drafting.
        token_s: seconds that each drafted token adds.
        extra_s: seconds that drafting adds, however many tokens.
        coverage: probability that a row gets a draft.
    """
    tokens, seconds = float(len(acceptances)), plain_s + MARGIN * extra_s
    gains = [coverage] * len(acceptances)
    count = 0
    while count < max(limits):
        rows = zip(gains, acceptances, limits, strict=True)
        gains = [gain * acceptance if count < limit else 0.0 for gain, acceptance, limit in rows]
        gained = sum(gains)
        if gained * seconds <= MARGIN * token_s * tokens:
            break
        tokens, seconds, count = tokens + gained, seconds + MARGIN * token_s, count + 1
    return count if tokens * plain_s > seconds * len(acceptances) else 0


class Pacer:
    """Chooses for the calls of one drafter, by each call's acceptance and by what rounds of its load cost."""

    def __init__(self, *, by_token: bool = True) -> None:
        """`by_token`: see `Costs`."""
        self._costs: defaultdict[int, Costs] = defaultdict(partial(Costs, by_token=by_token))
        self.forget()

    def forget(self) -> None:
        """Forgets what texts have taught: acceptance, and what followed from it. What rounds cost stays."""
        self._seen = Share(PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT)
        self._found = Share(1.0, 1.0)
        self._rows: weakref.WeakKeyDictionary[BatchRow, Share] = weakref.WeakKeyDictionary()
        self._rest, self._early_rest, self._run = 0.0, FIRST_REST, 0
        self._trial = False

    def acceptance(self, row: BatchRow) -> float:
        """The acceptance that is expected of a row: its own, as far as it is known, else that of all rows."""
        seen = self._seen.successes / self._seen.tries
        own = self._rows.get(row)
        return seen if own is None else own.estimate(seen, PRIOR_WEIGHT)

    def count(self, rows: Sequence[BatchRow], load: int) -> int:
        """How many tokens the rows of the next round draft. `load` is about how many rows share the round."""
        costs = self._costs[load]
        self._trial = False
        if costs.lacks_rounds:
            return 0
        if costs.lacks_drafts:
            self._trial = True
            return TRIAL_TOKENS
        best = costs.best_count([self.acceptance(row) for row in rows], self._found.estimate(1.0, 0.0))
        if best:
            self._run = (self._run + 1) % (LONGEST_RUN + 1)
            return best if self._run else 0
        self._run = 0
        self._trial = self._rest <= 0
        self._rest -= 1
        return TRIAL_TOKENS if self._trial else 0

    def worth_verifying(self, rows: Sequence[BatchRow], counts: Sequence[int], load: int) -> int:
        """Of so many tokens drafted for each row, the first how many pay the pass that verifies them; of a trial all.

        What looks tokens up often finds some for a few rows only, and then the pass is wider for all.
        """
        if self._trial:
            return max(counts)
        costs = self._costs[load]
        return best_count([self.acceptance(row) for row in rows], counts, costs.plain_s, costs.wide_s)

    def note(self, rows: Sequence[BatchRow], load: int, done: Round) -> None:
        """Takes what came of a round of that load."""
        costs = self._costs[load]
        costs.note(done)
        self._learn(rows, done)
        if self._trial and done.num_asked and not costs.lacks_drafts:
            self._rest = costs.loss_s(done) / (TRIAL_SHARE * costs.plain_s)
            if any(done.drafted):
                self._rest, self._early_rest = min(self._rest, self._early_rest), 2 * self._early_rest

    def _learn(self, rows: Sequence[BatchRow], done: Round) -> None:
        """Takes how many tokens were found and accepted. Those behind the first rejected one were not tried."""
        if done.num_asked:
            self._found.note(sum(map(bool, done.found)) / len(rows), 1.0, ROW_MEMORY)
        for row, num_drafted, num_accepted in zip(rows, done.drafted, done.accepted, strict=True):
            tries = num_accepted + (num_accepted < num_drafted)
            if tries or row in self._rows:
                self._rows.setdefault(row, Share()).note(num_accepted, tries, ROW_MEMORY)
            self._seen.note(num_accepted, tries, DRAFTER_MEMORY * len(rows), PRIOR_WEIGHT)
