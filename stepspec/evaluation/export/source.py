"""Reads a run for the exports: a few figures of every row are in memory, steps and texts stay on disk."""

import hashlib
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from stepspec.evaluation.records import Block, ResultRow, RunRecord, Trace
from stepspec.evaluation.runs import TraceIndex, iter_blocks, iter_rows, natural_order, read_run, says

PROBLEMS_AT_HAND = 128
"""Number of problems whose traces are cached, more than a run has between two rows of one problem."""


@dataclass(frozen=True)
class Written:
    """The files of one policy's log. `num_texts` is the number of rows whose output texts are known."""

    files: Sequence[Path]
    num_rows: int
    num_texts: int


class ExportedFigures(NamedTuple):
    """The figures of a row that stay in memory."""

    problem: str
    policy: str
    repeat: int
    level: int | None
    subject: str | None
    gold: str
    answer: str | None
    correct: float
    """1 or 0. An answer that could not be parsed or graded counts as not correct."""
    wall_s: float
    num_prompt_tokens: int
    num_tokens: int
    """Committed tokens."""
    output_sha256: str

    @classmethod
    def of(cls, row: ResultRow) -> "ExportedFigures":
        """Build from a row, without its steps and counts."""
        return cls(
            *row.key,
            level=row.level,
            subject=row.subject,
            gold=row.gold,
            answer=row.answer,
            correct=float(row.status == "correct"),
            wall_s=row.wall_s,
            num_prompt_tokens=row.num_prompt_tokens,
            num_tokens=row.tokens.committed,
            output_sha256=row.output_sha256,
        )


@dataclass(frozen=True)
class ExportedRun:
    """A run to be exported."""

    folder: Path
    run: RunRecord
    outcomes: Mapping[str, Mapping[str, Sequence[ExportedFigures]]]
    """The repeats in order, by policy and problem. Policies without a row are left out."""
    problems: Mapping[str, int]
    """Index of each problem in the order of ids, `line-2` before `line-10`. A run stores no other order."""
    traces: TraceIndex

    @classmethod
    def open(cls, folder: Path) -> "ExportedRun":
        """Open the run in a folder.

        Raises:
            UsageError: the folder holds no run, or its files are damaged.
            StepSpecError: a file cannot be read.
        """
        run = read_run(folder)
        by_policy: defaultdict[str, defaultdict[str, list[ExportedFigures]]] = defaultdict(lambda: defaultdict(list))
        for row in iter_rows(folder):
            insort(by_policy[row.policy][row.problem], ExportedFigures.of(row), key=lambda outcome: outcome.repeat)
        outcomes = {policy: by_policy[policy] for policy in run.policies if policy in by_policy}
        ids = {problem for by_problem in outcomes.values() for problem in by_problem}
        problems = sorted(ids, key=natural_order)
        return cls(
            folder, run, outcomes, {problem: index for index, problem in enumerate(problems)}, TraceIndex(folder)
        )

    def rows(self) -> Iterator[ResultRow]:
        """Yield all rows, read from disk again, in the order in which they finished."""
        return (row for row in iter_rows(self.folder) if row.policy in self.outcomes)

    def of(self, policy: str) -> list[ExportedFigures]:
        """Return all outcomes of a policy."""
        return list(chain.from_iterable(self.outcomes[policy].values()))

    def mean(self, policy: str, figure: Callable[[ExportedFigures], float]) -> "ProblemMean":
        """Return the mean of a figure under a policy."""
        return ProblemMean.of([[figure(each) for each in repeats] for repeats in self.outcomes[policy].values()])

    def blocks(self, policy: str) -> Iterator[Block]:
        """Yield the policy's blocks: measurements that cover several rows."""
        return (block for block in iter_blocks(self.folder) if block.policy == policy)

    def busy_s(self, policy: str) -> float:
        """Return the seconds that the policy ran, without the turns of other policies."""
        in_blocks = sum(block.wall_s for block in self.blocks(policy))
        return in_blocks or sum(each.wall_s for each in self.of(policy)) / self.run.concurrency

    def trace(self, outcome: ExportedFigures) -> Trace | None:
        """Return the trace of an outcome; None if it was not stored."""
        traces = [each for each in self._traces_of(outcome.problem) if each.key == outcome[:3]]
        # A run that was killed between a trace and its row asked again and may have received a different output.
        same = [each for each in traces if says(each) == outcome.output_sha256]
        return next(reversed(same or traces), None)

    @cached_property
    def _traces_of(self) -> Callable[[str], Sequence[Trace]]:
        """Returns a problem's traces. Cached, because a problem's rows under all policies come close together."""
        return lru_cache(maxsize=PROBLEMS_AT_HAND)(self.traces.of)

    def model(self, policy: str) -> str:
        """Return the model name in logs for a policy. It has no spaces, because it becomes a file name."""
        target = self.run.engines.get("target")
        return f"{'-'.join(target.name.split()) if target else 'target'}+{policy}"

    def id(self, *parts: str) -> str:
        """Return an identifier of something in this run that is the same in every export."""
        text = "\0".join([self.run.model_dump_json(), *parts])
        return hashlib.sha256(text.encode()).hexdigest()[:22]


@dataclass(frozen=True)
class ProblemMean:
    """A mean over problems, with each problem's repeats averaged first.

    `standard_error` is the problems' standard deviation (with n - 1) over the square root of n, as both tools define
    it; None for one problem.
    """

    value: float
    standard_error: float | None

    @classmethod
    def of(cls, repeats: Sequence[Sequence[float]]) -> "ProblemMean":
        """Build from the values of each problem; there must be at least one problem."""
        by_problem = [fmean(values) for values in repeats]
        error = stdev(by_problem) / sqrt(len(by_problem)) if len(by_problem) > 1 else None
        return cls(fmean(by_problem), error)
