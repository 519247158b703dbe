"""Runs a benchmark under several policies and stores every row as soon as it is finished."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, cast

from stepspec.engines.protocol import Sampling
from stepspec.errors import ContextError, EngineError
from stepspec.evaluation.grade import Grade, Grading
from stepspec.evaluation.records import (
    Block,
    Failure,
    JudgedStepRecord,
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
from stepspec.loop.step import JudgedStep, Result, Step

WARM_UP_QUESTION = "Ann has 3 apples. Ben has 4 more apples than Ann. How many apples does Ben have?"
WARM_UP_MAX_TOKENS = 128

MAX_FAILURES_IN_A_ROW = 5
"""After this many failures the engine is at fault, not a problem, and the run stops."""

OnRow = Callable[[ResultRow | None, int, int], None]
"""Callback. Args: the row just finished (None at the start or after a failure), number of done rows, total rows."""


class System(Protocol):
    """Answers questions under one policy: `stepspec.api.session.StepSpec`, or a scripted system in tests."""

    async def generate(
        self, question: str, *, prompt: str = ..., sampling: Sampling = ..., max_tokens: int = ...
    ) -> Result: ...

    async def forget(self) -> None:
        """Clear what the engines cache of ended requests, independent of the policy."""
        ...


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
    """Run the unfinished jobs of this part, then write and return the summary of the whole folder.

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
    with RunFolder(keeping.folder, keeping.part) as folder:
        folder.begin(run)
        done = {row.key for row in folder.rows()}
        if not keeping.retry_errors:
            done |= {failure.key for failure in folder.failures()}
        own_problems = keeping.part.of(problems)
        policies = [name for name in run.policies if only is None or name in only]
        blocks = list(schedule(own_problems, policies, run.concurrency, run.num_repeats))
        remaining = [[job for job in block if job.key not in done] for block in blocks]
        num_jobs = sum(map(len, blocks))
        progress = _Progress(on_row, num_jobs - sum(map(len, remaining)), num_jobs)
        traces = keeping.traces or keeping.record
        runner = _Runner(run, systems, folder, grading, ask, traces, gauges or Gauges(), progress)
        await runner.warm_up({job.policy for block in remaining for job in block}, max(map(len, remaining), default=0))
        for block in remaining:
            await runner.run_block(block)
        runner.note_failures()
        summary = summarise(run, folder.rows(), folder.blocks(), folder.failures())
        folder.finish(summary)
    return summary


