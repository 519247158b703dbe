"""The draft proposes steps, and judges decide about each of them."""

from collections.abc import Mapping
from typing import ClassVar, cast

from pydantic import Field, model_validator

from stepspec.loop.chain import Proposing, propose_chain
from stepspec.loop.family import FamilyTable
from stepspec.loop.step_loop import StepLoop


class ScoreTable(FamilyTable):
    """What family `score` proposes."""

    judged: ClassVar[bool] = True
    reads_steps: ClassVar[bool] = True

    depth: int = Field(default=1, ge=1, le=4)
    """Draft steps in a row that one pass of the target judges."""
    draft_answer: bool = False
    """Whether the draft also proposes the answer. The target keeps only its own choices."""
    max_overhead: float | None = Field(default=None, ge=0)
    """Speculate on steps only where that is faster. Retries cost at most this share of the time. By
    default, always speculate."""

    @model_validator(mode="before")
    @classmethod
    def _removed(cls, table: object) -> object:
        if isinstance(table, Mapping) and "look_ahead" in table:
            raise ValueError("look_ahead was removed in 0.2.0; remove it, or use the policy 'lookahead'")
        if isinstance(table, Mapping) and cast("Mapping[str, object]", table).get("depth") == "auto":
            raise ValueError('depth = "auto" was removed in 0.2.0; write a number from 1 to 4')
        return cast("object", table)

    @property
    def waste_rate(self) -> int:
        """See `FamilyTable.waste_rate`."""
        return self.depth


async def score(loop: StepLoop, table: ScoreTable) -> None:
    """SpecReason (arXiv:2504.07891, section 3): the target judges every step of the draft and writes the rejected ones.
    RSD (arXiv:2501.19324, section 3): a process reward model judges them.

    Departures: several judges may decide, the draft may propose several steps one after the other, the target may keep
    the part of a rejected step that it agrees with, and the draft may go on behind that part. Empty and repeated steps
    are rejected without asking, a step that repeats itself is aborted, too much waste ends the speculation, only the
    target ends the thinking, and it writes the answer.
    """
    works = True
    proposing = Proposing.fitted(loop.request, table.depth, answer=table.draft_answer)
    while works and await loop.reach_proposal():
        works = False
        async for step in loop.reviewer.chain(await propose_chain(loop.request, loop.draft, proposing)):
            works = True
            if step.accepted:
                loop.committer.accept(step)
            else:
                await loop.committer.replace(step)
    await loop.complete_step()
