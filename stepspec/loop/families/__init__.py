"""The list of families: who writes the steps of a request, and how it is decided. A policy selects one by its name."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, create_model

from stepspec.base.file_model import FileModel
from stepspec.loop.families.alone import AloneTable, alone
from stepspec.loop.families.alternate import AlternateTable, alternate
from stepspec.loop.families.compare import CompareTable, compare
from stepspec.loop.families.route import RouteTable, route
from stepspec.loop.families.score import ScoreTable, score
from stepspec.loop.family import FamilyTable
from stepspec.loop.step_loop import StepLoop


class FamilyCode(NamedTuple):
    """A family's function, which writes steps until a single writer finishes the text, and its table."""

    run: Callable[[StepLoop, Any], Awaitable[None]]
    table: type[FamilyTable]


FAMILIES: Mapping[str, FamilyCode] = {
    "target": FamilyCode(alone, AloneTable),
    "draft": FamilyCode(alone, AloneTable),
    "score": FamilyCode(score, ScoreTable),
    "compare": FamilyCode(compare, CompareTable),
    "route": FamilyCode(route, RouteTable),
    "alternate": FamilyCode(alternate, AlternateTable),
}

if TYPE_CHECKING:
    Family = str

    class FamilyTables(FileModel):
        """The tables of the families."""

else:
    Family = Literal[tuple(FAMILIES)]
    FamilyTables = create_model(
        "FamilyTables",
        __base__=FileModel,
        __doc__="The tables of the families that have settings, by the family's name.",
        **{
            name: (code.table, Field(code.table(), description=code.table.__doc__))
            for name, code in FAMILIES.items()
            if code.table.model_fields
        },
    )
