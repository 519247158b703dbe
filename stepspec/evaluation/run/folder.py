"""Writes the folder of a run: first `run.json`, then row by row, and finally the summary and the report.

A killed run leaves at most one incomplete line in each file, which the next start removes. Two processes never write
the same file: each holds a lock on the files of its part.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Generator, Iterator
from itertools import chain, starmap
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from stepspec.base.files import whole_file
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.records import Block, Conditions, Failure, Node, ResultRow, RunRecord, Summary, Trace
from stepspec.evaluation.report import markdown_report
from stepspec.evaluation.run.schedule import WHOLE, Part
from stepspec.evaluation.runs import read_run


class RunFolder:
    """The folder that stores a run. A context manager that holds the files of its part open.

    Raises, from every method:
        UsageError: the folder holds something else, or another run, or another process writes this part.
        StepSpecError: a file cannot be read or written.
    """

    def __init__(self, path: Path, part: Part = WHOLE) -> None:
        self.path = path
        self._part = part
        self._open: dict[str, int] = {}  # file descriptors by kind of record
        self.node: Node | None = None
        """This machine, if it is another one than that of `run.json`."""

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def refuse_strangers(self) -> None:
        """Reject a folder with files but no run, so that run files are not mixed with a user's other files."""
        if self.path.is_file():
            raise UsageError(f"{self.path} is a file; give a folder with --output.")
        with self._disk():
            if not self.path.is_dir() or (self.path / "run.json").exists():
                return
            # A start that was killed while it wrote run.json leaves a temporary file and nothing else.
            if any(not _is_temporary(entry) for entry in self.path.iterdir()):
                raise UsageError(f"{self.path} is not empty and holds no run; give another folder with --output.")

    def begin(self, run: RunRecord) -> RunRecord:
        """Create the folder and its `run.json`, or check that the run there is the same one. Return the one there."""
        self.refuse_strangers()
        with self._disk():
            self.path.mkdir(parents=True, exist_ok=True)
            with self._lock():
                if not (self.path / "run.json").exists():
                    self._write_run(run)
                there = read_run(self.path)
            refuse_another(self.path, there, run)
            self._descriptor("rows")
        return there

    def resume(self, here: Conditions) -> None:
        """Go on with the run on this machine."""
        self.note(here)
        self.node = node_of(read_run(self.path), here)

    def note(self, here: Conditions) -> None:
        """Note in `run.json` where and with what the run went on, if that is new."""

        def noted(run: RunRecord) -> RunRecord:
            is_known = any(here.is_like(each) for each in (run, *run.resumed))
            return run if is_known else run.model_copy(update={"resumed": [*run.resumed, here]})

        self._update(noted)

    def _update(self, change: Callable[[RunRecord], RunRecord]) -> None:
        """Replace `run.json` by a changed version. Other parts may change it too."""
        with self._disk(), self._lock():
            run = read_run(self.path)
            if (changed := change(run)) != run:
                self._write_run(changed)

    def _write_run(self, run: RunRecord) -> None:
        write_whole(self.path / "run.json", run.model_dump_json(indent=2) + "\n")

    @contextlib.contextmanager
    def _lock(self) -> Generator[None]:
        """Keep other parts from changing `run.json`."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def add(self, row: ResultRow, trace: Trace | None) -> None:
        """Append a finished row after its trace, so that no finished row lacks one."""
        if trace is not None:
            self.add_trace(trace)
        self.add_row(row)

    def add_row(self, row: ResultRow) -> None:
        """Append a finished row."""
        self._append("rows", row.model_dump_json(exclude={"steps": {"__all__": {"text"}}}))

    def add_trace(self, trace: Trace) -> None:
        """Append the full output of a request."""
        self._append("traces", trace.model_dump_json())

    def add_block(self, block: Block) -> None:
        """Append a block: measurements that cover several rows."""
        self._append("blocks", block.model_dump_json())

    def add_failure(self, failure: Failure) -> None:
        """Append a request that ended in an error."""
        self._append("failures", failure.model_dump_json())

    def finish(self, summary: Summary) -> None:
        """Write the summary and the report, which are computed from the rows."""
        self._update(lambda run: run.model_copy(update={"busy": summary.busy}))
        with self._disk():
            write_whole(self.path / "summary.json", summary.model_dump_json(indent=2) + "\n")
            write_whole(self.path / "report.md", markdown_report(read_run(self.path), summary))

    def _append(self, kind: str, line: str) -> None:
        with self._disk():
            _append_line(self._descriptor(kind), line)

    def _descriptor(self, kind: str) -> int:
        if kind not in self._open:
            self._open[kind] = _open_lines(self.path / f"{kind}{self._part.suffix}.jsonl")
        return self._open[kind]

    @contextlib.contextmanager
    def _disk(self) -> Generator[None]:
        try:
            yield
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise StepSpecError(
                f"Cannot store the run in {self.path}: {reason}. Finished rows stay valid. Fix the problem, then start "
                "again with the same --output."
            ) from error


def node_of(run: RunRecord, here: Conditions) -> Node | None:
    """Return the machine of some conditions, if it is another one than that of a run."""
    name = f"machine {here.machine or here.hardware.get('gpu') or here.hardware.get('cpu', 'unknown')}"
    return None if here.on_machine_of(run) else Node(name=name, hardware=here.hardware)


def refuse_another(path: Path, there: RunRecord, run: RunRecord) -> None:
    """Reject a run that is not the one in the folder.

    Raises:
        UsageError: the runs differ; the message lists the settings.
    """
    differences = what_differs(there, run)
    if differences:
        raise UsageError(
            f"{path} holds a run that differs in {differences}; give another folder with --output, or the same "
            "settings to resume that run."
        )


def what_differs(there: RunRecord, run: RunRecord) -> str:
    """Return the settings in which two runs differ, numbers with both values; empty if the runs are the same."""
    stored = there.identity()
    # What an earlier version did not record is None.
    pairs = ((name, stored[name], value) for name, value in run.identity().items() if stored[name] is not None)
    return ", ".join(chain.from_iterable(starmap(_differences, pairs)))


def _differences(name: str, was: Any, now: Any) -> Iterator[str]:
    """Yield the names of what differs in a setting, down to the keys of mappings."""
    if isinstance(was, dict) and isinstance(now, dict):
        before, after = cast("dict[str, Any]", was), cast("dict[str, Any]", now)
        for key in before | after:
            yield from _differences(f"{name}.{key}", before.get(key), after.get(key))
    elif was != now:
        yield f"{name} ({was} there, {now} here)" if isinstance(now, int | float) and name != "version" else name


def write_whole(file: Path, text: str) -> None:
    """Replace a file atomically: readers see the old text or the new one, never a part."""
    with whole_file(file) as stream:
        stream.write(text)


def _is_temporary(file: Path) -> bool:
    return file.name.lstrip(".").startswith("run.json.") and file.name.endswith("tmp")


def _open_lines(file: Path) -> int:
    """Open a file of lines for appending, cut off an incomplete last line, and lock out other processes."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, _complete_length(fd))
    except BlockingIOError as error:
        os.close(fd)
        raise UsageError(
            f"Another process is writing {file}. Let it finish, or restart both with --part 1/2 and --part 2/2."
        ) from error
    return fd


def _complete_length(fd: int) -> int:
    """Return the number of bytes up to the end of the last complete line."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - 65_536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _append_line(fd: int, text: str) -> None:
    line = text.encode() + b"\n"
    size = os.fstat(fd).st_size
    # A single write call, so that a killed process cuts short at most the last line.
    if os.write(fd, line) < len(line):
        os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
