"""A single model writes the whole text."""

from typing import ClassVar

from stepspec.loop.family import FamilyTable
from stepspec.loop.step_loop import StepLoop


class AloneTable(FamilyTable):
    """No settings."""

    speculates: ClassVar[bool] = False


async def alone(loop: StepLoop, table: AloneTable) -> None:
    """Let the target or the draft write everything, the baseline of all other families."""
    await loop.finish()
