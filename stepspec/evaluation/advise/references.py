"""Grades answers without right answers: checks whether a policy's answer agrees with the target's own answer.

The target first answers every prompt once with another seed. Above temperature 0, the target alone does not always
agree with that answer either. A policy's share of agreement is compared with the target's share.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from stepspec.api.models import Pair
from stepspec.api.session import StepSpec
from stepspec.engines.protocol import Sampling, side_by_side
from stepspec.errors import ContextError, UsageError
from stepspec.evaluation.benchmark import GraderKind
from stepspec.evaluation.grade import Grade, Grading
from stepspec.evaluation.grade.answer import find_answer
from stepspec.evaluation.run import EvalProblem, Executor, System
from stepspec.evaluation.run.schedule import seed_of
from stepspec.loop.policy import Policy

# Answers that are found are stripped, so no answer can be confused with these markers, which begin with a space.
WHOLE_TEXT = " sha256:"
"""Prefix of the reference for a text without a box, answer phrase or number: the hash of the whole text follows."""

NO_ANSWER = " none"
"""Reference for an answer that is empty or was cut short, or whose prompt did not fit the context."""


PROMPTS_PER_CALL = 4
"""Prompts that the target is asked between two reports of progress, over concurrent requests."""


class Agreement(Grading):
    """Compares texts with references: by the answer found in both texts, else by the whole texts."""

    def __init__(self, grader: GraderKind = "math", *, last_number: bool = True) -> None:
        super().__init__(grader, last_number=last_number)
        self._last_number = last_number

    def reference(self, text: str, *, cut_short: bool) -> str:
        """Return the reference that later answers are compared with."""
        if cut_short or not text.strip():
            return NO_ANSWER
        found = find_answer(text, numbers=self._last_number, cut_short=False)
        if found is not None and not found.denied:
            try:
                return self.check_gold(found.text)
            except UsageError:  # too long to be an answer, or nothing but marks
                pass
        return _text_hash(text)

    def grade(self, text: str, gold: str, *, cut_short: bool = False) -> Grade:
        """Grade a text against a reference: `correct` if it agrees."""
        if gold == NO_ANSWER or cut_short or not text.strip():
            return Grade("no_answer", why="The answer or the target's own was cut short, or there is none.")
        if not gold.startswith(WHOLE_TEXT):
            return super().grade(text, gold, cut_short=cut_short)
        text_hash = _text_hash(text)
        if text_hash == gold:
            return Grade("correct", text_hash, None, "text")
        return Grade("incorrect", text_hash, None, "text", "The text is another than the target's own.")


def _text_hash(text: str) -> str:
    """Return a hash that is the same for texts that differ only in case or whitespace."""
    return WHOLE_TEXT + hashlib.sha256(" ".join(text.casefold().split()).encode(errors="replace")).hexdigest()[:16]


async def ask_target(
    executor: Executor,
    policy: Policy,
    problems: Sequence[EvalProblem],
    agreement: Agreement,
    sampling: Sampling,
    max_tokens: int,
    concurrency: int,
    on_done: Callable[[int], None],
) -> Mapping[str, str]:
    """Return the references that answers are compared with, by prompt.

    Args:
        executor: runs the target.
        policy: the baseline.
        problems: the prompts.
        agreement: finds what is compared in a text.
        sampling: its seed is not used itself, but one that follows from it.
        max_tokens: limit for an answer.
        concurrency: number of requests that a worker runs concurrently.
        on_done: called with the number of finished prompts.

    Raises:
        EngineError: the engine failed.
    """
    waiting = iter(problems)
    references: dict[str, str] = {}

    async def work() -> None:
        while found := list(islice(waiting, concurrency * PROMPTS_PER_CALL)):
            ask = partial(_texts, policy, found, sampling, max_tokens, concurrency)
            for problem, (text, cut_short) in zip(found, await executor.call(ask), strict=True):
                references[problem.id] = agreement.reference(text, cut_short=cut_short)
            on_done(len(references))

    await side_by_side(*(work() for _ in range(executor.num_workers)))
    return {problem.id: references[problem.id] for problem in problems}


async def _texts(
    policy: Policy, problems: Sequence[EvalProblem], sampling: Sampling, max_tokens: int, concurrency: int, pair: Pair
) -> list[tuple[str, bool]]:
    return await texts_of(StepSpec(policy=policy, pair=pair), problems, sampling, max_tokens, concurrency)


async def texts_of(
    target: System, problems: Sequence[EvalProblem], sampling: Sampling, max_tokens: int, concurrency: int
) -> list[tuple[str, bool]]:
    """Return the target's answer to each prompt, empty if it does not fit, and whether it was cut short.

    Raises:
        EngineError: the engine failed.
    """
    slots = asyncio.Semaphore(concurrency)

    async def text_of(problem: EvalProblem) -> tuple[str, bool]:
        own = replace(sampling, seed=seed_of(sampling.seed + 1, problem.id, 0))
        async with slots:
            try:
                result = await target.generate(problem.question, prompt="bare", sampling=own, max_tokens=max_tokens)
            except ContextError:
                return "", True
        return result.answer, result.finish_reason == "length"

    return await side_by_side(*map(text_of, problems))
