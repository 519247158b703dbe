"""Evaluations with scripted systems: problems, conditions and answers that tests work out by hand."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepspec.engines.protocol import Sampling
from stepspec.evaluation.grade import GraderKind, Grading
from stepspec.evaluation.records import PolicyRecord, ResultRow, RunRecord, Summary
from stepspec.evaluation.run import Keeping, System, evaluate
from stepspec.evaluation.run.problems import EvalProblem
from stepspec.evaluation.run.runner import WARM_UP_QUESTION
from stepspec.loop.counts import Counts, Times
from stepspec.loop.policy import PolicyKind
from stepspec.loop.result import Result
from stepspec.loop.step import Step

POLICIES = ("target", "token", "two-level")
KINDS: Mapping[str, PolicyKind] = {"target": "target", "token": "token"}
Answer = Callable[[str, str], Result]
"""A function of policy and question that returns the result or raises."""


class Script:
    """Systems for several policies that answer with one function and record all requests."""

    def __init__(self, answer: Answer, policies: Sequence[str] = POLICIES) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []
        self.samplings: list[Sampling] = []
        self.most_at_once = 0
        self.policies_at_once: set[frozenset[str]] = set()
        self.since_forgetting: list[int] = []
        """Number of requests since each time that the engines forgot."""
        self._running: list[str] = []
        self.systems: dict[str, System] = {policy: _Scripted(self, policy) for policy in policies}

    @property
    def recorded(self) -> list[tuple[str, str]]:
        """Policy and question of each request, without the warm-up."""
        return [(policy, question) for policy, question in self.asked if question != WARM_UP_QUESTION]

    async def play(self, policy: str, question: str, sampling: Sampling) -> Result:
        """Answer one request, after a short wait that lets concurrent requests overlap."""
        self.asked.append((policy, question))
        if self.since_forgetting:
            self.since_forgetting[-1] += 1
        self.samplings.append(sampling)
        self._running.append(policy)
        self.most_at_once = max(self.most_at_once, len(self._running))
        self.policies_at_once.add(frozenset(self._running))
        try:
            await asyncio.sleep(0.001)
            return self.answer(policy, question)
        finally:
            self._running.remove(policy)


class _Scripted:
    def __init__(self, script: Script, policy: str) -> None:
        self._script = script
        self._policy = policy

    async def generate(
        self, question: str, *, prompt: str = "bare", sampling: Sampling | None = None, max_tokens: int = 1024
    ) -> Result:
        return await self._script.play(self._policy, question, sampling or Sampling())

    async def forget(self) -> None:
        self._script.since_forgetting.append(0)


def make_problems(n: int) -> list[EvalProblem]:
    """Return problems `p0`, `p1`, ... whose answers are their numbers."""
    return [EvalProblem(f"p{index}", f"What is {index}?", str(index), level=2) for index in range(n)]


def make_run(
    problems: Sequence[EvalProblem],
    policies: Sequence[str] = POLICIES,
    *,
    concurrency: int = 1,
    num_repeats: int = 1,
    grader: GraderKind = "integer",
) -> RunRecord:
    """Return the conditions of a run, without facts about the machine."""
    return RunRecord(
        benchmark="scripted",
        data_sha256="0" * 64,
        num_problems=len(problems),
        prompt_id="bare",
        prompt_version="0",
        policies={
            policy: PolicyRecord(text=policy, sha256=policy, kind=KINDS.get(policy, "step")) for policy in policies
        },
        engines={"target": None, "draft": None},
        pair="pair",
        temperature=0.0,
        top_p=1.0,
        max_tokens=64,
        seed=7,
        concurrency=concurrency,
        grader=grader,
        num_repeats=num_repeats,
        versions={"python": "3"},
        commit=None,
        hardware={},
        started="2000-01-01T00:00:00+00:00",
    )


def make_result(answer: str, wall_s: float = 1.0, *, judged: int = 0, accepted: int = 0) -> Result:
    """Return a result of ten tokens, plus four per judged step, with counts and times that add up."""
    step = Step(0, "draft", "One.\n\n", 4, 4, "delimiter", {"rating": 7.0})
    regenerated = 4 * (judged - accepted)
    counts = Counts(
        accepted=4 * accepted,
        regenerated=regenerated,
        forced=10,
        drafted=4 * judged,
        rejected=regenerated,
        committed=4 * judged + 10,
        generated=regenerated + 10,
        steps=judged,
        steps_proposed=judged,
        steps_judged=judged,
        steps_accepted=accepted,
        target_passes=10,
    )
    times = Times(judge=wall_s / 4, target=wall_s * 3 / 4, wall=wall_s)
    return Result("One.\n\n" * accepted, answer, (step,) * accepted, counts, times, "stop", 5)


def answer_right(policy: str, question: str) -> Result:
    """Return the right answer to a question of `make_problems`; `two-level` is twice as fast."""
    number = question.removeprefix("What is ").removesuffix("?")
    fast = policy == "two-level"
    return make_result(f"\\boxed{{{number}}}", 0.5 if fast else 1.0, judged=2 * fast, accepted=int(fast))


def play(
    folder: Path, script: Script, problems: Sequence[EvalProblem], run: RunRecord | None = None, **keeping: Any
) -> Summary:
    """Run the unfinished rows; `keeping` holds options of `Keeping`."""
    record = run or make_run(problems)
    with Grading(record.grader) as grading:
        storage = Keeping(folder, **keeping)
        return asyncio.run(evaluate(record, problems, script.systems, storage, grading=grading))


def rows_of(folder: Path) -> list[ResultRow]:
    lines = (folder / "rows.jsonl").read_text("utf-8").split("\n")
    assert lines.pop() == ""
    return [ResultRow.model_validate_json(line) for line in lines]
