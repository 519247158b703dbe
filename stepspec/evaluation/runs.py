"""Reads the folder of a run, row by row, so that memory does not grow with the length of the outputs.

Several processes may have written the files, each its own part (`rows.jsonl`, `rows-2of4.jsonl`). A killed process may
leave an incomplete last line, which is skipped.
"""

import hashlib
import re
import shlex
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from stepspec.base.file_model import parse_toml
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.records import Block, Failure, Record, ResultRow, RunRecord, Summary, Trace
from stepspec.loop.policy import Policy

R = TypeVar("R", bound=Record)
Key = tuple[str, str, int]
"""Problem, policy, repeat."""


@dataclass(frozen=True)
class FileLine:
    """A complete line of a file and its position."""

    file: Path
    number: int
    offset: int
    content: bytes


def find_runs(folder: Path) -> list[Path]:
    """Return the folder itself if it holds a run, else the runs in its direct subfolders, `c4` before `c16`.

    Raises:
        UsageError: there is no run.
    """
    if (folder / "run.json").is_file():
        return [folder]
    below = sorted((file.parent for file in folder.glob("*/run.json")), key=lambda path: natural_order(path.name))
    if not below:
        raise UsageError(f"There is no run in {folder}: neither it nor a folder right below it has a run.json.")
    return below


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers inside names by their value, `line-2` before `line-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def read_run(folder: Path) -> RunRecord:
    """Return the conditions of a run.

    Raises:
        UsageError: the folder holds no run, or its record is damaged.
        StepSpecError: the file cannot be read.
    """
    run = _read_record(folder / "run.json", RunRecord)
    if run is None:
        inside = [each.parent.name for each in sorted(folder.glob("*/run.json"))]
        hint = f" There are runs in it: {', '.join(inside[:5])}." if inside else ""
        raise UsageError(f"{folder} holds no run: there is no run.json.{hint}")
    return run


def policy_of(run: RunRecord, name: str) -> Policy:
    """Return a policy of a run, with the settings for the run's temperature.

    Raises:
        UsageError: the text of the policy is not one of this version.
    """
    try:
        table = parse_toml(run.policies[name].text)
        score = table.get("score", {})
        score.pop("candidates", None)
        if score.pop("look_ahead", None) is not None or score.get("depth") == "auto":  # runs of 0.1
            score["depth"] = 4
        table.get("step", {}).pop("abort_entropy", None)  # policy files of 0.2 and earlier, like the rest
        table.get("compare", {}).pop("width", None)
        for judge in table.get("judges", []):
            if judge["kind"] == "rating" and judge.get("prompt") == "specreason" and judge.get("readout") == "greedy":
                del judge["prompt"], judge["readout"]
        table.pop("certificate", None)
        table.pop("fallbacks", None)
        ranges = table.pop("temperatures", [])
        policy, setting = Policy.model_validate(table), run.policies[name].calibrated
        if setting is not None:
            return setting.applied(policy)
        former = next((each for each in ranges if run.temperature <= each["at_most"]), None)
        return policy if former is None else policy.with_thresholds(former["thresholds"], former.get("min_logprob"))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise UsageError(f"The policy {name!r} of the run cannot be read: {error}") from error


def read_summary(folder: Path) -> Summary | None:
    """Return the summary of a run; None if it has none yet.

    Raises:
        UsageError: the summary is damaged.
        StepSpecError: the file cannot be read.
    """
    return _read_record(folder / "summary.json", Summary)


def has_gone_on(folder: Path, summary: Summary) -> bool:
    """Return whether a run has rows that its summary does not cover. False if only the summary was kept.

    A row that two processes wrote counts twice here, so the result may be True without need.

    Raises:
        StepSpecError: a file cannot be read.
    """
    files = part_files(folder, "rows")
    if not files:
        return False
    # Parts that end together may each write a summary before the other's last rows. The later summary can then be
    # newer than all rows, so the times below are not enough.
    if summary.num_rows is not None and summary.num_rows != sum(1 for _ in iter_lines(folder, "rows")):
        return True
    written = (folder / "summary.json").stat().st_mtime_ns
    return any(file.stat().st_mtime_ns > written for file in files)


def _read_record(file: Path, model: type[R]) -> R | None:
    try:
        content = file.read_bytes()
        _reject_version_1(file, content)
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


def _reject_version_1(file: Path, content: bytes) -> None:
    """Reject files of version 1, in which `max_tokens` counted rejected tokens too.

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
    """Yield the finished rows. If two processes wrote rows with the same key, yield only the first.

    Raises during iteration, as do the functions below:
        UsageError: a line is damaged.
        StepSpecError: a file cannot be read.
    """
    seen = set[Key]()
    for row in _iter_records(folder, "rows", ResultRow):
        if row.key not in seen:
            seen.add(row.key)
            yield row


def iter_traces(folder: Path) -> Iterator[Trace]:
    """Yield all traces. A key occurs twice if a run was killed between a trace and its row; see `TraceIndex`."""
    return _iter_records(folder, "traces", Trace)


def iter_blocks(folder: Path) -> Iterator[Block]:
    """Yield the blocks in the order in which they ended."""
    return _iter_records(folder, "blocks", Block)


def iter_failures(folder: Path) -> Iterator[Failure]:
    """Yield all failures, including those of requests that succeeded in a later try."""
    return _iter_records(folder, "failures", Failure)


def iter_lines(folder: Path, kind: str) -> Generator[FileLine]:
    """Yield the complete lines of all files of a kind: `rows.jsonl`, `rows-1of4.jsonl` and so on for `rows`.

    Raises:
        StepSpecError: a file cannot be read.
    """
    for file in part_files(folder, kind):
        offset = 0
        try:
            with file.open("rb") as stream:
                for number, content in enumerate(stream, 1):
                    if content.endswith(b"\n"):
                        yield FileLine(file, number, offset, content)
                    offset += len(content)
        except OSError as error:
            raise StepSpecError(f"Cannot read {file}: {error.strerror}.") from error


def part_files(folder: Path, kind: str) -> list[Path]:
    """Return the files of one kind in a run's folder: the undivided file first, then the parts in order."""
    part = re.compile(rf"{re.escape(kind)}(-\d+of\d+)?\.jsonl")
    files = [file for file in folder.glob(f"{kind}*.jsonl") if part.fullmatch(file.name)]
    return sorted(files, key=lambda file: natural_order(file.stem))


def _iter_records(folder: Path, kind: str, model: type[R]) -> Generator[R]:
    for line in iter_lines(folder, kind):
        yield _parse(line, model)


def _parse(line: FileLine, model: type[R]) -> R:
    try:
        return model.model_validate_json(line.content)
    except ValidationError as error:
        again = "; missing rows run again" if model is ResultRow else ""
        without = shlex.join(["sed", "-i", f"{line.number}d", str(line.file)])
        raise UsageError(
            f"{line.file}, line {line.number} is not a valid {model.__name__} ({_first(error)}); the file is "
            f"damaged. Delete the line ({without}) and resume the run{_resumed_by(line.file)}{again}."
        ) from error


def _resumed_by(file: Path) -> str:
    return f" (stepspec eval with the same options and --output {shlex.quote(str(file.parent))})"


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where or 'file'}: {problem['msg'].removesuffix('.')}"


def output_sha256(reasoning: str, answer: str) -> str:
    """Return the hash of a model's output, as stored in rows."""
    # Lone surrogates are replaced, because a model may stop in the middle of a surrogate pair.
    return hashlib.sha256(f"{reasoning}\0{answer}".encode(errors="replace")).hexdigest()


def says(trace: Trace) -> str:
    """Return the output hash of a trace. It differs from its row's if a killed run left the trace of another try."""
    return output_sha256(reasoning(trace), trace.answer)


def reasoning(trace: Trace) -> str:
    """Return the steps of a trace as one text."""
    return "".join(step.text or "" for step in trace.steps)


class TraceIndex:
    """The positions of each problem's traces in the files, to read some of them without keeping any in memory.

    Raises:
        UsageError: a line is damaged.
        StepSpecError: a file cannot be read.
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
        """Return the problem's traces, under every policy and repeat."""
        return [self._read(*position) for position in self._lines.get(problem, ())]

    def _read(self, file: Path, number: int, offset: int) -> Trace:
        try:
            with file.open("rb") as stream:
                stream.seek(offset)
                return _parse(FileLine(file, number, offset, stream.readline()), Trace)
        except OSError as error:
            raise StepSpecError(f"Cannot read {file}: {error.strerror}.") from error
