"""Log-probabilities of committed tokens are those of the target, for tokens of the draft too."""

from collections.abc import AsyncIterator

import pytest
import torch
from scripted import ScriptedEngine, WordTokenizer

from stepspec import Pair, StepSpec
from stepspec.api.models import load_pair
from stepspec.errors import EngineError, TargetError, UsageError
from stepspec.loop.request import Request
from stepspec.mini import WEIGHTS

pytestmark = pytest.mark.anyio

QUESTION = "Some friends met. Ann has 12 apples. Ben has 5 more apples than Ann. How many apples does Ben have?"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[Pair]:
    loaded = load_pair(pair="embedded", notes=False)
    yield loaded
    await loaded.aclose()


@pytest.mark.parametrize("policy", ["target", "token", "two-level", "draft"])
async def test_they_are_those_of_the_target(pair: Pair, policy: str) -> None:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(WEIGHTS / "target", dtype=torch.float32).eval()
    spec, asked = StepSpec(policy=policy, pair=pair), list[Request]()
    made = spec._request
    spec._request = lambda *given: asked.append(made(*given)) or asked[-1]  # type: ignore[method-assign]
    result = await spec.generate(QUESTION, max_tokens=400, logprobs=True, top_logprobs=3)
    assert result.logprobs is not None
    assert len(result.logprobs) == result.counts.committed
    tokenizer = pair.target.tokenizer
    written = "".join(each.token for each in result.logprobs)
    assert written.replace("</think>", "").removesuffix("<|end|>") == result.reasoning + result.answer
    ids, start = asked[0].transcript.buffer.since(0), len(asked[0].prompt)
    assert [each.token for each in result.logprobs] == [tokenizer.piece(id) for id in ids[start:]]
    with torch.inference_mode():
        expected = network(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
    own = [expected[at, id].item() for at, id in enumerate(ids[start:])]
    assert [each.logprob for each in result.logprobs] == pytest.approx(own, abs=2e-3)
    for each, row in zip(result.logprobs, expected, strict=True):
        values, tokens = row.topk(3)
        assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=2e-3)
        assert each.top[0][0] == tokenizer.piece(int(tokens[0])) or values[0] - values[1] < 1e-3


async def test_without_them_the_result_has_none(pair: Pair) -> None:
    assert (await StepSpec(policy="token", pair=pair).generate(QUESTION, max_tokens=20)).logprobs is None


async def test_a_target_that_returns_none_is_refused_before_it_writes() -> None:
    engine = ScriptedEngine(WordTokenizer(), abilities=frozenset())
    with pytest.raises(UsageError, match="logprobs are not supported"):
        await StepSpec(policy="target", pair=Pair(engine, None)).generate("How many?", logprobs=True)
    assert not engine.calls


async def test_a_target_that_fails_at_the_end_loses_no_text() -> None:
    engine = ScriptedEngine(WordTokenizer(), ["One.</think>So 9.<|end|>"])
    engine._opinion_on = lambda call: (_ for _ in ()).throw(EngineError("gone"))  # type: ignore[method-assign]
    with pytest.raises(TargetError, match="gone The text was complete") as caught:
        await StepSpec(policy="target", pair=Pair(engine, None)).generate("How many?", logprobs=True)
    assert caught.value.committed == "One.So 9."
