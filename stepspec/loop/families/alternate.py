"""The two models take turns at fixed places. Nothing is judged."""

from pydantic import Field

from stepspec.loop.family import FamilyTable
from stepspec.loop.request import Request


class AlternateTable(FamilyTable):
    """How family `alternate` divides the steps."""

    period: int = Field(default=2, ge=2)
    """The target writes the first of every so many steps, and the draft the others."""


async def alternate(request: Request, table: AlternateTable) -> None:
    """The target writes every so many steps: the control for family `route`, which should be more accurate at the same
    share of the target's tokens. The target also writes the step after two equal ones, and what the draft cannot."""
    while await request.speculates():
        if request.is_stuck or len(request.transcript.steps) % table.period == 0:
            await request.write_step()
        elif not await request.finish_step():
            return
