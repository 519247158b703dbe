"""Collects what a comparison of policies needs from rows: a few figures per row, and sums of the rest.

Rows are read once and dropped. Memory grows by a few hundred bytes per row, independent of the output length.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from stepspec.errors import UsageError
from stepspec.evaluation.records import BASELINE, Failure, Percentiles, ResultRow, TimeRecord, TokenRecord
from stepspec.evaluation.repeats import Samples
from stepspec.evaluation.stats import Answered, Share
from stepspec.evaluation.stats.runs import Floats

Key = tuple[str, int]
"""Problem and repeat."""


class Figures(NamedTuple):
    """The figures of one row that policies are compared by."""

    correct: float
    strictly_correct: float
    """By the strict reading."""
    answer: str | None
    wall_s: float
    committed: int
    answered: bool
    """Neither cut off by the token limit nor without an answer."""
    judged: int
    """Judged steps."""
    accepted: int
    """Accepted steps."""
    node: str | None
    """The machine that it ran on, in a run on several."""
    first_step_s: float | None
    first_answer_s: float | None
    longest_gap_s: float | None
    seconds: tuple[float, ...]
    """Exclusive seconds by part, in the order of `TimeRecord`."""


@dataclass
class Tally:
    """The rows of one policy."""

    figures: dict[Key, Figures] = field(default_factory=dict[Key, Figures])
    failed: set[Key] = field(default_factory=set[Key])
    """Requests that ended in an error and have no row."""
    apart: Collection[Key] = ()
    """Requests that count for no time, see `Table.apart`."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """Sums over rows: statuses, token counts, drafted and accepted tokens, and target passes."""
    steps_proposed: int | None = 0
    """None if a row is from before they were counted."""
    not_proposed: Counter[str] = field(default_factory=Counter[str])
    """Requests by why the draft proposed no step, or no further one."""

    def add(self, row: ResultRow) -> None:
        """Add a row."""
        self.figures[row.problem, row.repeat] = Figures(
            correct=row.status == "correct",
            strictly_correct=row.strict_status == "correct",
            answer=row.answer,
            wall_s=row.wall_s,
            committed=row.tokens.committed,
            answered=row.is_answered,
            judged=row.steps_judged,
            accepted=row.steps_accepted,
            node=row.node,
            first_step_s=row.first_step_s,
            first_answer_s=row.first_answer_s,
            longest_gap_s=row.longest_gap_s,
            seconds=tuple(getattr(row.time_s, name) for name in TimeRecord.model_fields),
        )
        self.counts.update(row.tokens.model_dump())
        self.counts.update(row.model_dump(include=ADDED_UP))
        if row.steps_proposed is None or self.steps_proposed is None:
            self.steps_proposed = None
        else:
            self.steps_proposed += row.steps_proposed
        if row.not_proposed is not None:
            self.not_proposed[row.not_proposed] += 1
        self.counts.update({row.status: 1, "steps": len(row.steps)})
        self.counts["truncated"] += row.finish_reason == "length"

    @property
    def tokens(self) -> TokenRecord:
        """Token counts, summed over rows."""
        return TokenRecord(**{name: self.counts[name] for name in TokenRecord.model_fields})

    @property
    def timed(self) -> list[Figures]:
        """The rows that count for times."""
        return [figures for key, figures in self.figures.items() if key not in self.apart]

    @property
    def time_s(self) -> TimeRecord:
        """Exclusive seconds by part, summed over the rows that count."""
        sums = map(sum, zip(*(figures.seconds for figures in self.timed), strict=True))
        return TimeRecord(**dict(zip(TimeRecord.model_fields, sums, strict=False)))

    @property
    def ended(self) -> set[Key]:
        """Requests that have a row or ended in an error."""
        return self.failed | self.figures.keys()

    @property
    def answered(self) -> set[Key]:
        """Requests whose text was not cut off and has an answer."""
        return {key for key, figures in self.figures.items() if figures.answered}

    def score(self, key: Key) -> float:
        """Return 1 or 0 for a request that ended; one that ended in an error is not correct."""
        return self.figures[key].correct if key in self.figures else 0.0

    def accuracy(self, *, without_failed: bool = False, strict: bool = False) -> Share:
        """Return the accuracy over all requests that ended, or only those with a row, clustered by problem.

        With `strict`, it is by the strict reading.
        """
        by_problem: defaultdict[str, list[float]] = defaultdict(list)
        for key in self.figures if without_failed else sorted(self.ended):
            figures = self.figures.get(key)
            by_problem[key[0]].append(figures.strictly_correct if strict and figures else self.score(key))
        return Share.of(list(by_problem.values()))

    @property
    def samples(self) -> list[Samples]:
        """The answers to each problem over its repeats. A request that ended in an error has none."""
        figures = [[self.figures.get(key) for key in keys] for keys in _by_problem(self.ended).values()]
        return [
            Samples.of((bool(each.correct), each.answer) if each else (False, None) for each in row) for row in figures
        ]

    @property
    def step_acceptance(self) -> Share | None:
        """Share of judged steps that were accepted, clustered by problem; None if none was judged."""
        judged, accepted = Counter[str](), Counter[str]()
        for (problem, _), figures in self.figures.items():
            judged[problem] += figures.judged
            accepted[problem] += figures.accepted
        if not any(judged.values()):
            return None
        return Share.pooled([accepted[problem] for problem in judged], list(judged.values()))


ADDED_UP = {"token_drafted", "token_accepted", "relaxed_tokens", "target_passes"}


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Return the percentiles of the values that are known; None if there are none."""
    known = [value for value in values if value is not None]
    return percentiles_of(known) if known else None


