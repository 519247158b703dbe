"""A single model writes the whole text."""

from typing import ClassVar

from stepspec.loop.family import FamilyTable
from stepspec.loop.request import Request


class AloneTable(FamilyTable):
    """No settings."""

    speculates: ClassVar[bool] = False


async def alone(request: Request, table: AloneTable) -> None:
    """Let the target or the draft write everything, the baseline of all other families."""
    await request.write_rest()
