"""Where there are no right answers: whether a policy's answer agrees with another answer of the target's own.

The target answers every prompt once more beforehand, with another seed. Above temperature 0 the target alone does not
always agree with that either, and it is that share which a policy's is compared with.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence

from stepspec.engines.protocol import Sampling, side_by_side
from stepspec.errors import ContextError, UsageError
from stepspec.evaluation.grade import Grade, Grading
from stepspec.evaluation.grade.finding import find_answer
from stepspec.evaluation.running import EvalProblem
from stepspec.evaluation.running.running import System
from stepspec.evaluation.running.schedule import seed_of

# Of an answer that was found the blanks around it are gone, so nothing that begins with one is taken for another.
WHOLE_TEXT = " sha256:"
"""Begins what stands for an answer in which no box, answer phrase or number was found: the hash of all of it."""

NO_ANSWER = " none"
"""Stands for an answer that was cut short, or that could not be given for want of room."""


class Agreement(Grading):
    """Compares with what `reference` gave: by the answer that is found in both texts, else by the whole texts."""

    def __init__(self) -> None:
        super().__init__("math", last_number=True)

    def reference(self, text: str, *, cut_short: bool) -> str:
        """What later answers are compared with."""
        if cut_short or not text.strip():
            return NO_ANSWER
        found = find_answer(text, last_number=True, cut_short=False)
        if found is not None:
            try:
                return self.check_gold(found.text)
            except UsageError:  # too long to be an answer, or nothing but marks
                pass
        return _whole(text)

    def grade(self, text: str, gold: str, *, cut_short: bool = False) -> Grade:
        """`correct` for an answer that agrees."""
        if gold == NO_ANSWER or cut_short or not text.strip():
            return Grade("no_answer", why="The answer or the target's own was cut short, or there is none.")
        if not gold.startswith(WHOLE_TEXT):
            return super().grade(text, gold, cut_short=cut_short)
        whole = _whole(text)
        if whole == gold:
            return Grade("correct", whole, None, "text")
        return Grade("incorrect", whole, None, "text", "The text is another than the target's own.")


def _whole(text: str) -> str:
    """The same for texts that differ in case or in blank space only."""
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
    """By prompt, what answers are compared with; `on_done` is told how many are finished.

    Raises:
        EngineError: the engine failed.
    """
    places = asyncio.Semaphore(concurrency)
    references: dict[str, str] = {}

    async def ask(problem: EvalProblem) -> None:
        own = Sampling(sampling.temperature, seed=seed_of(sampling.seed + 1, problem.id, 0))
        async with places:
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
