"""`stepspec policies`: the policies that come with stepspec, and the file of one."""

import sys
from typing import Annotated

import typer

from stepspec.base.file_model import load_toml
from stepspec.base.files import find_data_file, list_data_files
from stepspec.cli.completion import names_of
from stepspec.cli.output import print_columns
from stepspec.loop.policy import Policy, load_policy


def main(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|FILE]", help="Print the file of this policy.", autocompletion=names_of("policies")
        ),
    ] = None,
) -> None:
    """List the policies that ship with stepspec, or print one: its text, and its path on stderr."""
    if name is not None:
        print(load_policy(name)[1], end="")
        print(find_data_file("policies", name), file=sys.stderr)
        return
    print_columns((name, load_toml(path, Policy)[0].summary) for name, path in list_data_files("policies").items())
