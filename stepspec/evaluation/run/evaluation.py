"""Runs a benchmark under several policies and stores every row as soon as it is finished."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepspec.evaluation.grade import Grading
from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.run.folder import RunFolder
from stepspec.evaluation.run.gauges import Gauges
from stepspec.evaluation.run.problems import EvalProblem
from stepspec.evaluation.run.results import OnRow, Progress, Results
from stepspec.evaluation.run.runner import Runner, System
from stepspec.evaluation.run.schedule import WHOLE, Part, Round, rounds, unfinished
from stepspec.evaluation.run.summary import summary_of
from stepspec.evaluation.runs import iter_failures, iter_rows

RunRounds = Callable[[Sequence[Round], Callable[[], Results]], Awaitable[None]]
"""Runs all rounds. The second argument makes the receiver of what one set of engines does."""


@dataclass(frozen=True)
class Keeping:
    """Where a run is stored, which part of it runs here, and what is stored besides rows."""

    folder: Path
    part: Part = WHOLE
    traces: bool = False
    """Whether to store the text of every step."""
    record: bool = False
    """Whether the systems record what was seen of each proposed step, which traces then store too."""
    retry_errors: bool = False
    """Whether to retry requests that ended in an error."""


async def evaluate(
    run: RunRecord,
    problems: Sequence[EvalProblem],
    systems: Mapping[str, System],
    keeping: Keeping,
    *,
    grading: Grading,
    ask: Callable[[str], str] | None = None,
    gauges: Gauges | None = None,
    on_row: OnRow | None = None,
    only: Collection[str] | None = None,
) -> Summary:
    """Run the unfinished jobs of this part here, then write and return the summary of the whole folder.

    Args:
        run: the conditions; its policies are the keys of `systems`.
        problems: the problems to run, of which the part selects its own.
        systems: the system that answers under each policy.
        keeping: where the run is stored, and which part runs here.
        grading: grades the answers; the caller closes it.
        ask: turns a question into the full request text; with None, the systems do so by `run.prompt_id`.
        gauges: counters to read before and after every block.
        on_row: called for every row.
        only: the policies to run now; None for all of the run.

    Raises:
        UsageError: the folder holds something else, or another run.
        StepSpecError: the disk failed, or an engine failed several times in a row; finished rows are stored.
    """
    assert set(systems) == set(run.policies), (systems, run.policies)
    runner = Runner(run, systems, grading, ask, keeping.traces or keeping.record, gauges or Gauges())

    async def run_here(found: Sequence[Round], make_results: Callable[[], Results]) -> None:
        await runner.run_all(found, make_results())

    return await run_unfinished(run, problems, keeping, run_here, on_row=on_row, only=only)


async def run_unfinished(
    run: RunRecord,
    problems: Sequence[EvalProblem],
    keeping: Keeping,
    run_rounds: RunRounds,
    *,
    on_row: OnRow | None = None,
    only: Collection[str] | None = None,
) -> Summary:
    """Run what is not in the folder yet by `run_rounds`. Arguments and errors are those of `evaluate`."""
    with RunFolder(keeping.folder, keeping.part) as folder:
        first = folder.begin(run)  # of the start, perhaps on another machine
        done = {row.key for row in iter_rows(folder.path)}
        if not keeping.retry_errors:
            done |= {failure.key for failure in iter_failures(folder.path)}
        policies = [name for name in run.policies if only is None or name in only]
        planned = list(rounds(keeping.part.of(problems), policies, run.concurrency, run.num_repeats))
        num_jobs = sum(len(block) for each in planned for block in each)
        left = [found for each in planned if (found := unfinished(each, done))]
        progress = Progress(on_row, num_jobs - sum(len(block) for each in left for block in each), num_jobs)
        if left:
            folder.resume(run.conditions)
        receivers: list[Results] = []

        def make_results() -> Results:
            receivers.append(Results(folder, progress, run.policies))
            return receivers[-1]

        await run_rounds(left, make_results)
        for each in receivers:
            each.close()
        summary = summary_of(first, folder.path)
        folder.finish(summary)
    return summary
