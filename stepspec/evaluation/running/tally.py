"""What is kept of rows to compare policies by: a few figures of each, and sums of the rest.

Rows are read once and forgotten, so that memory grows by some hundred bytes a row, whatever the models wrote.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from stepspec.errors import UsageError
from stepspec.evaluation.records import BASELINE, Failure, Percentiles, ResultRow, TimeRecord, TokenRecord
from stepspec.evaluation.stats import Answered, Share
from stepspec.evaluation.stats import Percentiles as Quantiles
from stepspec.evaluation.stats.runs import Floats

Key = tuple[str, int]
"""Problem and repeat."""


class Figures(NamedTuple):
    """What policies are compared by, row by row."""

    correct: float
    wall_s: float
    committed: int
    answered: bool
    """Neither cut off by the token limit nor without an answer."""
    judged: int
    accepted: int
    """Steps."""


@dataclass
class Tally:
    """The rows of one policy."""

    figures: dict[Key, Figures] = field(default_factory=dict[Key, Figures])
    failed: set[Key] = field(default_factory=set[Key])
    """Requests that ended in an error and have no row."""
    first_step_s: list[float] = field(default_factory=list[float])
    first_answer_s: list[float] = field(default_factory=list[float])
    counts: Counter[str] = field(default_factory=Counter[str])
    """Statuses, tokens by fate, steps, passes, and whatever else is only added up."""
    seconds: Counter[str] = field(default_factory=Counter[str])

    def add(self, row: ResultRow) -> None:
        """Takes a row."""
        correct = row.status == "correct"
        answered = row.finish_reason != "length" and row.status != "no_answer"
        self.figures[row.problem, row.repeat] = Figures(
            correct, row.wall_s, row.tokens.committed, answered, row.steps_judged, row.steps_accepted
        )
        if row.first_step_s is not None:
            self.first_step_s.append(row.first_step_s)
        if row.first_answer_s is not None:
            self.first_answer_s.append(row.first_answer_s)
        self.counts.update(row.tokens.model_dump())
        self.counts.update(row.model_dump(include=ADDED_UP))
        self.counts.update({row.status: 1})
        self.counts["truncated"] += row.finish_reason == "length"
        self.counts["by last number"] += correct and row.found_by == "last number"
        self.seconds.update(row.time_s.model_dump())  # pyright: ignore[reportArgumentType]  # a Counter adds floats too

    @property
    def tokens(self) -> TokenRecord:
        """Tokens by fate."""
        return TokenRecord(**{name: self.counts[name] for name in TokenRecord.model_fields})

    @property
    def time_s(self) -> TimeRecord:
        """Exclusive seconds by role."""
        return TimeRecord(**{name: self.seconds[name] for name in TimeRecord.model_fields})

    @property
    def ended(self) -> set[Key]:
        """Requests that have a row or ended in an error."""
        return self.failed | self.figures.keys()

    @property
    def answered(self) -> set[Key]:
        """Requests whose text was not cut off and has an answer."""
        return {key for key, figures in self.figures.items() if figures.answered}

    def score(self, key: Key) -> float:
        """Of a request that has ended; one that ended in an error is not correct."""
        return self.figures[key].correct if key in self.figures else 0.0

    def accuracy(self, *, without_failed: bool = False) -> Share:
        """Over all requests that have ended, or those that have a row, clustered by problem."""
        by_problem: defaultdict[str, list[float]] = defaultdict(list)
        for key in self.figures if without_failed else sorted(self.ended):
            by_problem[key[0]].append(self.score(key))
        return Share.of(list(by_problem.values()))

    @property
    def step_acceptance(self) -> Share | None:
        """Accepted of judged steps, clustered by problem; None where none was judged."""
        judged, accepted = Counter[str](), Counter[str]()
        for (problem, _), figures in self.figures.items():
            judged[problem] += figures.judged
            accepted[problem] += figures.accepted
        if not any(judged.values()):
            return None
        return Share.pooled([accepted[problem] for problem in judged], list(judged.values()))

    @property
    def latency_s(self) -> Percentiles | None:
        """Of the whole request."""
        return percentiles([figures.wall_s for figures in self.figures.values()])


ADDED_UP = {"token_drafted", "token_accepted", "target_passes"}


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """None of nothing."""
    return percentiles_of(values) if values else None


def percentiles_of(values: Sequence[float]) -> Percentiles:
    """As results keep them; there is at least one value."""
    quantiles = Quantiles.of(values)
    return Percentiles(p50=quantiles.p50, p90=quantiles.p90, p99=quantiles.p99)


@dataclass(frozen=True)
class Compared:
    """A policy's figures that others are compared with, by problem; repeats are summed, but for the scores."""

    scores: Mapping[str, Sequence[float]]
    """Of the requests that have ended under every policy, each by itself; a failed one is not correct."""
    problems: Sequence[str]
    """Those with a repeat that is finished under every policy; the others have no time."""
    wall_s: Floats  # [problems]
    committed: Floats  # [problems]

    def of(self, chosen: Collection[str]) -> "Compared":
        """The same for some of the problems."""
        places = [place for place, problem in enumerate(self.problems) if problem in chosen]
        return Compared(
            {problem: scores for problem, scores in self.scores.items() if problem in chosen},
            [self.problems[place] for place in places],
            self.wall_s[places],
            self.committed[places],
        )


