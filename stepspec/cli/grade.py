"""`stepspec grade`: grade a file of predictions and gold answers from any source."""

import json
import os
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, cast, get_args

import typer
from rich import box
from rich.table import Table

from stepspec.base.strict_json import read_json
from stepspec.cli.completion import one_of
from stepspec.cli.output import show
from stepspec.errors import UsageError, unknown_name
from stepspec.evaluation.grade import Grade, GraderKind, Grading, Status
from stepspec.evaluation.records import Reading, strict_status
from stepspec.evaluation.repeats import Samples, at_k
from stepspec.evaluation.stats import Share

KINDS: tuple[GraderKind, ...] = ("integer", "number", "math")
PREDICTION_KEYS = ("prediction", "output", "response", "text")
GOLD_KEYS = ("gold", "answer", "target", "reference")
AHEAD_PER_WORKER = 16
"""Rows read ahead for each worker. The limit bounds the memory."""


def main(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A jsonl file with predictions and gold answers.")],
    grader: Annotated[
        str, typer.Option("--grader", metavar="KIND", help="integer, number or math.", autocompletion=one_of(KINDS))
    ] = "math",
    prediction: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help=f"Key of the predictions. Default: the first of {', '.join(PREDICTION_KEYS)}."
        ),
    ] = None,
    gold: Annotated[
        str | None,
        typer.Option(metavar="KEY", help=f"Key of the gold answers. Default: the first of {', '.join(GOLD_KEYS)}."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A jsonl file for the grades.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes that compare formulas. Default: one for each core.")
    ] = None,
) -> None:
    """Grade predictions: accuracy with its interval, and why the others are not correct.

    In the flexible reading, the last number of a text is its answer if it has no other; in the strict one it is not.
    Rows with the same "id" are samples of one problem, which have pass@k and maj@k.

    A row whose "finish_reason" is "length" was cut off: the end of its text does not count as an answer.
    """
    if grader not in KINDS:
        raise UsageError(unknown_name("grader", grader, KINDS))
    if output is not None and output.resolve() == file.resolve():
        raise UsageError(f"The grades would overwrite {file}. Choose another --output.")
    num_workers = workers or _num_cores()
    start = time.perf_counter()
    tally = _GradeTally("strict" if grader == "integer" else "flexible")
    with ExitStack() as stack:
        # Open the files first, so that a bad path fails before the workers start.
        rows = stack.enter_context(_open_file(file, "rb"))
        grades = stack.enter_context(_open_file(output, "wb")) if output else None
        grading = stack.enter_context(Grading(grader, num_workers=num_workers))
        read = _read_rows(rows, file, grading, prediction, gold)
        for row, grade in _graded(read, grading, num_workers):
            tally.add(row, grade)
            if grades:
                strict = strict_status(grade.status, grade.found_by)
                grades.write(json.dumps({**row.name, **asdict(grade), "strict_status": strict}).encode() + b"\n")
    if not tally.n:
        raise UsageError(f"{file} has no rows. Each line must be a JSON object with a prediction and a gold answer.")
    show(tally.table())
    print(tally.sentence(time.perf_counter() - start))


@dataclass(frozen=True)
class _Row:
    name: Mapping[str, Any]
    """The row's id as `{"id": ...}`, or its number as `{"row": ...}`."""
    text: str
    gold: str
    cut_short: bool


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _open_file(path: Path, mode: Literal["rb", "wb"]) -> BinaryIO:
    try:
        return path.open(mode)
    except OSError as error:
        raise UsageError(f"Cannot {'read' if mode == 'rb' else 'write'} {path}: {error.strerror}.") from error


def _read_rows(
    lines: BinaryIO, file: Path, grading: Grading, prediction: str | None, gold: str | None
) -> Iterator[_Row]:
    """Yield the rows, each checked when it is read. A bad line raises an error with its line number."""
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{where} is not UTF-8: {error.reason}.") from error
        if text.strip():
            yield _parse_row(text, number, where, grading, (prediction, gold))


