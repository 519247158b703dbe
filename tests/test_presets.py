"""The published methods on the embedded pair, and what is published about them."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stepspec import Pair, Policy, Sampling, StepSpec, load_policy
from stepspec.api.session import load_pair
from stepspec.evaluation.generators.gsm_mini import load_split

pytestmark = pytest.mark.anyio

QUESTIONS = [problem.question for problem in itertools.islice(load_split("calibration"), 2)]
PRESETS = ("specreason", "lookahead", "glimprouter", "speculative-thinking")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[Pair]:
    loaded = load_pair()
    yield loaded
    await loaded.aclose()


@pytest.mark.parametrize("policy", PRESETS)
async def test_every_preset_answers_on_the_embedded_pair(pair: Pair, policy: str) -> None:
    for result in await StepSpec(pair=pair, policy=policy).batch(QUESTIONS, sampling=Sampling(temperature=0.6, seed=3)):
        result.counts.check()
        assert result.answer
        assert result.finish_reason == "stop"


@pytest.mark.parametrize(
    "tables",
    [
        {"family": "compare", "judges": [{"kind": "never"}]},
        {"family": "compare", "judges": [{"kind": "never"}], "compare": {"depth": 2, "width": 2}},
        {"family": "route", "route": {"threshold": 0.0}},
    ],
    ids=["compare", "two side by side", "route"],
)
@pytest.mark.parametrize("drafter", ["none", "draft-model"])
async def test_without_lenient_decisions_a_greedy_text_is_the_target_s(
    pair: Pair, tables: dict[str, Any], drafter: str
) -> None:
    """Then only steps with the words of the target's own stand, and only the target writes after a doubtful token."""
    table = {"version": 1, "summary": "a test", "token": {"drafter": drafter}} | tables
    policy = Policy.model_validate(table)
    expected = await StepSpec(pair=pair, policy="target").batch(QUESTIONS)
    found = await StepSpec(pair=pair, policy=policy).batch(QUESTIONS)
    for own, other in zip(expected, found, strict=True):
        assert (other.reasoning, other.answer) == (own.reasoning, own.answer)
        if policy.family == "compare":
            assert other.counts.accepted > 0


def test_lookahead_has_the_published_defaults() -> None:
    policy, _ = load_policy("lookahead")
    assert (policy.family, policy.compare.depth, policy.compare.width) == ("compare", 6, 1)
    assert (policy.step.delimiter, policy.step.max_step_tokens, policy.first_target_steps) == ("\n\n", 100, 0)


def test_speculative_thinking_has_the_published_lengths() -> None:
    route = load_policy("speculative-thinking")[0].route
    assert (route.signal, route.opening_tokens, route.checking_tokens, route.doubts) == ("words", 20, 125, 15)


def test_glimprouter_decides_by_the_entropy_of_one_token() -> None:
    policy, _ = load_policy("glimprouter")
    assert (policy.family, policy.route.signal, policy.draft_needs) == ("route", "first-entropy", {"entropies"})
