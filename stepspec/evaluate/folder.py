"""The folder of a run: `run.json` before anything, rows one by one, the summary and the report at the end.

A killed run leaves at most one line that is not whole; the next start removes it and keeps the rest.
"""

import contextlib
import errno
import os
from collections.abc import Generator
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from stepspec.errors import StepSpecError, UsageError
from stepspec.records import Row, RunRecord, Summary, Trace
from stepspec.report import markdown_report


class RunFolder:
    """Where a run is kept. A context manager that holds the files of rows and traces open.

    Raises, from every method:
        UsageError: the folder holds something else, or another run.
        StepSpecError: the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, int] = {}  # file descriptors by file name

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def refuse_strangers(self) -> None:
        """Refuses a folder with files but no run, so that nothing is mixed into what somebody keeps there."""
        with self._disk():
            if not self.path.is_dir() or (self.path / "run.json").exists():
                return
            # A start that was killed while it wrote run.json leaves the temporary file and nothing else.
            if any(entry.name != _temporary(self.path / "run.json").name for entry in self.path.iterdir()):
                raise UsageError(f"{self.path} is not empty and holds no run; give another folder with --output.")

    def begin(self, run: RunRecord) -> None:
        """Makes the folder and its `run.json`, or checks that the run there is the same one."""
        self.refuse_strangers()
        file = self.path / "run.json"
        with self._disk():
            if file.exists():
                self._check_same(run, file.read_text("utf-8"))
            else:
                self.path.mkdir(parents=True, exist_ok=True)
                write_whole(file, run.model_dump_json(indent=2) + "\n")

    def _check_same(self, run: RunRecord, text: str) -> None:
        try:
            there = RunRecord.model_validate_json(text).identity()
        except ValidationError as error:
            raise UsageError(f"{self.path / 'run.json'} is not the record of a run.") from error
        different = [name for name, value in run.identity().items() if there[name] != value]
        if different:
            raise UsageError(
                f"{self.path} holds a run that differs in {', '.join(different)}; give another folder with "
                "--output, or the same settings to resume that run."
            )

    def read_run(self) -> RunRecord:
        """The conditions, as they were when the run was first started."""
        with self._disk():
            text = (self.path / "run.json").read_text("utf-8")
        try:
            return RunRecord.model_validate_json(text)
        except ValidationError as error:
            raise UsageError(f"{self.path / 'run.json'} is not the record of a run.") from error

    def read_rows(self) -> list[Row]:
        """The finished rows; of two with one key, which two processes at once may write, the first."""
        file = self.path / "rows.jsonl"
        if not file.exists():
            return []
        with self._disk():
            lines = file.read_bytes().split(b"\n")[:-1]
        rows: dict[tuple[str, str, int], Row] = {}
        for number, line in enumerate(lines, 1):
            try:
                row = Row.model_validate_json(line)
            except ValidationError as error:
                raise UsageError(f"{file}, line {number} is not a row; the file is damaged.") from error
            rows.setdefault(row.key, row)
        return list(rows.values())

    def add(self, row: Row, trace: Trace | None) -> None:
        """Appends a finished row, after its trace, so that no finished row lacks one."""
        with self._disk():
            if trace is not None:
                self._append("traces.jsonl", trace.model_dump_json())
            self._append("rows.jsonl", row.model_dump_json(exclude={"steps": {"__all__": {"text"}}}))

    def _append(self, name: str, line: str) -> None:
        if name not in self._open:
            self._open[name] = _open_lines(self.path / name)
        _append_line(self._open[name], line)

    def finish(self, summary: Summary) -> None:
        """Writes what is computed from the rows."""
        with self._disk():
            write_whole(self.path / "summary.json", summary.model_dump_json(indent=2) + "\n")
            write_whole(self.path / "report.md", markdown_report(self.read_run(), summary))

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


def write_whole(file: Path, text: str) -> None:
    """Replaces a file at once: whoever reads it sees the old text or the new, never a part."""
    temporary = _temporary(file)
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.tmp")


def _open_lines(file: Path) -> int:
    """Opens a file of lines for appending, without the last line if it is not whole."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    content = file.read_bytes()
    os.ftruncate(fd, content.rfind(b"\n") + 1)
    return fd


def _append_line(fd: int, text: str) -> None:
    line = text.encode() + b"\n"
    size = os.fstat(fd).st_size
    # One call: whatever kills the process, at most the last line is cut short.
    if os.write(fd, line) < len(line):
        os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
