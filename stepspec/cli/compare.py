"""`stepspec compare`: compare two runs: first their conditions, then accuracy and speed."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepspec.cli.output import JsonOption, show, write_results
from stepspec.errors import UsageError
from stepspec.evaluation.compare import Comparison, compare
from stepspec.evaluation.compare.tables import differences_table, policy_table
from stepspec.evaluation.runs import find_runs, iter_rows, read_run


def main(
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
    a, b = _one_run(a), _one_run(b)
    run_a, run_b = read_run(a), read_run(b)
    comparison = compare(run_a, iter_rows(a), run_b, iter_rows(b), policy or (), force=force)
    _show(comparison, a, b)
    write_results(comparison, json_file)


def _one_run(folder: Path) -> Path:
    runs = find_runs(folder)
    if len(runs) > 1:
        raise UsageError(f"{folder} contains several runs; give one of them: {', '.join(map(str, runs))}.")
    return runs[0]


def _show(comparison: Comparison, a: Path, b: Path) -> None:
    if comparison.warning:
        print(f"Warning: {comparison.warning}", file=sys.stderr, flush=True)
    for letter, folder, run in (("A", a, comparison.a), ("B", b, comparison.b)):
        show(f"{letter} is {folder}, started {run.started}.")
    if comparison.differences:
        show("", differences_table(comparison.differences))
    for each in comparison.policies:
        show("", policy_table(each))
    show("", " ".join(comparison.conclusions))
