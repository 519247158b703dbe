"""The draft proposes steps ahead, and the target writes its own at each place at the same time."""

from typing import ClassVar

from pydantic import Field, model_validator

from stepspec.loop.family import FamilyTable
from stepspec.loop.lookahead import Lookahead, LookaheadPosition, StepComparison
from stepspec.loop.step_loop import StepLoop

MAX_PLACES = 64
"""Most places at which the target writes a step in one round."""


class CompareTable(FamilyTable):
    """How far family `compare` looks ahead."""

    judged: ClassVar[bool] = True

    depth: int = Field(default=4, ge=1, le=16)
    """Draft steps in a row. The target writes its own step after each of them, at the same time."""
    width: int = Field(default=1, ge=1, le=8)
    """Draft steps side by side at each place, above temperature 0. The first accepted one is kept."""

    @property
    def num_places(self) -> int:
        """Number of places at which the target writes a step."""
        return sum(self.width**level for level in range(self.depth + 1))

    @property
    def waste_rate(self) -> int:
        """See `FamilyTable.waste_rate`."""
        return 2 * self.num_places

    @model_validator(mode="after")
    def _few_enough(self) -> "CompareTable":
        if self.num_places > MAX_PLACES:
            raise ValueError(
                f"depth {self.depth} and width {self.width} make {self.num_places} places; at most {MAX_PLACES} are "
                "supported"
            )
        return self


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
        async with Lookahead(loop, table.width) as ahead:
            path = list[StepComparison]()
            branches = ahead.look(LookaheadPosition(), table.depth)
            while branches is not None:
                own = await ahead.wait("target", branches.own)
                if own is None:
                    break
                path.append(StepComparison(own))
                for draft, following in branches.drafts:
                    step = await ahead.wait_for_draft(branches, draft)
                    if step is not None and await ahead.compare(branches.place, step, path[-1]):
                        ahead.drop(other for other in branches.tasks if other is not following)
                        branches = await ahead.wait("draft", following)
                        break
                else:
                    break
            if not ahead.commit(path):
                return
