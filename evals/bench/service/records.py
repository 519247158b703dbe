"""What the measurements of the service have in common: checks of figures against limits, and their tables."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer
from rich.table import Table

from evals.bench.speed import cells_table
from stepspec.cli.output import finish
from stepspec.evaluation.records import Conditions, Record
from stepspec.evaluation.report.cells import UNKNOWN, significant


class Check(Record):
    """A figure and its limit."""

    name: str
    value: float | None
    """None if it could not be measured, which is a failure if there is a limit."""
    unit: str = ""
    limit: float | None = None
    """None for a figure without a limit."""
    bound: Literal["at most", "at least"] = "at most"

    @property
    def holds(self) -> bool:
        """Whether the figure keeps its limit."""
        if self.limit is None:
            return True
        if self.value is None:
            return False
        return self.value <= self.limit if self.bound == "at most" else self.value >= self.limit


class Scenario(Conditions, ABC):
    """Base class of the files that `python -m evals.bench service.NAME --json` writes."""

    version: Literal[1] = 1

    @property
    @abstractmethod
    def title(self) -> str:
        """What was measured."""

    @property
    @abstractmethod
    def checks(self) -> list[Check]:
        """The figures with their limits."""

    @property
    def details(self) -> tuple[Sequence[str], list[list[str]]] | None:
        """Heads and rows of a table of what the figures come from; None if there is none."""
        return None

    @property
    def holds(self) -> bool:
        """Whether all figures keep their limits."""
        return all(check.holds for check in self.checks)


HEADS = ("figure", "measured", "limit", "holds")


def rows_of(found: Scenario) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            check.name,
            _written(check),
            UNKNOWN if check.limit is None else f"{check.bound} {check.limit:,g} {check.unit}".rstrip(),
            UNKNOWN if check.limit is None else "yes" if check.holds else "no",
        ]
        for check in found.checks
    ]


def _written(check: Check) -> str:
    if check.value is not None and not check.unit and check.value.is_integer():
        return f"{check.value:,.0f}"
    return significant(check.value, check.unit)


def scenario_table(found: Scenario) -> Table:
    """Return a terminal table of the figures."""
    return cells_table(found.title, HEADS, rows_of(found))


def finish_scenario(tables: Sequence[Table], found: Scenario, json_file: Path | None) -> None:
    """Print the tables and write the file of `--json`.

    Raises:
        typer.Exit: a figure is past its limit.
    """
    finish(tables, found, json_file)
    if not found.holds:
        raise typer.Exit(1)
