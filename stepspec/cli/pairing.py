"""`stepspec pair`: build a pair of models on this machine, and list the pairs."""

import importlib
import sys
from typing import Annotated

import typer

from stepspec.api.pairs import EMBEDDED_NAME, PAIRS, find_pair
from stepspec.base.extras import from_extra
from stepspec.cli.completing import one_of
from stepspec.cli.help import WholeHelp
from stepspec.errors import ModelError, UsageError, unknown_name

BUILT = tuple(name for name in PAIRS if name != EMBEDDED_NAME)

app = typer.Typer(cls=WholeHelp, no_args_is_help=True, help="Build and list pairs of models.", rich_markup_mode=None)


@app.command("build")
def build_pair(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pair to build.", autocompletion=one_of(BUILT))],
) -> None:
    """Build a pair in the user's cache folder, and print its folder. A pair that is already there is checked."""
    if name == EMBEDDED_NAME:
        raise UsageError("The embedded pair ships with stepspec. It needs no build.")
    if name not in BUILT:
        raise UsageError(unknown_name("pair", name, BUILT))
    with from_extra("smol", f"Building the pair {name}"):
        for package in ("accelerate", "gguf"):  # transformers imports them when it reads the base
            importlib.import_module(package)
        from stepspec.mini.smol.build import build_smol
    folder = build_smol(lambda message: print(message, file=sys.stderr))
    print(folder)
    print(f'Ask it a question: stepspec run --pair {name} "What is 12 plus 5?"', file=sys.stderr)


@app.command("list")
def list_pairs() -> None:
    """List the pairs, and the folder of each one that can be used. A built pair is checked by its hashes."""
    for name in PAIRS:
        try:
            found = str(find_pair(name))
        except ModelError as error:
            found = str(error)
        print(f"{name:10}{found}")
