"""The draft proposes steps ahead, and the target writes its own at each place at the same time."""

from typing import ClassVar

from pydantic import Field

from stepspec.loop.family import FamilyTable
from stepspec.loop.lookahead import Lookahead, LookaheadPosition, StepComparison
from stepspec.loop.step_loop import StepLoop


class CompareTable(FamilyTable):
    """How far family `compare` looks ahead."""

    judged: ClassVar[bool] = True

    depth: int = Field(default=4, ge=1, le=16)
    """Draft steps in a row. The target writes its own beside each."""

    @property
    def waste_rate(self) -> int:
        """See `FamilyTable.waste_rate`."""
        return 2 * (self.depth + 1)


async def compare(loop: StepLoop, table: CompareTable) -> None:
    """Lookahead Reasoning (arXiv:2506.19830, section 3): the longest run of draft steps that mean the same as the
    target's own is accepted, and the target's own step follows it.

    Everything is written as soon as what it continues exists: the draft's next steps, and the target's step at each
    place.

    Departures: the target or an embedding judges equivalence, the target with the problem in view; steps are committed
    when a run is complete; only the target ends the thinking, and it writes the answer; a repeated step, and one that
    reached its longest length, is never accepted; the target continues alone once too much was wasted, or if the draft
    is slower.
    """
    while await loop.reach_proposal():
        async with Lookahead(loop) as ahead:
            path = list[StepComparison]()
            branch = ahead.look(LookaheadPosition(), table.depth)
            while branch is not None:
                own = await ahead.wait("target", branch.own)
                if own is None:
                    break
                path.append(StepComparison(own))
                step = await ahead.wait_for_draft(branch)
                if step is None or branch.following is None:
                    break
                if not await ahead.compare(branch.place, step, path[-1]):
                    break
                branch = await ahead.wait("draft", branch.following)
            if not ahead.commit(path):
                return
