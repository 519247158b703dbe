"""Progress of an evaluation on stderr: a bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from stepspec.cli.output import Console
from stepspec.evaluation.records import ResultRow

SECONDS_BETWEEN_LINES = 10.0
NARROW, WIDE = 60, 100
"""Terminal widths, in columns, at which the layout of the bar changes."""


class Meter(Protocol):
    """Shows progress as rows finish."""

    def begin(self, title: str) -> None:
        """Start to show another run."""
        ...

    def show(self, row: "ResultRow | str | None", done: int, total: int) -> None:
        """Show a finished row, or what runs now."""
        ...


@dataclass
class _PolicyProgress:
    num_rows: int = 0
    num_correct: int = 0
    wall_s: float = 0.0


class Standing:
    """Accuracy and mean time of each policy so far.

    Policies take turns, so their means cover nearly the same problems.
    """

    def __init__(self) -> None:
        self._policies: dict[str, _PolicyProgress] = {}
        self._now = ""

    def add(self, row: "ResultRow | str | None") -> None:
        """Add a row, or what runs now."""
        if row is None or isinstance(row, str):
            self._now = row or self._now
            return
        policy = self._policies.setdefault(row.policy, _PolicyProgress())
        policy.num_rows += 1
        policy.num_correct += row.status == "correct"
        policy.wall_s += row.wall_s

    def __str__(self) -> str:
        means = [
            f"{name} {each.num_correct / each.num_rows:.0%} {each.wall_s / each.num_rows:.3g} s"
            for name, each in self._policies.items()
        ]
        return " · ".join(filter(None, [self._now, *means]))


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._standing = Standing()
        self._task = progress.add_task("rows", total=None, standing="")

    def begin(self, title: str) -> None:
        self._standing = Standing()
        self._progress.reset(self._task, description=title, total=None)

    def show(self, row: "ResultRow | str | None", done: int, total: int) -> None:
        self._standing.add(row)
        self._progress.update(self._task, completed=done, total=total, standing=str(self._standing))


class _Lines:
    def __init__(self) -> None:
        self._title, self._next, self._standing = "", 0.0, Standing()
        self._begun: tuple[int, float] | None = None
        """Finished rows and time when the first of the others began."""

    def begin(self, title: str) -> None:
        self._title, self._next, self._standing, self._begun = f"{title}: ", 0.0, Standing(), None

    def show(self, row: "ResultRow | str | None", done: int, total: int) -> None:
        self._standing.add(row)
        now = time.monotonic()
        if self._begun is None:
            self._begun = done, now
        if now >= self._next or (done == total and not isinstance(row, str)):
            self._next = now + SECONDS_BETWEEN_LINES
            before, since = self._begun
            left = (
                f"about {(now - since) / (done - before) * (total - done):.0f} s left" if before < done < total else ""
            )
            parts = [f"{self._title}{done:,} of {total:,}", left, str(self._standing)]
            print(" · ".join(filter(None, parts)), file=sys.stderr, flush=True)


@contextmanager
def make_meter() -> Generator[Meter]:
    """Yield a progress bar on a terminal, otherwise a meter that prints a line every few seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    # Rendering takes time from the code that is being timed, so refresh only once a second.
    with Progress(
        *columns(console.width),
        console=console,
        refresh_per_second=1,
        expand=True,
        speed_estimate_period=3600,  # rows may take minutes
    ) as progress:
        yield _Bar(progress)


def columns(width: int) -> Sequence[ProgressColumn]:
    """Return the columns for a terminal width: always the count and the remaining time, then what fits."""
    title = TextColumn("{task.description}", markup=False, table_column=_cut(max_width=max(4, width // 5)))
    count = MofNCompleteColumn(table_column=Column(no_wrap=True))
    left = TimeRemainingColumn(compact=width < NARROW, table_column=Column(no_wrap=True))
    standing = TextColumn("{task.fields[standing]}", style="dim", markup=False, table_column=_cut(ratio=1))
    if width < NARROW:
        return title, count, left, standing
    bar = BarColumn(bar_width=20 if width >= WIDE else 8)
    return title, bar, count, TimeElapsedColumn(table_column=Column(no_wrap=True)), left, standing


def _cut(**settings: Any) -> Column:
    """Return a column that is truncated to make room for the others."""
    return Column(no_wrap=True, overflow="ellipsis", **settings)
