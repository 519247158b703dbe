"""The rows of a run that is not kept: policies on the problems of a benchmark, one request at a time."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from stepspec.api.models import Pair
from stepspec.evaluation.benchmark import Benchmark, asked
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.records import ResultRow
from stepspec.evaluation.run import Keeping, LoadedPolicy, ProblemSet, RunSettings, System, conditions, evaluate
from stepspec.evaluation.run.results import OnRow
from stepspec.evaluation.runs import iter_rows


async def unkept_rows(
    benchmark: tuple[str, Benchmark],
    problems: ProblemSet,
    policies: Mapping[str, LoadedPolicy],
    systems: Mapping[str, System],
    settings: RunSettings,
    pair: Pair,
    on_row: OnRow | None = None,
) -> list[ResultRow]:
    """Run all policies, which take turns, and return the rows in the order in which they ended.

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
