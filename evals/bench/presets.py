"""Choose thresholds of published methods for a pair by a plain sweep.

    python -m evals.bench presets write SWEEP           # one policy file for each method and threshold
    stepspec eval evals/calibration/gsm-mini.toml --temperature 0.6 --output RUN \
        --policy target $(printf -- "--policy %s " SWEEP/*.toml)
    python -m evals.bench presets pick RUN evals/policies/embedded          # writes NAME-picked.toml for each method

A method gets the fastest threshold among those that cost at most 2 points of accuracy against the target. If all cost
more, it gets the most accurate one.

After a run of all methods, `python -m evals.bench presets steps RUN` writes who wrote the steps to `RUN/steps.json`,
which the tables of the documentation need besides the run's summary.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from evals.bench.readme import OVERVIEW
from evals.bench.results import read_results
from stepspec.base.files import list_data_files
from stepspec.errors import UsageError
from stepspec.evaluation.records import BASELINE, PolicySummary, RunRecord, Summary
from stepspec.evaluation.report import UNKNOWN, conditions_sentence
from stepspec.evaluation.report.figures import named
from stepspec.evaluation.report.tables import markdown_table, not_run_rows, written
from stepspec.evaluation.runs import iter_rows, policy_of
from stepspec.loop.policy import load_policy

Figures = dict[str, Any]

SWEPT: Mapping[str, Sequence[float]] = {
    "specreason": (3, 5, 6, 7, 8, 9),
    "rsd": (0.3, 0.5, 0.6, 0.7, 0.8, 0.9),
    "lookahead": (0.05, 0.2, 0.5, 0.8, 0.95),
    "glimprouter": (0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0),
}
"""Thresholds to try, by policy. `speculative-thinking` has none; `rsd` needs `--judge reward=MODEL`."""
MAX_LOSS = 0.02
PICKED = "-picked"
"""Ending of the names of policies with a picked threshold."""
STEPS_FILE = "steps.json"

AREAS = {
    "rating": "rating.specreason",
    "reward": "reward",
    "equivalence": "equivalence",
    "likelihood": "likelihood.min",
    "yes-no": "yes_no",
}
"""The figure of a pair that has the area under the ROC curve of a judge, by the judge's kind."""
THRESHOLD, SUMMARY = (re.compile(rf"^{key} = .*$", re.MULTILINE) for key in ("threshold", "summary"))


def with_threshold(name: str, value: float) -> str:
    """Return the text of a shipped policy with another threshold, and with the token-level drafter of the others."""
    shipped = list_data_files("policies")[name].read_text("utf-8").replace('drafter = "engine"', 'drafter = "auto"')
    text, count = THRESHOLD.subn(f"threshold = {value:.12g}", shipped)
    assert count == 1, f"the policy {name} has {count} thresholds"
    about = f"{name} with the threshold {value:g}, and tokens drafted inside the target's steps"
    return SUMMARY.sub(f'summary = "{about}"', text)


main = typer.Typer(
    help="Choose the thresholds of the published methods, and count who wrote the steps.", rich_markup_mode=None
)


@main.command("write")
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
            f"# The policy {name} with the threshold that a sweep picked on the calibration split of {run.benchmark}:\n"
            f"# {run.num_problems} problems, temperature {run.temperature:g}, tried: {tried}.\n"
            f"# Tokens are drafted inside the target's steps. What follows is said of {name} itself.\n#\n"
        )
        (folder / f"{name}{PICKED}.toml").write_text(about + with_threshold(name, value), "utf-8")


@main.command("steps")
def write_steps(folder: Path) -> None:
    """Write the number of steps of each policy in a run, and of those in which the target wrote something."""
    steps: dict[str, dict[str, int]] = {}
    for row in iter_rows(folder):
        found = steps.setdefault(row.policy, {"steps": 0, "by_target": 0})
        found["steps"] += len(row.steps)
        found["by_target"] += sum(step.num_from_draft < step.num_tokens for step in row.steps)
    (folder / STEPS_FILE).write_text(json.dumps(steps, indent=1) + "\n", "utf-8")


def methods_block(folder: Path, run: RunRecord, summary: Summary, judging: Figures) -> str:
    """Return a table of the policies of one run: those that keep the accuracy, then the others, the fastest first.

    Args:
        folder: the folder of the run's `steps.json`.
        run: the conditions of the run.
        summary: its summary.
        judging: the part `judging` of the figures of the run's pair.
    """
    steps: Figures = json.loads((folder / STEPS_FILE).read_text("utf-8"))
    found = {**judging["scores"], "equivalence": judging["equivalence"]}
    areas = {kind: found[name]["area"] for kind, name in AREAS.items() if name in found}

    def order(name: str) -> tuple[bool, bool, float]:
        policy = summary.policies[name]
        return name != BASELINE, policy.accuracy_kept == "not known", -(policy.speedup_vs_target or 0)

    def signal(name: str) -> str:
        policy = tomllib.loads(run.policies[name].text)
        if policy["family"] == "route":
            return f"target in {steps[name]['by_target'] / max(1, steps[name]['steps']):.1%} of the steps"
        kinds = [judge["kind"] for judge in policy.get("judges", ())]
        return ", ".join(f"{kind} {areas[kind]:.2f}" if kind in areas else f"{kind} ?" for kind in kinds) or UNKNOWN

    rows = [
        [name, *(written(column, summary.policies[name]) for column in OVERVIEW), signal(name)]
        for name in sorted(summary.policies, key=order)
    ]
    rows += not_run_rows(run, len(OVERVIEW) + 1, "")
    table = markdown_table(["policy", *(column.title for column in named(OVERVIEW, summary)), "signal"], rows)
    ran = [name for name in run.policies if name in list_data_files("policies")]
    others = [name for name in ran if policy_of(run, name).settings_sha256 != load_policy(name)[0].settings_sha256]
    note = f" Ran with other settings than the policies of these names today: {', '.join(others)}." if others else ""
    return f"{table}\n\n{conditions_sentence(run, summary)} Intervals are 95%.{note}"


@main.command("pick")
def pick_thresholds(run: Path, folder: Path) -> None:
    """Write the policies with the picked thresholds."""
    results = read_results(run)
    if len(results) != 1:
        raise UsageError(f"{run} has {len(results)} runs. Name the folder of one.")
    ((record, summary),) = results
    write_picked(record, summary.policies, folder)
