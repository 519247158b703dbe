"""The tables that commands print at their end, and the file of `--json`."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from stepspec.base.files import is_link, write_text
from stepspec.base.printable import printable
from stepspec.errors import UsageError

TABLE_WIDTH = 140


class Console(RichConsole):
    """A console that escapes control characters in what it prints, such as the names in a run or of a server."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the parts of a line with their styles."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, keep="\n\t"), style, control)


def check_writable(file: Path | None) -> Path | None:
    """Check that a file can be written before the work whose results it is for.

    Raises:
        UsageError: it is a folder, or it or its folder cannot be written.
    """
    if file is None:
        return None
    if file.is_dir():
        raise UsageError(f"{file} is a folder. Give the path of a file.")
    if is_link(file):
        raise UsageError(f"Cannot write {file}: it is a symbolic link; remove it, or give another path.")
    existing = next(each for each in (file, *file.absolute().parents) if os.path.lexists(each))
    if existing != file and not existing.is_dir():
        raise UsageError(f"Cannot write {file}: {existing} is not a folder.")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"Cannot write {file}: permission denied.")
    return file


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write all results to this file.", callback=check_writable),
]


def finish(outputs: Iterable[Table | str], record: BaseModel, json_file: Path | None) -> None:
    """Print tables and lines, and write the file of `--json`."""
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    for each in outputs:
        console.print(each)
    write_results(record, json_file)


def write_results(record: BaseModel, json_file: Path | None) -> None:
    """Write the file of `--json`, and say so."""
    if json_file is not None:
        write_text(json_file, record.model_dump_json(indent=2) + "\n")
        print(f"Wrote {json_file}.")
