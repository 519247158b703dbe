"""The folder of a run as it is written: `run.json` before anything, rows one by one, summary and report at the end.

A killed run leaves at most one line in each file that is not whole; the next start removes it and keeps the rest. Two
processes never write one file: each holds a lock on the files of its part.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType

from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.records import Block, Failure, ResultRow, RunRecord, Summary, Trace
from stepspec.evaluation.report import markdown_report
from stepspec.evaluation.running.schedule import WHOLE, Part
from stepspec.evaluation.runs import iter_blocks, iter_failures, iter_rows, read_run


class RunFolder:
    """Where a run is kept. A context manager that holds the files of its part open.

    Raises, from every method:
        UsageError: the folder holds something else, or another run, or another process writes this part.
        StepSpecError: the disk refuses.
    """

    def __init__(self, path: Path, part: Part = WHOLE) -> None:
        self.path = path
        self._part = part
        self._open: dict[str, int] = {}  # file descriptors by kind of record

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def refuse_strangers(self) -> None:
        """Refuses a folder with files but no run, so that nothing is mixed into what somebody keeps there."""
        if self.path.is_file():
            raise UsageError(f"{self.path} is a file; a run is kept in a folder.")
        with self._disk():
            if not self.path.is_dir() or (self.path / "run.json").exists():
                return
            # A start that was killed while it wrote run.json leaves a temporary file and nothing else.
            if any(not _is_temporary(entry) for entry in self.path.iterdir()):
                raise UsageError(f"{self.path} is not empty and holds no run; give another folder with --output.")

    def begin(self, run: RunRecord) -> None:
        """Makes the folder and its `run.json`, or checks that the run there is the same one."""
        self.refuse_strangers()
        with self._disk():
            self.path.mkdir(parents=True, exist_ok=True)
            if not write_new(self.path / "run.json", run.model_dump_json(indent=2) + "\n"):
                refuse_another(self.path, read_run(self.path), run)
            self._descriptor("rows")

    def rows(self) -> Iterator[ResultRow]:
        """The finished rows of all parts, each once."""
        return iter_rows(self.path)

    def failures(self) -> Iterator[Failure]:
        """The requests that ended in an error, whether or not a later try succeeded."""
        return iter_failures(self.path)

    def blocks(self) -> Iterator[Block]:
        """What was measured of rows together."""
        return iter_blocks(self.path)

    def add(self, row: ResultRow, trace: Trace | None) -> None:
        """Appends a finished row, after its trace, so that no finished row lacks one."""
        if trace is not None:
            self.add_trace(trace)
        self.add_row(row)

    def add_row(self, row: ResultRow) -> None:
        """Appends a finished row."""
        self._append("rows", row.model_dump_json(exclude={"steps": {"__all__": {"text"}}}))

    def add_trace(self, trace: Trace) -> None:
        """Appends what a request said."""
        self._append("traces", trace.model_dump_json())

    def add_block(self, block: Block) -> None:
        """Appends what was measured of rows together."""
        self._append("blocks", block.model_dump_json())

    def add_failure(self, failure: Failure) -> None:
        """Appends a request that ended in an error."""
        self._append("failures", failure.model_dump_json())

    def finish(self, summary: Summary) -> None:
        """Writes what is computed from the rows."""
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
                f"Cannot keep the run in {self.path}: {reason}. What is finished there stays valid; start "
                "again with the same --output once this is put right."
            ) from error


def refuse_another(path: Path, there: RunRecord, run: RunRecord) -> None:
    """Refuses a run that is not the one in the folder.

    Raises:
        UsageError: they differ; the message says in what.
    """
    differences = what_differs(there, run)
    if differences:
        raise UsageError(
            f"{path} holds a run that differs in {differences}; give another folder with --output, or the same "
            "settings to resume that run."
        )


def what_differs(there: RunRecord, run: RunRecord) -> str:
    """The settings by which two runs are not the same, with both values where these are short; empty if they are."""
    kept = there.identity()
    different = {name: (kept[name], value) for name, value in run.identity().items() if kept[name] != value}
    return ", ".join(
        f"{name} ({was} there, {now} here)" if isinstance(now, int | float) and name != "version" else name
        for name, (was, now) in different.items()
    )


def write_whole(file: Path, text: str) -> None:
    """Replace a file atomically: readers see the old text or the new one, never a part."""
    _write_temporary(file, text).replace(file)


def write_new(file: Path, text: str) -> bool:
    """Makes a file at once, unless there is one already, which another process may be making just now."""
    if file.exists():
        return False
    temporary = _write_temporary(file, text)
    try:
        file.hardlink_to(temporary)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _write_temporary(file: Path, text: str) -> Path:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    return temporary


def _is_temporary(file: Path) -> bool:
    return file.name.startswith(".run.json.") and file.name.endswith("tmp")


def _open_lines(file: Path) -> int:
    """Opens a file of lines for appending, without the last line if it is not whole, and keeps others out."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, _whole_length(fd))
    except BlockingIOError as error:
        os.close(fd)
        raise UsageError(
            f"Another process is writing {file}. Let it finish, or start both anew with --part 1/2 and --part 2/2."
        ) from error
    return fd


def _whole_length(fd: int) -> int:
    """Bytes up to the end of the last whole line."""
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
    # One call: whatever kills the process, at most the last line is cut short.
    if os.write(fd, line) < len(line):
        os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
