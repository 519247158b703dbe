"""Reads the folder of a run, row by row, so that memory does not grow with what the models wrote.

Files may have been written by several processes, each to its own part (`rows.jsonl`, `rows-2of4.jsonl`), and a process
that was killed may have left a last line that is not whole: that line is not there.
"""

import hashlib
import re
import shlex
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.records import Block, Failure, Record, ResultRow, RunRecord, Summary, Trace

R = TypeVar("R", bound=Record)
Key = tuple[str, str, int]
"""Problem, policy, repeat."""


@dataclass(frozen=True)
class Line:
    """A whole line of a file, and where it is."""

    file: Path
    number: int
    offset: int
    content: bytes


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it holds a run, else the runs in the folders right below it, `c4` before `c16`.

    Raises:
        UsageError: there is none.
    """
    if (folder / "run.json").is_file():
        return [folder]
    below = sorted((file.parent for file in folder.glob("*/run.json")), key=lambda path: natural_order(path.name))
    if not below:
        raise UsageError(f"There is no run in {folder}: neither it nor a folder right below it has a run.json.")
    return below


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers inside names by their value, `line-2` before `line-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def read_run(folder: Path) -> RunRecord:
    """The conditions of a run.

    Raises:
        UsageError: the folder holds no run, or its record is damaged.
        StepSpecError: the disk refuses.
    """
    run = _read_whole(folder / "run.json", RunRecord)
    if run is None:
        raise UsageError(f"{folder} holds no run: there is no run.json.")
    return run


def read_summary(folder: Path) -> Summary | None:
    """The summary of a run; None while it has none.

    Raises:
        UsageError: the summary is damaged.
        StepSpecError: the disk refuses.
    """
    return _read_whole(folder / "summary.json", Summary)


def has_gone_on(folder: Path, summary: Summary) -> bool:
    """Whether a run has rows that its summary was not made of; not where the summary is all that was kept.

    Where two processes wrote the same row it counts twice here, and the answer is yes without need.

    Raises:
        StepSpecError: the disk refuses.
    """
    files = part_files(folder, "rows")
    if not files:
        return False
    # Parts that end together may each summarise before the other's last rows, and the later of the two may be newer
    # than all rows.
    if summary.num_rows is not None and summary.num_rows != sum(1 for _ in iter_lines(folder, "rows")):
        return True
    written = (folder / "summary.json").stat().st_mtime_ns
    return any(file.stat().st_mtime_ns > written for file in files)


def _read_whole(file: Path, model: type[R]) -> R | None:
    try:
        content = file.read_bytes()
        _refuse_older(file, content)
        return model.model_validate_json(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StepSpecError(f"Cannot read {file}: {error.strerror}.") from error
    except ValidationError as error:
        hint = f" Delete it and resume the run, which makes it again from the rows{_resumed_by(file)}."
        raise UsageError(
            f"{file} is damaged, or of another version of stepspec: {_first(error)}."
            + (hint if model is Summary else "")
        ) from error


def _refuse_older(file: Path, content: bytes) -> None:
    """Refuses what was written when `max_tokens` counted rejected tokens too.

    Raises:
        UsageError: the file is of version 1.
    """
    try:
        version = _Versioned.model_validate_json(content).version
    except ValidationError:
        return
    if version == 1:
        raise UsageError(
            f"{file} is of version 1, in which max_tokens counted rejected tokens too and failed requests were left "
            "out. Its figures cannot be compared with those of version 2: run 'stepspec eval' again into a new folder."
        )


class _Versioned(BaseModel):
    version: int


def iter_rows(folder: Path) -> Iterator[ResultRow]:
    """The finished rows; of two with one key, which two processes at once may write, the first.

    Raises, as the functions below do, while it is read:
        UsageError: a line is damaged.
        StepSpecError: the disk refuses.
    """
    seen = set[Key]()
    for row in _iter_records(folder, "rows", ResultRow):
        if row.key not in seen:
            seen.add(row.key)
            yield row


def iter_traces(folder: Path) -> Iterator[Trace]:
    """All traces. A key comes twice where a run was killed between a trace and its row; see `TraceIndex`."""
    return _iter_records(folder, "traces", Trace)


def iter_blocks(folder: Path) -> Iterator[Block]:
    """The blocks, in the order in which they ended."""
    return _iter_records(folder, "blocks", Block)


def iter_failures(folder: Path) -> Iterator[Failure]:
    """All failures, of requests that were later tried again with success as well."""
    return _iter_records(folder, "failures", Failure)


def iter_lines(folder: Path, kind: str) -> Generator[Line]:
    """The whole lines of `rows.jsonl`, `rows-1of4.jsonl` and so on, for the kind `rows`.

    Raises:
        StepSpecError: the disk refuses.
    """
    for file in part_files(folder, kind):
        offset = 0
        try:
            with file.open("rb") as stream:
                for number, content in enumerate(stream, 1):
                    if content.endswith(b"\n"):
                        yield Line(file, number, offset, content)
                    offset += len(content)
        except OSError as error:
            raise StepSpecError(f"Cannot read {file}: {error.strerror}.") from error


def part_files(folder: Path, kind: str) -> list[Path]:
    """The files of one kind in a run's folder: the undivided one first, then the parts in their order."""
    part = re.compile(rf"{re.escape(kind)}(-\d+of\d+)?\.jsonl")
    files = [file for file in folder.glob(f"{kind}*.jsonl") if part.fullmatch(file.name)]
    return sorted(files, key=lambda file: natural_order(file.stem))