class Table:
    """The rows of a run, and the requests without a row because they ended in an error, by policy.

    Raises:
        UsageError: a row is of a policy that is not the run's.
    """

    def __init__(self, policies: Iterable[str], rows: Iterable[ResultRow], failures: Iterable[Failure] = ()) -> None:
        self.tallies = {policy: Tally() for policy in policies}
        self.labels: dict[str, tuple[int | None, str | None]] = {}
        """By problem: its level and subject."""
        for row in rows:
            if row.policy not in self.tallies:
                raise UsageError(f"A row is of the policy {row.policy!r}, which this run does not have.")
            self.tallies[row.policy].add(row)
            self.labels[row.problem] = row.level, row.subject
        for failure in failures:
            tally = self.tallies.setdefault(failure.policy, Tally())
            if (failure.problem, failure.repeat) not in tally.figures:
                tally.failed.add((failure.problem, failure.repeat))
        # A policy of which nothing has finished must not take the others' comparisons with it.
        self.begun = {policy: tally for policy, tally in self.tallies.items() if tally.figures}
        ended = _by_problem(_common(tally.ended for tally in self.begun.values()))
        finished = _by_problem(_common(set(tally.figures) for tally in self.begun.values()))
        self.problems = list(ended)
        """Those with at least one repeat that has ended under every policy that has begun."""
        self.num_finished = len(finished)
        """Problems with at least one repeat that has a row under each of them."""
        self.compared: Mapping[str, Compared] = {
            policy: _compared(tally, ended, finished) for policy, tally in self.begun.items()
        }

    def answered(self, policy: str) -> Answered:
        """What the policy and the target answered of the requests that have ended under both."""
        own, target = self.begun[policy], self.begun[BASELINE]
        requests = own.ended & target.ended
        by_own, by_target = own.answered & requests, target.answered & requests
        return Answered(
            both=len(by_own & by_target),
            only_target=len(by_target - by_own),
            only_policy=len(by_own - by_target),
            neither=len(requests - by_own - by_target),
        )

    def why_no_speed(self, policy: str) -> str | None:
        """Why the policy's speed does not count; None where it does, of the target itself, and without a target."""
        if policy == BASELINE or BASELINE not in self.begun:
            return None
        return self.answered(policy).why_no_speed()


def _common(keys: Iterable[set[Key]]) -> set[Key]:
    sets = list(keys)
    return set[Key].intersection(*sets) if sets else set()


def _by_problem(keys: Iterable[Key]) -> Mapping[str, Sequence[Key]]:
    return {problem: list(repeats) for problem, repeats in groupby(sorted(keys), key=lambda key: key[0])}


def _compared(tally: Tally, ended: Mapping[str, Sequence[Key]], finished: Mapping[str, Sequence[Key]]) -> Compared:
    figures = [[tally.figures[key] for key in keys] for keys in finished.values()]
    return Compared(
        scores={problem: [tally.score(key) for key in keys] for problem, keys in ended.items()},
        problems=list(finished),
        wall_s=np.array([sum(row.wall_s for row in rows) for rows in figures]),
        committed=np.array([sum(row.committed for row in rows) for rows in figures], dtype=np.float64),
    )
