"""Token budgets and the accounting of time, on the embedded target with a useless draft."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stepspec.api.models import Pair, load_pair
from stepspec.api.session import StepSpec
from stepspec.base.files import package_folder
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.request import Request

pytestmark = pytest.mark.anyio

QUESTION = "Some friends met. Ann has 12 apples. Ben has 5 more apples than Ann. How many apples does Ben have?"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WEIGHTS = package_folder() / "mini" / "weights"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft with random weights."""
    folder = tmp_path_factory.mktemp("models") / "random"
    shutil.copytree(WEIGHTS / "draft", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
async def pair(random_draft: Path) -> AsyncIterator[Pair]:
    loaded = load_pair(f"torch:{WEIGHTS / 'target'}", f"torch:{random_draft}")
    yield loaded
    await loaded.aclose()


def strict() -> Policy:
    """Return a policy that salvages nothing from a random draft, so that the text is the target's own."""
    policy = load_policy("two-level")[0]
    return policy.model_copy(update={"salvage": None})


@pytest.mark.parametrize("max_tokens", [1, 2, 52, 120, 256, None])
async def test_a_budget_buys_as_much_text_with_a_useless_draft_as_without(pair: Pair, max_tokens: int | None) -> None:
    """At temperature 0, even the text is the same: rejected drafts do not change it."""
    alone = await StepSpec(policy="target", pair=pair).generate(QUESTION, max_tokens=max_tokens)
    result = await StepSpec(policy=strict(), pair=pair).generate(QUESTION, max_tokens=max_tokens)
    assert result.reasoning + result.answer == alone.reasoning + alone.answer
    assert (result.finish_reason, result.limit) == (alone.finish_reason, alone.limit)
    assert result.usage.completion_tokens == alone.usage.completion_tokens
    result.counts.check(max_tokens)


async def test_waste_is_bounded_and_reported(pair: Pair) -> None:
    policy = strict()
    result = await StepSpec(policy=policy, pair=pair).generate(QUESTION)
    assert 0 < result.usage.wasted_tokens <= result.counts.committed + 2 * policy.step.max_step_tokens
    counts = result.counts
    assert counts.discarded == 1, "the token that measures the target"
    assert result.usage.wasted_tokens == counts.rejected + counts.abandoned + counts.discarded


@pytest.mark.parametrize(
    ("policy", "options"),
    [("target", {}), ("two-level", {}), ("two-level", {"json_schema": {"enum": [1, 2]}}), ("target", {"tools": TOOLS})],
)
async def test_the_parts_of_the_time_add_up_to_almost_all_of_it(
    pair: Pair, policy: str, options: dict[str, Any]
) -> None:
    spec = StepSpec(policy=policy, pair=pair)
    times = [(await spec.generate(QUESTION, max_tokens=60, **options)).times for _ in range(5)]
    rest = [each.other / max(0.01 * each.wall, 0.2 * each.controller) for each in times]
    assert min(rest) <= 1, "a busy machine delays some answers, and a slow one all parts"
    assert all(each.controller > 0 for each in times)


async def test_an_accepted_step_that_the_target_never_read_has_only_its_tokens(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random draft also writes ids of its padded embedding, which the tokenizer does not have."""
    monkeypatch.setattr(Request, "has_control_token", lambda *_: False)  # its control tokens are found before these
    table = {"version": 1, "summary": "a test", "family": "score", "judges": [{"kind": "always"}]}
    result = await StepSpec(policy=Policy.model_validate(table), pair=pair).generate(QUESTION, max_tokens=600)
    assert result.counts.abandoned > 0
    assert result.answer
