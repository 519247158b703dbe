"""Stores what becomes of the jobs of a run, and shows the progress."""

from collections.abc import Callable, Iterable

from stepspec.errors import EngineError
from stepspec.evaluation.records import Block, Failure, ResultRow, Trace
from stepspec.evaluation.run.folder import RunFolder

MAX_FAILURES_IN_A_ROW = 5
"""After this many failures the engine is at fault, not a problem, and the run stops."""

OnRow = Callable[[ResultRow | str | None, int, int], None]
"""Callback. Args: the row just finished, or what runs now (None at the start or after a failure), number of done rows,
total rows."""


class Progress:
    """Counts finished jobs, and calls a callback for each."""

    def __init__(self, on_row: OnRow | None, num_done: int, num_rows: int) -> None:
        self._on_row = on_row
        self._num_done = num_done
        self._num_rows = num_rows
        self.report(None)

    def add(self, row: ResultRow | None) -> None:
        """Note that a job is finished; None if it failed."""
        self._num_done += 1
        self.report(row)

    def report(self, row: ResultRow | str | None) -> None:
        """Call the callback."""
        if self._on_row is not None:
            self._on_row(row, self._num_done, self._num_rows)


class Results:
    """Stores rows, blocks and failures of one set of engines, see `stepspec.evaluation.run.runner.Receiver`.

    Attributes:
        node: the machine of the engines; None for the one in `run.json`.
    """

    def __init__(self, folder: RunFolder, progress: Progress, policies: Iterable[str]) -> None:
        self._folder, self._progress = folder, progress
        self.node = folder.node
        # By policy, since its last success. They are stored only once the engine answers again: if the engine is
        # down, the failures are not the problems' own.
        self._failures: dict[str, list[Failure]] = {policy: [] for policy in policies}

    def answered(self, policy: str) -> None:
        """Store the policy's failures so far: the engine answers again, so the problems were at fault."""
        failures = self._failures[policy]
        while failures:
            self.refuse(failures.pop(0))

    def add(self, row: ResultRow, trace: Trace | None) -> None:
        """Store a row and its trace."""
        self._folder.add(row.on(self.node), trace)
        self._progress.add(row)

    def say(self, words: str) -> None:
        """Show what runs now."""
        self._progress.report(words)

    def refuse(self, failure: Failure) -> None:
        """Store a failure that is the problem's own."""
        self._folder.add_failure(failure)
        self._progress.add(None)

    def fail(self, failure: Failure) -> None:
        """Note a failure.

        Raises:
            EngineError: so many failed in a row that the engine is at fault.
        """
        in_a_row = self._failures[failure.policy]
        in_a_row.append(failure)
        if len(in_a_row) >= MAX_FAILURES_IN_A_ROW:
            raise EngineError(
                f"{MAX_FAILURES_IN_A_ROW} requests in a row failed under {failure.policy}. The last error: "
                f"{failure.error}"
            )

    def add_block(self, block: Block) -> None:
        """Store the measurements of a block."""
        self._folder.add_block(block.on(self.node))

    def close(self) -> None:
        """Store the failures at the end of the run, which were too few to blame an engine."""
        for policy in self._failures:
            self.answered(policy)
