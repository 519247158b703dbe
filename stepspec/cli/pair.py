"""`stepspec pair`: build a pair of models on this machine, and list the pairs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepspec.api.pairs import EMBEDDED_NAME, PAIRS, QWEN_NAME, build_qwen, find_pair
from stepspec.cli.completion import one_of
from stepspec.cli.group import SETTINGS, WholeHelp
from stepspec.cli.output import print_columns
from stepspec.errors import ModelError, UsageError, unknown_name

main = typer.Typer(
    cls=WholeHelp, help="Build a pair of models on this machine, and list the pairs.", add_completion=False, **SETTINGS
)


@main.command("build")
def build_pair(
    name: Annotated[str, typer.Argument(help="The pair to build.", autocompletion=one_of([QWEN_NAME]))],
    gguf: Annotated[
        list[Path] | None,
        typer.Option(
            "--gguf",
            metavar="FILE",
            help="A GGUF file that you have, of the target or of the draft; repeat it for both. Others are downloaded.",
        ),
    ] = None,
) -> None:
    """Build a pair in the user's cache folder, and print its folder. A build that was interrupted continues.

    The pair 'qwen' is Qwen2.5-Coder-1.5B-Instruct with the draft Qwen2.5-Coder-0.5B-Instruct. It takes 4.1 GB.
    """
    if name == EMBEDDED_NAME:
        raise UsageError("The embedded pair ships with stepspec. It needs no build.")
    if name != QWEN_NAME:
        raise UsageError(unknown_name("pair to build", name, [QWEN_NAME]))
    print(build_qwen(gguf or [], lambda message: print(message, file=sys.stderr)))


@main.command("list")
def list_pairs() -> None:
    """List the pairs, and the folder of each one that can be used."""
    print_columns((name, _place(name)) for name in PAIRS)


def _place(name: str) -> str:
    try:
        return str(find_pair(name))
    except ModelError as error:
        return str(error)
