"""`stepspec compare`: compare two runs: first their conditions, then accuracy and speed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from stepspec.base.files import write_text
from stepspec.cli.output import Console, JsonOption
from stepspec.errors import UsageError

if TYPE_CHECKING:
    from stepspec.evaluation.compare import Comparison

TABLE_WIDTH = 120
"""Width of the tables if the output is not a terminal."""


def compare_runs(
    a: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The folder of another run.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|NAME_IN_A=NAME_IN_B",
            help="A policy to compare; repeat it for several. Default: all that are in both runs.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare even if the data differ.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Compare two runs problem by problem: accuracy, speed, and the conditions that differ."""
    from stepspec.evaluation.compare import compare
    from stepspec.evaluation.runs import iter_rows, read_run

    a, b = _one_run(a), _one_run(b)
    run_a, run_b = read_run(a), read_run(b)
    comparison = compare(run_a, iter_rows(a), run_b, iter_rows(b), policy or (), force=force)
    if json_file is not None:
        write_text(json_file, comparison.model_dump_json(indent=2) + "\n")
    _show(comparison, a, b)


def _one_run(folder: Path) -> Path:
    from stepspec.evaluation.runs import find_runs

    runs = find_runs(folder)
    if len(runs) > 1:
        raise UsageError(f"{folder} contains several runs; give one of them: {', '.join(map(str, runs))}.")
    return runs[0]


def _show(comparison: "Comparison", a: Path, b: Path) -> None:
    from stepspec.evaluation.compare.tables import differences_table, policy_table

    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)
    if comparison.warning:
        print(f"Warning: {comparison.warning}", file=sys.stderr, flush=True)
    for letter, folder, run in (("A", a, comparison.a), ("B", b, comparison.b)):
        console.print(Text(f"{letter} is {folder}, started {run.started}."))
    if comparison.differences:
        console.print("", differences_table(comparison.differences), sep="\n")
    for each in comparison.policies:
        console.print("", policy_table(each), sep="\n")
    console.print("", Text(" ".join(comparison.conclusions)), sep="\n")
