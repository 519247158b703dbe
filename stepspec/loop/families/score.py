"""The draft proposes steps, and judges decide about each of them."""

from typing import ClassVar

from pydantic import Field

from stepspec.loop.family import FamilyTable
from stepspec.loop.request import Request


class ScoreTable(FamilyTable):
    """What family `score` proposes."""

    judged: ClassVar[bool] = True
    reads_steps: ClassVar[bool] = True

    candidates: int = Field(default=1, ge=1, le=16)
    """Draft steps side by side at each place, above temperature 0. Of those that the judges accept, the one with the
    highest score of the first judge that can accept is kept."""

    @property
    def waste_rate(self) -> int:
        """See `FamilyTable.waste_rate`."""
        return self.candidates


async def score(request: Request, table: ScoreTable) -> None:
    """SpecReason (arXiv:2504.07891, section 3): the target judges every step of the draft and writes the rejected ones.
    RSD (arXiv:2501.19324, section 3): a process reward model judges them.

    Departures: several judges may decide, the draft may propose several steps side by side, the target may keep the
    part of a rejected step that it agrees with, empty and repeated steps are rejected without asking, only the target
    ends the thinking, and it writes the answer.
    """
    while await request.speculates():
        proposals = await request.propose(table.candidates)
        best = await request.judge(proposals)
        if best is None:
            return
        if best.accepted:
            request.accept(best)
        else:
            await request.replace(best)
