"""The base class of the families' settings."""

from typing import ClassVar

from stepspec.base.file_model import FileModel
from stepspec.engines.protocol import Ability


class FamilyTable(FileModel):
    """The table of a policy file with a family's name. A family without settings has an empty one."""

    speculates: ClassVar[bool] = True
    """Whether both models write steps, rather than a single one."""
    judged: ClassVar[bool] = False
    """Whether judges decide about the draft's steps."""
    reads_steps: ClassVar[bool] = False
    """Whether the target makes a pass over the draft's steps, which salvage and most judges need."""

    @property
    def waste_rate(self) -> int:
        """Wasted tokens that are allowed for each committed token, see `Ledger.may_waste`."""
        return 1

    @property
    def draft_needs(self) -> frozenset[Ability]:
        """Abilities that the draft needs."""
        return frozenset()
