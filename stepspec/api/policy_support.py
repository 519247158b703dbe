"""Fits a policy to loaded models: chooses a drafter and judges, and rejects what the engines do not support."""

from collections.abc import Mapping

from stepspec.api.models import Pair
from stepspec.engines.protocol import Ability, DrafterName, check_acceptance
from stepspec.errors import UsageError
from stepspec.loop.policy import Policy

RETURNED: Mapping[Ability, str] = {
    "scores": "log-probabilities of proposed tokens",
    "choices": "its most likely tokens at the places of proposed ones",
    "label logprobs": "log-probabilities of a judge's answers",
    "logprobs": "log-probabilities of the tokens that it writes",
    "entropies": "the entropies of its predictions",
}
"""What models return, by ability."""


def fit_policy(policy: Policy, pair: Pair) -> tuple[Policy, str | None]:
    """Adapt a policy to the engines of a pair.

    Returns:
        The policy with a drafter in place of "auto", and a note for the user if that is not the draft model.

    Raises:
        UsageError: the engines do not support the policy; the message says what to change.
    """
    note = None
    if policy.token.drafter == "auto":
        drafter, note = _best_drafter(pair)
        changed: dict[str, str] = {"drafter": drafter}
        if drafter == "engine" and policy.token.acceptance != "exact":
            changed["num_tokens"] = "auto"
        policy = policy.model_copy(update={"token": policy.token.model_copy(update=changed)})
    check_judging(policy, pair)
    _check_drafting(policy, pair)
    return policy, note


def _best_drafter(pair: Pair) -> tuple[DrafterName, str | None]:
    """Return the drafter for "auto", and a note if it is not the draft model."""
    target = pair.target
    if "draft-model" in target.drafters:
        return "draft-model", None
    if "engine" in target.drafters:
        how = _own_drafting(target.own_speculation)
        return "engine", f"{target.name} {how}. The draft model drafts no tokens for it."
    drafter: DrafterName = "prompt-lookup" if "prompt-lookup" in target.drafters else "none"
    return drafter, f"Tokens are drafted by {drafter!r}{_why_no_draft_model(pair)}."


def _own_drafting(own: str | None) -> str:
    """Return how an engine drafts tokens by itself, see `Engine.own_speculation`."""
    if own is None:
        return "drafts tokens only if its server was started to"
    return "was started without speculation" if own == "none" else f"drafts tokens by itself ({own})"


def _why_no_draft_model(pair: Pair) -> str:
    if pair.draft is None:
        return ", because no draft is loaded"
    why = "runs on another engine than" if pair.one_vocabulary else "has another vocabulary than"
    return f": the draft {why} the target"


def check_judging(policy: Policy, pair: Pair) -> None:
    """Reject a policy that needs a judge model that is not there, or log-probabilities that a model does not return."""
    for name, ability in policy.judge_models.items():
        model = pair.judges.get(name)
        if model is None:
            form = "python:MODULE:NAME" if ability == "decide" else "torch:FOLDER or a server's address"
            raise UsageError(
                f"The policy needs the judge model {name!r}. Name it with --judge {name}={form} "
                f'(judges={{"{name}": ...}} in Python).'
            )
        if ability not in model.abilities:
            what = {"reward": "reward steps", "embed": "embed texts"}.get(ability, "answer questions")
            raise UsageError(f"The judge model {name!r}, {model.name}, does not {what}. Choose another model for it.")
    wanted = [(f"The judge {judge.name}", pair.target, judge.needs) for judge in policy.judges]
    wanted += [(f"The judge {judge.name}", pair.draft, judge.draft_needs) for judge in policy.judges]
    wanted.append((f"Family {policy.family!r}", pair.draft, policy.draft_needs))
    if policy.salvage is not None:
        wanted.append(("Salvage", pair.target, frozenset({"scores"})))
    for what, engine, needs in wanted:
        if engine is None or not (missing := needs - engine.abilities):
            continue
        values = " and ".join(sorted(RETURNED.get(ability, ability) for ability in missing))
        where = "with the torch engine" if "entropies" in missing else "with vLLM"
        raise UsageError(
            f"{what} needs {values}, which {engine.name} does not return. Choose a policy without it, such as "
            f"'specreason', whose judge takes the most likely digit, or serve the model {where}."
        )


def _check_drafting(policy: Policy, pair: Pair) -> None:
    """Reject a `[token]` table that the target's engine does not support."""
    target, table = pair.target, policy.token
    if policy.family == "draft":
        return  # only the draft generates text, and without token-level speculation
    if table.drafter == "none" and target.own_speculation not in (None, "none"):
        raise UsageError(
            f"The policy drafts no tokens, but {target.name} drafts by itself ({target.own_speculation}). Set "
            "drafter = \"engine\" in its [token] table, choose the policy 'engine', or turn off its speculation."
        )
    if table.drafter == "engine":
        if table.num_tokens != "auto":
            raise UsageError(
                f"The policy sets num_tokens, which {target.name} controls by itself. Leave it out of [token]."
            )
        check_acceptance(target, table.drafting.acceptance)
    if table.drafter == "none" and table.acceptance != "exact":
        raise UsageError(
            f"The policy accepts drafted tokens by {table.acceptance!r}, but {target.name} has no drafter. Set "
            'acceptance = "exact" in its [token] table.'
        )
    if table.drafter not in ("none", "engine", *target.drafters):
        why = _why_no_draft_model(pair) if table.drafter == "draft-model" and pair.draft is not None else ""
        supported = ", ".join(map(repr, target.drafters)) or "'none'"
        raise UsageError(
            f"The policy drafts tokens by {table.drafter!r}, but {target.name} supports only {supported}{why}. "
            'Choose another drafter in its [token] table, or "auto".'
        )
