"""`stepspec pair`: list the pairs of models."""

import typer

from stepspec.api.pairs import PAIRS, find_pair
from stepspec.cli.group import WholeHelp

app = typer.Typer(cls=WholeHelp, no_args_is_help=True, help="List pairs of models.", rich_markup_mode=None)


@app.command("list")
def list_pairs() -> None:
    """List the pairs, and the folder of each one."""
    for name in PAIRS:
        print(f"{name:10}{find_pair(name)}")