def percentiles_of(values: Sequence[float]) -> Percentiles:
    """Return the percentiles of at least one value. With fewer than 100, `p99` is close to the maximum."""
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99]).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True)
class Compared:
    """A policy's figures by problem, for comparison with other policies. All but the scores are summed over repeats."""

    scores: Mapping[str, Sequence[float]]
    """By problem, one score per request that ended under every policy; a failed request is not correct."""
    problems: Sequence[str]
    """Problems with a repeat that is finished under every policy on the same machine. Others have no time."""
    wall_s: Floats  # [problems]
    committed: Floats  # [problems]

    def of(self, chosen: Collection[str]) -> "Compared":
        """Return the same figures for a subset of the problems."""
        indices = [index for index, problem in enumerate(self.problems) if problem in chosen]
        return Compared(
            {problem: scores for problem, scores in self.scores.items() if problem in chosen},
            [self.problems[index] for index in indices],
            self.wall_s[indices],
            self.committed[indices],
        )


class Table:
    """The rows of a run and its failed requests, by policy.

    Raises:
        UsageError: a row is of a policy that is not the run's.
    """

    def __init__(self, policies: Iterable[str], rows: Iterable[ResultRow], failures: Iterable[Failure] = ()) -> None:
        self.tallies = {policy: Tally() for policy in policies}
        self.labels: dict[str, tuple[int | None, str | None]] = {}
        """Level and subject, by problem."""
        for row in rows:
            if row.policy not in self.tallies:
                raise UsageError(f"A row is of the policy {row.policy!r}, which this run does not have.")
            self.tallies[row.policy].add(row)
            self.labels[row.problem] = row.level, row.subject
        self.first_failure: Failure | None = None
        """See `Summary.first_failure`."""
        for failure in failures:
            tally = self.tallies.setdefault(failure.policy, Tally())
            if (failure.problem, failure.repeat) not in tally.figures:
                tally.failed.add((failure.problem, failure.repeat))
                if self.first_failure is None or self.first_failure.too_long > failure.too_long:
                    self.first_failure = failure
        # A policy without a finished row must not remove the comparisons of the others.
        self.begun = {policy: tally for policy, tally in self.tallies.items() if tally.figures}
        ended = _by_problem(_common(tally.ended for tally in self.begun.values()))
        finished = _common(set(tally.figures) for tally in self.begun.values())
        self.problems = list(ended)
        """Problems with at least one repeat that ended under every policy that has begun."""
        self.num_finished = len(_by_problem(finished))
        """Number of problems with at least one repeat that has a row under each of these policies."""
        self.apart = {key for key in finished if len({tally.figures[key].node for tally in self.begun.values()}) > 1}
        """Finished requests that ran on different machines under the policies. They count for no time."""
        for tally in self.begun.values():
            tally.apart = self.apart
        timed = _by_problem(finished - self.apart)
        self.compared: Mapping[str, Compared] = {
            policy: _compared(tally, ended, timed) for policy, tally in self.begun.items()
        }

    def answered(self, policy: str) -> Answered:
        """Return how many requests the policy and the target answered, of those that ended under both."""
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
        """Return why the policy's speed does not count; None if it does, for the target itself, or without one."""
        if policy == BASELINE or BASELINE not in self.begun:
            return None
        return self.answered(policy).why_no_speed()


def _common(keys: Iterable[set[Key]]) -> set[Key]:
    sets = list(keys)
    return set[Key].intersection(*sets) if sets else set()


def _by_problem(keys: Iterable[Key]) -> Mapping[str, Sequence[Key]]:
    return {problem: list(repeats) for problem, repeats in groupby(sorted(keys), key=lambda key: key[0])}


def _compared(tally: Tally, ended: Mapping[str, Sequence[Key]], timed: Mapping[str, Sequence[Key]]) -> Compared:
    figures = [[tally.figures[key] for key in keys] for keys in timed.values()]
    return Compared(
        scores={problem: [tally.score(key) for key in keys] for problem, keys in ended.items()},
        problems=list(timed),
        wall_s=np.array([sum(row.wall_s for row in rows) for rows in figures]),
        committed=np.array([sum(row.committed for row in rows) for rows in figures], dtype=np.float64),
    )
