"""The policies of a run: those that the user requests, and the baselines to compare them with."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepspec.api.models import Pair
from stepspec.api.policy_support import fit_policy
from stepspec.engines.protocol import DrafterName
from stepspec.errors import UsageError
from stepspec.evaluation.records import BASELINE
from stepspec.evaluation.run.variants import LoadedPolicy, load_variants
from stepspec.loop.policy import Policy, load_policy

TOKEN_LEVEL = """\
# Token-level speculation by {drafter}: the target verifies what was drafted, in one pass. Exact: sampled output has the
# target's distribution (arXiv:2211.17192), greedy output is the target's token for token, in bfloat16 up to rounding.
version = 1
summary = "the target with token-level speculation by {drafter}, {words}; exact"
family = "target"

[token]
drafter = "{drafter}"
num_tokens = {num_tokens}
"""


@dataclass(frozen=True)
class Fitted:
    """Policies as a pair runs them, and notes for the user on what was changed."""

    policies: Mapping[str, LoadedPolicy]
    notes: Sequence[str]


TOKEN_BASELINES = ("token", "lookup")
"""Baselines besides the target, in order of preference: token-level speculation by the draft, or by lookup."""


def load_named(arguments: Iterable[str]) -> dict[str, LoadedPolicy]:
    """Return policies and their variants by name, see `load_variants`.

    Raises:
        UsageError: a policy is unknown or invalid, or two share a name.
    """
    loaded: dict[str, LoadedPolicy] = {}
    for argument in arguments:
        found = load_variants(argument)
        if twice := sorted(found.keys() & loaded.keys()):
            raise UsageError(f"There are two policies called {twice[0]!r}; results need a name for each.")
        loaded |= found
    return loaded


def load_policies(arguments: Iterable[str]) -> dict[str, LoadedPolicy]:
    """Return the policies of a run by name, always including the baseline `target`.

    Raises:
        UsageError: see `load_named`; or `target` is not the target alone.
    """
    loaded = load_named(arguments)
    if "target" not in loaded:
        loaded = {"target": load_policy("target"), **loaded}
    if loaded["target"][0].kind() != "target":
        raise UsageError("The policy called 'target' must be the target alone, as the baseline; rename yours.")
    return loaded


def fit_policies(policies: Mapping[str, LoadedPolicy], pair: Pair, *, leave_out: bool = False) -> Fitted:
    """Return the policies as this pair runs them, with the baselines that it supports.

    If the target's engine drafts tokens by itself, the policy `target` is the target as its engine serves it.
    Otherwise an exact token-level baseline is added if none of the policies is one.

    Args:
        leave_out: leave out a policy that the pair cannot run, instead of raising an error, and one that is the same as
            another here, each with a note.

    Raises:
        UsageError: the pair cannot run a policy.
    """
    fitted, notes = dict[str, LoadedPolicy](), list[str]()
    for name, (wanted, text) in policies.items():
        if name == BASELINE and not can_serve(wanted, pair):
            wanted, text = load_policy("engine")
            notes.append(
                f"{pair.target.name} drafts tokens by itself ({pair.target.own_speculation}), so the policy "
                f"{BASELINE!r} is the target as its engine serves it."
            )
        try:
            policy, note = fit_policy(wanted, pair)
        except UsageError as error:
            if not leave_out:
                raise UsageError(f"{name!r} cannot run. {error}") from error
            notes.append(f"{name!r} is left out. {error}")
        else:
            fitted[name] = policy, text
            notes += [note] if note else []
    others = [BASELINE]
    for name in [name for name in fitted if name != BASELINE]:
        same = next((other for other in others if _same(fitted[name][0], fitted[other][0], pair)), None)
        if same is not None:
            del fitted[name]
            notes.append(f"{name!r} is left out: here it is the same as {same!r}.")
        elif leave_out:
            others.append(name)
    return Fitted(_with_token_baseline(fitted, pair), list(dict.fromkeys(notes)))


def _same(policy: Policy, baseline: Policy, pair: Pair) -> bool:
    """Return whether two policies do the same on these engines, so that only chance would make one faster."""
    own = pair.target.own_speculation
    found = [each.model_dump(exclude={"summary", "paper"}) for each in (policy, baseline)]
    for each in found:
        if own == "none" and each["token"]["drafter"] == "engine":
            each["token"]["drafter"] = "none"
    return found[0] == found[1]


def _with_token_baseline(policies: Mapping[str, LoadedPolicy], pair: Pair) -> dict[str, LoadedPolicy]:
    """Return the policies, plus an exact token-level policy that this pair supports if none of them is one."""
    own = pair.target.own_speculation
    if "engine" in pair.target.drafters or any(
        policy.kind(own) == "token" and policy.token_level_exact for policy, _ in policies.values()
    ):
        return dict(policies)
    for name in TOKEN_BASELINES:
        policy, text = load_policy(name)
        if name not in policies and can_serve(policy, pair):
            return {BASELINE: policies[BASELINE], name: (policy, text), **policies}
    return dict(policies)


def can_serve(policy: Policy, pair: Pair) -> bool:
    """Return whether a pair can run a policy."""
    try:
        fit_policy(policy, pair)
    except UsageError:
        return False
    return pair.draft is not None or not policy.needs_draft


def token_policy(drafter: DrafterName, num_tokens: int | None) -> LoadedPolicy:
    """Return token-level speculation with `num_tokens` drafted tokens per round; None lets the engine choose."""
    words = "as many tokens as pay" if num_tokens is None else f"{num_tokens} tokens a round"
    number = '"auto"' if num_tokens is None else str(num_tokens)
    text = TOKEN_LEVEL.format(drafter=drafter, words=words, num_tokens=number)
    return Policy.model_validate(tomllib.loads(text)), text
