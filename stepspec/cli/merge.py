"""`stepspec merge`: make one run of its parts."""

from pathlib import Path
from typing import Annotated

import typer

from stepspec.cli.eval import print_tables
from stepspec.evaluation.run import merge
from stepspec.evaluation.runs import read_run


def main(
    parts: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders with parts of one run.")],
    output: Annotated[Path, typer.Option(help="Folder for the merged run.")],
) -> None:
    """Merge the parts of a run that several processes or machines made."""
    summary, run = merge(parts, output), read_run(output)
    print_tables([(summary, run)], output, run.num_problems * len(run.policies) * run.num_repeats)
