"""The options `--csv` and `--plots`: the figures of the tables as numbers, and plots."""

import csv
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepspec.base.files import name_for_file, write_text
from stepspec.cli.output import check_writable
from stepspec.errors import UsageError
from stepspec.evaluation.report.cells import count
from stepspec.evaluation.report.source import Source, figure_rows

if TYPE_CHECKING:
    from stepspec.evaluation.report.plots import Plot


def _check(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check that a path can be written before the work whose figures it is for."""
    if path is None:
        return None
    if path.name.startswith("-"):
        raise UsageError(f"{parameter.opts[0]} takes a path, got {str(path)!r}.")
    return check_writable(path, is_folder=parameter.metavar == "FOLDER")


CsvOption = Annotated[
    Path | None,
    typer.Option(
        "--csv",
        metavar="FILE",
        help="Write the figures of the tables to this CSV file, with a row for each policy or judge.",
        callback=_check,
    ),
]
PlotsOption = Annotated[
    Path | None,
    typer.Option("--plots", metavar="FOLDER", help="Write plots to this folder as SVG files.", callback=_check),
]


def write_csv(rows: Sequence[Mapping[str, object]], file: Path | None) -> None:
    """Write rows of figures, and say so. Rows with other figures leave cells empty."""
    if file is not None:
        heads = dict.fromkeys(head for row in rows for head in row)
        writer = csv.DictWriter(text := StringIO(), [*heads], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(file, text.getvalue())
        print(f"Wrote {file}.")


def write_plots(plots: "Iterable[tuple[str, Plot]]", folder: Path | None) -> None:
    """Write plots to files that are named by their titles, and say so."""
    if folder is not None:
        written = Counter[str]()
        for title, plot in plots:
            name = name_for_file(title.lower())
            written[name] += 1
            number = f"-{written[name]}" if written[name] > 1 else ""
            write_text(folder / f"{name}{number}.svg", plot.image())
        if not written:
            print("There is nothing to plot.", file=sys.stderr)
        else:
            print(f"Wrote {count(written.total(), 'plot')} to {folder}.")


def write_figures(sources: Sequence[Source], csv_file: Path | None, plots: Path | None) -> None:
    """Write the figures and the plots of runs."""
    write_csv([row for source in sources for row in figure_rows(source)], csv_file)
    if plots is not None:
        from stepspec.evaluation.report.plots import plots_of  # loads matplotlib

        write_plots(plots_of(sources), plots)
