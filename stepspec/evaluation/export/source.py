"""Reads a run for its export: the figures of every row are in memory, steps and texts stay on disk."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean

from stepspec.evaluation.records import Block, ResultRow, RunRecord, Trace
from stepspec.evaluation.runs import TraceIndex, iter_blocks, iter_rows, natural_order, read_run, says

PROBLEMS_AT_HAND = 128
"""Number of problems whose traces are cached, more than a run has between two rows of one problem."""


@dataclass(frozen=True)
class ExportedRun:
    """A run to be exported."""

    folder: Path
    run: RunRecord
    outcomes: Mapping[str, Sequence[ResultRow]]
    """The rows by policy, without their steps. Policies without a row are left out."""
    problems: Sequence[str]
    """In the order of their ids, `line-2` before `line-10`. A run stores no other order."""
    traces: TraceIndex

    @classmethod
    def open(cls, folder: Path) -> "ExportedRun":
        """Open the run in a folder.

        Raises:
            UsageError: the folder holds no run, or its files are damaged.
            StepSpecError: a file cannot be read.
        """
        run = read_run(folder)
        by_policy: defaultdict[str, list[ResultRow]] = defaultdict(list)
        for row in iter_rows(folder):
            by_policy[row.policy].append(row.without_steps())
        outcomes = {policy: by_policy[policy] for policy in run.policies if policy in by_policy}
        problems = sorted({each.problem for rows in outcomes.values() for each in rows}, key=natural_order)
        return cls(folder, run, outcomes, problems, TraceIndex(folder))

    def rows(self) -> Iterator[ResultRow]:
        """Yield all rows, read from disk again, in the order in which they finished."""
        return (row for row in iter_rows(self.folder) if row.policy in self.outcomes)

    def correct(self, policy: str) -> list[float]:
        """Return the share of correct answers to each problem under a policy, over its repeats.

        An answer that could not be parsed or graded counts as not correct.
        """
        by_problem: defaultdict[str, list[float]] = defaultdict(list)
        for each in self.outcomes[policy]:
            by_problem[each.problem].append(float(each.status == "correct"))
        return [fmean(repeats) for repeats in by_problem.values()]

    def blocks(self, policy: str) -> Iterator[Block]:
        """Yield the policy's blocks: measurements that cover several rows."""
        return (block for block in iter_blocks(self.folder) if block.policy == policy)

    def busy_s(self, policy: str) -> float:
        """Return the seconds that the policy ran, without the turns of other policies."""
        in_blocks = sum(block.wall_s for block in self.blocks(policy))
        return in_blocks or sum(each.wall_s for each in self.outcomes[policy]) / self.run.concurrency

    def trace(self, row: ResultRow) -> Trace | None:
        """Return the trace of a row; None if it was not stored."""
        traces = [each for each in self._traces_of(row.problem) if each.key == row.key]
        # A run that was killed between a trace and its row asked again and may have received a different output.
        same = [each for each in traces if says(each) == row.output_sha256]
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
