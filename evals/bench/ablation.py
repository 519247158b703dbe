"""What each part of a step-level policy is worth: the policy with one part switched off or on at a time.

    # One policy file for each change, with the thresholds of one temperature.
    python -m evals.bench ablation write two-level FOLDER --calibrated policies/thresholds/PAIR/two-level-t0.json
    stepspec eval gsm-mini --temperature 0 --limit 100 --output RUNS/t0 \
        --policy two-level $(printf -- "--policy %s " FOLDER/*.toml)
    python -m evals.bench ablation compare RUNS evals/results/ablation/embedded.json
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tomlkit
import typer

from evals.bench.results import runs_in_words
from evals.bench.speed import with_interval
from stepspec.errors import UsageError
from stepspec.evaluation.advise.policy_file import policy_text
from stepspec.evaluation.records import Record, RunRecord
from stepspec.evaluation.report.tables import markdown_table
from stepspec.evaluation.runs import find_runs, iter_rows, read_run
from stepspec.evaluation.stats.ratios import ratio_of_sums
from stepspec.loop.calibrated import CalibratedSetting
from stepspec.loop.policy import Policy, load_policy

Document = dict[str, Any]

main = typer.Typer(help="Compare a policy with one part switched off or on at a time.", rich_markup_mode=None)


def _without_salvage(policy: Document) -> None:
    policy.pop("salvage", None)


def _set(table: str, key: str, value: object) -> Callable[[Document], None]:
    def change(policy: Document) -> None:
        policy.setdefault(table, {})[key] = value

    return change


def _with_redraft(policy: Document) -> None:
    if "salvage" in policy:
        policy["salvage"]["redraft"] = True


CHANGES: Mapping[str, Callable[[Document], None]] = {
    "no-salvage": _without_salvage,
    "redraft": _with_redraft,
    "no-redraft": lambda policy: policy.get("salvage", {}).pop("redraft", None),
    "no-draft-answer": _set("score", "draft_answer", False),
    "no-max-overhead": lambda policy: policy.get("score", {}).pop("max_overhead", None),
    "no-drafter": _set("token", "drafter", "none"),
    "prompt-lookup": _set("token", "drafter", "prompt-lookup"),
}
"""What a changed policy does otherwise, by its name."""


class Change(Record):
    """What a change does to a policy, on the same problems."""

    name: str
    temperature: float
    problems: int
    ratio: float
    """Seconds of the policy over those of the changed one: below 1 if the change makes it slower."""
    ratio_ci: tuple[float, float] | None
    accuracy: float
    own_accuracy: float
    """Accuracy of the policy itself."""


class Ablation(Record):
    """The file that `compare` writes."""

    version: Literal[1] = 1
    policy: str
    runs: list[RunRecord]
    changes: list[Change]


def changed(text: str, name: str) -> str | None:
    """Return the text of a policy with one change, without fallbacks; None if it has the change."""
    policy = tomllib.loads(text)
    policy.pop("fallbacks", None)
    own = Policy.model_validate(policy)
    CHANGES[name](policy)
    if Policy.model_validate(policy) == own:
        return None
    policy["summary"] = f"{policy['summary']}; {name}"
    return tomlkit.dumps(policy)


@main.command()
def write(
    policy: str,
    folder: Path,
    calibrated: Annotated[Path | None, typer.Option(help="The calibrated setting that the policy runs with.")] = None,
) -> None:
    """Write one policy file for each change that the policy does not have already."""
    text = load_policy(policy)[1]
    if calibrated is not None:
        setting = CalibratedSetting.model_validate_json(calibrated.read_bytes())
        text = policy_text(text, [], setting.thresholds, setting.min_logprob)
    folder.mkdir(parents=True, exist_ok=True)
    for name in CHANGES:
        file, found = folder / f"{name}.toml", changed(text, name)
        if found is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(found, "utf-8")


def compare(folder: Path) -> Ablation:
    """Compare all changed policies in runs with the policy that they change.

    Raises:
        UsageError: there is no run, or a run has no policy of another name.
    """
    runs, changes, names = list[RunRecord](), list[Change](), set[str]()
    for each in find_runs(folder):
        run = read_run(each)
        own = [name for name, policy in run.policies.items() if name not in CHANGES and policy.kind == "step"]
        if len(own) != 1:
            raise UsageError(f"{each} needs one policy to change, and has {', '.join(own) or 'none'}.")
        names.update(own)
        runs.append(run)
        rows: dict[str, dict[tuple[str, int], Any]] = {}
        for row in iter_rows(each):
            rows.setdefault(row.policy, {})[row.problem, row.repeat] = row
        for name in (name for name in CHANGES if name in rows):
            both = [(rows[own[0]][key], row) for key, row in rows[name].items() if key in rows[own[0]]]
            seconds = np.array([[before.wall_s, after.wall_s] for before, after in both])
            ratio, interval = ratio_of_sums(seconds[:, 0], seconds[:, 1], np.random.default_rng(0))
            correct = np.mean([[row.status == "correct" for row in pair] for pair in both], axis=0)
            changes.append(
                Change(
                    name=name,
                    temperature=run.temperature,
                    problems=len(both),
                    ratio=ratio,
                    ratio_ci=interval,
                    own_accuracy=float(correct[0]),
                    accuracy=float(correct[1]),
                )
            )
    if len(names) != 1:
        raise UsageError(f"{folder} needs runs of one policy and its changes.")
    return Ablation(policy=names.pop(), runs=runs, changes=changes)


def ablation_block(file: Path) -> str:
    """Return a Markdown table of the changes: their speed over the policy's own, and their accuracy, by temperature."""
    found = Ablation.model_validate_json(file.read_text("utf-8"))
    temperatures = sorted({each.temperature for each in found.changes})
    heads = ["change", *(f"{what}, T = {each:g}" for each in temperatures for what in ("speed", "accuracy gain"))]
    by_place = {(each.name, each.temperature): each for each in found.changes}
    rows: list[list[str]] = []
    for name in (name for name in CHANGES if any(each.name == name for each in found.changes)):
        rows.append([name])
        for temperature in temperatures:
            each = by_place.get((name, temperature))
            gain = "–" if each is None else f"{100 * (each.accuracy - each.own_accuracy):+.1f}%"
            rows[-1] += ["–" if each is None else with_interval(each.ratio, each.ratio_ci), gain]
    return f"{markdown_table(heads, rows)}\n\n{runs_in_words(found.runs)} Intervals are 95%."


@main.command("compare")
def compare_runs(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs.")],
    file: Annotated[Path, typer.Argument(help="File to write.")],
) -> None:
    """Compare the changed policies in runs, and print the table."""
    file.write_text(compare(runs).model_dump_json(indent=1) + "\n", "utf-8")
    print(ablation_block(file))