class _Progress:
    def __init__(self, on_row: OnRow | None, num_done: int, num_rows: int) -> None:
        self._on_row = on_row
        self._num_done = num_done
        self._num_rows = num_rows
        self._report(None)

    def add(self, row: ResultRow | None) -> None:
        self._num_done += 1
        self._report(row)

    def _report(self, row: ResultRow | None) -> None:
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
        # By policy, since its last success. They are stored only once the engine answers again: if the engine is
        # down, the failures are not the problems' own.
        self._failures: dict[str, list[Failure]] = {policy: [] for policy in self.run.policies}

    async def warm_up(self, policies: set[str], num_jobs: int) -> None:
        """Send warm-up requests under each policy, so that no recorded request is the first of its kind.

        As many run concurrently as in a block of `num_jobs` jobs.
        """
        limit = min(self.run.max_tokens, WARM_UP_MAX_TOKENS)
        num_requests = min(self.run.concurrency, num_jobs)
        for policy in [name for name in self.run.policies if name in policies]:
            await _run_concurrently([self._generate(policy, WARM_UP_QUESTION, 0, limit) for _ in range(num_requests)])

    async def run_block(self, block: Sequence[Job]) -> None:
        """Run jobs of one policy, `concurrency` at a time, and store the measurements that cover all of them.

        The engines' caches are cleared before the block, so that an earlier policy's work cannot help this one. Within
        the block they are kept, as in production.

        Answers are graded while the next requests run. After the last request the clock stops, so grading time counts
        for no policy.
        """
        if not block:
            return
        await self.systems[block[0].policy].forget()
        waiting = iter(block)
        storing: list[asyncio.Task[ResultRow]] = []

        async def work() -> None:
            for job in waiting:
                result = await self._answer(job)
                if result is not None:
                    storing.append(asyncio.create_task(self._store(job, result)))

        before, started = self.gauges.read(), time.perf_counter()
        try:
            await _run_concurrently([work() for _ in range(min(self.run.concurrency, len(block)))])
            wall_s, now = time.perf_counter() - started, self.gauges.read()
        finally:
            rows = await asyncio.gather(*storing)  # store answered requests even if others failed
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

    async def _answer(self, job: Job) -> Result | None:
        """Return the result of a job; None if the request ended in an error."""
        question = self.ask(job.problem.question) if self.ask else job.problem.question
        seed = seed_of(self.run.seed, job.problem.id, job.repeat)
        try:
            result = await self._generate(job.policy, question, seed, self.run.max_tokens)
        except ContextError as error:  # the problem is at fault, and the engine still works
            self._store_failure(_failure(job, error))
            return None
        except EngineError as error:
            self._failed(_failure(job, error), error)
            return None
        self._note_failures(job.policy)
        result.counts.check(self.run.max_tokens)
        return result

    async def _store(self, job: Job, result: Result) -> ResultRow:
        cut_short = result.finish_reason == "length"
        # Run in a thread, because grading an answer can take seconds.
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
                f"{MAX_FAILURES_IN_A_ROW} requests in a row failed under {failure.policy}. The last error: {error}"
            ) from error

    def note_failures(self) -> None:
        """Store the failures at the end of the run, which were too few to blame an engine."""
        for policy in self._failures:
            self._note_failures(policy)

    def _note_failures(self, policy: str) -> None:
        """Store a policy's failures so far: the engine answers again, so the problems were at fault."""
        failures = self._failures[policy]
        while failures:
            self._store_failure(failures.pop(0))

    def _store_failure(self, failure: Failure) -> None:
        self.folder.add_failure(failure)
        self.progress.add(None)

    async def _generate(self, policy: str, question: str, seed: int, max_tokens: int) -> Result:
        sampling = Sampling(temperature=self.run.temperature, top_p=self.run.top_p, seed=seed)
        prompt = "bare" if self.ask else self.run.prompt_id
        result = await self.systems[policy].generate(question, prompt=prompt, sampling=sampling, max_tokens=max_tokens)
        return _replace_surrogates(result)


def _failure(job: Job, error: Exception) -> Failure:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Failure(problem=job.problem.id, policy=job.policy, repeat=job.repeat, error=str(error), at=now)


def _replace_surrogates(result: Result) -> Result:
    """Return the result without lone surrogates, which a model may end on and which no file can store."""
    return replace(
        result,
        reasoning=_encodable(result.reasoning),
        answer=_encodable(result.answer),
        steps=tuple(replace(step, text=_encodable(step.text)) for step in result.steps),
    )


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


async def _run_concurrently(coroutines: Sequence[Coroutine[None, None, object]]) -> None:
    """Run all coroutines concurrently. The first error cancels the others and is raised itself, not in a group."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_row(run: RunRecord, job: Job, result: Result, grade: Grade) -> ResultRow:
    """Return the row of a finished job."""
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
        reached=list(result.times.reached),
    )


def _make_trace(job: Job, result: Result) -> Trace:
    return Trace(
        problem=job.problem.id,
        policy=job.policy,
        repeat=job.repeat,
        question=job.problem.question,
        steps=[_step_record(step, with_text=True) for step in result.steps],
        answer=result.answer,
        judged_steps=[_judged_step_record(step) for step in result.judged_steps],
    )


def _judged_step_record(step: JudgedStep) -> JudgedStepRecord:
    return JudgedStepRecord.model_validate({name: _rounded(value) for name, value in asdict(step).items()})


def _rounded(value: Any) -> Any:
    """Return log-probabilities and the like as a list with six decimals, which is enough; None if one is infinite."""
    if isinstance(value, tuple):
        numbers = cast("tuple[float, ...]", value)
        return [round(each, 6) for each in numbers] if all(map(math.isfinite, numbers)) else None
    return _encodable(value) if isinstance(value, str) else value


def _step_record(step: Step, *, with_text: bool) -> StepRecord:
    return StepRecord(
        origin=step.origin,
        num_tokens=step.num_tokens,
        num_from_draft=step.num_from_draft,
        scores=dict(step.scores),
        text=step.text if with_text else None,
    )
