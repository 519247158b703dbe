"""`stepspec fit-judge`: fit a judge of cheap signals from the recorded steps of a run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from stepspec.base.files import write_text
from stepspec.cli.advising import check_policy_file
from stepspec.cli.evaluating import require_extras
from stepspec.cli.output import JsonOption, finish
from stepspec.errors import UsageError

if TYPE_CHECKING:
    from stepspec.evaluation.replay.fitting import Fitted, Labels


def fit_a_judge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that was made with --record.")],
    labels: Annotated[
        str, typer.Option(help="What makes a step good: answers (its text's is right) or verdicts (it was accepted).")
    ] = "answers",
    signals: Annotated[
        str, typer.Option(metavar="NAME[,NAME...]", help="Signals to use: all, draft, target, or their names.")
    ] = "all",
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Put the judge first in a cascade before the recorded ones.")
    ] = False,
    policy_file: Annotated[Path, typer.Option(help="File for the policy with the judge.")] = Path("fitted.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the policy file.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Fit a judge of cheap signals from the recorded steps of a run."""
    require_extras()
    from stepspec.evaluation.replay import read_recordings
    from stepspec.evaluation.replay.fitting import chosen_signals, fit_judge, judged_by

    kinds: dict[str, Labels] = {"answers": "answers", "verdicts": "verdicts"}
    if labels not in kinds:
        raise UsageError(f"--labels must be answers or verdicts, got {labels!r}.")
    check_policy_file(policy_file, force)
    names = chosen_signals(signals)
    recordings = read_recordings(run)
    fitted = fit_judge(recordings, kinds[labels], names)
    recorded = recordings.recordings[0]
    comment = f"Its judge was fitted on {fitted.num_steps:,} steps of {recordings.run.benchmark}, labels: {labels}."
    text = recordings.run.policies[recorded.name].text
    write_text(policy_file, judged_by(text, fitted.table(cascade=cascade), cascade=cascade, comments=[comment]))
    about = {"benchmark": recordings.run.benchmark, "temperature": recordings.run.temperature, "labels": labels}
    finish([_table(fitted)], about | asdict(fitted), json_file)
    print(f"{fitted.num_steps:,} steps. Policy written to {policy_file}. Calibrate its threshold before you use it:")
    print(f"stepspec calibrate BENCHMARK --policy {policy_file}")


def _table(fitted: "Fitted") -> Table:
    table = Table("score", "area under the curve, held-out problems", "weight")
    for name, area in fitted.areas.items():
        if area.value is None or area.interval is None:
            text = area.why or ""
        else:
            text = "{:.3f} [{:.3f}, {:.3f}]".format(area.value, *area.interval)
        table.add_row(name, text, f"{fitted.weights[name]:.3g}" if name in fitted.weights else "")
    return table
