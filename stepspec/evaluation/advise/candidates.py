"""The policies that are tried, each as the text of a policy file, so that what is advised is exactly what was run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stepspec.api.session import Pair, fit_policy
from stepspec.errors import UsageError
from stepspec.evaluation.advise.findings import Trial
from stepspec.evaluation.report.cells import times
from stepspec.evaluation.running import LoadedPolicy, token_policy
from stepspec.loop.policy import load_policy

STEP_LEVEL = ("stepspec", "specreason")

WORTH_RUNNING = 1.05
"""The predicted speedup from which on a drafter without a draft model is run; of those the best is."""


@dataclass
class Candidates:
    """The policies to run, the target first, and why others are not."""

    policies: dict[str, LoadedPolicy] = field(default_factory=dict[str, LoadedPolicy])
    left_out: dict[str, str] = field(default_factory=dict[str, str])


def baseline_of(pair: Pair) -> LoadedPolicy:
    """The target alone, as far as its engine lets it be."""
    return load_policy("engine" if "engine" in pair.target.drafters else "target")


def make_candidates(pair: Pair, trials: Sequence[Trial]) -> Candidates:
    """What this pair can do and what may pay, by the trials of its drafters.

    Raises:
        UsageError: there is nothing to compare the target with.
    """
    found = Candidates({"target": baseline_of(pair)})
    _add_token_level(found, pair, trials)
    _add_step_level(found, pair)
    if len(found.policies) == 1 and not trials:
        why = " ".join(found.left_out.values())
        raise UsageError(f"There is nothing to compare {pair.target.name} with. {why}")
    return found


def _add_token_level(found: Candidates, pair: Pair, trials: Sequence[Trial]) -> None:
    if "engine" in pair.target.drafters:
        found.left_out["token-level"] = (
            f"{pair.target.name} drafts tokens as its server or engine was started to, which cannot be changed from "
            "here: compare token-level speculation by starting it both ways."
        )
        return
    others = [trial for trial in trials if trial.drafter != "draft-model"]
    best = max(others, key=lambda trial: trial.predicted, default=None)
    for trial in trials:
        # Whether the draft pays is what is asked here, so it is run in any case.
        if trial.drafter == "draft-model" or (trial is best and trial.predicted >= WORTH_RUNNING):
            found.policies[trial.drafter] = token_policy(trial.drafter, None)
            if trial.best_num_tokens:
                fixed = token_policy(trial.drafter, trial.best_num_tokens)
                found.policies[f"{trial.drafter}-{trial.best_num_tokens}"] = fixed
        else:
            found.left_out[trial.drafter] = (
                f"By a trial on a few prompts it would give {times(trial.predicted)[0]} at best"
                + ("." if trial is best or best is None else f", and {best.drafter} {times(best.predicted)[0]}.")
            )


def _add_step_level(found: Candidates, pair: Pair) -> None:
    for name in STEP_LEVEL:
        if pair.draft is None:
            found.left_out[name] = "Steps are proposed by a draft model, and none was named with --draft."
            continue
        policy, text = load_policy(name)
        try:
            found.policies[name] = fit_policy(policy, pair)[0], text
        except UsageError as error:
            found.left_out[name] = str(error)


def advised_text(text: str, comments: Sequence[str]) -> str:
    """A policy's text with comments above it, a sentence a line."""
    return "".join(f"# {line}\n" for line in comments) + "#\n" + text
