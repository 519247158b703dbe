"""Compare replays with real runs.

RECORDED is a run with recorded steps, RUN one of the same problems under other policies as well, both one request at a
time on the same machine. Each policy of RUN that a replay can predict is replayed over RECORDED. A replay on policy
decides all steps as a recorded policy did; the others show how wrong the estimates off policy are.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from evals.bench.results import read_results
from stepspec.cli.output import JsonOption, write_results
from stepspec.errors import UsageError
from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.replay import Recordings, read_recordings, replay
from stepspec.evaluation.replay.recordings import is_recorded
from stepspec.evaluation.report.tables import markdown_table
from stepspec.evaluation.runs import policy_of


@dataclass(frozen=True)
class Compared:
    """What a replay predicted for a policy, and what a run measured."""

    policy: str
    on_policy: float
    """Share of the requests in which the policy decides as the recorded one did."""
    predicted_speedup: float
    speedup: float
    predicted_acceptance: float
    acceptance: float

    @property
    def speed_error(self) -> float:
        """Relative error of the predicted speedup."""
        return self.predicted_speedup / self.speedup - 1


def compared(recordings: Recordings, run: RunRecord, summary: Summary) -> Iterator[Compared]:
    """Yield each policy of a run that a replay can predict.

    Raises:
        UsageError: the run is of other problems, models or settings.
    """
    differing = [
        name
        for name in ("data_sha256", "pair", "prompt_version", "temperature", "top_p", "max_tokens", "seed")
        if getattr(run, name) != getattr(recordings.run, name)
    ]
    if differing:
        raise UsageError(f"The two runs differ in {', '.join(differing)}.")
    policies = {name: policy_of(run, name) for name in run.policies}
    usable = {name: each for name, each in policies.items() if is_recorded(each)}
    for found in replay(usable, recordings):
        real = summary.policies[found.name]
        if real.speedup_vs_target is None or real.step_acceptance is None or found.step_acceptance is None:
            raise UsageError(f"The run has no speed or no judged steps under {found.name!r}.")
        yield Compared(
            found.name,
            found.on_policy,
            found.speedup,
            real.speedup_vs_target,
            found.step_acceptance,
            real.step_acceptance,
        )


def replays_block(file: Path) -> str:
    """Return a Markdown table of what `--json` wrote, replays on policy first."""
    found = [Compared(**each) for each in json.loads(file.read_text("utf-8"))["policies"]]
    head = ("policy", "same texts", "speedup", "predicted", "error", "steps accepted", "predicted")
    rows = [
        [
            each.policy,
            f"{each.on_policy:.0%}",
            f"{each.speedup:.2f}×",
            f"{each.predicted_speedup:.2f}×",
            f"{each.speed_error:+.1%}",
            f"{each.acceptance:.1%}",
            f"{each.predicted_acceptance:.1%}",
        ]
        for each in sorted(found, key=lambda each: -each.on_policy)
    ]
    return markdown_table(head, rows)


def main(
    recorded: Annotated[Path, typer.Argument(help="Folder of the run with recorded steps.")],
    run: Annotated[Path, typer.Argument(help="Folder of the real run.")],
    json_file: JsonOption = None,
) -> None:
    """Compare the replays of recorded steps with a real run."""
    ((record, summary),) = read_results(run)
    found = list(compared(read_recordings(recorded), record, summary))
    for each in found:
        print(
            f"{each.policy}: {each.on_policy:.0%} same texts, {each.predicted_speedup:.2f} predicted, "
            f"{each.speedup:.2f} measured ({each.speed_error:+.1%}); steps accepted {each.predicted_acceptance:.1%} "
            f"predicted, {each.acceptance:.1%} measured"
        )
    about = {"benchmark": record.benchmark, "problems": summary.n, "temperature": record.temperature}
    write_results({**about, "policies": [asdict(each) for each in found]}, json_file)
