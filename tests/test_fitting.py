"""Policies fitted to engines: unsupported drafters are refused, and "auto" picks the best supported drafter."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from scripted import ScriptedEngine, WordTokenizer

from stepspec.api.models import Pair
from stepspec.api.policy_support import fit_policy
from stepspec.api.session import StepSpec
from stepspec.engines.protocol import EVERYTHING, DrafterName
from stepspec.errors import UsageError
from stepspec.evaluation.run import fit_policies, load_policies
from stepspec.loop.policy import Policy, load_policy

OURS: list[DrafterName] = ["draft-model", "prompt-lookup", "suffix"]
NGRAM = "ngram, 3 tokens"
RATIO = {"acceptance": "ratio", "threshold": 0.1}


def pair(
    drafters: Sequence[DrafterName] = OURS, own: str | None = "none", *, draft: bool = True, one_vocabulary: bool = True
) -> Pair:
    """Return models whose target supports `drafters` and speculates by itself as `own` says."""
    tokenizer = WordTokenizer()
    target, helper = ScriptedEngine(tokenizer, name="target"), ScriptedEngine(tokenizer, name="draft")
    target.drafters, target.own_speculation = drafters, own
    return Pair(target, helper if draft else None, one_vocabulary)


def steered(own: str | None) -> Pair:
    """Return models on an engine like vLLM or a server, whose drafter is fixed when it starts."""
    return pair(["engine"], own)


def drafting(drafter: str, **settings: Any) -> Policy:
    table = {"drafter": drafter, **settings}
    return Policy.model_validate({"version": 1, "summary": "a test", "family": "target", "token": table})


@pytest.mark.parametrize("own", [None, "none", NGRAM])
@pytest.mark.parametrize("drafter", OURS)
def test_an_engine_with_a_fixed_drafter_refuses_every_other_drafter(drafter: str, own: str | None) -> None:
    with pytest.raises(UsageError, match=f"by '{drafter}', but target supports only 'engine'"):
        StepSpec(policy=drafting(drafter), pair=steered(own))


@pytest.mark.parametrize("missing", OURS)
def test_a_drafter_that_the_engine_does_not_have_is_refused(missing: DrafterName) -> None:
    have = [name for name in OURS if name != missing]
    with pytest.raises(UsageError, match=f"by '{missing}', but"):
        fit_policy(drafting(missing), pair(have))
    for name in have:
        assert fit_policy(drafting(name), pair(have)) == (drafting(name), None)


def test_the_target_policy_is_refused_where_the_engine_drafts_by_itself() -> None:
    with pytest.raises(UsageError, match=r"drafts by itself \(ngram, 3 tokens\).*'engine'"):
        StepSpec(policy="target", pair=steered(NGRAM))
    for own in (None, "none"):
        assert StepSpec(policy="target", pair=steered(own)).policy.token.drafter == "none"


@pytest.mark.parametrize("models", [pair(), steered(None), steered("none"), steered(NGRAM)])
@pytest.mark.parametrize("policy", ["engine", "specreason", "two-level"])
def test_policies_that_leave_drafting_to_the_engine_run_on_every_engine(models: Pair, policy: str) -> None:
    fitted = StepSpec(policy=policy, pair=models).policy
    drafts = policy == "two-level" and models.target.drafters == OURS
    assert fitted.token.drafter == ("draft-model" if drafts else "engine")


@pytest.mark.parametrize("drafter", ["auto", "engine"])
def test_settings_that_the_engine_decides_cannot_be_set(drafter: str) -> None:
    with pytest.raises(UsageError, match="sets num_tokens, which target controls"):
        fit_policy(drafting(drafter, num_tokens=4), steered(NGRAM))
    without, models = EVERYTHING - {"relaxed acceptance"}, steered(NGRAM)
    models.target.abilities = without  # type: ignore[misc]
    with pytest.raises(UsageError, match=r"by its own rule, not by 'ratio'.*stepspec's plugin"):
        fit_policy(drafting(drafter, **RATIO), models)


@pytest.mark.parametrize("policy", ["relaxed", "fly"])
def test_relaxed_policies_use_the_speculation_of_an_engine_that_can_relax_tokens(policy: str) -> None:
    table = StepSpec(policy=policy, pair=steered(NGRAM)).policy.token
    assert (table.drafter, table.num_tokens, table.drafting.acceptance.is_exact) == ("engine", "auto", False)


def test_a_relaxed_rule_needs_a_drafter() -> None:
    with pytest.raises(UsageError, match="drafted tokens by 'ratio', but target has no drafter"):
        fit_policy(drafting("auto", **RATIO), pair([]))


@pytest.mark.parametrize(
    ("models", "drafter", "note"),
    [
        (pair(), "draft-model", None),
        (pair(OURS[1:]), "prompt-lookup", "the draft runs on another engine than the target"),
        (pair(OURS[1:], one_vocabulary=False), "prompt-lookup", "the draft has another vocabulary than the target"),
        (pair(["prompt-lookup"], draft=False), "prompt-lookup", "no draft is loaded"),
        (pair([]), "none", "Tokens are drafted by 'none'"),
        (steered(NGRAM), "engine", NGRAM),
        (steered("none"), "engine", "was started without speculation"),
        (steered(None), "engine", "only if its server was started to"),
    ],
)
def test_auto_takes_the_best_supported_drafter_and_warns_if_it_is_not_the_draft_model(
    models: Pair, drafter: str, note: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stepspec"):
        assert StepSpec(policy=drafting("auto"), pair=models).policy.token.drafter == drafter
    assert (note in caplog.text) if note else not caplog.text


def test_an_evaluation_runs_the_supported_policies_and_names_those_it_leaves_out() -> None:
    wanted = load_policies(["target", "token", "specreason", "specreason-decode", "two-level"])
    fitted = fit_policies(wanted, steered(NGRAM), leave_out=True)
    assert {name: policy.token.drafter for name, (policy, _) in fitted.policies.items()} == {
        "target": "engine",
        "specreason": "engine",
        "two-level": "engine",
    }
    assert fitted.policies["target"][1] == load_policy("engine")[1]
    notes = " ".join(fitted.notes)
    assert "'token' is left out" in notes
    assert "'specreason-decode' is left out: here it is the same as 'specreason'." in notes
    assert "'target' is the target as its engine serves it" in notes
    with pytest.raises(UsageError, match="'token' cannot run"):
        fit_policies(wanted, steered(NGRAM))


@pytest.mark.parametrize(
    ("models", "policies"),
    [
        (pair(), ["target", "token", "two-level"]),
        (pair(OURS[1:]), ["target", "lookup", "two-level"]),
        (steered(None), ["target", "two-level"]),
        (steered("none"), ["target", "two-level"]),
        (steered(NGRAM), ["target", "two-level"]),
    ],
)
def test_the_baseline_is_token_level_speculation_that_the_pair_really_does(models: Pair, policies: list[str]) -> None:
    fitted = fit_policies(load_policies(["two-level"]), models)
    assert list(fitted.policies) == policies
    own = models.target.own_speculation
    kinds = {name: policy.kind(own) for name, (policy, _) in fitted.policies.items()}
    assert kinds["target"] == ("token" if own == NGRAM else "target")
    assert [name for name, kind in kinds.items() if kind == "token"] == (
        ["target"] if own == NGRAM else [name for name in policies if name in ("token", "lookup")]
    )


def test_a_policy_whose_thresholds_are_those_of_other_models_proposes_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the target need not support its judges either."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    models = steered(NGRAM)
    models.target.abilities = EVERYTHING - {"scores"}
    spec = StepSpec(policy="two-level", pair=models)
    assert (spec.policy.kind(NGRAM), spec.policy.judges) == ("token", ())
    with pytest.raises(UsageError, match="log-probabilities of proposed tokens"):
        fit_policy(load_policy("two-level")[0], models)


def test_tables_of_former_policy_files_say_what_replaces_them() -> None:
    with pytest.raises(ValidationError, match="no table fallbacks any more: write a policy with those judges"):
        Policy.model_validate({"version": 1, "summary": "a test", "family": "target", "fallbacks": []})
