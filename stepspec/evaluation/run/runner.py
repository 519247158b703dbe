"""Runs the jobs of a run on the models, and passes on what became of each."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol, cast

from stepspec.engines.protocol import Sampling
from stepspec.errors import ContextError, EngineError
from stepspec.evaluation.grade import Grade, Grading
from stepspec.evaluation.machine import Processors
from stepspec.evaluation.records import (
    Block,
    Failure,
    JudgedStepRecord,
    ResultRow,
    RunRecord,
    StepRecord,
    TimeRecord,
    TokenRecord,
    Trace,
)
from stepspec.evaluation.run.gauges import Gauges
from stepspec.evaluation.run.schedule import Job, JobBlock, Round, seed_of
from stepspec.evaluation.runs import output_sha256
from stepspec.loop.result import Result
from stepspec.loop.step import JudgedStep, Step

WARM_UP_QUESTION = "Ann has 3 apples. Ben has 4 more apples than Ann. How many apples does Ben have?"
WARM_UP_MAX_TOKENS = 128
BATCH_WARM_UP_MAX_TOKENS = 16
"""For each request after the first one: a batch only has to have been there."""
SHOWN_EVERY_S = 1.0


class System(Protocol):
    """Answers questions under one policy: `stepspec.api.session.StepSpec`, or a scripted system in tests."""

    async def generate(
        self, question: str, *, prompt: str = ..., sampling: Sampling = ..., max_tokens: int = ...
    ) -> Result: ...

    async def forget(self) -> None:
        """Clear what the engines cache of ended requests, independent of the policy."""
        ...


class Receiver(Protocol):
    """Takes what became of jobs, in the order in which it happens: `stepspec.evaluation.run.results.Results`."""

    def answered(self, policy: str) -> None:
        """A request under the policy succeeded. Its row follows when it is graded."""
        ...

    def add(self, row: ResultRow, trace: Trace | None) -> None: ...

    def refuse(self, failure: Failure) -> None:
        """A request failed because of its problem. The engine still works."""
        ...

    def fail(self, failure: Failure) -> None:
        """A request failed.

        Raises:
            EngineError: so many failed in a row that the engine is at fault.
        """
        ...

    def add_block(self, block: Block) -> None: ...

    def say(self, words: str) -> None:
        """Show what runs now."""
        ...


@dataclass(frozen=True)
class Runner:
    """Runs jobs of a run.

    Attributes:
        run: the conditions; its policies are the keys of `systems`.
        systems: the system that answers under each policy.
        grading: grades the answers; the caller closes it.
        ask: turns a question into the full request text; with None, the systems do so by `run.prompt_id`.
        traces: whether to pass on the text of every step.
        gauges: counters to read before and after every block.
    """

    run: RunRecord
    systems: Mapping[str, System]
    grading: Grading
    ask: Callable[[str], str] | None
    traces: bool
    gauges: Gauges

    async def run_all(self, rounds: Sequence[Round], receiver: Receiver) -> None:
        """Run rounds, one block after the other.

        Raises:
            EngineError: an engine failed several times in a row.
        """
        blocks = [block for each in rounds for block in each]
        await self.warm_up(blocks, receiver)
        for block in blocks:
            await self.run_block(block, receiver)

    async def warm_up(self, blocks: Sequence[JobBlock], receiver: Receiver) -> None:
        """Send warm-up requests under each policy, so that no recorded request is the first of its kind.

        As many run concurrently as in the largest block, all but one of them briefly.
        """
        policies = {job.policy for block in blocks for job in block}
        num_requests = min(self.run.concurrency, max(map(len, blocks), default=0))
        limits = [WARM_UP_MAX_TOKENS, *[BATCH_WARM_UP_MAX_TOKENS] * (num_requests - 1)]
        for policy in [name for name in self.run.policies if name in policies]:
            with self._shown(f"warm-up of {policy}", receiver):
                await _run_concurrently(
                    [self._generate(policy, WARM_UP_QUESTION, 0, min(self.run.max_tokens, each)) for each in limits]
                )

    @contextmanager
    def _shown(self, what: str, receiver: Receiver) -> Generator[None]:
        """Say every second what runs in the block, and how many tokens the models have written in it."""
        before = self.gauges.read()

        async def show() -> None:
            while True:
                num_tokens = sum(each.generated_tokens for each in (self.gauges.usage_since(before) or {}).values())
                receiver.say(f"{what}, {num_tokens:,} tokens" if num_tokens else what)
                await asyncio.sleep(SHOWN_EVERY_S)

        task = asyncio.create_task(show())
        try:
            yield
        finally:
            task.cancel()

    async def run_block(self, block: JobBlock, receiver: Receiver) -> None:
        """Run jobs of one policy, `concurrency` at a time, and pass on the measurements that cover all of them.

        The engines' caches are cleared before the block, so that an earlier policy's work cannot help this one. Within
        the block they are kept, as in production.

        Answers are graded while the next requests run. After the last request the clock stops, so grading time counts
        for no policy.
        """
        await self.systems[block[0].policy].forget()
        waiting = iter(block)
        storing: list[asyncio.Task[ResultRow]] = []

        async def work() -> None:
            for job in waiting:
                result = await self._answer(job, receiver)
                if result is not None:
                    storing.append(asyncio.create_task(self._store(job, result, receiver)))

        before, processors, started = self.gauges.read(), Processors.read(), time.perf_counter()
        try:
            with self._shown(block[0].policy, receiver):
                await _run_concurrently([work() for _ in range(min(self.run.concurrency, len(block)))])
            wall_s, now, processors_now = time.perf_counter() - started, self.gauges.read(), Processors.read()
        finally:
            if storing:  # keep answered requests even if others failed, and leave no task behind
                await asyncio.wait(storing)
            rows = [task.result() for task in storing]
        if rows:
            receiver.add_block(
                Block(
                    policy=rows[0].policy,
                    jobs=[(row.problem, row.repeat) for row in rows],
                    wall_s=wall_s,
                    committed_tokens=sum(row.tokens.committed for row in rows),
                    usage=self.gauges.usage_since(before, now),
                    cpu_s=processors_now.own_since(processors),
                    others_share=processors_now.others_since(processors, wall_s),
                    load=processors_now.load,
                )
            )

    async def _answer(self, job: Job, receiver: Receiver) -> Result | None:
        """Return the result of a job; None if the request ended in an error."""
        question = self.ask(job.problem.question) if self.ask else job.problem.question
        seed = seed_of(self.run.seed, job.problem.id, job.repeat)
        try:
            result = await self._generate(job.policy, question, seed, self.run.max_tokens)
        except ContextError as error:  # the problem is at fault, and the engine still works
            receiver.refuse(_failure(job, error))
            return None
        except EngineError as error:
            receiver.fail(_failure(job, error))
            return None
        receiver.answered(job.policy)
        result.counts.check(self.run.max_tokens)
        return result

    async def _store(self, job: Job, result: Result, receiver: Receiver) -> ResultRow:
        cut_short = result.finish_reason == "length"
        # Run in a thread, because grading an answer can take seconds.
        grade = await asyncio.to_thread(self.grading.grade, result.answer, job.problem.gold, cut_short=cut_short)
        row = make_row(self.run, job, result, grade)
        receiver.add(row, _make_trace(job, result) if self.traces else None)
        return row

    async def _generate(self, policy: str, question: str, seed: int, max_tokens: int) -> Result:
        sampling = Sampling(temperature=self.run.temperature, top_p=self.run.top_p, seed=seed)
        prompt = "bare" if self.ask else self.run.prompt_id
        result = await self.systems[policy].generate(question, prompt=prompt, sampling=sampling, max_tokens=max_tokens)
        return _replace_surrogates(result)


def _failure(job: Job, error: Exception) -> Failure:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    words, too_long = str(error), isinstance(error, ContextError)
    return Failure(problem=job.problem.id, policy=job.policy, repeat=job.repeat, error=words, at=now, too_long=too_long)


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
    times["queue"] += times["engine_wait"]
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
        longest_gap_s=result.times.longest_gap,
        tokens=TokenRecord(**{name: counts[name] for name in TokenRecord.model_fields}),
        time_s=TimeRecord(**{name: times[name] for name in TimeRecord.model_fields}),
        num_prompt_tokens=result.num_prompt_tokens,
        steps_proposed=result.counts.steps_proposed,
        not_proposed=result.not_proposed,
        steps_judged=result.counts.steps_judged,
        steps_accepted=result.counts.steps_accepted,
        token_drafted=result.counts.token_drafted,
        token_accepted=result.counts.token_accepted,
        relaxed_tokens=result.counts.relaxed_tokens,
        first_relaxed=result.first_relaxed,
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
