"""The `stepspec` command: `run` answers one question, `eval` compares policies on a benchmark.

Each command imports its heavy modules itself, so that `--help` is fast.
"""

from typing import Annotated

import typer

from stepspec import __version__
from stepspec.cli import costs, pair
from stepspec.cli.advise import advise
from stepspec.cli.calibrate import calibrate_policy
from stepspec.cli.compare import compare_runs
from stepspec.cli.eval import evaluate_policies, merge_runs
from stepspec.cli.export import export_run
from stepspec.cli.grade import grade_file
from stepspec.cli.group import WholeHelp
from stepspec.cli.key import create_key
from stepspec.cli.models import describe_models
from stepspec.cli.policies import list_benchmarks, list_policies, show_docs
from stepspec.cli.program import run_program
from stepspec.cli.replay import replay_run
from stepspec.cli.report import report_runs
from stepspec.cli.run import answer_question
from stepspec.cli.serve import serve_models
from stepspec.cli.size import size_service
from stepspec.errors import UsageError

__all__ = ["app", "main"]

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
app.add_typer(pair.app, name="pair")
app.add_typer(costs.app, name="costs")
app.command("models")(describe_models)
app.command("policies")(list_policies)
app.command("benchmarks")(list_benchmarks)
app.command("docs")(show_docs)


@app.command("bench", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench() -> None:
    """Say where the measurements of earlier versions are."""
    raise UsageError(
        "The measurements of stepspec itself are not part of the package: run python -m evals.bench in a checkout. "
        "For files of costs, use stepspec costs models and stepspec costs service."
    )


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
    """Run the `stepspec` command line. See `run_program` for its errors."""
    run_program(app, "stepspec")
