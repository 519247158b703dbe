"""Runs a benchmark under several policies and keeps every row as soon as it is finished."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from stepspec.engines.protocol import Sampling
from stepspec.errors import ContextError, EngineError
from stepspec.evaluation.grade import Grade, Grading
from stepspec.evaluation.records import (
    Block,
    Failure,
    ResultRow,
    RunRecord,
    StepRecord,
    Summary,
    TimeRecord,
    TokenRecord,
    Trace,
)
from stepspec.evaluation.running.folder import RunFolder
from stepspec.evaluation.running.gauges import Gauges
from stepspec.evaluation.running.problems import EvalProblem
from stepspec.evaluation.running.schedule import WHOLE, Job, Part, schedule, seed_of
from stepspec.evaluation.running.summary import summarise
from stepspec.evaluation.runs import output_sha256
from stepspec.loop.step import Result, Step

WARM_UP_QUESTION = "Ann has 3 apples. Ben has 4 more apples than Ann. How many apples does Ben have?"
WARM_UP_MAX_TOKENS = 128

MAX_FAILURES_IN_A_ROW = 5
"""With so many the fault is the engine's and not a problem's, and the run stops."""

OnRow = Callable[[ResultRow | None, int, int], None]
"""Called with the row just finished (None at the start), the number of finished rows, and of all rows."""


class System(Protocol):
    """What answers questions under one policy: `stepspec.api.session.StepSpec`, or a script in tests."""

    async def generate(
        self, question: str, *, prompt: str = ..., sampling: Sampling = ..., max_tokens: int = ...
    ) -> Result: ...

    async def forget(self) -> None:
        """Drops what the engines keep of requests that have ended, whatever the policy."""
        ...


@dataclass(frozen=True)
class Keeping:
    """How a run is kept and what of it is done here."""

    folder: Path
    part: Part = WHOLE
    traces: bool = False
    retry_errors: bool = False
    """Whether requests that ended in an error are made again."""


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
) -> Summary:
    """Runs what is not finished yet of this part, and summarises all that is in the folder.

    Args:
        run: the conditions; its policies are those of `systems`.
        problems: all of the run, of which the part takes its own.
        systems: what answers, by policy.
        keeping: where, and how much.
        grading: what grades answers; the caller closes it.
        ask: puts a question into the words of the whole request; None has the systems do that by `run.prompt_id`.
        gauges: what is read before and after every block.
        on_row: told of every row.

    Raises:
        UsageError: the folder holds something else, or another run.
        StepSpecError: the disk failed, or an engine did several times in a row; finished rows are kept.
    """
    assert set(systems) == set(run.policies), (systems, run.policies)
    with RunFolder(keeping.folder, keeping.part) as kept:
        kept.begin(run)
        done = {row.key for row in kept.rows()}
        if not keeping.retry_errors:
            done |= {failure.key for failure in kept.failures()}
        mine = keeping.part.of(problems)
        blocks = list(schedule(mine, list(run.policies), run.concurrency, run.num_repeats))
        remaining = [[job for job in block if job.key not in done] for block in blocks]
        num_jobs = sum(map(len, blocks))
        progress = _Progress(on_row, num_jobs - sum(map(len, remaining)), num_jobs)
        runner = _Runner(run, systems, kept, grading, ask, keeping.traces, gauges or Gauges(), progress)
        await runner.warm_up({job.policy for block in remaining for job in block}, max(map(len, remaining), default=0))
        for block in remaining:
            await runner.run_block(block)
        runner.note_failures()
        summary = summarise(run, kept.rows(), kept.blocks(), kept.failures())
        kept.finish(summary)
    return summary


class _Progress:
    def __init__(self, on_row: OnRow | None, num_done: int, num_rows: int) -> None:
        self._on_row = on_row
        self._num_done = num_done
        self._num_rows = num_rows
        self._tell(None)

    def add(self, row: ResultRow | None) -> None:
        self._num_done += 1
        self._tell(row)

    def _tell(self, row: ResultRow | None) -> None:
        if self._on_row is not None:
            self._on_row(row, self._num_done, self._num_rows)


@dataclass
class _Runner:
    run: RunRecord
    systems: Mapping[str, System]
    folder: RunFolder
    grading: Grading
    ask: Callable[[str], str] | None
    traces: bool
    gauges: Gauges
    progress: _Progress

    def __post_init__(self) -> None:
        # By policy, since its last success: an engine that is gone is no problem's failure.
        self._failures: dict[str, list[Failure]] = {policy: [] for policy in self.run.policies}

    async def warm_up(self, policies: set[str], num_jobs: int) -> None:
        """As many requests at once as in the run, so that no recorded one is the first of its kind: those of a block
        of that many jobs."""
        limit = min(self.run.max_tokens, WARM_UP_MAX_TOKENS)
        num_requests = min(self.run.concurrency, num_jobs)
        for policy in [name for name in self.run.policies if name in policies]:
            await _together([self._generate(policy, WARM_UP_QUESTION, 0, limit) for _ in range(num_requests)])

    async def run_block(self, block: Sequence[Job]) -> None:
        """Runs jobs of one policy, `concurrency` at a time, and keeps what was measured of all of them.

        Before it the engines forget, so that nothing an earlier policy did helps this one. Within it they carry
        everything on, as in production.

        Answers are graded beside the next requests, and after the last one the clock has stopped: a grader's time is
        no policy's.
        """
        if not block:
            return
        await self.systems[block[0].policy].forget()
        waiting = iter(block)
        keeping: list[asyncio.Task[ResultRow]] = []

        async def work() -> None:
            for job in waiting:
                result = await self._answered(job)
                if result is not None:
                    keeping.append(asyncio.create_task(self._keep(job, result)))

        before, started = self.gauges.read(), time.perf_counter()
        try:
            await _together([work() for _ in range(min(self.run.concurrency, len(block)))])
            wall_s, now = time.perf_counter() - started, self.gauges.read()
        finally:
            rows = await asyncio.gather(*keeping)  # what is answered is kept, whatever happened to the others
        if rows:
            self.folder.add_block(
                Block(
                    policy=rows[0].policy,
                    jobs=[(row.problem, row.repeat) for row in rows],
                    wall_s=wall_s,
                    committed_tokens=sum(row.tokens.committed for row in rows),
                    joules=self.gauges.joules_since(before, now),
                    usage=self.gauges.usage_since(before, now),
                )
            )

    async def _answered(self, job: Job) -> Result | None:
        """None if the request ended in an error."""
        question = self.ask(job.problem.question) if self.ask else job.problem.question
        seed = seed_of(self.run.seed, job.problem.id, job.repeat)
        try:
            result = await self._generate(job.policy, question, seed, self.run.max_tokens)
        except ContextError as error:  # the problem's own fault, at which the engine is well
            self._keep_failure(_failure(job, error))
            return None
        except EngineError as error:
            self._failed(_failure(job, error), error)
            return None
        self._note_failures(job.policy)
        result.counts.check(self.run.max_tokens)
        return result

    async def _keep(self, job: Job, result: Result) -> ResultRow:
        cut_short = result.finish_reason == "length"
        # In a thread, since a worker may take seconds over what a model wrote.
        grade = await asyncio.to_thread(self.grading.grade, result.answer, job.problem.gold, cut_short=cut_short)
        row = make_row(self.run, job, result, grade)
        self.folder.add(row, _make_trace(job, result) if self.traces else None)
        self.progress.add(row)
        return row

    def _failed(self, failure: Failure, error: EngineError) -> None:
        in_a_row = self._failures[failure.policy]
        in_a_row.append(failure)
        if len(in_a_row) >= MAX_FAILURES_IN_A_ROW:
            raise EngineError(
                f"{MAX_FAILURES_IN_A_ROW} requests in a row under {failure.policy} failed, the last of them so: {error}"
            ) from error

    def note_failures(self) -> None:
        """Keeps the failures of the end of the run, which were too few to be an engine's."""
        for policy in self._failures:
            self._note_failures(policy)

    def _note_failures(self, policy: str) -> None:
        """Keeps a policy's failures so far: an engine that answers again has shown that they were the problems' own."""
        failures = self._failures[policy]
        while failures:
            self._keep_failure(failures.pop(0))

    def _keep_failure(self, failure: Failure) -> None:
        self.folder.add_failure(failure)
        self.progress.add(None)

    async def _generate(self, policy: str, question: str, seed: int, max_tokens: int) -> Result:
        sampling = Sampling(temperature=self.run.temperature, top_p=self.run.top_p, seed=seed)
        prompt = "bare" if self.ask else self.run.prompt_id
        result = await self.systems[policy].generate(question, prompt=prompt, sampling=sampling, max_tokens=max_tokens)
        return _without_halves(result)


