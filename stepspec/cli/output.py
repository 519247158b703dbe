"""The tables that commands print at their end, and the file of `--json`."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, TextIO

import typer
from pydantic import BaseModel
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from stepspec.base.files import is_link, write_text
from stepspec.base.printable import printable
from stepspec.errors import UsageError

TABLE_WIDTH = 160
"""Width of the tables if the output is not a terminal and the variable COLUMNS is not set."""
ON_STDOUT = Path("-")
"""As the file of `--json`, standard output."""
_json_stream = ContextVar[TextIO]("json_stream")
"""Where `--json -` writes: standard output, before `check_json_file` redirects what else is printed."""


class Console(RichConsole):
    """A console that escapes control characters in what it prints, such as the names in a run or of a server."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the parts of a line with their styles."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, keep="\n\t"), style, control)


def check_json_file(context: typer.Context, file: Path | None) -> Path | None:
    """Check that a file can be written before the work whose results it is for.

    For `-`, standard output is for the results alone, and what the command prints goes to stderr.

    Raises:
        UsageError: it is an option or a folder, or it or its folder cannot be written.
    """
    if file is None:
        return None
    if file == ON_STDOUT:
        _json_stream.set(sys.stdout)
        context.with_resource(redirect_stdout(sys.stderr))
        return file
    if file.name.startswith("-"):
        raise UsageError(f"--json takes a file, or - for standard output, got {str(file)!r}.")
    return check_writable(file)


def check_writable(path: Path, *, is_folder: bool = False) -> Path:
    """Check that a file, or files in a folder, can be written. Neither has to exist.

    Raises:
        UsageError: the path or its folder cannot be written, or it is a folder in place of a file, or the reverse.
    """
    if path.is_dir() and not is_folder:
        raise UsageError(f"{path} is a folder. Give the path of a file.")
    if is_link(path):
        raise UsageError(f"Cannot write {path}: it is a symbolic link; remove it, or give another path.")
    existing = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if (existing != path or is_folder) and not existing.is_dir():
        raise UsageError(f"Cannot write {path}: {existing} is not a folder.")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"Cannot write {path}: permission denied.")
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Also write all results to this file; - is standard output.",
        callback=check_json_file,
    ),
]


def finish(outputs: Iterable[Table | str], record: object, json_file: Path | None) -> None:
    """Print tables and lines, and write the file of `--json`."""
    show(*outputs)
    write_results(record, json_file)


def write_results(record: object, json_file: Path | None) -> None:
    """Write the file of `--json`, and say so on stderr.

    Args:
        record: a model, or plain values.
        json_file: the file, or `ON_STDOUT`.
    """
    if json_file is None:
        return
    if isinstance(record, BaseModel):
        text = record.model_dump_json(indent=2)
    else:
        text = json.dumps(record, indent=2, ensure_ascii=False)
    if json_file == ON_STDOUT:
        print(text, file=_json_stream.get())
    else:
        write_text(json_file, text + "\n")
        print(f"Wrote {json_file}.", file=sys.stderr)


def show(*outputs: Table | str) -> None:
    """Print tables and lines. A table that is too wide for its place is printed as a list.

    Only a terminal breaks lines, so that those in a file stay whole.
    """
    is_terminal = sys.stdout.isatty()
    has_width = is_terminal or "COLUMNS" in os.environ
    console = Console(width=None if has_width else TABLE_WIDTH, highlight=False, markup=False)
    for each in outputs:
        if isinstance(each, str):
            console.print(each, soft_wrap=not is_terminal)
        else:
            console.print(each if _fits(each, console) else as_list(each))


def print_columns(table: Iterable[Sequence[str]]) -> None:
    """Print rows of cells in aligned columns."""
    rows = list(table)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _fits(table: Table, console: Console) -> bool:
    """Return whether a table has room for every word of its cells."""
    with console.capture() as captured:
        console.print(table)
    cells = [cell for column in table.columns for cell in (column.header, *column.cells)]
    return Counter(captured.get().split()) >= Counter(word for cell in cells for word in str(cell).split())


def as_list(table: Table) -> Table:
    """Return a table of two columns, with a line for each cell of another table and a section for each of its rows."""
    found = Table(title=table.title, caption=table.caption, show_header=False)
    for row, *cells in zip(table.rows, *(column.cells for column in table.columns), strict=True):
        for column, cell in zip(table.columns, cells, strict=True):
            if cell != "":
                found.add_row(column.header, cell, style=row.style)
        found.add_section()
    return found
