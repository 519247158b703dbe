"""The rows of measurements: of a file that a run continues, and of a run that is not kept."""

import gzip
import tempfile
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from stepspec.api.models import Pair
from stepspec.errors import UsageError
from stepspec.evaluation.benchmark import Benchmark, asked
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.records import ResultRow
from stepspec.evaluation.run import Keeping, LoadedPolicy, ProblemSet, RunSettings, System, conditions, evaluate
from stepspec.evaluation.run.results import OnRow
from stepspec.evaluation.runs import iter_rows

M = TypeVar("M", bound=BaseModel)


def stored_rows(file: Path, model: type[M]) -> list[M]:
    """Return the rows of a file that a run continues, if there is one, and remove an incomplete last row.

    Raises:
        UsageError: the file has other rows, or no whole one, and stays as it is.
    """
    content = file.read_bytes() if file.exists() else b""
    found, length = _complete_rows(content, file, model)
    if content and not found:
        raise UsageError(f"{file} has no whole row. Delete it, or name another file.")
    if length < len(content):
        file.write_bytes(content[:length])
    return found


def finished_rows(file: Path, model: type[M]) -> list[M]:
    """Return the rows of a file, which may be gzipped, but for an incomplete last row. The file stays as it is.

    Raises:
        UsageError: the file cannot be read, or has no rows or other ones.
    """
    try:
        content = file.read_bytes()
        found, _ = _complete_rows(gzip.decompress(content) if file.suffix == ".gz" else content, file, model)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"Cannot read {file}: {error}.") from error
    if not found:
        raise UsageError(f"{file} has no rows.")
    return found


def _complete_rows(content: bytes, file: Path, model: type[M]) -> tuple[list[M], int]:
    """Return the rows of the lines that end, and the number of their bytes."""
    length = content.rfind(b"\n") + 1
    try:
        return [*map(model.model_validate_json, content[:length].splitlines())], length
    except ValidationError as error:
        raise UsageError(f"{file} has other rows than this command stores. Name another file.") from error


async def unkept_rows(
    benchmark: tuple[str, Benchmark],
    problems: ProblemSet,
    policies: Mapping[str, LoadedPolicy],
    systems: Mapping[str, System],
    settings: RunSettings,
    pair: Pair,
    on_row: OnRow | None = None,
) -> list[ResultRow]:
    """Run policies on problems, which take turns, one request at a time. Return the rows in the order of their ends.

    Args:
        benchmark: its name and itself.
        problems: the problems to run.
        policies: the policies by name.
        systems: what answers under each of them.
        settings: sampling and its seed.
        pair: the models of the run's conditions.
        on_row: called for every row.

    Raises:
        StepSpecError: an engine failed several times in a row.
    """
    run = conditions(*benchmark, problems, policies, settings, pair)
    with tempfile.TemporaryDirectory() as folder, Grading(benchmark[1].grader) as grading:
        await evaluate(
            run,
            problems.problems,
            systems,
            Keeping(Path(folder)),
            grading=grading,
            ask=partial(asked, benchmark[1]),
            on_row=on_row,
        )
        return list(iter_rows(Path(folder)))
