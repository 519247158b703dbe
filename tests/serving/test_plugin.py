"""The plugin's rules inside a real vLLM, in `.venv-vllm`: on its sampler, on tiny models, and with a hostile draft."""

import json
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import VllmForks, needs_vllm

from evals.training.gsm_mini import load_split
from stepspec.engines.protocol import Acceptance
from stepspec.engines.vllm_plugin import register
from stepspec.engines.vllm_plugin.fields import acceptance_in, fields_of
from stepspec.errors import UsageError
from stepspec.mini import WEIGHTS

INSIDE = Path(__file__).with_name("inside_rules.py")
FALSE_ALARM = 1e-6
"""Probability that a correct sampler fails, over the choice of seeds."""


@pytest.fixture(scope="module")
def found(vllm: VllmForks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what `inside_rules.py` writes. Its last part fails if an answer has a token of the draft alone."""
    folder = tmp_path_factory.mktemp("rules")
    questions = [each.question for each in islice(load_split("test"), 6)]
    (folder / "asked.json").write_text(json.dumps({"weights": str(WEIGHTS), "questions": questions}))
    words = [str(INSIDE), str(folder / "asked.json"), str(folder / "found.json")]
    vllm.run(words, folder / "log", 580.0)
    assert (folder / "found.json").exists(), (folder / "log").read_text()[-3000:]
    return json.loads((folder / "found.json").read_text())


@needs_vllm
def test_vllm_s_sampler_decides_greedy_requests_like_the_torch_engine(found: dict[str, Any]) -> None:
    theirs, ours = found["greedy rounds"]
    assert theirs == ours
    assert sum(map(len, theirs[1])) > 20, "some tokens are relaxed"


@needs_vllm
def test_sampled_requests_differ_from_the_target_by_their_relaxed_tokens_alone(found: dict[str, Any]) -> None:
    """Each rule with each way to sample, in rounds with greedy requests."""
    p_values = found["sampled rounds"]
    right = {name: value for name, value in p_values.items() if not name.startswith("wrong")}
    assert len(right) == 16
    assert min(right.values()) > FALSE_ALARM, right
    wrong = [p_values[f"wrong: {name}"] for name in right if name.startswith(("exact", "ratio"))]
    assert max(wrong) < FALSE_ALARM, "the draft's distribution passes"


@needs_vllm
def test_texts_of_a_model_have_the_distribution_of_their_rule(found: dict[str, Any]) -> None:
    """Three tokens, one and eight requests concurrently, with the prefix cache and prompts that are read in parts."""
    tiny = found["tiny"]
    assert "relaxed acceptance" in tiny["abilities"]
    assert tiny["cached"] > 0
    for name, (p_of_rule, p_of_exact, num_relaxed) in tiny["p"].items():
        assert p_of_rule > FALSE_ALARM, name
        loose = name.startswith("ratio")
        assert (num_relaxed > 0) == loose, name
        assert (p_of_exact < FALSE_ALARM) == loose, f"{name}: the test would not see a rule without effect"


@needs_vllm
def test_greedy_texts_are_the_target_s_under_the_exact_rule_and_relaxed_tokens_are_reported(
    found: dict[str, Any],
) -> None:
    for text in found["greedy"]:
        assert text["exact"] == [text["own"]] * 2
        assert text["loose"][0] == text["loose"][1]
        assert text["relaxed"] == text["differing"]
    assert any(text["relaxed"] for text in found["greedy"])


@needs_vllm
def test_invalid_rules_are_refused_when_a_request_arrives(found: dict[str, Any]) -> None:
    expected = [
        "stepspec_acceptance must be one of exact, ratio, typical, fly, got '?'",
        "Acceptance 'ratio' needs threshold",
        "threshold must be above 0 and at most 1, got 2",
        "Did you mean 'stepspec_threshold'",
        "a window of 6 needs more than 2 drafted tokens",
        "stepspec_acceptance must be a number or text, got ['ratio']",
    ]
    for message, part in zip(found["refusals"], expected, strict=True):
        assert part in message


@needs_vllm
def test_a_cpu_build_that_loses_the_temperature_of_drafted_tokens_is_a_clear_error(found: dict[str, Any]) -> None:
    """The smallest case is one call of its kernel, in `expands`. Without the plugin, sampled calls are refused."""
    keeps, greedy, sampled = found["guard"]
    assert not keeps, "this build is repaired: leave out what the plugin does for CPUs"
    assert greedy == ""
    assert "loses temperature, top_k and top_p of drafted tokens. Set temperature to 0" in sampled


@pytest.mark.parametrize(
    "rule",
    [
        Acceptance(),
        Acceptance("ratio", 0.3, exact_digits=True),
        Acceptance("typical", 0.1),
        Acceptance("fly", window=6, entropy=0.3),
    ],
    ids=lambda rule: rule.rule,
)
def test_a_rule_passes_through_the_fields_of_a_request(rule: Acceptance) -> None:
    assert acceptance_in(json.loads(json.dumps(fields_of(rule)))) == rule
    assert acceptance_in({"other": 1, "stepspec_key": "x"}) == Acceptance()


def test_another_version_of_vllm_gets_one_warning_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.0+cpu"))
    finders = [*sys.meta_path]
    register()
    assert sys.meta_path == finders
    (record,) = caplog.records
    assert "does nothing with vLLM 0.99.0: it is for 0.32.0" in record.getMessage()


@pytest.mark.parametrize("fields", [{"window": 2.5}, {"threshold": "0.1"}, {"threshold": True}, {"entropy": None}])
def test_a_field_of_the_wrong_type_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        acceptance_in({f"stepspec_{name}": value for name, value in fields.items()} | {"stepspec_acceptance": "fly"})
