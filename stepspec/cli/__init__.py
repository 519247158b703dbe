"""The `stepspec` command: `run` answers one question, `eval` compares policies on a benchmark."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from stepspec import __version__
from stepspec.cli.group import SETTINGS, Modules
from stepspec.cli.program import run_program
from stepspec.evaluation.machine import versions

__all__ = ["app", "main"]


class Commands(Modules):
    """The commands. Each one is the module of this package that has its name."""

    package = __name__
    sentences: ClassVar[Mapping[str, str]] = {
        "run": "Answer one question: the answer on standard output, its steps and figures on stderr.",
        "serve": "Serve models over HTTP until stopped.",
        "key": "Create an API key.",
        "size": "Find the number of replicas for a number of concurrent agents, from measured costs and simulations.",
        "advise": "Measure on your own prompts whether speculation pays, and write the policy to use.",
        "calibrate": "Find a policy's thresholds for your models, and certify what they may cost in accuracy.",
        "replay": "Estimate the speed of policies from the recorded steps of a run, in seconds and without a model.",
        "judge-bench": "Measure judges on labelled steps: what their scores say, and what a judgment costs.",
        "eval": "Compare policies on a benchmark: accuracy and speed, with intervals.",
        "report": "Show the results of runs: a table in the terminal, a Markdown file and an HTML page.",
        "compare": "Compare two runs problem by problem: accuracy, speed, and the conditions that differ.",
        "export": "Write a run as logs of inspect_ai, one model for each policy.",
        "merge": "Merge the parts of a run that several processes or machines made.",
        "grade": "Grade predictions: accuracy with its interval, and why the others are not correct.",
        "costs": "Measure costs for replays and for sizing.",
        "models": "Print how models think, how fast they are here, whether a draft fits, and which policies run "
        "with them.",
        "pair": "Build a pair of models on this machine, and list the pairs.",
        "policies": "List the policies that ship with stepspec, or print one: its text, and its path on stderr.",
        "benchmarks": "List the benchmarks that come with stepspec: their size, their source and a summary.",
        "docs": "Print where the documentation is.",
    }
    removed: ClassVar[Mapping[str, str]] = {
        "bench": "The measurements of stepspec itself are not part of the package: run python -m evals.bench in a "
        "checkout. For files of costs, use stepspec costs models and stepspec costs service.",
    }


app = typer.Typer(cls=Commands, **SETTINGS)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"stepspec {__version__}")
        for name, installed in versions().items():
            if name not in ("stepspec", "math-verify"):
                print(f"{name.replace('python', 'Python')} {installed}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version, and those of the engines."
        ),
    ] = False,
) -> None:
    """Speculative reasoning: a draft model proposes steps and tokens; the target verifies and judges them."""


def main() -> None:
    """Run the `stepspec` command line. See `run_program` for its errors."""
    run_program(app, "stepspec")
