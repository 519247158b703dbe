"""`stepspec replay`: estimate policies from the recorded steps of a run, without a model."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from stepspec.cli.completing import names_of
from stepspec.cli.evaluating import require_extras
from stepspec.cli.output import Console
from stepspec.errors import UsageError

if TYPE_CHECKING:
    from stepspec.evaluation.replay import Replayed
    from stepspec.loop.policy import Policy

TABLE_WIDTH = 140
"""Width of the table if the output is not a terminal."""


def replay_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that was made with --record.")],
    policy: Annotated[
        list[str],
        typer.Option(
            "--policy",
            metavar="NAME|FILE",
            help="A policy to replay; repeat it for several.",
            autocompletion=names_of("policies"),
        ),
    ],
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also replay each policy with other thresholds, from careful to fast.")
    ] = False,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Costs of other hardware, from 'stepspec bench costs'.")
    ] = None,
) -> None:
    """Estimate the speed of policies from the recorded steps of a run, in seconds and without a model."""
    require_extras()
    from stepspec.base.files import find_data_file
    from stepspec.evaluation.replay import front, read_costs, read_recordings, replay
    from stepspec.evaluation.replay.path import make_path
    from stepspec.loop.policy import load_policy

    hardware = None if costs is None else read_costs(costs)
    policies: dict[str, Policy] = {}
    for each in policy:
        name = find_data_file("policies", each).stem
        if name in policies:
            raise UsageError(f"There are two policies called {name!r}. Rename one.")
        policies[name] = load_policy(each)[0]
    recordings = read_recordings(run)
    policies = {name: each.at(recordings.run.temperature) for name, each in policies.items()}
    if sweep:
        for name, each in list(policies.items()):
            for setting in make_path(each, recordings):
                words = [*(f"{value:g}" for value in setting.thresholds.values())]
                words += [] if setting.min_logprob is None else [f"{setting.min_logprob:g}"]
                policies[f"{name} {'/'.join(words)}"] = setting.policy
    replayed = replay(policies, recordings, hardware)
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)
    console.print(_table(replayed, front(replayed)))
    for sentence in _notes(replayed, sweep=sweep):
        console.print(sentence, markup=False)


def _table(replayed: "list[Replayed]", best: list[str]) -> Table:
    table = Table("policy", "speedup", "vs token", "steps accepted", "same texts", "accuracy between", "front")
    for each in replayed:
        interval = "" if each.speedup_ci is None else " [{:.2f}, {:.2f}]".format(*each.speedup_ci)
        table.add_row(
            each.name,
            f"{each.speedup:.2f}×{interval}",
            "–" if each.speedup_vs_token is None else f"{each.speedup_vs_token:.2f}×",
            "–" if each.step_acceptance is None else f"{each.step_acceptance:.1%}",
            f"{each.on_policy:.0%}",
            "{:.1%} and {:.1%}".format(*each.accuracy),
            "yes" if each.name in best else "",
        )
    return table


def _notes(replayed: "list[Replayed]", *, sweep: bool) -> list[str]:
    notes = [
        f"{replayed[0].num_requests:,} requests. 'same texts' is the share of them in which a policy decides as the "
        "recorded one did. The rest is an estimate: the text would have gone on otherwise."
    ]
    if sweep:
        notes.append("A sweep's policies are named by their thresholds and the bound of salvage.")
    wide = max(each.extrapolated for each in replayed)
    if wide:
        notes.append(
            f"Up to {wide:.0%} of the judging passes are wider than the costs were measured for: extrapolated."
        )
    notes.append("Confirm the policies of the front with 'stepspec eval' or 'stepspec calibrate'.")
    return notes
