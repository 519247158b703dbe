"""The rows of measurements: of a file that a run continues, and of a run that is not kept."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from stepspec.api.models import Pair
from stepspec.errors import UsageError
from stepspec.evaluation.benchmark import Benchmark, asked
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.records import ResultRow
from stepspec.evaluation.run import Keeping, LoadedPolicy, ProblemSet, RunSettings, System, conditions, evaluate
from stepspec.evaluation.run.results import OnRow
from stepspec.evaluation.runs import iter_rows


def complete_lines(file: Path) -> list[bytes]:
    """Return the lines of a file of JSON objects, if there is one, and remove an incomplete last line.

    Raises:
        UsageError: the file is another one, which stays as it is.
    """
    content = file.read_bytes() if file.exists() else b""
    if content and not content.startswith(b"{"):
        raise UsageError(f"{file} exists and is not a file of this command. Name another file.")
    complete = content[: content.rfind(b"\n") + 1]
    if complete != content:
        file.write_bytes(complete)
    return complete.splitlines()


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