def _parse_row(line: str, number: int, where: str, grading: Grading, keys: tuple[str | None, str | None]) -> _Row:
    try:
        row: Any = read_json(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where} is not a JSON object.")
    fields = cast(Mapping[str, Any], row)
    text = _value(fields, keys[0], PREDICTION_KEYS, "prediction", where)
    gold = _value(fields, keys[1], GOLD_KEYS, "gold answer", where)
    try:
        gold = grading.check_gold(gold)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    name = {"id": fields["id"]} if isinstance(fields.get("id"), str | int) else {"row": number}
    return _Row(name, text, gold, fields.get("finish_reason") == "length")


def _value(fields: Mapping[str, Any], key: str | None, known: Sequence[str], what: str, where: str) -> str:
    found = key if key is not None else next((each for each in known if each in fields), None)
    if found is None or found not in fields:
        wanted = f"key {key!r}" if key is not None else f"key for the {what} ({', '.join(known)})"
        raise UsageError(f"{where} has no {wanted}; its keys are {', '.join(map(repr, fields)) or 'none'}.")
    value = fields[found]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UsageError(f"{where}: key {found!r} must be text or a number.")
    return value


def _graded(rows: Iterator[_Row], grading: Grading, num_workers: int) -> Iterator[tuple[_Row, Grade]]:
    """Yield the grades in the order of the rows, with a bounded number of gradings in progress."""
    waiting: deque[tuple[_Row, Future[Grade]]] = deque()
    with ThreadPoolExecutor(num_workers) as threads:
        for row in rows:
            waiting.append((row, threads.submit(grading.grade, row.text, row.gold, cut_short=row.cut_short)))
            if len(waiting) >= AHEAD_PER_WORKER * num_workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for row, future in waiting:
            yield row, future.result()


class _GradeTally:
    """Counts of grades by status and by method."""

    def __init__(self, reading: Reading) -> None:
        self.n = 0
        self._reading: Reading = reading
        self._statuses = Counter[str]()
        self._methods = Counter[tuple[str, str]]()
        self._answers: defaultdict[tuple[str, Any], list[tuple[bool, str | None]]] = defaultdict(list)
        """By problem, whether an answer is correct, and the answer. Rows with the same id are not independent."""
        self._by_last_number = Counter[tuple[str, Any]]()
        """By problem, correct answers that the strict reading does not count."""

    def add(self, row: _Row, grade: Grade) -> None:
        self.n += 1
        (problem,) = row.name.items()
        self._answers[problem].append((grade.status == "correct", grade.answer))
        strict = strict_status(grade.status, grade.found_by)
        self._by_last_number[problem] += grade.status == "correct" and strict != "correct"
        self._statuses[grade.status] += 1
        self._methods["found by", grade.found_by or "nothing"] += 1
        self._methods["decided by", grade.decided_by or "nothing"] += 1

    def table(self) -> Table:
        table = Table(box=box.SIMPLE)
        for title in ("", "rows", "share"):
            table.add_column(title, justify="right" if title else "left")
        for status in get_args(Status):
            table.add_row(status, f"{self._statuses[status]:,}", f"{self._statuses[status] / self.n:.1%}")
        for heading in ("found by", "decided by"):
            table.add_section()
            for (kind, method), count in self._methods.most_common():
                if kind == heading:
                    table.add_row(f"{heading} {method}", f"{count:,}", f"{count / self.n:.1%}")
        table.add_section()
        for name, share in at_k([Samples.of(answers) for answers in self._answers.values()]).items():
            table.add_row(f"{name} ({self._reading})", "", _with_interval(share))
        return table

    def sentence(self, seconds: float) -> str:
        """Return a sentence with the accuracy by each reading, its interval and the gradings per second."""
        num_rows = list(map(len, self._answers.values()))
        correct = [sum(right for right, _ in answers) for answers in self._answers.values()]
        stated = [number - self._by_last_number[each] for each, number in zip(self._answers, correct, strict=True)]
        readings = {self._reading: correct, "strict": stated}
        runs = f", runs of {len(num_rows):,} problems" if len(num_rows) < self.n else ""
        figures = [
            f"accuracy ({reading}) {_with_interval(Share.pooled(hits, num_rows))}, {sum(hits):,} of {self.n:,}"
            for reading, hits in readings.items()
        ]
        return f"A{'; '.join(figures)[1:]}{runs} (Wilson's 95%); {self.n / seconds:,.0f} gradings/s."


def _with_interval(share: Share) -> str:
    low, high = share.interval()
    return f"{share.value:.1%} [{low:.1%}, {high:.1%}]"