def _iter_records(folder: Path, kind: str, model: type[R]) -> Generator[R]:
    for line in iter_lines(folder, kind):
        yield _parse(line, model)


def _parse(line: Line, model: type[R]) -> R:
    try:
        return model.model_validate_json(line.content)
    except ValidationError as error:
        without = shlex.join(["sed", "-i", f"{line.number}d", str(line.file)])
        raise UsageError(
            f"{line.file}, line {line.number} is not a {model.__name__.lower()} ({_first(error)}); the file is "
            f"damaged. To go on, delete the line ({without}) and resume the run{_resumed_by(line.file)}: what is then "
            "missing is done again."
        ) from error


def _resumed_by(file: Path) -> str:
    return f" (stepspec eval with the same options and --output {shlex.quote(str(file.parent))})"


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where or 'file'}: {problem['msg'].removesuffix('.')}"


def output_sha256(reasoning: str, answer: str) -> str:
    """The hash of what a model said, as rows keep it."""
    # Replaced, because a model may stop in the middle of a character that two surrogates would make up.
    return hashlib.sha256(f"{reasoning}\0{answer}".encode(errors="replace")).hexdigest()


def says(trace: Trace) -> str:
    """The hash of what a trace says, which its row has too: a killed run may have left the trace of another try."""
    return output_sha256(reasoning(trace), trace.answer)


def reasoning(trace: Trace) -> str:
    """The steps of a trace as one text."""
    return "".join(step.text or "" for step in trace.steps)


class TraceIndex:
    """Where each problem's traces are, to read some of them without keeping any.

    Raises:
        UsageError: a line is damaged.
        StepSpecError: the disk refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._lines: dict[str, list[tuple[Path, int, int]]] = {}
        for line in iter_lines(folder, "traces"):
            trace = _parse(line, Trace)
            self._lines.setdefault(trace.problem, []).append((line.file, line.number, line.offset))

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, problem: str) -> bool:
        return problem in self._lines

    def of(self, problem: str) -> list[Trace]:
        """The problem's traces, under every policy and repeat."""
        return [self._read(*place) for place in self._lines.get(problem, ())]

    def _read(self, file: Path, number: int, offset: int) -> Trace:
        try:
            with file.open("rb") as stream:
                stream.seek(offset)
                return _parse(Line(file, number, offset, stream.readline()), Trace)
        except OSError as error:
            raise StepSpecError(f"Cannot read {file}: {error.strerror}.") from error
