"""`stepspec replay`: estimate policies from the recorded steps of a run, without a model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from stepspec.cli.figures import CsvOption, PlotsOption, write_csv, write_plots
from stepspec.cli.options import policy_option
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.evaluation.replay import Replayed, front, read_costs, read_recordings, replay
from stepspec.evaluation.replay.path import make_path
from stepspec.evaluation.replay.totals import replayable
from stepspec.evaluation.run import calibrated_settings, load_named
from stepspec.loop.calibrated import setting_at


def main(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that was made with --record.")],
    policy: Annotated[list[str], policy_option("A policy to replay; repeat it for several.")],
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also replay each policy with other thresholds, from careful to fast.")
    ] = False,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Costs of other hardware, from 'stepspec costs models'.")
    ] = None,
    json_file: JsonOption = None,
    csv_file: CsvOption = None,
    plots: PlotsOption = None,
) -> None:
    """Estimate the speed of policies from the recorded steps of a run, in seconds and without a model."""
    hardware = None if costs is None else read_costs(costs)
    policies = {name: each for name, (each, _) in load_named(policy).items()}
    recordings = read_recordings(run)
    for name, each in policies.items():
        settings = calibrated_settings(name, each, recordings.run.pair, record=True)
        setting = setting_at(settings, recordings.run.temperature)
        policies[name] = each if setting is None else setting.applied(each)
        replayable(name, policies[name], recordings)
    given = {*policies}
    if sweep:
        with make_meter() as meter:
            for name, each in list(policies.items()):
                meter.begin(f"settings of {name}")
                for setting in make_path(name, each, recordings, show=meter.show):
                    words = [*(f"{value:g}" for value in setting.thresholds.values())]
                    words += [] if setting.min_logprob is None else [f"{setting.min_logprob:g}"]
                    policies[f"{name} {'/'.join(words)}"] = setting.policy
        first = {each.model_dump_json(exclude={"summary", "paper"}): name for name, each in reversed(policies.items())}
        policies = {name: each for name, each in policies.items() if name in first.values() or name in given}
    replayed = replay(policies, recordings, hardware)
    best = front(replayed)
    figures = [asdict(each) | {"on_front": each.name in best} for each in replayed]
    shown = [{name: each[name] for name in each if name != "likely_correct"} for each in figures]
    conditions = {"benchmark": recordings.run.benchmark, "temperature": recordings.run.temperature}
    finish([_table(replayed, best), *_notes(replayed, sweep=sweep)], conditions | {"policies": shown}, json_file)
    write_csv([_figures(each, best) for each in replayed], csv_file)
    if plots is not None:
        from stepspec.evaluation.report.plots import replay_plot  # loads matplotlib

        write_plots(((plot.title, plot) for plot in replay_plot(replayed)), plots)


def _figures(each: Replayed, best: list[str]) -> dict[str, object]:
    """Return the row of the CSV file."""
    low, high = each.speedup_ci or (None, None)
    return {
        "policy": each.name,
        "requests": each.num_requests,
        "speedup": each.speedup,
        "speedup low": low,
        "speedup high": high,
        "speedup vs token": each.speedup_vs_token,
        "steps accepted": each.step_acceptance,
        "same texts": each.on_policy,
        "departure": each.departure,
        "front": each.name in best,
    }


def _table(replayed: list[Replayed], best: list[str]) -> Table:
    table = Table("policy", "speedup", "vs token", "steps accepted", "same texts", "departure", "front")
    for each in replayed:
        interval = "" if each.speedup_ci is None else " [{:.2f}, {:.2f}]".format(*each.speedup_ci)
        table.add_row(
            each.name,
            f"{each.speedup:.2f}×{interval}",
            "–" if each.speedup_vs_token is None else f"{each.speedup_vs_token:.2f}×",
            "–" if each.step_acceptance is None else f"{each.step_acceptance:.1%}",
            f"{each.on_policy:.0%}",
            "–" if each.departure is None else f"{each.departure:.3g}",
            "yes" if each.name in best else "",
        )
    return table


def _notes(replayed: list[Replayed], *, sweep: bool) -> list[str]:
    notes = [
        f"{replayed[0].num_requests:,} requests. 'same texts' is the share of them in which a policy decides as the "
        "recorded one did. The rest is an estimate: the text would have gone on otherwise. 'departure' is how unlikely "
        "the kept tokens of the draft are under the target, in nats a request."
    ]
    if sweep:
        notes.append("A sweep's policies are named by their thresholds and the bound of salvage.")
    wide = max(each.extrapolated for each in replayed)
    if wide:
        notes.append(
            f"Up to {wide:.0%} of the judging passes are wider than the costs were measured for: extrapolated."
        )
    if any(each.departure is None for each in replayed):
        notes.append("The departure of one is not known, so the front is by accepted steps instead.")
    notes.append(
        "On the front are the policies of which no other one is as fast and departs as little. Confirm them with "
        "'stepspec eval' or 'stepspec calibrate'."
    )
    return notes
