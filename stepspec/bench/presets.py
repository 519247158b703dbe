"""Choose thresholds of published methods for a pair by a plain sweep, in a checkout:

    python -m stepspec.bench.presets write SWEEP           # one policy file for each method and threshold
    stepspec eval evals/calibration/gsm-plain.toml --pair smol --temperature 0.6 --output RUN \
        --policy target $(printf -- "--policy %s " SWEEP/*.toml)
    python -m stepspec.bench.presets pick RUN evals/policies/smol

A method gets the fastest threshold among those that cost at most 2 points of accuracy against the target. If all cost
more, it gets the most accurate one.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepspec.base.files import list_data_files
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.records import BASELINE, PolicySummary, RunRecord
from stepspec.evaluation.report import read_results

SWEPT: Mapping[str, Sequence[float]] = {
    "specreason": (3, 5, 6, 7, 8, 9),
    "rsd": (0.3, 0.5, 0.6, 0.7, 0.8, 0.9),
    "lookahead": (0.05, 0.2, 0.5, 0.8, 0.95),
    "glimprouter": (0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0),
}
"""Thresholds to try, by policy. `speculative-thinking` has none."""
MAX_LOSS = 0.02
THRESHOLD = re.compile(r"^threshold = .*$", re.MULTILINE)


def with_threshold(name: str, value: float) -> str:
    """Return the text of a shipped policy with another threshold."""
    text, count = THRESHOLD.subn(f"threshold = {value:.12g}", list_data_files("policies")[name].read_text("utf-8"))
    assert count == 1, f"the policy {name} has {count} thresholds"
    return text


def write_sweep(folder: Path) -> None:
    """Write one policy file for each method and threshold."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in SWEPT.items():
        for value in values:
            (folder / f"{name}-{value:g}.toml").write_text(with_threshold(name, value), "utf-8")


def pick(policies: Mapping[str, PolicySummary], name: str) -> float:
    """Return the threshold of a method that a run of the sweep favors.

    Raises:
        UsageError: the run has no policy of this method, or lacks the target.
    """
    found = {value: policies[key] for value in SWEPT[name] if (key := f"{name}-{value:g}") in policies}
    if not found or BASELINE not in policies:
        raise UsageError(f"The run lacks the policy {BASELINE!r} or all thresholds of {name!r}.")
    least = policies[BASELINE].accuracy - MAX_LOSS
    fine = {value: each.wall_s for value, each in found.items() if each.accuracy >= least and each.no_speed is None}
    return min(fine, key=fine.__getitem__) if fine else max(found, key=lambda value: found[value].accuracy)


def write_picked(run: RunRecord, policies: Mapping[str, PolicySummary], folder: Path) -> None:
    """Write a policy file for each method in a run of the sweep, with the picked threshold."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SWEPT:
        if not any(key.startswith(f"{name}-") for key in policies):
            continue
        value = pick(policies, name)
        tried = ", ".join(f"{each:g}" for each in SWEPT[name] if f"{name}-{each:g}" in policies)
        about = (
            f"# The policy {name} with the threshold that a sweep picked on {run.benchmark}: {run.num_problems}\n"
            f"# problems, temperature {run.temperature:g}, tried: {tried}.\n#\n"
        )
        (folder / f"{name}.toml").write_text(about + with_threshold(name, value), "utf-8")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m stepspec.bench.presets", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write the policies of the sweep")
    write.add_argument("folder", type=Path)
    picking = commands.add_parser("pick", help="write the policies with the picked thresholds")
    picking.add_argument("run", type=Path)
    picking.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.command == "write":
            write_sweep(arguments.folder)
        else:
            results = read_results(arguments.run)
            if len(results) != 1:
                raise UsageError(f"{arguments.run} has {len(results)} runs. Name the folder of one.")
            run, summary = results[0]
            write_picked(run, summary.policies, arguments.folder)
    except StepSpecError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
