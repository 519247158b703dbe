"""Runs a command line: an error prints one sentence on stderr and sets the exit code."""

import io
import os
import sys
from collections.abc import Sequence

import typer

from stepspec.base.printable import printable
from stepspec.errors import StepSpecError, UsageError

EXIT_CODES: Sequence[tuple[type[BaseException], int]] = (
    (UsageError, 2),
    (StepSpecError, 1),
    (OSError, 1),  # from the terminal or the output pipe; a closed pipe prints no message
    (KeyboardInterrupt, 130),
)
"""Exit codes by exception type. The first matching type decides."""


def run_program(app: typer.Typer, name: str) -> None:
    """Run the command line of this process.

    Args:
        app: the commands.
        name: the program's name in help texts.

    Raises:
        SystemExit: the program ended.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            app(prog_name=name)
        finally:
            sys.stdout.flush()
    except tuple(kind for kind, _ in EXIT_CODES) as error:
        _explain(error)
        sys.exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind)))


def _explain(error: BaseException) -> None:
    if isinstance(error, OSError):
        # The buffered output cannot be written either. Without this, the interpreter reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, StepSpecError):
        print("stepspec:", printable(str(error), keep="\n"), file=sys.stderr)
    elif isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        print(f"stepspec: {error.strerror or error}.", file=sys.stderr)
