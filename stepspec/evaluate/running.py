"""Runs a benchmark under several policies and keeps every row as soon as it is finished."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from stepspec.engine import Sampling
from stepspec.errors import ContextError
from stepspec.evaluate.folder import RunFolder
from stepspec.evaluate.problems import EvalProblem
from stepspec.evaluate.schedule import Job, schedule, seed_of
from stepspec.evaluate.summary import summarise
from stepspec.grade import GRADERS, Grader
from stepspec.records import Row, RunRecord, StepRecord, Summary, TimeRecord, TokenRecord, Trace
from stepspec.step import Result, Step

WARM_UP_QUESTION = "Ann has 3 apples. Ben has 4 more apples than Ann. How many apples does Ben have?"
WARM_UP_MAX_TOKENS = 128

OnRow = Callable[[Row | None, int, int], None]
"""Called with the row just finished (None at the start), the number of finished rows, and of all rows."""


class System(Protocol):
    """What answers questions under one policy: `stepspec.session.StepSpec`, or a script in tests."""

    async def generate(
        self, question: str, *, prompt: str = ..., sampling: Sampling = ..., max_tokens: int = ...
    ) -> Result: ...


async def evaluate(
    run: RunRecord,
    problems: Sequence[EvalProblem],
    systems: Mapping[str, System],
    folder: Path,
    *,
    grader: str = "integer",
    traces: bool = False,
    num_repeats: int = 1,
    on_row: OnRow | None = None,
) -> Summary:
    """Runs what is not finished yet in `folder`, and summarises all that is there.

    Raises:
        UsageError: the folder holds something else, or another run.
        StepSpecError: an engine or the disk failed; finished rows are kept.
    """
    assert set(systems) == set(run.policies), (systems, run.policies)
    with RunFolder(folder) as kept:
        kept.begin(run)
        done = {row.key for row in kept.read_rows()}
        blocks = list(schedule(problems, list(run.policies), run.concurrency, num_repeats))
        progress = _Progress(on_row, len(done), sum(len(block) for block in blocks))
        runner = _Runner(run, systems, kept, GRADERS[grader], traces, progress)
        remaining = [[job for job in block if job.key not in done] for block in blocks]
        await runner.warm_up({job.policy for block in remaining for job in block})
        for block in remaining:
            await runner.run_block(block)
        summary = summarise(run, kept.read_rows())
        kept.finish(summary)
    return summary


class _Progress:
    def __init__(self, on_row: OnRow | None, num_done: int, num_rows: int) -> None:
        self._on_row = on_row
        self._num_done = num_done
        self._num_rows = num_rows
        self._tell(None)

    def add(self, row: Row) -> None:
        self._num_done += 1
        self._tell(row)

    def _tell(self, row: Row | None) -> None:
        if self._on_row is not None:
            self._on_row(row, self._num_done, self._num_rows)


class _Runner:
    def __init__(
        self,
        run: RunRecord,
        systems: Mapping[str, System],
        folder: RunFolder,
        grader: Grader,
        traces: bool,
        progress: _Progress,
    ) -> None:
        self._run = run
        self._systems = systems
        self._folder = folder
        self._grader = grader
        self._traces = traces
        self._progress = progress

    async def warm_up(self, policies: set[str]) -> None:
        """As many requests at once as in the run, so that no recorded one is the first of its kind."""
        limit = min(self._run.max_tokens, WARM_UP_MAX_TOKENS)
        for policy in [name for name in self._run.policies if name in policies]:
            await _together([self._generate(policy, WARM_UP_QUESTION, 0, limit) for _ in range(self._run.concurrency)])

    async def run_block(self, block: Sequence[Job]) -> None:
        """Runs jobs of one policy, `concurrency` at a time."""
        waiting = iter(block)

        async def work() -> None:
            for job in waiting:
                await self._do(job)

        await _together([work() for _ in range(min(self._run.concurrency, len(block)))])

    async def _do(self, job: Job) -> None:
        seed = seed_of(self._run.seed, job.problem.id, job.repeat)
        try:
            result = await self._generate(job.policy, job.problem.question, seed, self._run.max_tokens)
        except ContextError as error:
            raise ContextError(f"Problem {job.problem.id!r}: {error}") from error
        result.counts.check()
        result.times.check()
        row = make_row(job, result, self._grader)
        self._folder.add(row, _make_trace(job, result) if self._traces else None)
        self._progress.add(row)

    async def _generate(self, policy: str, question: str, seed: int, max_tokens: int) -> Result:
        sampling = Sampling(temperature=self._run.temperature, top_p=self._run.top_p, seed=seed)
        system = self._systems[policy]
        return await system.generate(question, prompt=self._run.prompt_id, sampling=sampling, max_tokens=max_tokens)


async def _together(coroutines: Sequence[Coroutine[None, None, object]]) -> None:
    """Runs all at once; the first error ends the others and is raised as it is, not in a group."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_row(job: Job, result: Result, grader: Grader) -> Row:
    """The row of a finished job."""
    status, answer = grader(result.answer, job.problem.gold)
    counts, times = asdict(result.counts), asdict(result.times)
    return Row(
        problem=job.problem.id,
        policy=job.policy,
        repeat=job.repeat,
        level=job.problem.level,
        status=status,
        answer=answer,
        gold=job.problem.gold,
        finish_reason=result.finish_reason,
        output_sha256=_output_hash(result),
        wall_s=result.times.wall,
        tokens=TokenRecord(**{name: counts[name] for name in TokenRecord.model_fields}),
        time_s=TimeRecord(**{name: times[name] for name in TimeRecord.model_fields}),
        num_prompt_tokens=result.num_prompt_tokens,
        steps_judged=result.counts.steps_judged,
        steps_accepted=result.counts.steps_accepted,
        token_drafted=result.counts.token_drafted,
        token_accepted=result.counts.token_accepted,
        target_passes=result.counts.target_passes,
        steps=[_step_record(step, with_text=False) for step in result.steps],
    )


def _make_trace(job: Job, result: Result) -> Trace:
    return Trace(
        problem=job.problem.id,
        policy=job.policy,
        repeat=job.repeat,
        question=job.problem.question,
        steps=[_step_record(step, with_text=True) for step in result.steps],
        answer=result.answer,
    )


def _output_hash(result: Result) -> str:
    output = f"{result.reasoning}\0{result.answer}"
    # Replaced, because a model may stop in the middle of a character that two surrogates would make up.
    return hashlib.sha256(output.encode(errors="replace")).hexdigest()


def _step_record(step: Step, *, with_text: bool) -> StepRecord:
    return StepRecord(
        origin=step.origin,
        num_tokens=step.num_tokens,
        num_from_draft=step.num_from_draft,
        scores=dict(step.scores),
        text=step.text if with_text else None,
    )