def _failure(job: Job, error: Exception) -> Failure:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Failure(problem=job.problem.id, policy=job.policy, repeat=job.repeat, error=str(error), at=now)


def _without_halves(result: Result) -> Result:
    """The result, without the half characters that a model may stop at and that no file takes."""
    return replace(
        result,
        reasoning=_whole(result.reasoning),
        answer=_whole(result.answer),
        steps=tuple(replace(step, text=_whole(step.text)) for step in result.steps),
    )


def _whole(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


async def _together(coroutines: Sequence[Coroutine[None, None, object]]) -> None:
    """Runs all at once; the first error ends the others and is raised as it is, not in a group."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_row(run: RunRecord, job: Job, result: Result, grade: Grade) -> ResultRow:
    """The row of a finished job."""
    counts, times = asdict(result.counts), asdict(result.times)
    return ResultRow(
        problem=job.problem.id,
        policy=job.policy,
        repeat=job.repeat,
        prompt_id=run.prompt_id,
        prompt_version=run.prompt_version,
        level=job.problem.level,
        subject=job.problem.subject,
        status=grade.status,
        answer=grade.answer,
        gold=job.problem.gold,
        found_by=grade.found_by,
        decided_by=grade.decided_by,
        why=grade.why,
        finish_reason=result.finish_reason,
        output_sha256=output_sha256(result.reasoning, result.answer),
        wall_s=result.times.wall,
        first_step_s=result.times.first_step,
        first_answer_s=result.times.first_answer,
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


def _step_record(step: Step, *, with_text: bool) -> StepRecord:
    return StepRecord(
        origin=step.origin,
        num_tokens=step.num_tokens,
        num_from_draft=step.num_from_draft,
        scores=dict(step.scores),
        text=step.text if with_text else None,
    )
