"""The policies to try, each as the text of a policy file, so that the advised policy is exactly the one that ran."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stepspec.api.models import Pair
from stepspec.api.policy_support import fit_policy
from stepspec.errors import UsageError
from stepspec.evaluation.advise.findings import Trial
from stepspec.evaluation.report.cells import times
from stepspec.evaluation.run import LoadedPolicy, token_policy
from stepspec.loop.policy import load_policy

STEP_LEVEL = ("two-level", "specreason-decode")
"""All with token-level speculation inside, so that the way to judge steps is what differs."""

WORTH_RUNNING = 1.05
"""Minimum predicted speedup to run a drafter without a draft model. Only the best of those runs."""


@dataclass
class Candidates:
    """The policies to run, with the target first, and the reasons why others are left out."""

    policies: dict[str, LoadedPolicy] = field(default_factory=dict[str, LoadedPolicy])
    left_out: dict[str, str] = field(default_factory=dict[str, str])


def baseline_of(pair: Pair) -> LoadedPolicy:
    """Return the baseline: the target alone, or as its engine serves it if the engine drafts by itself."""
    return load_policy("engine" if "engine" in pair.target.drafters else "target")


def make_candidates(trials: Sequence[Trial], pair: Pair) -> Candidates:
    """Return the policies that this pair supports and that may pay, based on the trials of its drafters.

    Raises:
        UsageError: there is nothing to compare the target with.
    """
    candidates = Candidates({"target": baseline_of(pair)})
    _add_token_level(candidates, pair, trials)
    _add_step_level(candidates, pair)
    if len(candidates.policies) == 1 and not trials:
        why = " ".join(candidates.left_out.values())
        raise UsageError(f"There is nothing to compare {pair.target.name} with. {why}")
    return candidates


def _add_token_level(candidates: Candidates, pair: Pair, trials: Sequence[Trial]) -> None:
    if "engine" in pair.target.drafters:
        candidates.left_out["token-level"] = (
            f"The server or engine of {pair.target.name} controls token-level drafting, so stepspec cannot change it. "
            "To compare, start it with and without speculation."
        )
        return
    others = [trial for trial in trials if trial.drafter != "draft-model"]
    best = max(others, key=lambda trial: trial.predicted, default=None)
    for trial in trials:
        # The draft model always runs, because the user wants to know whether it pays.
        if trial.drafter == "draft-model" or (trial is best and trial.predicted >= WORTH_RUNNING):
            candidates.policies[trial.drafter] = token_policy(trial.drafter, None)
            if trial.best_num_tokens:
                fixed = token_policy(trial.drafter, trial.best_num_tokens)
                candidates.policies[f"{trial.drafter}-{trial.best_num_tokens}"] = fixed
        else:
            candidates.left_out[trial.drafter] = (
                "By a trial on a few prompts, which decides only what is run, it would give "
                f"{times(trial.predicted)[0]} at best"
                + ("." if trial is best or best is None else f", and {best.drafter} {times(best.predicted)[0]}.")
            )


def _add_step_level(candidates: Candidates, pair: Pair) -> None:
    for name in STEP_LEVEL:
        if pair.draft is None:
            candidates.left_out[name] = "Step-level speculation needs a draft model; give one with --draft."
            continue
        policy, text = load_policy(name)
        try:
            candidates.policies[name] = fit_policy(policy, pair)[0], text
        except UsageError as error:
            candidates.left_out[name] = str(error)
