"""The `stepspec` command: `run` answers one question, `eval` compares policies on a benchmark.

Each command imports its heavy modules itself, so that `--help` is fast.
"""

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from stepspec import __version__
from stepspec.base.printable import printable
from stepspec.cli import pairing
from stepspec.cli.advising import advise
from stepspec.cli.calibrating import calibrate_policy
from stepspec.cli.comparing import compare_runs
from stepspec.cli.describing import describe_models
from stepspec.cli.evaluating import evaluate_policies, merge_runs
from stepspec.cli.exporting import export_run
from stepspec.cli.grading import grade_file
from stepspec.cli.help import WholeHelp
from stepspec.cli.keying import create_key
from stepspec.cli.listing import list_benchmarks, list_policies, show_docs
from stepspec.cli.replaying import replay_run
from stepspec.cli.reporting import report_runs
from stepspec.cli.running import answer_question
from stepspec.cli.serving import serve_models
from stepspec.cli.sizing import size_service
from stepspec.errors import StepSpecError, UsageError

__all__ = ["app", "main"]

EXIT_CODES: Sequence[tuple[type[BaseException], int]] = (
    (UsageError, 2),
    (StepSpecError, 1),
    (OSError, 1),  # from the terminal or the output pipe; a closed pipe prints no message
    (KeyboardInterrupt, 130),
)
"""Exit codes by exception type. The first matching type decides."""

app = typer.Typer(
    cls=WholeHelp,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(answer_question)
app.command("serve")(serve_models)
app.command("key")(create_key)
app.command("size")(size_service)
app.command("advise")(advise)
app.command("calibrate")(calibrate_policy)
app.command("replay")(replay_run)
app.command("eval")(evaluate_policies)
app.command("report")(report_runs)
app.command("compare")(compare_runs)
app.command("export")(export_run)
app.command("merge")(merge_runs)
app.command("grade")(grade_file)
app.add_typer(pairing.app, name="pair")
app.command("models")(describe_models)
app.command("policies")(list_policies)
app.command("benchmarks")(list_benchmarks)
app.command("docs")(show_docs)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"stepspec {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative reasoning: a draft model proposes steps and tokens; the target verifies and judges them."""


def main() -> None:
    """Run the command line. An error prints one sentence on stderr and sets the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            app(prog_name="stepspec")
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
