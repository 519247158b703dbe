"""A run as the exports read it: a few figures of every row in memory, steps and texts on the disk."""

import contextlib
import hashlib
import os
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple, TextIO

from stepspec.evaluation.records import Block, ResultRow, RunRecord, Trace
from stepspec.evaluation.runs import TraceIndex, iter_blocks, iter_rows, natural_order, read_run, says

PROBLEMS_AT_HAND = 128
"""Problems whose traces are kept in memory, more than a run has between two rows of one problem."""


@dataclass(frozen=True)
class Written:
    """The files of one policy's log. `num_texts` is in how many rows it is known what the models said."""

    files: Sequence[Path]
    num_rows: int
    num_texts: int


class Outcome(NamedTuple):
    """What stays of a row in memory."""

    problem: str
    policy: str
    repeat: int
    level: int | None
    subject: str | None
    gold: str
    answer: str | None
    correct: float
    """1 or 0; whatever could not be read or graded is not correct."""
    wall_s: float
    num_prompt_tokens: int
    num_tokens: int
    """Committed."""
    output_sha256: str

    @classmethod
    def of(cls, row: ResultRow) -> "Outcome":
        """Without steps and counts."""
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
class Source:
    """A run to be exported."""

    folder: Path
    run: RunRecord
    outcomes: Mapping[str, Mapping[str, Sequence[Outcome]]]
    """By policy and problem, the repeats in their order. Policies without a row are not there."""
    problems: Mapping[str, int]
    """Where each problem comes in the order of their ids, `line-2` before `line-10`; a run keeps no other order."""
    traces: TraceIndex

    @classmethod
    def open(cls, folder: Path) -> "Source":
        """The run in a folder.

        Raises:
            UsageError: the folder holds no run, or its files are damaged.
            StepSpecError: the disk refuses.
        """
        run = read_run(folder)
        found: defaultdict[str, defaultdict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
        for row in iter_rows(folder):
            insort(found[row.policy][row.problem], Outcome.of(row), key=lambda outcome: outcome.repeat)
        outcomes = {policy: found[policy] for policy in run.policies if policy in found}
        problems = sorted({problem for by_problem in outcomes.values() for problem in by_problem}, key=natural_order)
        return cls(
            folder, run, outcomes, {problem: index for index, problem in enumerate(problems)}, TraceIndex(folder)
        )

    def rows(self) -> Iterator[ResultRow]:
        """All rows, read once more, in the order in which they were finished."""
        return (row for row in iter_rows(self.folder) if row.policy in self.outcomes)

    def of(self, policy: str) -> list[Outcome]:
        """All of a policy."""
        return list(chain.from_iterable(self.outcomes[policy].values()))

    def mean(self, policy: str, figure: Callable[[Outcome], float]) -> "Mean":
        """A figure of a policy."""
        return Mean.of([[figure(each) for each in repeats] for repeats in self.outcomes[policy].values()])

    def blocks(self, policy: str) -> Iterator[Block]:
        """What was measured of the policy's rows together."""
        return (block for block in iter_blocks(self.folder) if block.policy == policy)

    def busy_s(self, policy: str) -> float:
        """Seconds that the policy was at work; others had their turns in between."""
        in_blocks = sum(block.wall_s for block in self.blocks(policy))
        return in_blocks or sum(each.wall_s for each in self.of(policy)) / self.run.concurrency

    def trace(self, outcome: Outcome) -> Trace | None:
        """What the models said; None if it was not kept."""
        traces = [each for each in self._traces_of(outcome.problem) if each.key == outcome[:3]]
        # A run that was killed between a trace and its row has asked again, and may have been told other words.
        same = [each for each in traces if says(each) == outcome.output_sha256]
        return next(reversed(same or traces), None)

    @cached_property
    def _traces_of(self) -> Callable[[str], Sequence[Trace]]:
        """A problem's traces under all policies are asked for within a short while."""
        return lru_cache(maxsize=PROBLEMS_AT_HAND)(self.traces.of)

    def model(self, policy: str) -> str:
        """What logs call the models under a policy; no spaces, as it becomes the name of a file."""
        target = self.run.engines.get("target")
        return f"{'-'.join(target.name.split()) if target else 'target'}+{policy}"

    def id(self, *parts: str) -> str:
        """An identifier of something in this run, the same whenever and wherever it is exported."""
        text = "\0".join([self.run.model_dump_json(), *parts])
        return hashlib.sha256(text.encode()).hexdigest()[:22]


@dataclass(frozen=True)
class Mean:
    """A mean over problems, each problem's repeats averaged first.

    `standard_error` is the problems' standard deviation (with n - 1) over the root of n, as both tools define it; None
    for one problem.
    """

    value: float
    standard_error: float | None

    @classmethod
    def of(cls, repeats: Sequence[Sequence[float]]) -> "Mean":
        """From each problem's values, of at least one problem."""
        by_problem = [fmean(values) for values in repeats]
        error = stdev(by_problem) / sqrt(len(by_problem)) if len(by_problem) > 1 else None
        return cls(fmean(by_problem), error)


@contextlib.contextmanager
def whole_file(path: Path) -> Generator[TextIO]:
    """A file to write, which appears under its name once it is whole.

    Raises:
        OSError: the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            yield stream
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
