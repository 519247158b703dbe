"""Grades answers without right answers: checks whether a policy's answer agrees with the target's own answer.

The target first answers every prompt once with another seed. Above temperature 0, the target alone does not always
agree with that answer either. A policy's share of agreement is compared with the target's share.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stepspec.engines.protocol import Sampling, side_by_side
from stepspec.errors import ContextError, UsageError
from stepspec.evaluation.benchmark import GraderKind
from stepspec.evaluation.grade import Grade, Grading
from stepspec.evaluation.grade.finding import find_answer
from stepspec.evaluation.running import EvalProblem
from stepspec.evaluation.running.runner import System
from stepspec.evaluation.running.schedule import seed_of

# Answers that are found are stripped, so no answer can be confused with these markers, which begin with a space.
WHOLE_TEXT = " sha256:"
"""Prefix of the reference for a text without a box, answer phrase or number: the hash of the whole text follows."""

NO_ANSWER = " none"
"""Reference for an answer that is empty or was cut short, or whose prompt did not fit the context."""


class Agreement(Grading):
    """Compares texts with references: by the answer found in both texts, else by the whole texts."""

    def __init__(self, grader: GraderKind = "math", *, last_number: bool = True) -> None:
        super().__init__(grader, last_number=last_number)
        self._last_number = last_number

    def reference(self, text: str, *, cut_short: bool) -> str:
        """Return the reference that later answers are compared with."""
        if cut_short or not text.strip():
            return NO_ANSWER
        found = find_answer(text, last_number=self._last_number, cut_short=False)
        if found is not None:
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
    target: System,
    problems: Sequence[EvalProblem],
    agreement: Agreement,
    sampling: Sampling,
    max_tokens: int,
    concurrency: int,
    on_done: Callable[[int], None],
) -> Mapping[str, str]:
    """Return the references that answers are compared with, by prompt.

    `on_done` is called with the number of finished prompts.

    Raises:
        EngineError: the engine failed.
    """
    slots = asyncio.Semaphore(concurrency)
    references: dict[str, str] = {}

    async def ask(problem: EvalProblem) -> None:
        own = replace(sampling, seed=seed_of(sampling.seed + 1, problem.id, 0))
        async with slots:
            try:
                result = await target.generate(problem.question, prompt="bare", sampling=own, max_tokens=max_tokens)
            except ContextError:
                references[problem.id] = NO_ANSWER
            else:
                cut_short = result.finish_reason == "length"
                references[problem.id] = agreement.reference(result.answer, cut_short=cut_short)
        on_done(len(references))

    await side_by_side(*map(ask, problems))
    return {problem.id: references[problem.id] for problem in problems}
