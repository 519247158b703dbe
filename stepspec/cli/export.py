"""`stepspec export`: write a run as logs of inspect_ai."""

from pathlib import Path
from typing import Annotated

import typer

from stepspec.evaluation.export import export
from stepspec.evaluation.runs import find_runs


def main(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of one or several runs.")],
    output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Output folder. Default: RUN/inspect.")] = None,
) -> None:
    """Write a run as logs of inspect_ai, one model for each policy."""
    runs = find_runs(run)
    for each in runs:
        folder = output / each.name if output and len(runs) > 1 else output
        exported = export(each, folder)
        print(f"Wrote {exported.num_rows:,} rows of {', '.join(exported.logs)} to {exported.folder}.")
        if missing := exported.num_rows - exported.num_texts:
            which = "These" if missing == exported.num_rows else f"{missing:,} of these"
            print(f"{which} rows have no texts, because the run was made without --traces.")
