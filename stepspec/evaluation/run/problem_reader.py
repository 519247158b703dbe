"""Turns rows of data into problems: selects columns, extracts the gold answer, and hashes the content."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepspec.errors import UsageError
from stepspec.evaluation.benchmark import AnswerFrom, GraderKind, RowsTable
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.grade.answer import closed_boxes
from stepspec.evaluation.run.data import DataRow, content_line, read_rows, text_of, text_or_number_of

_LEVEL = re.compile(r"(?:Level )?(\d{1,4})(?:\.0)?")
# Most boxes in MATH have braces. Some have none and end with the formula.
_OPEN_BOX = re.compile(r"\\boxed[ \t]+([^{\s$][^$\n]*)")


@dataclass(frozen=True)
class EvalProblem:
    """A question and its right answer, with its difficulty (`level`) and `subject` if known."""

    id: str
    question: str
    gold: str
    level: int | None = None
    subject: str | None = None


@dataclass(frozen=True)
class ProblemSet:
    """The problems of a run.

    `sha256` is the content hash of all rows, independent of the limit and the file format. For generated problems it
    covers only those up to the limit.
    """

    problems: tuple[EvalProblem, ...]
    sha256: str


class ProblemReader:
    """Reads files one row at a time. It keeps the first `limit` problems (None: all) and checks and hashes all rows."""

    def __init__(self, grader: GraderKind, data: RowsTable, limit: int | None) -> None:
        self.num_rows = 0
        self._grading = Grading(grader)
        self._data = data
        self._limit = limit
        self._digest = hashlib.sha256()
        self._ids: set[str] = set()
        self._problems: list[EvalProblem] = []

    @property
    def num_problems(self) -> int:
        """Number of rows with an answer, including those beyond the limit."""
        return len(self._ids)

    @property
    def sha256(self) -> str:
        """Content hash of all rows read so far."""
        return self._digest.hexdigest()

    def problem_set(self) -> ProblemSet:
        """Return the problems that were kept."""
        return ProblemSet(tuple(self._problems), self.sha256)

    def read(self, path: Path) -> None:
        """Add the rows of a file.

        Raises:
            UsageError: the file cannot be read, a row is incomplete, or two rows have the same id.
        """
        for row in read_rows(path):
            self.num_rows += 1
            problem = self._problem(row)
            if problem is None:
                continue
            if problem.id in self._ids:
                raise UsageError(f"{path}: two problems have the id {problem.id!r}.")
            self._ids.add(problem.id)
            if self._limit is None or len(self._problems) < self._limit:
                self._problems.append(problem)

    def _problem(self, row: DataRow) -> EvalProblem | None:
        columns = self._data.columns
        question = text_of(row, columns.question)
        answer = text_or_number_of(row, columns.answer)
        # A row without an id is named by its index, because line numbers differ between file formats.
        names = [text_or_number_of(row, columns.id or "id")] if columns.id or "id" in row.fields else []
        self._digest.update(content_line(question, answer, *names))
        gold = _answer_in(answer, self._data.answer_from)
        if not gold and self._data.skip_unanswered:
            return None
        return EvalProblem(
            id=names[0] if names else f"row-{self.num_rows}",
            question=question,
            gold=self._checked(gold, row),
            level=_level(_optional(row, columns.level, "level")),
            subject=_subject(_optional(row, columns.subject, "subject")),
        )

    def _checked(self, gold: str | None, row: DataRow) -> str:
        where = f"{row.where}: key {self._data.columns.answer!r}"
        if not gold:
            raise UsageError(f"{where} has no answer in it.")
        try:
            return self._grading.check_gold(gold)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error


def _optional(row: DataRow, named: str | None, usual: str) -> Any:
    if named is not None and named not in row.fields:
        raise UsageError(f"{row.where}: key {named!r} is missing.")
    return row.fields.get(named or usual)


def _level(value: Any) -> int | None:
    match = _LEVEL.fullmatch(str(value).strip())
    return int(match.group(1)) if match else None


def _subject(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _answer_in(text: str, answer_from: AnswerFrom) -> str | None:
    match answer_from:
        case "whole":
            return text.strip()
        case "hashes":
            return text.rpartition("#### ")[2].strip()
        case "boxed":
            closed = closed_boxes(text)
            boxed = text[closed[-1][1] : closed[-1][2]].strip() if closed else None
            open_boxes = _OPEN_BOX.findall(text)
            return boxed or (open_boxes[-1].strip().removesuffix(".") if open_boxes else None)
