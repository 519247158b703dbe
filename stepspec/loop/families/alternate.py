"""The two models take turns at fixed places. Nothing is judged."""

from pydantic import Field

from stepspec.loop.family import FamilyTable
from stepspec.loop.step_loop import StepLoop


class AlternateTable(FamilyTable):
    """How family `alternate` divides the steps."""

    period: int = Field(default=2, ge=2)
    """The target writes the first of this many steps, and the draft the others."""


async def alternate(loop: StepLoop, table: AlternateTable) -> None:
    """The target writes every so many steps: the control for family `route`, which should be more accurate at the same
    share of the target's tokens. The target also writes the step after two equal ones, and what the draft cannot."""
    transcript = loop.request.transcript
    while await loop.reach_proposal():
        if transcript.is_stuck or len(transcript.steps) % table.period == 0:
            await loop.committer.write_step()
        elif not await loop.turns.finish_step():
            return
